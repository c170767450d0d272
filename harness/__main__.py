"""Run a plan where opcast's other parts are not installed: ``python -m opcast.harness PLAN.json STORE [--quiet]``.

Needs torch, numpy and pyarrow (triton for its kernels). ``--part 3/8`` runs one of
eight parts of it, beside others on other nodes. Exit codes: 0 done, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .command import execute, refuse
from .parts import CampaignPart, read_plan


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run the plan, print what was done."""
    parser = argparse.ArgumentParser(prog="python -m opcast.harness", description="Run a campaign's plan into a store.")
    parser.add_argument("plan", help="file written by Plan.to_json, as `opcast profile` makes it")
    parser.add_argument("store", help="folder of measurements; made when it is not there")
    parser.add_argument("--part", default="0/1", help="one of several parts of the plan, counted from 0: 3/8")
    parser.add_argument("--quiet", action="store_true", help="no progress, errors only")
    chosen = parser.parse_args(arguments)
    try:
        plan = read_plan(Path(chosen.plan))
    except ValueError as error:
        return refuse(f"{chosen.plan}: {error}")
    try:
        campaign_part = CampaignPart.parse(chosen.part)
    except ValueError as error:
        return refuse(str(error))
    return execute(plan, chosen.store, chosen.quiet, part=campaign_part)


if __name__ == "__main__":
    sys.exit(main())
