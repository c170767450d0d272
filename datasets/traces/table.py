"""An execution trace in columns: one array for each field of a node, dependencies and attributes as sparse rows.

Nothing here is a Python object per node, so that millions of nodes fit. Text is kept once in :class:`Words` and stands
in columns as its number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .schema import ARMS, EXACT_DURATION, EXACT_START, FIRST_ARM, arm_name

IO_FIELDS = ("values", "shapes", "types")
_DTYPES = {
    "double": np.float64, "float": np.float32, "int32": np.int32, "int64": np.int64, "uint32": np.uint32,
    "uint64": np.uint64, "sint32": np.int32, "sint64": np.int64, "fixed32": np.uint32, "fixed64": np.uint64,
    "sfixed32": np.int32, "sfixed64": np.int64, "bool": np.bool_,
}  # fmt: skip


class Words(Sequence[str]):
    """Texts by number: their bytes one after another, ``offsets`` [n + 1]. Number 0 is the empty text."""

    def __init__(self, blob: np.ndarray, offsets: np.ndarray) -> None:
        self.blob, self.offsets = blob, offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def raw(self, number: int) -> bytes:
        """The bytes of one text."""
        return self.blob[self.offsets[number] : self.offsets[number + 1]].tobytes()

    def __getitem__(self, number: Any) -> Any:
        return self.raw(number).decode("utf-8", "backslashreplace")

    def find(self, text: str) -> int:
        """The number of a text, -1 where no node has it."""
        raw = text.encode()
        fits = np.flatnonzero(np.diff(self.offsets) == len(raw))
        return next((int(number) for number in fits if self.raw(int(number)) == raw), -1)

    def with_text(self, text: str) -> tuple[Words, int]:
        """These with a text among them, and its number."""
        number = self.find(text)
        if number >= 0:
            return self, number
        added = np.frombuffer(text.encode(), np.uint8)
        blob, end = np.concatenate([self.blob, added]), int(self.offsets[-1]) + len(added)
        return Words(blob, np.append(self.offsets, end)), len(self)


@dataclass(frozen=True, eq=False)
class SparseRows:
    """Numbers of each row: those of row i are ``values[offsets[i]:offsets[i + 1]]``."""

    offsets: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> np.ndarray:
        """The numbers of one row."""
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    @property
    def rows(self) -> np.ndarray:
        """The row of each value, int32."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.offsets))


@dataclass(frozen=True, eq=False)
class Attributes:
    """Attributes of rows: those of row i lie at ``offsets[i]`` to ``offsets[i + 1]`` of the other columns.

    ``name`` and ``doc`` are words, ``arm`` the field number of the value. ``value`` holds the bits of a number, the
    word of a text or bytes, or the place in ``lists`` of a list, whose values are bits or words again.
    """

    offsets: np.ndarray
    name: np.ndarray
    doc: np.ndarray
    arm: np.ndarray
    value: np.ndarray
    lists: SparseRows

    def decode(self, index: int, words: Words) -> Any:
        """The value of one attribute as Python has it."""
        arm, value = int(self.arm[index]), self.value[index : index + 1]
        if arm < FIRST_ARM:
            return None
        name = arm_name(arm)
        if name.endswith("_list"):
            values = self.lists.row(int(value[0]))
            return _decode(values, name.removesuffix("_list"), words)
        return _decode(value, name, words)[0]

    def items(self, row: int, words: Words) -> Iterator[tuple[str, str, Any]]:
        """Name, arm and value of each attribute of a row."""
        for index in range(int(self.offsets[row]), int(self.offsets[row + 1])):
            arm = int(self.arm[index])
            yield words[self.name[index]], arm_name(arm) if arm else "", self.decode(index, words)


def numbers_of(bits: np.ndarray, arm: str) -> np.ndarray:
    """Bits of values (int64) as numbers of their arm."""
    dtype = np.dtype(_DTYPES[arm])
    if dtype.itemsize == 8:
        return bits.view(dtype)
    if dtype.kind == "f":
        return bits.astype(np.uint32).view(dtype)
    return bits.astype(dtype)


def _decode(bits: np.ndarray, arm: str, words: Words) -> list[Any]:
    if arm == "string":
        return [words[number] for number in bits.tolist()]
    if arm == "bytes":
        return [words.raw(number) for number in bits.tolist()]
    return numbers_of(np.ascontiguousarray(bits), arm).tolist()


def concatenate(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Columns one after another; the column itself, not a copy, where it is alone."""
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


@dataclass(frozen=True, eq=False)
class ExecutionTrace:
    """The nodes of one rank. Columns are [n], in the file's order; times in microseconds.

    ``inputs`` and ``outputs`` [n, 3] are the words of values, shapes and types; -1 where a node tells none.
    ``about`` are the attributes of the file itself, as one row.
    """

    words: Words
    version: str
    about: Attributes
    ids: np.ndarray
    name: np.ndarray
    kind: np.ndarray
    start_us: np.ndarray
    duration_us: np.ndarray
    control: SparseRows
    data: SparseRows
    inputs: np.ndarray
    outputs: np.ndarray
    attributes: Attributes

    def __len__(self) -> int:
        return len(self.ids)

    def name_of(self, row: int) -> str:
        """The name of a node."""
        return self.words[self.name[row]]

    @cached_property
    def names(self) -> Mapping[str, int]:
        """The attributes that occur: their names' numbers."""
        return {self.words[number]: int(number) for number in np.unique(self.attributes.name)}

    def attribute(self, name: str, arm: str = "") -> tuple[np.ndarray, np.ndarray]:
        """Rows that have an attribute as a number, and its values: of one arm, or of any (as float64 then)."""
        word = self.names.get(name, -1)
        indices = np.flatnonzero(self.attributes.name == word)
        arms = self.attributes.arm[indices]
        rows = np.searchsorted(self.attributes.offsets, indices, "right") - 1
        if arm:
            is_kept = arms == ARMS[arm].field
            return rows[is_kept], numbers_of(self.attributes.value[indices[is_kept]], arm)
        values = np.full(len(indices), np.nan)
        for field in np.unique(arms):
            if field % 2 and arm_name(int(field)) in _DTYPES:
                is_arm = arms == field
                values[is_arm] = numbers_of(self.attributes.value[indices[is_arm]], arm_name(int(field)))
        is_kept = ~np.isnan(values)
        return rows[is_kept], values[is_kept]

    def column(self, name: str, missing: float, arm: str = "") -> np.ndarray:
        """An attribute as one number for each node [n], ``missing`` where a node has none."""
        rows, values = self.attribute(name, arm)
        default = np.asarray(missing)
        filled = np.full(len(self), default.astype(values.dtype) if len(values) else default)
        filled[rows] = values
        return filled

    def text(self, name: str) -> np.ndarray:
        """An attribute as the word of each node [n], -1 where a node has none."""
        word = self.names.get(name, -1)
        indices = np.flatnonzero((self.attributes.name == word) & (self.attributes.arm == ARMS["string"].field))
        words = np.full(len(self), -1, np.int64)
        words[np.searchsorted(self.attributes.offsets, indices, "right") - 1] = self.attributes.value[indices]
        return words

    @cached_property
    def exact_us(self) -> np.ndarray:
        """Durations with their fractions where the file keeps them, else as it rounds them; float64 [n]."""
        return self._exact(EXACT_DURATION, self.duration_us)

    @cached_property
    def exact_start_us(self) -> np.ndarray:
        """Starts with their fractions where the file keeps them, else as it rounds them; float64 [n]."""
        return self._exact(EXACT_START, self.start_us)

    def _exact(self, name: str, rounded: np.ndarray) -> np.ndarray:
        exact = rounded.astype(np.float64)
        rows, values = self.attribute(name, "double")
        exact[rows] = values
        return exact
