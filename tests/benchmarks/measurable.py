"""What of each step that measuring is proved on can be measured on its hardware; needs no GPU.

    python tests/benchmarks/measurable.py [WORDS]

runs ``opcast profile coverage`` for the steps of ``tests/jobs/test_profile_coverage.py`` (those whose names contain
WORDS) against an empty store. Printed are the share of the step's time that can be measured, how long that takes beside
what packages compile, and the largest op that cannot be, with the reason. Exit code 1 where less than 98 % can be.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opcast.datasets.store import Store
from opcast.jobs import resolve
from opcast.jobs.composing import compose
from opcast.jobs.profile_coverage import NOT, coverage, coverage_values
from opcast.simulator.engines.chain import caller_of
from opcast.simulator.report.needs import needs
from opcast.tests.jobs.test_profile_coverage import LEAST_SHARE, STEPS


def values_of(words: str, home: Path) -> Mapping[str, Any]:
    """What the verb says of a step in JSON."""
    config = compose("profile_coverage", [*words.split(), f"home={home}"])
    answered: Any = resolve.bench(config).answered(resolve.request_of("simulate", config))
    state = answered.report.state
    caller = caller_of(state.plan.stack, answered.device)
    ops = coverage(needs(state), answered.device, answered.engine, Store(home / "store"), caller)
    return coverage_values(ops, answered.device.id, caller.framework)


def main(wanted: Sequence[str]) -> int:
    steps = {name: words for name, words in STEPS.items() if all(word in name for word in wanted)}
    home, short = Path(tempfile.mkdtemp()), 0
    print(f"{'step':46}{'on':12}{'measurable':>11}{'minutes':>9}")
    for name, words in steps.items():
        told = values_of(words, home)
        share = told["shares"]["measurable"]
        missing = next((op for op in told["ops"] if op["status"] == NOT), None)
        rest = f"  {missing['share']:.1%} {missing['op']['kind']}: {missing['why'][:100]}" if missing else ""
        print(f"{name:46}{told['device']:12}{share:11.1%}{told['seconds'] / 60:9.1f}{rest}", flush=True)
        short += share < LEAST_SHARE
    print(f"{len(steps) - short} of {len(steps)} steps: at least {LEAST_SHARE:.0%} can be measured")
    return int(short > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
