"""The calls of torch.distributed that the collective kinds stand for, on buffers as nccl-tests sizes them.

The exchange between experts is an all-to-all of unequal parts, with the gather before it or the sum after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..datasets.ops import Op
from .cases.base import Unsupported, torch_dtype

TILE_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class ReadyCollective:
    """A collective ready to run on this rank: the call, what it reads and what it writes (the same when in place)."""

    run: Callable[[], object]
    source: torch.Tensor
    target: torch.Tensor
    calls: int = 1  # that one ``run`` makes


@dataclass(frozen=True)
class CallSetting:
    """What the builder of a call needs to know."""

    op: Op
    group: ProcessGroup
    rank: int  # in the group
    device: str
    in_place: bool = False
    control: ProcessGroup | None = None  # the same ranks over gloo

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Random values in so many bytes; Unsupported when they are no whole number of elements."""
        dtype = torch_dtype(self.op.dtype)
        if size_bytes <= 0 or size_bytes % dtype.itemsize:
            raise Unsupported(f"{size_bytes} bytes are no whole number of {self.op.dtype} elements")
        return self._random(size_bytes // dtype.itemsize, dtype)

    def rows(self, count: int, dtype: str) -> torch.Tensor:
        """Random values [count, hidden] of an exchange between experts."""
        return self._random(count * self.op.hidden, torch_dtype(dtype)).view(count, self.op.hidden)

    def peer(self, member: int) -> int:
        """The rank of a member of the group among all ranks, which is how torch's point-to-point calls name it."""
        return dist.get_global_rank(self.group, member) if self.group else member

    def _random(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        tile = torch.rand(min(numel, TILE_ELEMENTS), device=self.device).mul_(100).to(dtype)
        return tile.repeat(-(-numel // TILE_ELEMENTS))[:numel]

    def shard_bytes(self) -> int:
        """The part of one rank; Unsupported when the buffer does not divide into whole elements for each."""
        unit = self.op.ranks * torch_dtype(self.op.dtype).itemsize
        if self.op.size_bytes % unit:
            raise Unsupported(f"size_bytes={self.op.size_bytes} is no multiple of ranks times itemsize ({unit})")
        return self.op.size_bytes // self.op.ranks

    def own_shard(self, gathered: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole buffer."""
        return gathered.chunk(self.op.ranks)[self.rank]


def _all_reduce(s: CallSetting) -> ReadyCollective:
    data = s.buffer(s.op.size_bytes)
    return ReadyCollective(lambda: dist.all_reduce(data, group=s.group), data, data)


def _all_gather(s: CallSetting) -> ReadyCollective:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    shard_bytes, gathered = s.shard_bytes(), s.buffer(s.op.size_bytes)
    shard = s.own_shard(gathered) if s.in_place else s.buffer(shard_bytes)
    return ReadyCollective(lambda: gather(gathered, shard, group=s.group), shard, gathered)


def _reduce_scatter(s: CallSetting) -> ReadyCollective:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
    shard_bytes, source = s.shard_bytes(), s.buffer(s.op.size_bytes)
    shard = s.own_shard(source) if s.in_place else s.buffer(shard_bytes)
    return ReadyCollective(lambda: scatter(shard, source, group=s.group), source, shard)


def _all_to_all(s: CallSetting) -> ReadyCollective:
    s.shard_bytes()
    source, target = s.buffer(s.op.size_bytes), s.buffer(s.op.size_bytes)
    return ReadyCollective(lambda: dist.all_to_all_single(target, source, group=s.group), source, target)


def _broadcast(s: CallSetting) -> ReadyCollective:
    data = s.buffer(s.op.size_bytes)
    return ReadyCollective(lambda: dist.broadcast(data, 0, group=s.group), data, data)


def _send_recv(s: CallSetting) -> ReadyCollective:
    """To the next rank of the ring and from the one before, as nccl-tests' sendrecv."""
    source, target = s.buffer(s.op.size_bytes), s.buffer(s.op.size_bytes)
    after, before = (s.peer((s.rank + step) % s.op.ranks) for step in (1, -1))

    def run() -> None:
        send = dist.P2POp(dist.isend, source, after, s.group)
        receive = dist.P2POp(dist.irecv, target, before, s.group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    return ReadyCollective(run, source, target)


def _ep_dispatch(s: CallSetting) -> ReadyCollective:
    """Gather each destination's tokens, then exchange them."""
    routes, mine = _routes(s), s.rank
    tokens = s.rows(s.op.tokens, s.op.dtype)
    index = _indices(routes[mine], s.device)
    sent = [len(route) for route in routes[mine]]
    received = [len(routes[rank][mine]) for rank in range(s.op.ranks)]
    target = s.rows(sum(received), s.op.dtype)
    exchange = _exchange(target, received, sent, s)
    return ReadyCollective(lambda: exchange(tokens[index]), tokens, target)


def _ep_combine(s: CallSetting) -> ReadyCollective:
    """The rows of :func:`_ep_dispatch` back to their tokens' rank, and their sum there."""
    routes, mine = _routes(s), s.rank
    index = _indices(routes[mine], s.device)
    back = [len(route) for route in routes[mine]]
    sent = [len(routes[rank][mine]) for rank in range(s.op.ranks)]
    source, arrived = s.rows(sum(sent), s.op.out_dtype), s.rows(sum(back), s.op.out_dtype)
    target = s.rows(s.op.tokens, s.op.out_dtype)
    exchange = _exchange(arrived, back, sent, s)

    def run() -> None:
        exchange(source)
        target.zero_().index_add_(0, index, arrived)

    return ReadyCollective(run, source, target)


def _routes(s: CallSetting) -> list[list[torch.Tensor]]:
    """Tokens that each rank sends to each: [from][to], the same on every rank.

    Every token draws its topk experts at random. It goes once to each rank that holds one of them; in the mode
    ``low_latency`` once for each expert.
    """
    op = s.op
    if op.experts % op.ranks or op.topk > op.experts:
        raise Unsupported(f"top {op.topk} of {op.experts} experts on {op.ranks} ranks: they must divide evenly")
    if op.sms:
        raise Unsupported("torch chooses the compute units of an exchange itself: set sms=0")
    routes = []
    for rank in range(op.ranks):
        generator = torch.Generator().manual_seed(rank)
        experts = torch.rand(op.tokens, op.experts, generator=generator).topk(op.topk, dim=-1)[1]
        counts = torch.zeros(op.tokens, op.ranks, dtype=torch.int64)
        counts.scatter_add_(1, experts // (op.experts // op.ranks), torch.ones_like(experts))
        repeats = counts if op.mode else counts.clamp(max=1)
        routes.append([torch.arange(op.tokens).repeat_interleave(column) for column in repeats.unbind(1)])
    return routes


def _indices(routes: list[torch.Tensor], device: str) -> torch.Tensor:
    """The tokens of all destinations one after the other."""
    return torch.cat(routes).to(device)


def _exchange(
    target: torch.Tensor, received: list[int], sent: list[int], s: CallSetting
) -> Callable[[torch.Tensor], None]:
    """A call that exchanges rows as bytes, so that every format travels."""
    out = target.view(torch.uint8)

    def run(rows: torch.Tensor) -> None:
        dist.all_to_all_single(out, rows.view(torch.uint8), received, sent, group=s.group)

    return run


CALLS: dict[str, Callable[[CallSetting], ReadyCollective]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send_recv": _send_recv,
    "ep_dispatch": _ep_dispatch,
    "ep_combine": _ep_combine,
}
IN_PLACE = ("all_gather", "reduce_scatter")
