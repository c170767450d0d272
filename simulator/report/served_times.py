"""Times of served traffic: their spread over requests, what they are called, and the table of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .view import PAGE, Toned, ViewColumn, ViewTable

TIMES = {  # the report's name -> what it is called, what it is; those that moved caches have a row where any did
    "ttft_ms": ("TTFT", "until the first token"),
    "tpot_ms": ("TPOT", "of each later token of a request, on average"),
    "itl_ms": ("ITL", "between two tokens"),
    "e2e_ms": ("end to end", "until the last token"),
    "queue_ms": ("queue", "until the request runs"),
    "normalised_ms": ("per output token", "end to end over tokens of the answer"),
    "prefill_e2e_ms": ("prefill", "until the prompt is computed, of requests whose cache moves"),
    "kv_transfer_ms": ("KV transfer", "of a cache to the pool that decodes"),
    "decode_e2e_ms": ("decode", "from the arrival of the cache to the last token"),
}
STATISTICS = ("mean", "p50", "p90", "p99")
NAME = ViewColumn("", "words")


@dataclass(frozen=True)
class TimeSpread:
    """A time over all requests, in milliseconds; NaN where ``count`` is 0: nobody had it."""

    mean: float
    p50: float
    p90: float
    p99: float
    count: int
    cdf: tuple[tuple[float, float], ...] = field(default=(), repr=False)  # (ms, share of requests at most as long)

    def to_dict(self) -> dict[str, float | None]:
        """Without the CDF; None where nobody had it."""
        had = self.count > 0
        return {name: getattr(self, name) if had else None for name in ("mean", "p50", "p90", "p99")}


NOBODY = TimeSpread(math.nan, math.nan, math.nan, math.nan, 0)
"""A time that nobody had."""


def times_table(times: Mapping[str, TimeSpread | None], intervals: Mapping[str, tuple[float, float]]) -> ViewTable:
    """How long requests took, and on a page how sure that is."""
    quantiles = ("p50", "p99") if intervals else ()
    sure = [ViewColumn(f"interval of {quantile}", "ms_range", only=PAGE) for quantile in quantiles]
    rows = [
        [
            Toned(title, hint=meaning),
            *(getattr(spread, statistic) for statistic in STATISTICS),
            *(intervals.get(f"{name}.{quantile}") for quantile in quantiles),
        ]
        for name, (title, meaning) in TIMES.items()
        if (spread := times[name]) is not None
    ]
    return ViewTable("milliseconds", [NAME, *(ViewColumn(name, "time_ms") for name in STATISTICS), *sure], rows)
