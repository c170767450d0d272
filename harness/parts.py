"""A campaign cut into parts, one for each node: every part has some of each kind, and all write into one store.

All parts of a campaign share its run id, so that what one way of running it has measured, another need not: parts that
Slurm left undone are finished by ``opcast profile`` here, or by another number of parts.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import zlib
from collections import Counter
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..datasets.files import StoreError, write_atomically
from ..datasets.reading import read_json
from .plan import CampaignPlan, CampaignPlanError, Case

CAMPAIGNS = "campaigns"
COMMON = 3  # cases that every part measures where the plan names none: what nodes are compared by
MOST_PARTS = 10_000


@dataclass(frozen=True, slots=True)
class CampaignPart:
    """One of the parts of a campaign, numbered from 0."""

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> CampaignPart:
        """From ``3/8``; CampaignPlanError for anything else."""
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
        if not match or not int(match[1]) < int(match[2]) <= MOST_PARTS:
            raise CampaignPlanError(f"part={text!r} must be a number from 0, a slash and how many, as 3/8")
        return cls(int(match[1]), int(match[2]))


def cut(plan: CampaignPlan, part: CampaignPart) -> CampaignPlan:
    """The plan of one part: every ``count``-th case of each kind, in the plan's order, and all the canaries."""
    if part.count == 1:
        return plan
    counts: Counter[str] = Counter()
    mine = []
    for case in plan.cases:
        if (counts[case.op.kind] + _offset(case.op.kind, plan)) % part.count == part.index:
            mine.append(case)
        counts[case.op.kind] += 1
    return replace(plan, cases=tuple(mine), canaries=plan.canaries or common(plan))


def read_plan(path: Path) -> CampaignPlan:
    """A plan's file, plain or gzip. CampaignPlanError."""
    if path.suffix != ".gz":
        return CampaignPlan.from_json(path)
    try:
        return CampaignPlan.from_json(gzip.decompress(path.read_bytes()).decode())
    except (OSError, EOFError, UnicodeError, zlib.error) as error:
        raise CampaignPlanError(f"{path} is no plan: {error}") from None


def _offset(kind_name: str, plan: CampaignPlan) -> int:
    """Where a kind begins, so that the parts differ by one case at most over all kinds."""
    before = itertools.takewhile(lambda name: name != kind_name, dict.fromkeys(case.op.kind for case in plan.cases))
    names = set(before)
    return sum(case.op.kind in names for case in plan.cases)


def common(plan: CampaignPlan) -> tuple[Case, ...]:
    """Some cases of a plan without canaries, of different kinds, that every part measures."""
    first: dict[str, Case] = {}
    for case in plan.cases:
        first.setdefault(case.op.kind, case)
    return tuple(first.values())[:COMMON]


def campaign_id(plan: CampaignPlan) -> str:
    """The name of a campaign wherever and in however many parts it runs."""
    return f"{plan.name}-{plan.identity[:12]}"


def announce(store: Path, plan: CampaignPlan, parts: int, where: str = "") -> Path:
    """Write down that a campaign runs in so many parts, for who asks how far it is; its path. StoreError."""
    path = store / CAMPAIGNS / f"{campaign_id(plan)}.json"
    record = {"parts": parts, "where": where, "plan": json.loads(plan.to_json())}
    if path.exists():
        record_before = read_json(path, StoreError, "a campaign")
        if isinstance(record_before, dict) and all(
            record_before.get(name) == record[name] for name in ("parts", "plan")
        ):
            return path
    record["announced_at"] = datetime.now(UTC).isoformat(timespec="seconds")
    return write_atomically(path, lambda file: file.write_text(json.dumps(record), "utf-8"))


def announcements(store: Path) -> dict[str, dict[str, Any]]:
    """What :func:`announce` wrote, by campaign. StoreError for a damaged record."""
    records = {}
    for path in sorted(store.glob(f"{CAMPAIGNS}/*.json")):
        record = read_json(path, StoreError, f"campaign {path.stem}")
        if not isinstance(record, dict) or not {"parts", "plan"} <= set(record):
            raise StoreError(f"{path} is damaged: remove it, and give the campaign's command again")
        records[path.stem] = record
    return records
