"""One rank of the correctness test of collectives: runs each call once and checks what arrived, bit by bit.

``python collective_ranks.py RANK RANKS PORT``; prints the names of the calls that were right, with the ranks that took
part: all of them, then the first two.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from opcast.datasets.ops import make_op
from opcast.harness.collective_calls import CALLS, IN_PLACE, CallSetting, ReadyCollective
from opcast.harness.environment import use_loopback


def expected(kind: str, sources: list[torch.Tensor], rank: int) -> torch.Tensor:
    """What a rank's target must hold, from the sources of all ranks."""
    ranks = len(sources)
    if kind in ("all_reduce", "reduce_scatter"):
        total = torch.stack(sources).sum(0)
        return total if kind == "all_reduce" else total.chunk(ranks)[rank]
    if kind == "all_gather":
        return torch.cat(sources)
    if kind == "all_to_all":
        return torch.cat([source.chunk(ranks)[rank] for source in sources])
    return sources[0] if kind == "broadcast" else sources[(rank - 1) % ranks]


def check(kind: str, rank: int, ranks: int, in_place: bool, group: dist.ProcessGroup) -> None:
    """Run a call on whole numbers, which add up exactly, and compare."""
    op = make_op(kind, size_bytes=48 * ranks * 5, ranks=ranks, dtype="fp32")
    transfer: ReadyCollective = CALLS[kind](CallSetting(op, group, rank, "cpu", in_place))
    transfer.source.copy_(torch.arange(transfer.source.numel()) + 1000 * rank)
    sources = [torch.empty_like(transfer.source) for _ in range(ranks)]
    dist.all_gather(sources, transfer.source.clone(), group)
    if in_place:
        assert transfer.source.untyped_storage().data_ptr() == transfer.target.untyped_storage().data_ptr()
    transfer.run()
    assert torch.equal(transfer.target, expected(kind, sources, rank)), (kind, rank)
    whole = max(transfer.source.numel(), transfer.target.numel()) * 4
    assert whole == op.size_bytes, (kind, whole)


def check_exchange(rank: int, ranks: int, mode: str, group: dist.ProcessGroup) -> None:
    """Dispatch marked tokens, send what arrived back, and find each token as often as ranks or experts had it."""
    dims = {"tokens": 7, "hidden": 8, "topk": 3, "experts": 4 * ranks, "ranks": ranks, "mode": mode}
    made = {}
    for kind in ("ep_dispatch", "ep_combine"):
        setting = CallSetting(make_op(kind, "fp32", **dims), group, rank, "cpu", False)
        made[kind] = CALLS[kind](setting)
    there, back = made["ep_dispatch"], made["ep_combine"]
    there.source.copy_((torch.arange(7) + 100.0 * rank + 1.0)[:, None].expand(7, 8))
    there.run()
    arrived = torch.bincount((there.target[:, 0] // 100).long(), minlength=ranks)
    sent = [torch.empty_like(arrived) for _ in range(ranks)]
    dist.all_gather(sent, arrived, group)
    back.source.copy_(there.target)
    back.run()
    copies = back.target / there.source
    assert torch.equal(copies, copies.round()), copies
    assert copies.sum() / 8 == torch.stack(sent)[:, rank].sum()
    assert (copies == 3).all() if mode == "low_latency" else ((copies >= 1) & (copies <= min(3, ranks))).all()


def check_all(rank: int, ranks: int, group: dist.ProcessGroup) -> None:
    """Every call, in place too where it can be."""
    for mode in ("normal", "low_latency"):
        check_exchange(rank, ranks, mode, group)
    print(f"ep_dispatch/{ranks}", f"ep_combine/{ranks}")
    for kind in (each for each in CALLS if not each.startswith("ep_")):
        check(kind, rank, ranks, False, group)
        print(f"{kind}/{ranks}")
        if kind in IN_PLACE:
            check(kind, rank, ranks, True, group)
            print(f"{kind}:inplace/{ranks}")


def main(rank: int, ranks: int, port: int) -> None:
    """Join the others and check every call."""
    torch.set_num_threads(1)
    use_loopback()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    first_two = dist.new_group([0, 1])
    for group, size in ((dist.group.WORLD, ranks), (first_two, 2)):
        if rank < size:
            check_all(rank, size, group)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
