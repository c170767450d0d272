"""Kill a real CPU campaign with SIGKILL at random moments, resume it, and compare with an undisturbed run.

    python tests/benchmarks/kill_resume.py [--kills 10] [--seed 0] [--budget 30]

Takes the shipped campaign ``quick``, scaled to a budget in seconds. Prints, for every kill, how many cases the
campaign had reported as done and how many rows were found; at the end the rows of both runs, case by case. Exit code
1 when a row is lost, doubled or missing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import yaml
from opcast.datasets.store import Store
from opcast.harness.plan import Plan, build_plan

QUICK = Path(__file__).resolve().parents[2] / "conf" / "campaign" / "quick.yaml"
DRIVER = (
    "import sys; from opcast.datasets.store import Store; from opcast.harness.campaign import run;"
    "from opcast.harness.plan import Plan;"
    "s = run(Plan.from_json(open(sys.argv[1]).read()), Store(sys.argv[2]), lambda p: print(p.done, flush=True));"
    "print(s.outcome, flush=True)"
)


def make_plan(budget_s: float, seed: int) -> Plan:
    """The quick campaign for this CPU; without a deadline, so that it always ends complete."""
    spec: dict[str, Any] = yaml.safe_load(QUICK.read_text())
    spec["budget_s"] = budget_s
    spec["settings"] |= {"device": "cpu", "seed": seed, "deadline_s": 0.0, "case_budget_s": 0.02}
    return build_plan({**spec, "max_flops": 1e9, "max_bytes": 1e8})


def keys(store: Path) -> Counter[tuple[Any, ...]]:
    """How many rows each case has, by kind, dims, dtypes, backend, cache and run."""
    found: Counter[tuple[Any, ...]] = Counter()
    opened = Store(store)
    for kind in opened.kinds():
        for row in opened.read(kind, status=None, newest=False).to_pylist():
            named = sorted(
                (k, v) for k, v in row.items() if isinstance(v, int) and k not in ("iterations", "throttled")
            )
            found[kind, *named, row["dtype"], row["out_dtype"], row["backend"], row["cache"], row["run_id"]] += 1
    return found


def attempt(plan: Path, store: Path, seconds: float | None) -> tuple[str, int]:
    """Run the campaign, killed after so many seconds; its last line and the most that it reported as done."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", DRIVER, str(plan), str(store)], stdout=subprocess.PIPE, text=True
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    lines = output.split()
    return (lines[-1] if lines else ""), max((int(line) for line in lines if line.isdigit()), default=0)


def main() -> int:
    """The experiment; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=30.0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return experiment(Path(folder), chosen)


def experiment(folder: Path, chosen: argparse.Namespace) -> int:
    """One undisturbed run, then one that is killed again and again."""
    plan = folder / "plan.json"
    plan.write_text(make_plan(chosen.budget, chosen.seed).to_json())
    start = time.monotonic()
    attempt(plan, folder / "undisturbed", None)
    whole_s = time.monotonic() - start
    undisturbed = keys(folder / "undisturbed")
    print(f"undisturbed: {sum(undisturbed.values())} rows in {whole_s:.0f} s")
    random, lost = Random(chosen.seed), 0
    disturbed = folder / "disturbed"
    for kill in range(1, chosen.kills + 1):
        seconds = random.uniform(0.5, max(2.0, 2.5 * whole_s / chosen.kills))
        last, reported = attempt(plan, disturbed, seconds)
        rows = sum(keys(disturbed).values()) if disturbed.exists() else 0
        lost += max(0, reported - rows)
        print(f"kill {kill:2d} after {seconds:5.1f} s: {reported} reported done, {rows} rows in the store, {last}")
    last, _ = attempt(plan, disturbed, None)
    resumed = keys(disturbed)
    doubled = sum(count > 1 for count in resumed.values())
    missing, extra = undisturbed.keys() - resumed.keys(), resumed.keys() - undisturbed.keys()
    leftovers = len(list(disturbed.rglob("*.tmp")))
    print(f"resumed: {sum(resumed.values())} rows, {last}; undisturbed: {sum(undisturbed.values())} rows")
    print(f"missing {len(missing)}, extra {len(extra)}, doubled {doubled}, lost {lost}, leftover files {leftovers}")
    return int(bool(missing or extra or doubled or lost or leftovers or last != "complete"))


if __name__ == "__main__":
    sys.exit(main())
