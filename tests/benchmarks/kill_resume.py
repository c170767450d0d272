"""Kill a real CPU campaign with SIGKILL at random moments, resume it, and compare with an undisturbed run.

    python tests/benchmarks/kill_resume.py [--kills 10] [--seed 0] [--budget 30]

Takes the shipped campaign ``quick``, scaled to a budget in seconds and to small shapes, on one thread. The moments are
random shares of the campaign, and up to half a second later. Prints, for every kill, how many cases the campaign had
reported as done and how many rows were found; at the end both runs beside each other. Exit code 1 when a row is lost,
doubled or missing.
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
from opcast.harness.plan import CampaignPlan, build_plan

QUICK = Path(__file__).resolve().parents[2] / "conf" / "campaign" / "quick.yaml"
DRIVER = """
import sys
from opcast.datasets.store import Store
from opcast.harness.campaign import run
from opcast.harness.plan import CampaignPlan
plan, store = CampaignPlan.from_json(open(sys.argv[1]).read()), Store(sys.argv[2])
print(run(plan, store, lambda p: print(p.done, p.done + p.waiting, flush=True)).outcome, flush=True)
"""


def make_plan(budget_s: float, seed: int) -> CampaignPlan:
    """The quick campaign for this CPU; without a deadline, so that it always ends complete."""
    spec: dict[str, Any] = yaml.safe_load(QUICK.read_text())
    spec["budget_s"] = budget_s
    spec["settings"] |= {"device": "cpu", "threads": 1, "seed": seed, "deadline_s": 0.0, "case_budget_s": 0.02}
    small = {"max_flops": 1e8, "max_bytes": 2e7}
    entries = [{key: value for key, value in entry.items() if key not in small} for entry in spec["cases"]]
    return build_plan({**spec, **small, "cases": entries})


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


def attempt(plan: Path, store: Path, kill_at: int | None = None, delay_s: float = 0.0) -> tuple[str, int]:
    """Run the campaign, killed so long after it has measured so many cases; its last word and the most done."""
    command = [sys.executable, "-P", "-c", DRIVER, str(plan), str(store)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.split())
        if kill_at is not None and len(lines[-1]) > 1 and int(lines[-1][1]) >= kill_at:
            time.sleep(delay_s)
            process.kill()
            break
    lines += [line.split() for line in process.stdout]
    process.wait()
    done = max((int(words[0]) for words in lines if len(words) > 1), default=0)
    return ("complete" if lines and lines[-1] == ["complete"] else "killed"), done


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
    plan, made = folder / "plan.json", make_plan(chosen.budget, chosen.seed)
    plan.write_text(made.to_json())
    start = time.monotonic()
    attempt(plan, folder / "undisturbed")
    undisturbed = keys(folder / "undisturbed")
    print(f"undisturbed: {sum(undisturbed.values())} rows in {time.monotonic() - start:.0f} s", flush=True)
    random, lost = Random(chosen.seed), 0
    disturbed = folder / "disturbed"
    moments = sorted(random.sample(range(len(made.cases)), chosen.kills))
    for number, moment in enumerate(moments, 1):
        delay_s = random.uniform(0.0, 0.5)
        last, reported = attempt(plan, disturbed, moment, delay_s)
        rows = sum(keys(disturbed).values()) if disturbed.exists() else 0
        lost += max(0, reported - rows)
        where = f"{delay_s:.2f} s after {moment} cases"
        print(f"kill {number:2d}, {where:24s}: {reported} reported done, {rows} rows in the store, {last}", flush=True)
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
