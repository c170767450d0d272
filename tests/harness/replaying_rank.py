"""One rank of a replay on a CUDA device that is not there: NCCL's calls go to gloo, tensors live on the processor.

python replaying_rank.py RANK STORE_PORT PLAN.json RESULT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from opcast.datasets.traces.calls import TraceCall
from opcast.harness.replaying import ReplaySettings, run_rank
from opcast.tests.harness.fake_cuda import fake_cuda


def main(rank: int, port: int, plan: Path, result: Path) -> None:
    """Replay and write what was measured, and which back ends were asked for."""
    told = json.loads(plan.read_text())
    calls = [TraceCall(**{name: tuple(each) if isinstance(each, list) else each for name, each in call.items()})
             for call in told["calls"]]  # fmt: skip
    asked: list[str] = []
    begin, group = dist.init_process_group, dist.new_group

    def begun(backend: str, **settings: Any) -> Any:
        asked.append(backend)
        return begin("gloo", **settings)

    def grouped(members: Any, backend: str = "", **settings: Any) -> Any:
        asked.append(backend)
        return group(members, backend="gloo", **settings)

    dist.init_process_group, dist.new_group = begun, grouped
    with fake_cuda() as machine:
        groups = [tuple(each) for each in told["groups"]]
        settings = ReplaySettings("cuda", iterations=2, against=("gloo", "bf16"))
        found = run_rank(calls, settings, rank, 2, groups, port)
        found |= {"launches": machine.launches, "asked": asked}
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
