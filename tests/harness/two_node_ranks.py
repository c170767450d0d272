"""One rank of the test of collectives on two nodes: four processes of this machine, of which two each call it another.

``python two_node_ranks.py RANK RANKS PORT PLAN STORE``; rank 0 runs the plan into the store.
"""

from __future__ import annotations

import sys
from pathlib import Path

from torch.distributed import TCPStore

from opcast.datasets.store import Store
from opcast.harness import collectives
from opcast.harness.campaign import run
from opcast.harness.collectives import InProcess, RankGroup
from opcast.harness.environment import use_loopback
from opcast.harness.plan import CampaignPlan


def main(rank: int, ranks: int, port: int, plan_path: str, store: str) -> None:
    """Join the others; rank 0 measures, the others serve."""
    use_loopback()
    collectives.machine_name = lambda: f"node {2 * rank // ranks}"
    plan = CampaignPlan.from_json(Path(plan_path))
    meeting = TCPStore("127.0.0.1", port, ranks, is_master=rank == 0, wait_for_workers=False)
    group = RankGroup._join(plan.settings, rank, ranks, meeting)
    if rank:
        group.serve()
    else:
        run(plan, Store(store), measurer=InProcess(group))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *sys.argv[4:6])
