"""How layouts are shown: their figures, the headlines of the best, what pointing at one says."""

from __future__ import annotations

from ...datasets.counts import counted
from ..html import units
from ..html.page import Card
from ..report.view import PAGE, TERMINAL, ViewColumn
from .objectives import OBJECTIVES
from .rank import Row
from .result import SearchReport
from .space import settings
from .view import RowsView


def hints(row: Row) -> list[str]:
    """What a page says of a layout that is pointed at."""
    bubble, exposed = (units.duration(row[name] * 1e6) for name in ("bubble_s", "exposed_comm_s"))
    return [
        f"step {units.duration(row['step_time_s'] * 1e6)}",
        f"MFU {units.share(row['mfu'])}, {units.gib(row['peak_gib'])}",
        f"bubble {bubble}, exposed {exposed}",
    ]


def cards(report: SearchReport) -> list[Card]:
    """Headlines of the best layout."""
    best, after = report.best[0], report.best[1:2]
    span = ("interval", units.duration_range(best["low_s"] * 1e6, best["high_s"] * 1e6))
    gap = after[0]["step_time_s"] / best["step_time_s"] - 1 if after else 0.0
    next_one = (("the next one takes", f"{gap * 100:.1f} % longer"),) if gap >= 0.0005 else ()
    rate = units.count(best["tokens_per_s_per_gpu"])
    return [
        Card("Step time", (("", units.duration(best["step_time_s"] * 1e6)),), (span, *next_one)),
        Card("Tokens/s per GPU", (("", rate),), (("MFU", units.share(best["mfu"])),)),
        Card("Peak memory", (("", units.gib(best["peak_gib"])),)),
    ]


LAYOUTS = RowsView(
    noun=("layout", "layouts"),
    looked="simulated",
    grid="combination",
    name=settings,
    place=lambda row: f"{settings(row)} dp={row['dp']} on {counted(row['devices'], 'GPU')}",
    title=lambda row: f"{settings(row)}, dp={row['dp']} on {counted(row['devices'], 'GPU')}",
    columns={
        "step_time_s": ViewColumn("step", "seconds", bar=True),
        "tokens_per_s_per_gpu": ViewColumn("tokens/s/GPU", "count", only=TERMINAL),
        "mfu": ViewColumn("MFU", "share"),
        "peak_gib": ViewColumn("GiB", "gib", "peak memory of the fullest stage"),
        "compute_s": ViewColumn("compute", "seconds", only=PAGE),
        "exposed_comm_s": ViewColumn("exposed", "seconds", "communication during which nothing computes", only=PAGE),
        "bubble_s": ViewColumn("bubble", "seconds", "waiting in the pipeline", only=PAGE),
    },
    objectives=OBJECTIVES,
    kinds=(("simulated", "muted", lambda row: True),),
    hints=hints,
    cards=cards,
    front_note="Each point is a layout that was simulated; point at one for its settings. No other layout is as good "
    "in all objectives as one of the front (blue) and better in one of them.",
    change="why",
    shown_front=12,
)
