"""The accuracy of every calibration that shipped, by the history of ``calibration_scores.json``, as a table.

python tests/benchmarks/ledger.py
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = ("tests/evidence/calibration_scores.json", "conf/calibration_scores.json")  # where it is, and where it was
ORDER = ("framework", "chip", "table", "halves", "fitted", "physics")
SAID = ("framework left out", "chip left out", "table left out", "half left out", "fitted", "physics")
HEADS = ("commit", "date", "runs", *SAID)


def git(*words: str) -> str:
    """What git says."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def rows() -> list[str]:
    """A row for each commit that changed the scores of all runs, the newest first."""
    made, last = [], {}
    for line in reversed(git("log", "--format=%h %cs", "--", *FILES).splitlines()):
        commit, date = line.split()
        (path,) = git("ls-tree", "--name-only", commit, *FILES).split()
        of = json.loads(git("show", f"{commit}:{path}")).get("all", {})
        if set(ORDER) <= set(of) and of != last:
            cells = " | ".join(f"{of[how]['median']:.1f} / {of[how]['p90']:.1f}" for how in ORDER)
            made.append(f"| `{commit}` | {date} | {of['fitted']['rows']:.0f} | {cells} |")
            last = of
    return made[::-1]


if __name__ == "__main__":
    print(f"| {' | '.join(HEADS)} |", "|" + " --- |" * len(HEADS), *rows(), sep="\n")
