"""One rank of the test of collectives that run out of memory: before they begin, which all ranks agree on, and inside.

``python short_of_memory_ranks.py RANK RANKS PORT``; rank 0 prints what becomes of each case as a JSON line.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from torch.distributed import TCPStore

from opcast.datasets.ops import make_op
from opcast.harness.collective_calls import CALLS, CallSetting, ReadyCollective
from opcast.harness.collectives import RankGroup
from opcast.harness.environment import use_loopback
from opcast.harness.measuring import outcome
from opcast.harness.plan import Case, Settings

SETTINGS = Settings(threads=1, case_budget_s=0.01, ci_width=0.5, case_timeout_s=30.0)


def no_room_for_buffers(setting: CallSetting) -> ReadyCollective:
    """The last rank cannot make its buffers."""
    if setting.rank == setting.op.ranks - 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB")
    data = torch.ones(4)
    return ReadyCollective(lambda: None, data, data)


def no_room_inside(setting: CallSetting) -> ReadyCollective:
    """Rank 0 fails inside the library; elsewhere the call returns at once, as NCCL's does, and the device waits."""
    data = torch.ones(4)

    def run() -> None:
        if setting.rank == 0:
            raise torch.OutOfMemoryError("NCCL error: unhandled cuda error, out of memory")

    return ReadyCollective(run, data, data)


def main(rank: int, ranks: int, port: int) -> None:
    """Rank 0 asks for the cases, the others serve."""
    use_loopback()
    CALLS.update(all_gather=no_room_for_buffers, all_reduce=no_room_inside)
    store = TCPStore("127.0.0.1", port, ranks, is_master=rank == 0, wait_for_workers=False)
    group = RankGroup._join(SETTINGS, rank, ranks, store)
    if rank:
        group.serve()
        return
    for kind in ("all_gather", "broadcast", "all_reduce"):
        case = Case(make_op(kind, size_bytes=1024, ranks=ranks, dtype="fp32"), "gloo")
        print(json.dumps({"kind": kind, **outcome(case, SETTINGS, group)}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
