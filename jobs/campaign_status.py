"""``opcast profile status``: how far the campaigns of a store are, live with ``watch=true``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets.counts import counted
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
    campaigns = status(store)
    if as_json:
        print_json({"store": str(path), "campaigns": [status_values(campaign, price) for campaign in campaigns]})
        return 0
    for campaign in campaigns:
        show(campaign, price)
    if not campaigns:
        say(f"{path}: no campaign was run into this store")
    return 0


def status_values(campaign: CampaignStatus, price: float | None) -> dict[str, Any]:
    """A campaign's status as plain values; ``cost`` in the currency of ``price_per_gpu_hour``."""
    hours = campaign.device_s / 3600
    return {
        **asdict(campaign),
        "complete": campaign.complete,
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
            campaigns = status(store)
            live.update(Group(*(status_table(campaign, price) for campaign in campaigns)))
            if campaigns and all(campaign.complete for campaign in campaigns):
                return 0
            time.sleep(EVERY_S)


def headline(campaign: CampaignStatus, price: float | None) -> str:
    """One line: cases, failures, time left, cost."""
    figures = status_values(campaign, price)
    words = [f"{campaign.campaign} ({campaign.where}): {campaign.done:,} of {counted(campaign.cases, 'case')}"]
    words += [f"{count} {name}" for name, count in sorted(campaign.failures.items())]
    if campaign.not_started:
        words.append(f"{counted(campaign.not_started, 'part')} not started")
    if not campaign.complete and campaign.left_s is not None:
        words.append(f"{duration(campaign.left_s)} left")
    words.append(f"{figures['gpu_hours']:.2f} device hours" + ("" if price is None else f", {figures['cost']:.2f}"))
    return ", ".join(words)


HEADS = ("part", "node", "job", "state", "cases", "failures", "starts", "time", "left", "note")


def lines(campaign: CampaignStatus) -> list[tuple[str, ...]]:
    """A line for each part that was started."""
    rows: list[tuple[str, ...]] = []
    for part in campaign.parts:
        failures = ", ".join(f"{count} {name}" for name, count in sorted(part.statuses.items()) if name != "ok")
        skew = f"clock {part.clock_offset_s:+.0f} s off" if part.clock_offset_s else ""
        note = part.error or skew or (f"silent for {duration(part.heard_s)}" if part.state == "silent" else "")
        time_left = "" if part.left_s is None else duration(part.left_s)
        cases = f"{part.done}/{part.total}"
        counts = failures, str(part.starts), duration(part.busy_s), time_left, note
        rows.append((part.part, part.node, part.job, part.state, cases, *counts))
    return rows


def show(campaign: CampaignStatus, price: float | None) -> None:
    table(headline(campaign, price), HEADS, lines(campaign))


def status_table(campaign: CampaignStatus, price: float | None) -> Any:
    """The same as a table of rich."""
    from rich.table import Table

    rich_table = Table(title=headline(campaign, price), title_justify="left")
    for head in HEADS:
        rich_table.add_column(head)
    for line in lines(campaign):
        rich_table.add_row(*line)
    return rich_table
