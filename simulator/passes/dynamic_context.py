"""Context parallelism per sequence: a batch of unequal lengths, each with the degree that suits it.

A short sequence is best left whole on one rank, where nothing has to be exchanged; a long one would keep its rank
busy long after the others, so it is spread. :func:`dynamic_context` picks degree and zigzag for every sequence and
places it so that the busiest rank has as little to do as can be found: longest first, for few sequences then branch and
bound from there (dynamic context parallelism as in Charon, section 5.1; longest first is Graham's rule, 1969).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ..question.plan import PlanError

Work = Callable[[int, int, bool], float]
FEW = 12  # sequences up to which better ways than the longest-first one are searched for
VISITS = 20_000  # placements that the search looks at before it takes the best so far


@dataclass(frozen=True)
class Placement:
    """One sequence: ``length`` tokens on ``ranks``, which share its tokens (in zigzag or in a row)."""

    index: int
    length: int
    ranks: tuple[int, ...]
    zigzag: bool

    @property
    def degree(self) -> int:
        """Ranks that share the sequence."""
        return len(self.ranks)


@dataclass(frozen=True)
class Assignment:
    """Where every sequence of a batch goes, in the batch's order, and what each rank has to do."""

    placements: tuple[Placement, ...]
    load: tuple[float, ...]

    @property
    def busiest(self) -> float:
        """The load that decides."""
        return max(self.load, default=0.0)


def attention_work(hidden: int, layer_flops_per_token: float, exchange_flops_per_token: float = 0.0) -> Work:
    """A rank's share of one layer of a sequence, in FLOPs: ``(length, degree, zigzag) -> work``.

    Attention costs 4 · ``hidden`` FLOPs a pair of tokens under a causal mask; zigzag shares pairs evenly, in a row the
    last rank has the most. Each of the degree - 1 exchanges costs as much time as ``exchange_flops_per_token`` for
    every token sent.
    """

    def work(length: int, degree: int, zigzag: bool) -> float:
        tokens = length / degree
        pairs = length * (length + 1) / 2 / degree
        if degree > 1 and not zigzag:
            pairs = tokens * (length - tokens) + tokens * (tokens + 1) / 2
        return 4.0 * hidden * pairs + layer_flops_per_token * tokens + exchange_flops_per_token * tokens * (degree - 1)

    return work


def dynamic_context(lengths: Sequence[int], ranks: int, work: Work) -> Assignment:
    """Degree, zigzag and ranks for every sequence. ``work`` says what each of its ranks does, in any unit.

    Degrees divide ``ranks``; the ranks of a sequence are neighbours that begin at a multiple of their number. Zigzag
    needs a length that 2 · degree parts cut evenly. Deterministic. PlanError for lengths or ranks below one.
    """
    if ranks < 1 or any(length < 1 for length in lengths):
        raise PlanError(f"sequence lengths and ranks must be at least 1, not {min((ranks, *lengths))}")
    options = lru_cache(maxsize=None)(lambda length: _options(length, ranks, work))
    order = sorted(range(len(lengths)), key=lambda i: (-min(o.total for o in options(lengths[i])), i))
    queue = [options(lengths[i]) for i in order]
    chosen = _longest_first(queue, ranks)
    if len(queue) <= FEW:
        chosen = _search(queue, ranks, chosen)
    placements = [
        Placement(index, lengths[index], tuple(range(option.first, option.first + option.degree)), option.zigzag)
        for index, option in sorted(zip(order, chosen, strict=True))
    ]
    return Assignment(tuple(placements), tuple(_loads(chosen, ranks)))


@dataclass(frozen=True, order=True)
class _Option:
    """One way to place a sequence: ``each`` is what each of its ranks does."""

    total: float
    degree: int
    first: int
    zigzag: bool
    each: float


def _options(length: int, ranks: int, work: Work) -> list[_Option]:
    """Every degree, at every place, with the better of zigzag and in a row."""
    options = []
    for degree in (d for d in range(1, min(ranks, length) + 1) if ranks % d == 0 and length % d == 0):
        zigzags = [False, True] if degree > 1 and length % (2 * degree) == 0 else [False]
        least, zigzag = min((work(length, degree, z), z) for z in zigzags)
        options += [_Option(least * degree, degree, first, zigzag, least) for first in range(0, ranks, degree)]
    return sorted(options)


def _loads(chosen: Sequence[_Option], ranks: int) -> list[float]:
    loads = [0.0] * ranks
    for option in chosen:
        for rank in range(option.first, option.first + option.degree):
            loads[rank] += option.each
    return loads


def _after(loads: list[float], option: _Option) -> list[float]:
    stop = option.first + option.degree
    return [load + option.each if option.first <= rank < stop else load for rank, load in enumerate(loads)]


def _remaining(queue: list[list[_Option]]) -> list[float]:
    """Work that is left before each sequence, however it is placed."""
    least = [0.0] * (len(queue) + 1)
    for position in range(len(queue) - 1, -1, -1):
        least[position] = least[position + 1] + queue[position][0].total
    return least


def _longest_first(queue: list[list[_Option]], ranks: int) -> list[_Option]:
    """One option for each sequence in turn: the one that promises the lowest load, with least work, soonest done."""
    loads, together, least = np.zeros(ranks), 0.0, _remaining(queue)
    chosen: list[_Option] = []
    for position, options in enumerate(queue):
        top, ways = float(loads.max()), []
        for option in (o for o in options if o.first == 0):
            tops = loads.reshape(-1, option.degree).max(axis=1)
            freest = int(tops.argmin())
            most, total = max(top, float(tops[freest]) + option.each), together + option.total
            promise = max(most, (total + least[position + 1]) / ranks)
            ways.append((promise, total, most, replace(option, first=freest * option.degree)))
        best = min(ways)[3]
        loads[best.first : best.first + best.degree] += best.each
        together += best.total
        chosen.append(best)
    return chosen


def _search(queue: list[list[_Option]], ranks: int, chosen: list[_Option]) -> list[_Option]:
    """A better option for each sequence than ``chosen``, where there is one."""
    least, best = _remaining(queue), chosen
    bound, visits = max(_loads(chosen, ranks)), VISITS

    def visit(position: int, loads: list[float], chosen: list[_Option]) -> None:
        nonlocal best, bound, visits
        if position == len(queue):
            best, bound = list(chosen), max(loads)
            return
        tried: set[tuple[float, ...]] = set()
        for at_least, _, _, option, after in sorted(_ways(queue[position], loads, least[position + 1])):
            alike = tuple(sorted(after))
            if visits <= 0:
                return
            if at_least >= bound * (1 - 1e-12) or (option.degree == 1 and alike in tried):
                continue
            tried.add(alike)
            visits -= 1
            visit(position + 1, after, [*chosen, option])

    visit(0, [0.0] * ranks, [])
    return best


def _ways(
    options: list[_Option], loads: list[float], remaining: float
) -> Iterator[tuple[float, float, float, _Option, list[float]]]:
    """Every option with what the busiest rank will have at least, all ranks together, and the busiest now.

    Ways that may all turn out as well are tried in the order of the work that they make.
    """
    for option in options:
        after = _after(loads, option)
        together, most = sum(after), max(after)
        yield max(most, (together + remaining) / len(after)), together, most, option, after
