"""A measurer that answers with what was recorded of a real worker: campaigns' own work without torch and processes.

``python recorded.py PLAN STORE RECORD [PART]`` runs a campaign (a part of it) so, and prints how far it is.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from opcast.datasets.store import Store
from opcast.harness.campaign import run
from opcast.harness.parts import CampaignPart
from opcast.harness.plan import CampaignPlan, Case
from opcast.harness.supervisor import InterruptError


class Recorded:
    """Gives every case the same columns, in ``case_s`` seconds."""

    restarts = 0

    def __init__(self, environment: Mapping[str, Any], columns: Mapping[str, Any], case_s: float = 0.0) -> None:
        self.environment, self.columns, self.case_s = dict(environment), dict(columns), case_s
        self.interrupted = threading.Event()

    def start(self) -> dict[str, Any]:
        return dict(self.environment)

    def probe(self) -> dict[str, Any]:
        raise AssertionError("the device is known")

    def ask(self, case: Case, lost: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        time.sleep(self.case_s)
        if self.interrupted.is_set():
            raise InterruptError
        return dict(self.columns)

    def interrupt(self) -> None:
        self.interrupted.set()

    def close(self) -> None: ...


if __name__ == "__main__":
    plan, store, record, *part = sys.argv[1:]
    measurer = Recorded(**json.loads(Path(record).read_text()))
    summary = run(
        CampaignPlan.from_json(Path(plan).read_text()),
        Store(store),
        lambda p: print(p.done, p.waiting, flush=True),
        measurer,
        *map(CampaignPart.parse, part),
    )
    print(summary.outcome, flush=True)
