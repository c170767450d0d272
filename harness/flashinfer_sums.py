"""TensorRT-LLM's all-reduces as FlashInfer carries them: alone, and with the residual's add and the norm behind them.

vLLM, SGLang and TensorRT-LLM sum small tensors of one node so, most of them with the norm in the same kernel: a row of
it is the time of all three, and its op says ``norm=yes``. ``trtllm`` reads the memory of its peers, ``mnnvl`` goes
through NVLink's multicast. Of the size an op says bytes alone; the rows that the kernels work on are as wide as those
of large models, where the bytes divide so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from .cases.base import Unsupported
from .cases.packages import package
from .cases.rows import EPSILON
from .collective_calls import CallSetting, ReadyCollective

RANKS = (2, 4, 8)
MOST_BYTES = 8 << 20  # larger sums engines leave to NCCL
WIDEST, LANE = 8192, 8  # elements of a row at most, and in multiples of what a thread loads


@dataclass(frozen=True)
class FlashInferSum:
    """A backend: the kernels' family as FlashInfer names it, and whether the norm is part of the call."""

    family: str
    norm: bool = False

    def build(self, s: CallSetting) -> ReadyCollective:
        """The call, to be captured. Unsupported for ranks and bytes that no engine reduces so."""
        check(s.op.ranks, s.op.ranks_per_node, s.op.size_bytes)
        comm = package("flashinfer.comm")
        source = s.buffer(s.op.size_bytes)
        rows = source.view(-1, row_width(source.numel()))
        space = workspace(self.family, s.control, s.rank, s.op.ranks, source.dtype)
        target = torch.empty_like(rows)
        call = partial(comm.allreduce_fusion, input=rows, workspace=space, launch_with_pdl=True)
        kinds = comm.AllReduceFusionPattern
        if not self.norm:
            return ReadyCollective(partial(call, pattern=kinds.kAllReduce, output=target), source, target)
        residual = torch.rand_like(rows)
        run = partial(
            call,
            pattern=kinds.kARResidualRMSNorm,
            residual_in=residual,
            residual_out=torch.empty_like(rows),
            norm_out=target,
            rms_gamma=torch.ones(rows.shape[1], dtype=rows.dtype, device=rows.device),
            rms_eps=EPSILON,
            fp32_acc=True,
        )
        return ReadyCollective(run, source, target)


SUMS = {
    "flashinfer:trtllm_all_reduce": FlashInferSum("trtllm"),
    "flashinfer:mnnvl_all_reduce": FlashInferSum("mnnvl"),
    "flashinfer:trtllm_all_reduce_norm": FlashInferSum("trtllm", norm=True),
    "flashinfer:mnnvl_all_reduce_norm": FlashInferSum("mnnvl", norm=True),
}


def check(ranks: int, ranks_per_node: int, size_bytes: int) -> None:
    """Unsupported for sums that engines leave to NCCL."""
    if ranks not in RANKS or ranks > ranks_per_node or size_bytes > MOST_BYTES:
        raise Unsupported("engines leave it to NCCL: these kernels are for up to 8 MiB on 2, 4 or 8 GPUs of one node")


def row_width(numel: int) -> int:
    """Elements of a row: the most that divide the tensor, up to :data:`WIDEST`."""
    for width in range(min(WIDEST, numel // LANE * LANE), 0, -LANE):
        if numel % width == 0:
            return width
    raise Unsupported(f"{numel} elements do not divide into rows of multiples of {LANE}")


@lru_cache(maxsize=16)
def workspace(family: str, control: Any, rank: int, ranks: int, dtype: torch.dtype) -> Any:
    """The memory that the ranks of a group share, for the largest sum; they make it together over ``control``."""
    comm, peers = package("flashinfer.comm"), package("flashinfer.comm.mnnvl")
    if family == "mnnvl" and not peers.is_multicast_supported(torch.cuda.current_device()):
        raise Unsupported("these GPUs have no NVLink multicast")
    return comm.create_allreduce_fusion_workspace(
        backend=family,
        world_size=ranks,
        rank=rank,
        max_token_num=MOST_BYTES // (WIDEST * dtype.itemsize),
        hidden_dim=WIDEST,
        dtype=dtype,
        comm_backend=peers.TorchDistBackend(group=control),
        group=control,
    )
