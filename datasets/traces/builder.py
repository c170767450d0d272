"""A trace made node by node, in Python: of other formats, or of what is to be emitted."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .interning import WordList
from .schema import ARMS, EXACT_DURATION, EXACT_START, VERSION, NodeKind, TraceFileError
from .table import Attributes, ExecutionTrace, SparseRows

Attribute = tuple[str, str, Any]
"""Name, arm (``int64``, ``string``, ``bool_list``, …) and value."""
_FORMATS = {"double": ("<d", "<q"), "float": ("<f", "<I")}
MAX_UINT64 = (1 << 64) - 1


class AttributeRows:
    """Attributes of rows as they are added."""

    def __init__(self, words: WordList) -> None:
        self.words = words
        self.ends, self.list_ends, self.list_values = [0], [0], list[int]()
        self.name, self.doc, self.arm, self.value = list[int](), list[int](), list[int](), list[int]()

    def add(self, attributes: Iterable[Attribute], docs: Mapping[str, str] | None = None) -> None:
        """The attributes of the next row. TraceFileError for a value that its arm cannot hold."""
        for name, arm, value in attributes:
            plain = arm.removesuffix("_list")
            if plain and plain not in ARMS:
                raise TraceFileError(f"attribute {name!r} has a value of kind {arm!r}; known: {', '.join(ARMS)}")
            try:
                if plain == arm:
                    bits = self._bits(plain, value) if arm else 0
                else:
                    self.list_values += [self._bits(plain, item) for item in value]
                    bits = len(self.list_ends) - 1
                    self.list_ends.append(len(self.list_values))
            except (TypeError, ValueError, OverflowError, struct.error):
                raise TraceFileError(f"attribute {name!r} of kind {arm} cannot hold {str(value)[:60]!r}") from None
            self.name.append(self.words.add(name))
            self.doc.append(self.words.add(docs[name]) if docs and name in docs else 0)
            self.arm.append(ARMS[plain].field + (plain != arm) if arm else 0)
            self.value.append(bits)
        self.ends.append(len(self.name))

    def _bits(self, arm: str, value: Any) -> int:
        if arm in ("string", "bytes"):
            return self.words.add(value if isinstance(value, (str, bytes)) else str(value))
        if arm in _FORMATS:
            code, bits = _FORMATS[arm]
            return int(struct.unpack(bits, struct.pack(code, float(value)))[0])
        number = int(value)
        if not -(1 << 63) <= number <= MAX_UINT64:
            raise OverflowError
        return number - (1 << 64) if number >= 1 << 63 else number

    def columns(self) -> Attributes:
        """All of them."""
        lists = SparseRows(np.array(self.list_ends, np.int64), np.array(self.list_values, np.int64))
        name, doc, arm = (np.array(column, np.int32) for column in (self.name, self.doc, self.arm))
        return Attributes(np.array(self.ends, np.int64), name, doc, arm, np.array(self.value, np.int64), lists)


class TraceBuilder:
    """Collects nodes; :meth:`trace` makes the columns."""

    def __init__(self, about: Iterable[Attribute] = (), version: str = VERSION) -> None:
        self.words, self.version = WordList(), version
        self._about, self._attributes = AttributeRows(self.words), AttributeRows(self.words)
        self._about.add(about)
        self._ids, self._name, self._kind = list[int](), list[int](), list[int]()
        self._start, self._duration = list[int](), list[int]()
        self._inputs, self._outputs = list[tuple[int, ...]](), list[tuple[int, ...]]()
        self._parents: dict[str, list[int]] = {"control": [], "data": []}
        self._ends: dict[str, list[int]] = {"control": [0], "data": [0]}

    def __len__(self) -> int:
        return len(self._ids)

    def add(
        self,
        id: int,
        name: str,
        kind: int = NodeKind.COMP,
        *,
        start_us: float = 0,
        duration_us: float = 0,
        control: Sequence[int] = (),
        data: Sequence[int] = (),
        inputs: Sequence[str] | None = None,
        outputs: Sequence[str] | None = None,
        attributes: Iterable[Attribute] = (),
        docs: Mapping[str, str] | None = None,
    ) -> int:
        """One node; its id again. Fractions of microseconds are kept in attributes of their own beside the whole ones.

        ``inputs`` and ``outputs``: texts of values, shapes and types; ``docs``: explanations of attributes by name.
        """
        for number in (id, *control, *data):
            if not 0 <= number <= MAX_UINT64:
                raise TraceFileError(f"node {id}: {number} is no id; ids are whole numbers from 0 to 2^64 - 1")
        for us in (start_us, duration_us):
            if not 0 <= us < MAX_UINT64:
                raise TraceFileError(f"node {id}: {us!r} is no time in microseconds")
        exact = [(name, "double", us) for name, us in ((EXACT_START, start_us), (EXACT_DURATION, duration_us))
                 if us != int(us)]  # fmt: skip
        self._ids.append(id)
        self._name.append(self.words.add(name))
        self._kind.append(int(kind))
        self._start.append(int(start_us))
        self._duration.append(int(duration_us))
        for which, parents in (("control", control), ("data", data)):
            self._parents[which] += parents
            self._ends[which].append(len(self._parents[which]))
        for column, texts in ((self._inputs, inputs), (self._outputs, outputs)):
            column.append((-1, -1, -1) if texts is None else tuple(self.words.add(text) for text in texts))
        self._attributes.add([*attributes, *exact], docs)
        return id

    def trace(self) -> ExecutionTrace:
        """The columns of what was added."""

        def rows(which: str) -> SparseRows:
            return SparseRows(np.array(self._ends[which], np.int64), np.array(self._parents[which], np.uint64))

        return ExecutionTrace(
            words=self.words.words(), version=self.version, about=self._about.columns(),
            ids=np.array(self._ids, np.uint64), name=np.array(self._name, np.int32),
            kind=np.array(self._kind, np.int32), start_us=np.array(self._start, np.uint64),
            duration_us=np.array(self._duration, np.uint64), control=rows("control"), data=rows("data"),
            inputs=np.array(self._inputs, np.int32).reshape(-1, 3),
            outputs=np.array(self._outputs, np.int32).reshape(-1, 3), attributes=self._attributes.columns(),
        )  # fmt: skip
