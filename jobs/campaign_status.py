"""``opcast profile status``: how far the campaigns of a store are, live with ``watch=true``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets.store import Store
from ..harness.command import duration
from .show import BadInputError, print_json, say, table, wants_json

if TYPE_CHECKING:
    from ..harness.status import CampaignStatus

EVERY_S = 2.0


def run(config: Mapping[str, Any]) -> int:
    """Print it once, or until all campaigns are through; returns the exit code."""
    from ..harness.status import status

    as_json = wants_json(dict(config))
    path = Path(str(config["store"])).expanduser()
    if not path.is_dir():
        raise BadInputError(f"store {path} does not exist; `opcast profile` makes one, store=… names another")
    store, price = Store(path), config.get("price_per_gpu_hour")
    if config.get("watch") and not as_json:
        return watch(store, price)
    found = status(store)
    if as_json:
        print_json({"store": str(path), "campaigns": [described(each, price) for each in found]})
        return 0
    for each in found:
        show(each, price)
    if not found:
        say(f"{path}: no campaign was run into this store")
    return 0


def described(found: CampaignStatus, price: float | None) -> dict[str, Any]:
    """A campaign's status as plain values; ``cost`` in the currency of ``price_per_gpu_hour``."""
    hours = found.device_s / 3600
    return {
        **asdict(found),
        "complete": found.complete,
        "gpu_hours": hours,
        "cost": None if price is None else hours * price,
    }


def watch(store: Store, price: float | None) -> int:
    """Redraw the tables every two seconds, until everything is measured or Ctrl-C."""
    from rich.console import Group
    from rich.live import Live

    from ..harness.status import status

    with Live(refresh_per_second=1) as live:
        while True:
            found = status(store)
            live.update(Group(*(drawn(each, price) for each in found)))
            if found and all(each.complete for each in found):
                return 0
            time.sleep(EVERY_S)


def headline(found: CampaignStatus, price: float | None) -> str:
    """One line: cases, failures, time left, cost."""
    told = described(found, price)
    words = [f"{found.campaign} ({found.where}): {found.done:,} of {found.cases:,} cases"]
    words += [f"{count} {name}" for name, count in sorted(found.failures.items())]
    if found.not_started:
        words.append(f"{found.not_started} parts not started")
    if not found.complete and found.left_s is not None:
        words.append(f"{duration(found.left_s)} left")
    words.append(f"{told['gpu_hours']:.2f} device hours" + ("" if price is None else f", {told['cost']:.2f}"))
    return ", ".join(words)


HEADS = ("part", "node", "job", "state", "cases", "failures", "starts", "time", "left", "note")


def lines(found: CampaignStatus) -> list[tuple[str, ...]]:
    """A line for each part that was started."""
    made: list[tuple[str, ...]] = []
    for each in found.parts:
        failures = ", ".join(f"{count} {name}" for name, count in sorted(each.statuses.items()) if name != "ok")
        skew = f"clock {each.clock_offset_s:+.0f} s off" if each.clock_offset_s else ""
        note = each.error or skew or (f"silent for {duration(each.heard_s)}" if each.state == "silent" else "")
        left = "" if each.left_s is None else duration(each.left_s)
        cases = f"{each.done}/{each.total}"
        counts = failures, str(each.starts), duration(each.busy_s), left, note
        made.append((each.part, each.node, each.job, each.state, cases, *counts))
    return made


def show(found: CampaignStatus, price: float | None) -> None:
    table(headline(found, price), HEADS, lines(found))


def drawn(found: CampaignStatus, price: float | None) -> Any:
    """The same as a table of rich."""
    from rich.table import Table

    made = Table(title=headline(found, price), title_justify="left")
    for head in HEADS:
        made.add_column(head)
    for line in lines(found):
        made.add_row(*line)
    return made
