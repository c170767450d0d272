"""The accuracy of every calibration that shipped, by the history of ``conf/calibration_scores.json``, as a table.

python tests/benchmarks/ledger.py
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = "conf/calibration_scores.json"
ORDER = ("framework", "chip", "table", "halves", "fitted", "physics")
SAID = ("framework left out", "chip left out", "table left out", "half left out", "fitted", "physics")
HEADS = ("commit", "date", "runs", *SAID)


def git(*words: str) -> str:
    """What git says."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def rows() -> Iterator[str]:
    """A row for each commit that changed the scores of all runs, the newest first."""
    for line in git("log", "--format=%h %cs", "--", FILE).splitlines():
        commit, date = line.split()
        of = json.loads(git("show", f"{commit}:{FILE}")).get("all", {})
        if set(ORDER) <= set(of):
            cells = " | ".join(f"{of[how]['median']:.1f} / {of[how]['p90']:.1f}" for how in ORDER)
            yield f"| `{commit}` | {date} | {of['fitted']['rows']:.0f} | {cells} |"


if __name__ == "__main__":
    print(f"| {' | '.join(HEADS)} |", "|" + " --- |" * len(HEADS), *rows(), sep="\n")
