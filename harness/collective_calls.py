"""The calls of torch.distributed that the collective kinds stand for, on buffers as nccl-tests sizes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..datasets.ops import Op
from .cases.base import Unsupported, torch_dtype

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

TILE_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Transfer:
    """A collective ready to run on this rank: the call, what it reads and what it writes (the same when in place)."""

    run: Callable[[], object]
    source: torch.Tensor
    target: torch.Tensor


@dataclass(frozen=True)
class Setting:
    """What the builder of a call needs to know."""

    op: Op
    group: ProcessGroup
    rank: int
    device: str
    in_place: bool

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Random values in so many bytes; Unsupported when they are no whole number of elements."""
        import torch

        dtype = torch_dtype(self.op.dtype)
        if size_bytes <= 0 or size_bytes % dtype.itemsize:
            raise Unsupported(f"{size_bytes} bytes are no whole number of {self.op.dtype} elements")
        numel = size_bytes // dtype.itemsize
        tile = torch.rand(min(numel, TILE_ELEMENTS), device=self.device).mul_(100).to(dtype)
        return tile.repeat(-(-numel // TILE_ELEMENTS))[:numel]

    def shard_bytes(self) -> int:
        """The part of one rank; Unsupported when the buffer does not divide into whole elements for each."""
        unit = self.op.ranks * torch_dtype(self.op.dtype).itemsize
        if self.op.size_bytes % unit:
            raise Unsupported(f"size_bytes={self.op.size_bytes} is no multiple of ranks times itemsize ({unit})")
        return self.op.size_bytes // self.op.ranks

    def own_shard(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole buffer."""
        return whole.chunk(self.op.ranks)[self.rank]


def _all_reduce(s: Setting) -> Transfer:
    import torch.distributed as dist

    data = s.buffer(s.op.size_bytes)
    return Transfer(lambda: dist.all_reduce(data, group=s.group), data, data)


def _all_gather(s: Setting) -> Transfer:
    import torch.distributed as dist

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    shard_bytes, whole = s.shard_bytes(), s.buffer(s.op.size_bytes)
    shard = s.own_shard(whole) if s.in_place else s.buffer(shard_bytes)
    return Transfer(lambda: gather(whole, shard, group=s.group), shard, whole)


def _reduce_scatter(s: Setting) -> Transfer:
    import torch.distributed as dist

    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
    shard_bytes, whole = s.shard_bytes(), s.buffer(s.op.size_bytes)
    shard = s.own_shard(whole) if s.in_place else s.buffer(shard_bytes)
    return Transfer(lambda: scatter(shard, whole, group=s.group), whole, shard)


def _all_to_all(s: Setting) -> Transfer:
    import torch.distributed as dist

    s.shard_bytes()
    source, target = s.buffer(s.op.size_bytes), s.buffer(s.op.size_bytes)
    return Transfer(lambda: dist.all_to_all_single(target, source, group=s.group), source, target)


def _broadcast(s: Setting) -> Transfer:
    import torch.distributed as dist

    data = s.buffer(s.op.size_bytes)
    return Transfer(lambda: dist.broadcast(data, 0, group=s.group), data, data)


def _send_recv(s: Setting) -> Transfer:
    """To the next rank of the ring and from the one before, as nccl-tests' sendrecv."""
    import torch.distributed as dist

    source, target = s.buffer(s.op.size_bytes), s.buffer(s.op.size_bytes)
    after, before = (s.rank + 1) % s.op.ranks, (s.rank - 1) % s.op.ranks

    def run() -> None:
        send = dist.P2POp(dist.isend, source, after, s.group)
        receive = dist.P2POp(dist.irecv, target, before, s.group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    return Transfer(run, source, target)


CALLS: dict[str, Callable[[Setting], Transfer]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send_recv": _send_recv,
}
IN_PLACE = ("all_gather", "reduce_scatter")
