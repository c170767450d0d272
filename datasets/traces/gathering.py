"""Rows of a trace taken again and again, and columns changed: what many nodes share is built once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from .schema import ARMS
from .table import Attributes, ExecutionTrace, SparseRows, Words

_BITS = {"int64": np.int64, "uint64": np.uint64, "double": np.float64, "int32": np.int64, "bool": np.int64}


def taken(trace: ExecutionTrace, rows: np.ndarray) -> ExecutionTrace:
    """The nodes of these rows [n], in this order, as often as they are named; ids as they are."""
    return replace(
        trace,
        **{name: getattr(trace, name)[rows] for name in ("ids", "name", "kind", "start_us", "duration_us")},
        inputs=trace.inputs[rows],
        outputs=trace.outputs[rows],
        control=_rows(trace.control, rows),
        data=_rows(trace.data, rows),
        attributes=_attributes(trace.attributes, rows),
    )


def _places(offsets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Offsets of the taken rows, and the place of each of their values."""
    lengths = np.diff(offsets)[rows]
    made = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths, out=made[1:])
    return made, np.repeat(offsets[rows] - made[:-1], lengths) + np.arange(made[-1])


def _rows(given: SparseRows, rows: np.ndarray) -> SparseRows:
    offsets, places = _places(given.offsets, rows)
    return SparseRows(offsets, given.values[places])


def _attributes(given: Attributes, rows: np.ndarray) -> Attributes:
    offsets, places = _places(given.offsets, rows)
    columns = {name: getattr(given, name)[places] for name in ("name", "doc", "arm", "value")}
    return Attributes(offsets, lists=given.lists, **columns)


def with_numbers(trace: ExecutionTrace, name: str, arm: str, values: np.ndarray) -> ExecutionTrace:
    """The trace with one more attribute, the last of each node [n]."""
    words, number = trace.words, trace.words.find(name)
    if number < 0:
        words, number = words.with_text(name)
    own, n = trace.attributes, len(trace)
    at = own.offsets[1:]
    bits = np.ascontiguousarray(values.astype(_BITS[arm])).view(np.int64)

    def filled(column: np.ndarray, added: int | np.ndarray) -> np.ndarray:
        return np.insert(column, at, added)

    made = Attributes(own.offsets + np.arange(n + 1), filled(own.name, number), filled(own.doc, 0),
                      filled(own.arm, ARMS[arm].field), filled(own.value, bits), own.lists)  # fmt: skip
    return replace(trace, words=words, attributes=made)


def with_words(trace: ExecutionTrace, texts: Mapping[str, str]) -> ExecutionTrace:
    """The trace with other texts in the place of some. The new ones must be no words of it."""
    raw = [trace.words.raw(number) for number in range(len(trace.words))]
    changed = {old.encode(): new.encode() for old, new in texts.items()}
    raw = [changed.get(each, each) for each in raw]
    offsets = np.zeros(len(raw) + 1, np.int64)
    np.cumsum([len(each) for each in raw], out=offsets[1:])
    return replace(trace, words=Words(np.frombuffer(b"".join(raw), np.uint8), offsets))


def with_values(trace: ExecutionTrace, name: str, meant: np.ndarray) -> ExecutionTrace:
    """The trace with the numbers of an attribute looked up in ``meant``."""
    here = trace.attributes.name == trace.names.get(name, -1)
    value = trace.attributes.value.copy()
    value[here] = meant[value[here]]
    return replace(trace, attributes=replace(trace.attributes, value=value))
