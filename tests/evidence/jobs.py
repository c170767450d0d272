"""Whole jobs that were published, beside what ``opcast plan`` says of them: ``python tests/evidence/jobs.py``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

import opcast

FILE = Path(__file__).with_name("jobs.yaml")
LIVES = 2000


@dataclass(frozen=True)
class PublishedJob:
    """A job: its published figure, and what most lives lie between, where ``setbacks`` are those of other jobs."""

    name: str
    figure: str
    published: float
    p10: float
    p50: float
    p90: float
    goal: float | None
    setbacks: float

    @property
    def error(self) -> float:
        """Percent that the median is off."""
        return 100.0 * (self.p50 / self.published - 1.0)


def jobs() -> dict[str, dict[str, Any]]:
    """The table."""
    table: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())
    return table


def setback(name: str) -> float:
    """ln of how much longer a job took than machines explain; 0 where it was no longer."""
    row = jobs()[name]
    expected = getattr(opcast.plan(**row["told"], lives=LIVES, setbacks=0.0), row["figure"]).p50
    sign = -1.0 if row["figure"] == "goodput" else 1.0
    return max(sign * math.log(row["published"] / expected), 0.0)


@lru_cache
def setbacks() -> dict[str, float]:
    """Those of jobs whose step was known, whole ones."""
    return {name: setback(name) for name, row in jobs().items() if row.get("setbacks")}


def answer(name: str) -> PublishedJob:
    """One job lived through, with the setbacks of the others in the mean."""
    row = jobs()[name]
    others = [each for other, each in setbacks().items() if other not in (name, row.get("part_of"))]
    mean = 0.0 if row["told"].get("failures", {}).get("fleet") == "none" else sum(others) / len(others)
    report = opcast.plan(**row["told"], lives=LIVES, setbacks=mean)
    spread = getattr(report, row["figure"])
    return PublishedJob(name, row["figure"], row["published"], spread.p10, spread.p50, spread.p90, row["goal"], mean)


def lines() -> Iterator[str]:
    """The table as Markdown."""
    yield "| job | figure | published | P50 | P10 to P90 | error | setbacks of others |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name in jobs():
        job = answer(name)
        between = f"{job.p10:,.4g} to {job.p90:,.4g}"
        figures = f"{job.published:,.6g} | {job.p50:,.4g} | {between} | {job.error:+.1f} % | {job.setbacks:.3f}"
        yield f"| {name} | {job.figure} | {figures} |"
    told = ", ".join(f"{name} {each:.3f}" for name, each in setbacks().items())
    yield f"setbacks: {told}; mean {sum(setbacks().values()) / len(setbacks()):.3f}"


if __name__ == "__main__":
    print("\n".join(lines()))
