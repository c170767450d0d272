"""Experts whose popularity changes while a model is served, and how an engine shares them out anew."""

from __future__ import annotations

from dataclasses import dataclass

from ...datasets.loading import check_fields
from .canonical import RequestError
from .declaration import setting

WINDOW, INTERVAL = 1000, 3000  # of vLLM's EPLBConfig (config/parallel.py, 0.33.0)


@dataclass(frozen=True)
class ExpertBalance:
    """Experts on several GPUs (expert parallelism) whose load drifts. Without ``drift`` nothing is read of the rest."""

    drift: int = setting(0, "iterations in which popularity becomes another (its time constant); 0: even for ever")
    spread: float = setting(0.5, "standard deviation of the logarithm of an expert's popularity")
    num_redundant_experts: int = setting(0, "copies of experts beside one of each (vllm: num_redundant_experts)")
    step_interval: int = setting(INTERVAL, "iterations between two rebalances (vllm: step_interval); 0: never")
    window_size: int = setting(WINDOW, "iterations whose loads count for one (vllm: window_size)", least=1)
    nodes: int = setting(
        1, "that the ranks of experts are on: groups of experts stay on one, where they come out even", least=1
    )
    groups: int = setting(
        1, "of experts, of which a token takes experts of few; 1: all GPUs are packed at once", least=1
    )
    ranks: int | None = setting(None, "GPUs that share the experts out; null: those of the layout", least=1)
    experts: int | None = setting(None, "of a layer; null: those of the model", least=1)
    layers: int | None = setting(None, "with experts; null: those of the model", least=1)
    expert_mib: float | None = setting(None, "of one expert of one layer; null: as the model has it, 0 without a model")
    gbps: float | None = setting(
        None, "GB/s at which weights come to a GPU; null: those of its links, 50 without a model", positive=True
    )
    token_us: float | None = setting(
        None, "that experts take of each token of an iteration; null: as their kernels take, 0 without a model"
    )

    def __post_init__(self) -> None:
        check_fields(self, RequestError, "eplb")

    @property
    def exist(self) -> bool:
        """Whether loads are ever uneven."""
        return bool(self.drift and self.spread)
