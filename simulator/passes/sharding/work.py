"""What one tensor rank does of a node, and what limits the number of ranks that can share it."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from ....datasets.ops import Op


@dataclass
class RankWork:
    """One rank's share of a node: its op, operands to gather first, results still to be summed.

    ``statistics`` is how many sums over the vocabulary, or over features of a token, it needs of all ranks;
    ``expert``: gathers over experts' ranks; ``exchanged``: as :mod:`.adapters` says.
    """

    op: Op | None
    gathers: tuple[int, ...] = ()
    pending: dict[int, int] = field(default_factory=dict)
    statistics: int = 0
    parts: Fraction = Fraction(1)
    expert: bool = False
    exchanged: bool = False


class Limit(NamedTuple):
    """A size that a degree must divide; with ``few`` the degree may be a multiple of it instead."""

    size: int
    what: str
    degree: str = "tp"
    few: bool = False

    def allows(self, degree: int) -> bool:
        """Whether so many ranks can share it."""
        return self.size % degree == 0 or (self.few and degree % self.size == 0)
