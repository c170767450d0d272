"""What a timeline shows: one track per rank and stream, sends between ranks, memory over time.

Ranks that do the same work are folded into one :class:`RankTrack` until they are written.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

TASK_STREAM = "pipeline"


@dataclass(frozen=True, slots=True)
class TrackSpan:
    """Something that runs from ``start_us`` for ``duration_us`` on one stream. ``args`` are shown when it is chosen."""

    name: str
    start_us: float
    duration_us: float
    stream: str = "compute"
    category: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankTrack:
    """The spans of one rank, which stands for all that ``folded`` counts by dimension: ``{"data": 128, "tensor": 8}``.

    ``memory`` are (microsecond, GiB) from which on the rank holds so much, ``counters`` the like in units of their own.
    """

    name: str
    spans: Sequence[TrackSpan]
    folded: Mapping[str, int] = field(default_factory=dict)
    memory: Sequence[tuple[float, float]] = ()
    counters: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """How many ranks it stands for."""
        return int(np.prod(list(self.folded.values()), dtype=np.int64)) if self.folded else 1

    def members(self, limit: int) -> Iterator[str]:
        """Names of its first ranks, ``limit`` at the most; the last name says how many are not shown."""
        shown_count = min(self.ranks, max(limit, 1))
        coordinates = itertools.islice(
            itertools.product(*(range(count) for count in self.folded.values())), shown_count
        )
        for number, coordinate in enumerate(coordinates):
            parts = [self.name, *(f"{name} {at}" for name, at in zip(self.folded, coordinate, strict=True))]
            rest = self.ranks - shown_count if number == shown_count - 1 else 0
            yield ", ".join(parts) + (f" (and {rest:,} alike)" if rest else "")


@dataclass(frozen=True, slots=True)
class TrackFlow:
    """A transfer: from the span of one rank track at a moment to that of another."""

    name: str
    source: int
    source_us: float
    target: int
    target_us: float
    stream: str = TASK_STREAM
