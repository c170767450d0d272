"""Which measurement answers for an op: the one rule for rows of a store and for predictors, for steps and single ops.

1. Rows of this very device that opcast timed itself come first (*own*), of them the kernel that the caller launches.
2. Then tables of other labs: of the caller's own framework, else of any.
3. Own rows of another kernel for the same op come after tables of the caller's framework, before any other.
4. Operators one by one (:func:`..datasets.kernels.is_eager`) are what eager PyTorch runs: under a stack that fuses
   they never answer. For an op that nobody launches in particular (``opcast predict``) they are another kernel.

Who launches which kernel is a table (:mod:`..datasets.launches`), from which campaigns are planned, too.

Outside of what own rows reach, a table is taken times what own rows are off it (:mod:`..simulator.engines.own_rows`),
and up to :data:`.few_rows.ENOUGH_ROWS` rows are learned as a correction of the tables of their device where that is
better.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..datasets.backends import DEFAULT_BACKEND, answers_anyone, means
from ..datasets.devices import RATE_OF
from ..datasets.dtypes import itemsize
from ..datasets.kernels import is_eager
from ..datasets.launches import ANYONE, Caller, launches, place
from .features import alike
from .labs import OWN_SOURCES

OWN = "own rows of the kernel that is launched"
BEYOND = "a table, times what own rows are off it"
OTHER = "own rows of another kernel"
TABLE = "a table of the kernel that is launched"
LIBRARY = "tables of PyTorch's own call"
ANY = "a table of the op"
OTHER_FORMAT = "a table of another format, times what physics says of this one"
ROW = "a row of another lab"
ALIKE = "another kind of op that is alike"
KIN = "tables of other devices"
NETWORK = "the network's formula"
MAT_VEC = "weights over the bandwidth that the engine's own kernel reaches"
FEWER_BYTES = "a product of as many bytes in another format: a table takes so much longer that it timed something else"
MORE_ROWS = "the same product of more rows: a table takes longer for fewer"
SUM_OF_BYTES = "a sum of tensors of as many bytes: a table of another format takes longer"
SIXTEEN_BITS_FASTER = "16-bit experts of as many bytes: a table takes longer for fewer bits, so that it was not tuned"
SIXTEEN_BITS_RATE = "the product in 16 bits, less what is not read: weights are unpacked before they are multiplied"
THROTTLED = "PyTorch's own call by another table: this one's machine lowered its clocks"
BEYOND_MEMORY = "bytes over what memory sustains: a table is faster"
OWN_SUM = "the serving engine's own kernel, over the links of a mesh"
SINGLE_RANK = "a single rank: nothing moves"
LAW = "physics"
"""Clauses of the rule, as answers name them."""

OWN_ROWS = "own rows"  # the source of what was timed here; others go by the names of their labs
CAUSAL, HEAD_SIZE = "causal", "head_dim"  # dimensions of attention: whether later keys are masked, and columns of a key
CORRECTED = f", corrected by {OWN_ROWS}"  # behind the name of a lab whose table they correct


def sources_of(card: Mapping[str, Any]) -> tuple[str, ...]:
    """Whose rows a predictor learned from, by its card."""
    return tuple(card.get("sources", {}).get("source", ()))


def is_own(sources: Sequence[str]) -> bool:
    """Whether rows with these sources were timed on the device itself; of none it is taken to be so."""
    return not sources or not set(OWN_SOURCES).isdisjoint(sources)


def ranked(
    rows: Mapping[str, int], label: str | None, preferences: Sequence[str], kind: str = "", caller: Caller = ANYONE
) -> list[str]:
    """The backends that may answer, best first; ``rows`` says how many rows each has.

    With a wish those that it means, itself first; without one all that the caller admits, one kernel before
    several, ``torch`` first. Then the order of ``preferences`` (backends, versions or frameworks), then most rows, then
    the name.
    """
    first = DEFAULT_BACKEND if label is None else label
    candidates = [
        candidate
        for candidate in rows
        if (caller.admits(kind, candidate) if label is None else means(label, candidate))
    ]

    def order(backend: str) -> tuple[bool, bool, bool, int, int, str]:
        at = next((at for at, candidate in enumerate(preferences) if means(candidate, backend)), len(preferences))
        parts = label is None and not caller.eager and is_eager(kind, backend)
        return parts, backend != first, not means(first, backend), at, -rows[backend], backend

    return sorted(candidates, key=order)


def launched(rows: Mapping[str, int], preferences: Sequence[str], kind: str, dtype: str, caller: Caller) -> list[str]:
    """The backends of own rows that are what a caller launches for an op, best first; ``rows`` as in :func:`ranked`."""
    places = {
        candidate: place(caller, kind, dtype, candidate) for candidate in ranked(rows, None, preferences, kind, caller)
    }
    named = launches(caller, kind, dtype)  # itself before its variants: ``nccl`` before ``nccl:graph``
    admitted = [(at, candidate not in named, candidate) for candidate, at in places.items() if at is not None]
    return [candidate for *_, candidate in sorted(admitted, key=lambda item: item[:2])]


Card = Mapping[str, Any]


def matching(
    labels: Sequence[str],
    card_of: Callable[[str], Card],
    label: str | None,
    dtype: str | None,
    preferences: Sequence[str],
    kind: str = "",
    caller: Caller = ANYONE,
    unmasked: int = 0,
) -> str | None:
    """Of backends with a predictor the one meant by ``wanted``: itself, or the best of a framework; None where none is.

    A format that none has learned is answered by those that know the units which it is computed on, one of 16 bits or
    more never by those of fewer bits alone: their kernels do not run it. Attention without a mask, whose head
    size ``unmasked`` is (0: anything else), is answered by those that were timed so, where there are any. Cards are
    asked for only where it takes them to choose.
    """
    if label is None:
        labels = [candidate for candidate in labels if caller.admits(kind, candidate)]
        labels = [candidate for candidate in labels if answers_anyone(candidate, dtype)] or labels
    else:
        labels = [candidate for candidate in labels if means(label, candidate)]
    if label in labels or len(labels) < 2:
        return label if label in labels else next(iter(labels), None)
    cards = {backend: card_of(backend) for backend in labels}
    labels = [candidate for candidate in labels if not unmasked or has_unmasked(cards[candidate], unmasked)] or labels
    formats = () if dtype is None else (dtype, *RATE_OF.get(dtype, ()))
    taught = [[backend for backend in labels if has_learned(cards[backend], candidate)] for candidate in formats]
    if dtype is not None and itemsize(dtype) >= 2:
        taught.append(
            [backend for backend in labels if any(itemsize(name) >= 2 for name in cards[backend].get("dtypes", ()))]
        )
    taught_label = next(filter(None, taught), labels)
    return ranked({backend: cards[backend].get("n", 0) for backend in taught_label}, label, preferences, kind, caller)[
        0
    ]


def has_unmasked(card: Card, head_size: int) -> bool:
    """Whether a predictor has rows of attention without a mask alone, and heads as small and as large.

    Of one that has both the range of heads does not say which it saw without a mask.
    """
    ranges = card.get("range", {})
    least, most = ranges.get(HEAD_SIZE, (0, 0))
    return ranges.get(CAUSAL, (0, 1))[1] == 0 and least <= head_size <= most


def has_learned(card: Card, dtype: str) -> bool:
    """Whether a predictor has rows of a format; formats of 16 bits are alike to it."""
    return alike(dtype) in {alike(name) for name in card.get("dtypes", ())}
