"""Low-rank adapters that requests ask for beside one model that all share: which, of what size, kept where."""

from __future__ import annotations

from dataclasses import dataclass

from ...datasets.loading import check_fields
from .canonical import RequestError
from .declaration import setting
from .kv_tiers import SSD_GBPS

MODULES = ("all", "attention", "mlp")
MOST_ADAPTERS = 4096  # with contents of prefixes they are numbers of 63 bits


@dataclass(frozen=True)
class ServedAdapters:
    """Adapters of a served model (multi-LoRA). Where there are none, or of rank 0, nothing is read of the rest."""

    adapters: int = setting(0, "low-rank adapters that requests ask for; 0: none")
    rank: int = setting(16, "of each, for which memory is taken at the start (vllm: max-lora-rank)")
    modules: str = setting(
        "all", "all | attention | mlp: products of a layer that have them, but for experts", choices=MODULES
    )
    popularity: str = setting("zipf:1", "uniform | zipf:EXPONENT: how often each is asked for")
    share: float = setting(1.0, "of the requests, or sessions, that ask for one", most=1)
    max_loras: int | None = setting(
        None, "on a GPU, and in a batch; others wait. null: as the engine has it (vllm 1, sglang 8)", least=1
    )
    max_cpu_loras: int | None = setting(
        None, "in host memory; null: as the engine has it (vllm: max_loras, sglang: all)", least=1
    )
    host_gbps: float | None = setting(None, "GB/s from there to a GPU; null: as tiers.host_gbps", positive=True)
    disk_gbps: float = setting(SSD_GBPS, "GB/s at which one is read that is not in host memory", positive=True)
    gib: float | None = setting(None, "of one adapter; null: as rank and model say, 0 without a model")
    adapter_us: float | None = setting(
        None, "that each adapter of a batch adds to an iteration; null: as its kernels take, 0 without a model"
    )
    token_us: float | None = setting(None, "that each token with an adapter adds; null: the same")

    def __post_init__(self) -> None:
        check_fields(self, RequestError, "lora")
        if self.adapters > MOST_ADAPTERS:
            raise RequestError(f"lora.adapters={self.adapters:,} is too many: at most {MOST_ADAPTERS:,} are told apart")
        if self.max_cpu_loras is not None and self.max_cpu_loras < (self.max_loras or 1):
            raise RequestError(
                f"lora.max_cpu_loras={self.max_cpu_loras} must be at least lora.max_loras={self.max_loras}"
            )
        if (self.adapter_us is None) != (self.token_us is None):
            raise RequestError("lora.adapter_us and lora.token_us stand in place of kernels together: give both")
        self.exponent  # noqa: B018 - complains where the popularity is none

    @property
    def exist(self) -> bool:
        """Whether any request has an adapter."""
        return bool(self.adapters and self.rank and self.share)

    @property
    def exponent(self) -> float:
        """Of the popularity: the n-th adapter is asked for as often as 1 / n to this power; 0: all alike."""
        kind, _, value = self.popularity.partition(":")
        try:
            exponent = 0.0 if kind == "uniform" and not value else float(value) if kind == "zipf" else -1.0
        except ValueError:
            exponent = -1.0
        if not 0 <= exponent <= 10:
            raise RequestError(f"lora.popularity={self.popularity} must be uniform, or zipf:EXPONENT such as zipf:1")
        return exponent
