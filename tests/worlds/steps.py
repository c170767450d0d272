"""The steps that measuring is to make better: thirteen of training and serving, on 8 to 64 devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opcast.datasets.store import Store
from opcast.simulator.question.keywords import simulate_request
from opcast.simulator.question.requests import SimulateRequest
from opcast.simulator.question.sources import Sources
from opcast.tests.worlds.chip import World


@dataclass(frozen=True)
class StepAsked:
    """A step by name: what a user asks :func:`opcast.simulate` for."""

    name: str
    model: str
    workload: str
    settings: Mapping[str, Any]

    def request(self, world: World, home: Path | str) -> SimulateRequest:
        """The request in a world, answered from the measurements of a home. No run is known of the world's devices."""
        sources = Sources.at(str(home), calibration="none")
        known = world.shipped or Store(Path(home) / "store").device(world.device.id) is not None
        device: Any = world.device.id if known else world.device  # once it was measured, its name says it all
        given = {**self.settings, "cluster": world.cluster}
        return simulate_request(self.model, self.workload, device, sources, given)  # type: ignore[no-any-return]


def _training(name: str, model: str, stack: str, **settings: Any) -> StepAsked:
    return StepAsked(name, model, "train", {"stack": stack, "seq_len": 8192, "micro_batch": 1, **settings})


def _serving(name: str, model: str, workload: str, stack: str, **settings: Any) -> StepAsked:
    return StepAsked(name, model, workload, {"stack": stack, "nodes": 1, "tp": 8, **settings})


FSDP: dict[str, Any] = {"zero_stage": 3, "recompute": "full"}
DECODE: dict[str, Any] = {"batch": 64, "input_len": 4096}
PROMPT: dict[str, Any] = {"batch": 2, "input_len": 4096}
TWO_NODES: dict[str, Any] = {"nodes": 2, "pp": 2}  # 671 GB of weights do not fit into one
STEPS = (
    _training("8b torchtitan bf16", "llama3_8b", "torchtitan", nodes=1, dp=8, global_batch=8, **FSDP),
    _training(
        "70b torchtitan float8", "llama3_70b", "torchtitan", nodes=8, dp=64, global_batch=64, precision="fp8", **FSDP
    ),
    _training(
        "8b megatron bf16",
        "llama3_8b",
        "megatron_core",
        nodes=1,
        tp=2,
        dp=4,
        zero_stage=1,
        global_batch=32,
        precision="bf16",
    ),
    _training(
        "70b megatron fp8",
        "llama3_70b",
        "megatron_core",
        nodes=4,
        tp=8,
        pp=4,
        dp=1,
        seq_len=4096,
        global_batch=16,
        precision="fp8",
        recompute="selective",
    ),
    _training("8b torch eager", "llama3_8b", "torch", nodes=1, dp=8, seq_len=2048, global_batch=8, **FSDP),
    _training("8b torch compiled", "llama3_8b", "torchtitan", nodes=2, dp=16, seq_len=4096, global_batch=16, **FSDP),
    _serving("v3 prefill vllm", "deepseek_v3", "prefill", "vllm", **PROMPT, **TWO_NODES),
    _serving("v3 decode vllm", "deepseek_v3", "decode", "vllm", **DECODE, **TWO_NODES),
    _serving("v3 prefill sglang", "deepseek_v3", "prefill", "sglang", **PROMPT, **TWO_NODES),
    _serving("v3 decode sglang", "deepseek_v3", "decode", "sglang", **DECODE, nodes=2, tp=16, ep=16),
    _serving("v3 decode trtllm", "deepseek_v3", "decode", "trtllm", **DECODE, **TWO_NODES),
    _serving("qwen3 decode vllm", "qwen3_30b_a3b", "decode", "vllm", **DECODE, tp=2, dp=4),
    _serving("gpt-oss decode vllm", "gpt_oss_120b", "decode", "vllm", **DECODE),
)
TRTLLM_ON_ADA = _serving("qwen3 decode trtllm", "qwen3_30b_a3b", "decode", "trtllm", **DECODE, tp=2, dp=4)


def steps_of(world: World) -> tuple[StepAsked, ...]:
    """The steps that are asked in a world: TensorRT-LLM has no experts in blocks of fp8 before Hopper."""
    kept = {"v3 decode trtllm": TRTLLM_ON_ADA} if world.device.sm < 9.0 else {}
    return tuple(kept.get(each.name, each) for each in STEPS)
