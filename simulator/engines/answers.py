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
NO_NAMES = np.array("", dtype=object)
MAX_REMEMBERED = 100_000  # ops whose answers an engine keeps; longer lists are not looked up


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
    clause: np.ndarray = field(default_factory=lambda: NO_NAMES)
    source: np.ndarray = field(default_factory=lambda: NO_NAMES)

    def __post_init__(self) -> None:
        for name in ("clause", "source"):
            if getattr(self, name) is NO_NAMES:
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
            np.broadcast_to(np.array(value, dtype=object), self.clause.shape) for value in (clause, source)
        )
        return self

    @property
    def open(self) -> np.ndarray:
        """Positions that nobody answered yet."""
        return np.flatnonzero(np.isnan(self.latency_us))

    def witnesses(self) -> np.ndarray:
        """Who answered for each op: :class:`Witness` [n]."""
        names = np.empty(len(self.latency_us), dtype=object)
        columns = (self.clause.tolist(), self.source.tolist(), self.engine.tolist(), self.predictor.tolist())
        for position, (clause, source, engine, predictor) in enumerate(zip(*columns, strict=True)):
            names[position] = Witness(clause or engine, source or engine, predictor or engine)
        return names

    def take(self, positions: np.ndarray) -> Answers:
        """Some of the entries."""
        return Answers(*(getattr(self, f.name)[positions] for f in fields(self)))

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


def in_turn(engines: Sequence[Engine], kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
    """What the first engine that knows it says of each op; each sees only the ops that those before it declined."""
    answers: Answers | None = None
    for engine in engines:
        waiting = slice(None) if answers is None else answers.open
        if not isinstance(waiting, slice) and not len(waiting):
            break
        pending = columns if answers is None else {name: column[waiting] for name, column in columns.items()}
        answer = engine.answer(kind, pending, dtype, out_dtype, cache)
        answered = ~np.isnan(answer.latency_us)
        if answers is None and not answered.any():
            continue
        if answers is None and answered.all() and isinstance(answer, Answers):
            return answer  # the usual case of a large table: nothing is copied
        answers = answers or Answers.declined(len(next(iter(columns.values()))))
        answers.put(waiting, answer)
    return answers or Answers.declined(len(next(iter(columns.values()))))


def ask(engine: Engine, ops: Sequence[Op], cache: str = "warm") -> Answers:
    """The engine's answers for a mixed list of ops, in its order; what one that remembers was asked before is known."""
    remembered: dict[tuple[str, Op], tuple[Any, ...]] | None = getattr(engine, "answered", None)
    if remembered is None or len(ops) > MAX_REMEMBERED:
        return _ask(engine, ops, cache)
    if len(remembered) > MAX_REMEMBERED:
        remembered.clear()
    new = [op for op in dict.fromkeys(ops) if (cache, op) not in remembered]
    if new:
        fresh = _ask(engine, new, cache)
        rows = zip(*(getattr(fresh, f.name).tolist() for f in fields(fresh)), strict=True)
        remembered.update(zip(((cache, op) for op in new), rows, strict=True))
    columns = zip(*(remembered[cache, op] for op in ops), strict=True)
    answers = Answers.declined(len(ops))
    for f, column in zip(fields(answers), columns, strict=False):
        getattr(answers, f.name)[:] = column
    return answers


def ask_ahead(engine: Engine, ops: Sequence[Op]) -> None:
    """Have an engine that remembers answer ops, warm and cold, that it will be asked for list by list."""
    if getattr(engine, "answered", None) is not None:
        for cache in ("warm", "cold"):
            ask(engine, ops, cache)


def _ask(engine: Engine, ops: Sequence[Op], cache: str) -> Answers:
    answers = Answers.declined(len(ops))
    for kind, dtype, out_dtype, positions, columns in iterate_groups(list(ops)):
        answers.put(positions, engine.answer(kind, columns, dtype, out_dtype, cache))
    return answers
