"""What every tensor is to the ranks that share it: whole, a share of tokens, of features or of the vocabulary.

A tensor of features has ``num / den`` shares of equal size: the number of ranks, less where heads of keys and values
are fewer than they, and a fraction where one tensor holds queries beside such keys and values.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import numpy as np

from ...graph import FROZEN, WEIGHT
from ..rewriting.draft import Draft, Section

WHOLE, TOKENS, FEATURES, VOCAB = range(4)
DONE, SUM, EXPERT_SUM, SCALAR_SUM, GRADIENT_SUM, EXCHANGE = range(6)  # what ranks still owe each other, and how
COLUMN, ROW, TABLE, REPLICATED = range(1, 5)  # how a weight is cut


class Shards:
    """States by tensor id of a draft (its tensors at the start; those that a pass adds are none of its business)."""

    def __init__(self, draft: Draft, parts: int, tokens: int) -> None:
        self.draft, self.parts, self.tokens = draft, parts, tokens
        self.widths: dict[int, Fraction] = {}
        self.dirty, count = False, len(draft.sizes)
        self.kind, self.pending, self.cut = (np.zeros(count, dtype=np.int8) for _ in range(3))
        self.num, self.den = np.ones(count, dtype=np.int64), np.ones(count, dtype=np.int64)
        self.weight = np.isin(draft.roles, [WEIGHT, FROZEN])
        self.generated, self.thin = (np.zeros(count, dtype=bool) for _ in range(2))
        self.numel = draft.elements(np.arange(count)).astype(np.int64)

    def mark(self, section: Section, tensor: int, kind: int, parts: Fraction | int, visible: bool = False) -> None:
        """Raise a tensor's state in all repetitions; ``visible``: others may have seen it as something else."""
        if kind <= self.kind[tensor] or self.numel[tensor] < 2:
            return
        where = section.span(tensor)
        self.kind[where] = kind
        self.num[where], self.den[where] = (
            (parts, 1) if isinstance(parts, int) else (parts.numerator, parts.denominator)
        )
        self.dirty |= visible

    def wait(self, section: Section, tensor: int, how: int) -> None:
        """Note that the ranks' values of a tensor are still to be summed (``DONE``: that they are)."""
        self.pending[section.span(tensor)] = how

    def share(self, tensor: int) -> Fraction:
        """In how many shares a tensor is cut."""
        return Fraction(int(self.num[tensor]), int(self.den[tensor]))

    def together(self, tensors: list[int]) -> Fraction:
        """In how many shares several tensors are cut that make up one operand."""
        if len(tensors) == 1:
            return self.share(tensors[0])
        return Fraction(sum(int(self.numel[t]) for t in tensors)) / sum(
            int(self.numel[t]) / self.share(t) for t in tensors
        )

    def of_width(self, tensor: int, rows: int = 0) -> Fraction:
        """The shares of a tensor of features known by its width alone (elements a token, or a row)."""
        return self.widths.get(int(self.numel[tensor]) // (rows or self.tokens), Fraction(self.parts))

    def derived(self, tensor: int, sources: Iterable[int]) -> Fraction:
        """The shares of what an op makes of tensors of features: theirs where sizes agree, else those of its width."""
        sources = list(sources)
        for source in sources:
            if self.numel[source] == self.numel[tensor]:
                return self.share(source)
        shares = {self.share(source) for source in sources}
        smaller = all(self.numel[source] > self.numel[tensor] for source in sources)
        share = shares.pop() if len(shares) == 1 else Fraction(self.parts)
        return share if smaller and share.denominator == 1 else self.of_width(tensor)

    def sized(self) -> None:
        """Give every tensor of the draft the size of one share."""
        count = len(self.kind)
        sizes = self.draft.sizes[:count]
        self.draft.sizes[:count] = -(-sizes * self.den // self.num)
