"""What a launcher runs on a node: one part of a campaign that was announced in the store."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..datasets.store import Store
from .campaign import run
from .ledger import CampaignError
from .nodes import compare, set_aside
from .parts import CampaignPart, announcements
from .plan import CampaignPlan


def run_part(store: str, campaign: str, part: str) -> dict[str, Any]:
    """What a launcher runs on a node: one part of an announced campaign; the summary's fields.

    CampaignError when the part was interrupted or cannot run, so that the launcher sees a failure.
    """
    record = announcements(Path(store)).get(campaign)
    if record is None:
        raise CampaignError(f"store {store} has no campaign {campaign}: is it the same folder on every node?")
    plan = CampaignPlan.from_json(json.dumps(record["plan"]))
    try:
        summary = run(plan, Store(store), part=CampaignPart.parse(part))
    except KeyboardInterrupt:
        raise CampaignError(f"part {part} of {campaign} was interrupted before its first case") from None
    for line in set_aside(Store(store), compare(Store(store))):
        print(f"set aside: {line}", file=sys.stderr)
    if summary.outcome == "interrupted":
        raise CampaignError(f"part {part} of {campaign} was interrupted: {summary.remaining} cases are left")
    return asdict(summary)
