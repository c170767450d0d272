"""Whole jobs that were published, beside what ``opcast plan`` says of them: ``python tests/evidence/jobs.py``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import opcast

FILE = Path(__file__).with_name("jobs.yaml")
LIVES = 2000


@dataclass(frozen=True)
class PublishedJob:
    """A job: its published figure, and what most lives lie between."""

    name: str
    figure: str
    published: float
    p10: float
    p50: float
    p90: float
    goal: float | None

    @property
    def error(self) -> float:
        """Percent that the median is off."""
        return 100.0 * (self.p50 / self.published - 1.0)


def jobs() -> dict[str, dict[str, Any]]:
    """The table."""
    table: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())
    return table


def answer(name: str) -> PublishedJob:
    """One job lived through."""
    row = jobs()[name]
    report = opcast.plan(**row["told"], lives=LIVES)
    spread = getattr(report, row["figure"])
    return PublishedJob(name, row["figure"], row["published"], spread.p10, spread.p50, spread.p90, row["goal"])


def lines() -> Iterator[str]:
    """The table as Markdown."""
    yield "| job | figure | published | P50 | P10 to P90 | error |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name in jobs():
        job = answer(name)
        between = f"{job.p10:,.4g} to {job.p90:,.4g}"
        yield f"| {name} | {job.figure} | {job.published:,.6g} | {job.p50:,.4g} | {between} | {job.error:+.1f} % |"


if __name__ == "__main__":
    print("\n".join(lines()))
