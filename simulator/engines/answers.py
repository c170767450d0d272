"""What an engine answers: columns of latencies with their intervals and where each came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np

from ...datasets.ops import Op, iterate_groups


@dataclass(frozen=True, order=True)
class Witness:
    """Who answered for an op: the clause of the rule, who measured what that one knows, and its name."""

    clause: str = ""
    source: str = ""
    predictor: str = ""


Columns = Mapping[str, np.ndarray]
NOBODY = np.array("", dtype=object)
MOST_KNOWN = 100_000  # ops whose answers an engine keeps; longer lists are not looked up


@dataclass
class Answers:
    """One entry per asked op. An engine that declines an op leaves NaN in ``latency_us``.

    ``low_us`` and ``high_us`` bound the latency with :data:`.coverage.COVERAGE`; ``engine`` and ``predictor`` name
    who answered (one for all: an array of stride 0, which cannot be written); ``in_envelope`` is False where a
    predictor had to extrapolate. ``clause`` is that of :mod:`...models.choice` by which it was asked, ``source``
    who measured what it knows; empty where an engine does not say.
    """

    latency_us: np.ndarray
    low_us: np.ndarray
    high_us: np.ndarray
    engine: np.ndarray
    predictor: np.ndarray
    in_envelope: np.ndarray
    clause: np.ndarray = field(default_factory=lambda: NOBODY)
    source: np.ndarray = field(default_factory=lambda: NOBODY)

    def __post_init__(self) -> None:
        for name in ("clause", "source"):
            if getattr(self, name) is NOBODY:
                setattr(self, name, np.full(len(self.latency_us), "", dtype=object))

    @classmethod
    def declined(cls, n: int) -> Answers:
        """Answers of an engine that knows none of ``n`` ops."""
        nan = np.full(n, np.nan)
        return cls(
            nan,
            nan.copy(),
            nan.copy(),
            np.full(n, "", dtype=object),
            np.full(n, None, dtype=object),
            np.zeros(n, dtype=bool),
        )

    def by(self, clause: str, source: str) -> Answers:
        """The same, all by one clause and source."""
        self.clause, self.source = (
            np.broadcast_to(np.array(each, dtype=object), self.clause.shape) for each in (clause, source)
        )
        return self

    @property
    def open(self) -> np.ndarray:
        """Positions that nobody answered yet."""
        return np.flatnonzero(np.isnan(self.latency_us))

    def witnesses(self) -> np.ndarray:
        """Who answered for each op: :class:`Witness` [n]."""
        found = np.empty(len(self.latency_us), dtype=object)
        columns = (self.clause.tolist(), self.source.tolist(), self.engine.tolist(), self.predictor.tolist())
        for at, (clause, source, engine, predictor) in enumerate(zip(*columns, strict=True)):
            found[at] = Witness(clause or engine, source or engine, predictor or engine)
        return found

    def take(self, chosen: np.ndarray) -> Answers:
        """Some of the entries."""
        return Answers(*(getattr(self, f.name)[chosen] for f in fields(self)))

    def put(self, positions: np.ndarray | slice, other: Answers) -> None:
        """Copy the entries of ``other`` to ``positions`` of this one."""
        for f in fields(self):
            getattr(self, f.name)[positions] = getattr(other, f.name, "")


class Engine(Protocol):
    """Answers a batch of ops of one kind and dtype, or declines some of them."""

    @property
    def name(self) -> str:
        """What answers call it."""
        ...

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        """``columns``: one int64 array of shape [n] per dim of the kind; ``cache``: ``cold`` or ``warm``."""
        ...


def ask(engine: Engine, ops: Sequence[Op], cache: str = "warm") -> Answers:
    """The engine's answers for a mixed list of ops, in its order; what one that remembers was asked before is known."""
    known: dict[tuple[str, Op], tuple[Any, ...]] | None = getattr(engine, "answered", None)
    if known is None or len(ops) > MOST_KNOWN:
        return _ask(engine, ops, cache)
    if len(known) > MOST_KNOWN:
        known.clear()
    new = [op for op in dict.fromkeys(ops) if (cache, op) not in known]
    if new:
        found = _ask(engine, new, cache)
        rows = zip(*(getattr(found, f.name).tolist() for f in fields(found)), strict=True)
        known.update(zip(((cache, op) for op in new), rows, strict=True))
    columns = zip(*(known[cache, op] for op in ops), strict=True)
    answers = Answers.declined(len(ops))
    for f, column in zip(fields(answers), columns, strict=False):
        getattr(answers, f.name)[:] = column
    return answers


def _ask(engine: Engine, ops: Sequence[Op], cache: str) -> Answers:
    answers = Answers.declined(len(ops))
    for kind, dtype, out_dtype, positions, columns in iterate_groups(list(ops)):
        answers.put(positions, engine.answer(kind, columns, dtype, out_dtype, cache))
    return answers
