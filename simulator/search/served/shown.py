"""How ways to serve are shown: their figures, the headlines of the best, what pointing at one says."""

from __future__ import annotations

from ...html import units
from ...html.page import Card
from ...report.view import ViewColumn
from ..objectives import OF_SERVING
from ..rank import Row
from ..result import SearchReport
from ..view import RowsView
from .explain import settings


def hints(row: Row) -> list[str]:
    """What a page says of a way to serve that is pointed at."""
    return [
        f"{row['tokens_per_s_per_gpu']:,.0f} tokens/s a GPU, {row['tokens_per_s_per_user']:.1f} a user",
        f"TTFT {row['ttft_ms']:,.0f} ms, TPOT {row['tpot_ms']:.1f} ms, {row['requests_per_s']:.2f} requests/s",
    ]


def cards(report: SearchReport) -> list[Card]:
    """Headlines of the best way to serve."""
    best = report.best[0]
    return [
        Card("For GPUs", (("tokens/s each", units.count(best["tokens_per_s_per_gpu"])),)),
        Card("For users", (("tokens/s each", f"{best['tokens_per_s_per_user']:.1f}"),)),
        Card("First token", (("", units.duration(best["ttft_ms"] * 1e3)),), (("mean, in steady state", ""),)),
    ]


WAYS = RowsView(
    noun=("way to serve", "ways to serve"),
    looked="looked at",
    grid="layout",
    name=settings,
    place=lambda row: f"{settings(row)} on {row['cluster']}",
    title=lambda row: f"{settings(row)}, on {units.count(row['devices'])} GPUs",
    columns={
        "devices": ViewColumn("GPUs"),
        "tokens_per_s_per_gpu": ViewColumn("tokens/s/GPU", "count", bar=True),
        "tokens_per_s_per_user": ViewColumn("tokens/s/user", "tenths"),
        "ttft_ms": ViewColumn("TTFT", "ms"),
        "tpot_ms": ViewColumn("TPOT", "fine_ms"),
        "requests_per_s": ViewColumn("requests/s", "hundredths"),
        "kv_share": ViewColumn("KV", "percent", "share of the KV memory that is in use on average"),
    },
    objectives=OF_SERVING,
    kinds=(
        ("one pool", "green", lambda row: row["pools"] == "together"),
        ("pools apart", "violet", lambda row: row["pools"] == "apart"),
    ),
    hints=hints,
    cards=cards,
    front_note="Each point is a way to serve; point at one for its settings. No other is as good in all objectives as "
    "one of the front and better in one of them, among those that give users what they expect.",
    change="what users notice",
    shown_front=16,
    turned=True,
    measured=" an iteration",
)
