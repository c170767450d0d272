"""Select rows of a trace, each as often as needed, and change its columns: what many nodes share is built once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from .schema import ARMS
from .table import Attributes, ExecutionTrace, SparseRows, Words

_BITS = {"int64": np.int64, "uint64": np.uint64, "double": np.float64, "int32": np.int64, "bool": np.int64}


def take_rows(trace: ExecutionTrace, rows: np.ndarray) -> ExecutionTrace:
    """The nodes of these rows [n], in this order, as often as they are named; ids as they are."""
    return replace(
        trace,
        **{name: getattr(trace, name)[rows] for name in ("ids", "name", "kind", "start_us", "duration_us")},
        inputs=trace.inputs[rows],
        outputs=trace.outputs[rows],
        control=_take_sparse(trace.control, rows),
        data=_take_sparse(trace.data, rows),
        attributes=_take_attributes(trace.attributes, rows),
    )


def _value_indices(offsets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Offsets of the taken rows, and the place of each of their values."""
    lengths = np.diff(offsets)[rows]
    new_offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths, out=new_offsets[1:])
    return new_offsets, np.repeat(offsets[rows] - new_offsets[:-1], lengths) + np.arange(new_offsets[-1])


def _take_sparse(column: SparseRows, rows: np.ndarray) -> SparseRows:
    offsets, indices = _value_indices(column.offsets, rows)
    return SparseRows(offsets, column.values[indices])


def _take_attributes(attributes: Attributes, rows: np.ndarray) -> Attributes:
    offsets, indices = _value_indices(attributes.offsets, rows)
    columns = {name: getattr(attributes, name)[indices] for name in ("name", "doc", "arm", "value")}
    return Attributes(offsets, lists=attributes.lists, **columns)


def with_numbers(trace: ExecutionTrace, name: str, arm: str, values: np.ndarray) -> ExecutionTrace:
    """The trace with one more attribute, the last of each node [n]."""
    words, number = trace.words.with_text(name)
    bits = np.ascontiguousarray(values.astype(_BITS[arm])).view(np.int64)
    attributes = with_attribute(trace.attributes, np.arange(len(trace)), number, arm, bits)
    return replace(trace, words=words, attributes=attributes)


def with_attribute(before: Attributes, rows: np.ndarray, name: int, arm: str, bits: np.ndarray) -> Attributes:
    """The attributes with one more, the last, of these rows [n] in order; ``name`` is the number of its word."""
    more = np.zeros(len(before.offsets), np.int64)
    more[rows + 1] = 1
    values: dict[str, Any] = {"name": name, "doc": 0, "arm": ARMS[arm].field, "value": bits}
    ends = before.offsets[rows + 1]
    columns = {column: np.insert(getattr(before, column), ends, value) for column, value in values.items()}
    return Attributes(before.offsets + np.cumsum(more), lists=before.lists, **columns)


def with_words(trace: ExecutionTrace, texts: Mapping[str, str]) -> ExecutionTrace:
    """The trace with other texts in the place of some. The new ones must be no words of it."""
    raw = [trace.words.raw(number) for number in range(len(trace.words))]
    changed = {old.encode(): new.encode() for old, new in texts.items()}
    raw = [changed.get(word, word) for word in raw]
    offsets = np.zeros(len(raw) + 1, np.int64)
    np.cumsum([len(word) for word in raw], out=offsets[1:])
    return replace(trace, words=Words(np.frombuffer(b"".join(raw), np.uint8), offsets))


def with_values(trace: ExecutionTrace, name: str, lookup: np.ndarray) -> ExecutionTrace:
    """The trace with an attribute's numbers replaced: number ``i`` becomes ``lookup[i]``."""
    is_named = trace.attributes.name == trace.names.get(name, -1)
    value = trace.attributes.value.copy()
    value[is_named] = lookup[value[is_named]]
    return replace(trace, attributes=replace(trace.attributes, value=value))
