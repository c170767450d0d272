"""The ways in which a collective is run, by the name of the backend: torch's plain call, and what engines make of it.

``nccl:graph`` replays calls that were captured in a CUDA graph, as serving engines decode; ``nccl:registered`` has its
buffers in memory that NCCL knows (user buffers, NVLink's multicast where there is one), captured too. ``symm_mem:…``
are torch's kernels on symmetric memory, ``vllm:custom_all_reduce`` is vLLM's own for small tensors of one node, and
``flashinfer:…`` are TensorRT-LLM's (:mod:`.flashinfer_sums`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from ..datasets.kernels import other_form
from ..datasets.ops import Op
from .cases.base import Unsupported
from .cases.packages import package
from .collective_calls import CALLS, IN_PLACE, CallSetting, ReadyCollective
from .deep_ep_calls import DEEP_EP, ELASTIC, ELASTIC_CALLS
from .flashinfer_sums import SUMS, FlashInferSum

GRAPH_CALLS = 10  # captured one behind the other, so that the launch of the graph is no part of one
Build = Callable[[CallSetting], ReadyCollective]


def plain(s: CallSetting) -> ReadyCollective:
    """The call that torch has."""
    return CALLS[s.op.kind](s)


def in_place(s: CallSetting) -> ReadyCollective:
    """The same from and into one buffer, as nccl-tests' second column."""
    return plain(replace(s, in_place=True))


def capture_call(ready: ReadyCollective) -> ReadyCollective:
    """The replay of a graph of :data:`GRAPH_CALLS` calls."""
    ready.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(GRAPH_CALLS):
            ready.run()
    return replace(ready, run=graph.replay, calls=GRAPH_CALLS)


def in_graph(s: CallSetting) -> ReadyCollective:
    """torch's call, captured."""
    return capture_call(plain(s))


# --- registered memory ---------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def registered_pool(group: Any) -> Any:
    """A pool of NCCL's own memory that a group's communicator knows; what is allocated in it is registered."""
    backend = group._get_backend(torch.device("cuda"))
    dist.all_reduce(torch.zeros(1, device="cuda"), group=group)  # the communicator is made by the first call
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        torch.empty(1, device="cuda")
    backend.register_mem_pool(pool)
    return pool


def register_buffers(s: CallSetting) -> ReadyCollective:
    """torch's call on registered buffers, captured."""
    with torch.cuda.use_mem_pool(registered_pool(s.group)):
        ready = plain(s)
    return capture_call(ready)


# --- symmetric memory, vLLM ----------------------------------------------------------------------------


def symmetric(name: str, s: CallSetting) -> ReadyCollective:
    """An all-reduce in place by a kernel that reads and writes the memory of all ranks, captured."""
    source = s.buffer(s.op.size_bytes)
    buffer = symmetric_memory.empty(source.numel(), dtype=source.dtype, device=source.device)
    handle = symmetric_memory.rendezvous(buffer, s.group.group_name)
    if name == "multimem" and not handle.multicast_ptr:
        raise Unsupported("these GPUs have no NVLink multicast")
    kernel = {
        "multimem": torch.ops.symm_mem.multimem_all_reduce_,
        "two_shot": torch.ops.symm_mem.two_shot_all_reduce_,
        "one_shot": torch.ops.symm_mem.one_shot_all_reduce,
    }[name]
    buffer.copy_(source)
    return capture_call(ReadyCollective(lambda: kernel(buffer, "sum", s.group.group_name), buffer, buffer))


@lru_cache(maxsize=8)
def custom_communicator(control: Any) -> Any:
    """vLLM's communicator of a group of one node, whose processes talk over ``control``."""
    module = package("vllm.distributed.device_communicators.custom_all_reduce")
    return module.CustomAllreduce(group=control, device=torch.device("cuda", torch.cuda.current_device()))


def vllm_all_reduce(s: CallSetting) -> ReadyCollective:
    """vLLM's one- and two-shot kernels on graphs' own buffers, which it registers at the end of the capture."""
    communicator = custom_communicator(s.control)
    source = s.buffer(s.op.size_bytes)
    if communicator.disabled or not communicator.should_custom_ar(source):
        raise Unsupported(f"vLLM leaves {s.op.size_bytes} bytes on {s.op.ranks} of these GPUs to NCCL")
    with communicator.capture():
        reduced = capture_call(ReadyCollective(lambda: communicator.custom_all_reduce(source), source, source))
    return reduced


# --- by name -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """How a backend makes a collective ready, and for which kinds it does."""

    build: Build
    kinds: tuple[str, ...] = tuple(CALLS)
    dtypes: tuple[str, ...] = ()  # none: all


def _symmetric(name: str) -> Variant:
    return Variant(lambda s: symmetric(name, s), ("all_reduce",), ("bf16", "fp32"))


def _flashinfer(flashinfer_sum: FlashInferSum) -> Variant:
    return Variant(lambda s: capture_call(flashinfer_sum.build(s)), ("all_reduce",), ("bf16", "fp16", "fp32"))


ON_GPU: dict[str, Variant] = {
    "nccl": Variant(plain),
    "nccl:inplace": Variant(in_place, IN_PLACE),
    "nccl:graph": Variant(in_graph, tuple(kind for kind in CALLS if kind not in ("send_recv",))),
    "nccl:registered": Variant(register_buffers, ("all_reduce", "all_gather", "reduce_scatter")),
    "symm_mem:multimem": _symmetric("multimem"),
    "symm_mem:two_shot": _symmetric("two_shot"),
    "symm_mem:one_shot": _symmetric("one_shot"),
    "vllm:custom_all_reduce": Variant(vllm_all_reduce, ("all_reduce",), ("bf16", "fp16", "fp32")),
    **{name: _flashinfer(flashinfer_sum) for name, flashinfer_sum in SUMS.items()},
    "deep_ep": Variant(lambda s: DEEP_EP[s.op.kind](s), tuple(DEEP_EP)),
    ELASTIC: Variant(lambda s: ELASTIC_CALLS[s.op.kind](s), tuple(ELASTIC_CALLS)),
}
ON_CPU: dict[str, Variant] = {"gloo": Variant(plain), "gloo:inplace": Variant(in_place, IN_PLACE)}


def variant(op: Op, backend: str, device: str) -> Variant:
    """The way of a backend. Unsupported where a device, a kind or a format has not got it."""
    by_backend = ON_GPU if device == "cuda" else ON_CPU
    if op.kind not in CALLS:
        raise Unsupported(f"{op.kind} is no collective")
    if backend not in by_backend:
        usual = next(iter(by_backend))
        raise Unsupported(f"no backend {backend!r} for collectives on {device}: use {usual}")
    if why := other_form(op, backend):
        raise Unsupported(why)
    make_variant = by_backend[backend]
    if op.kind not in make_variant.kinds:
        raise Unsupported(f"{backend} does not run {op.kind}; it runs {', '.join(make_variant.kinds)}")
    if make_variant.dtypes and op.dtype not in make_variant.dtypes:
        raise Unsupported(f"{backend} adds {', '.join(make_variant.dtypes)}, not {op.dtype}")
    return make_variant
