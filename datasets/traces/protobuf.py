"""Chakra's binary files (``.et``, gzip or not) to columns and back, a window of bytes at a time."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO

import numpy as np

from ..files import write_packed
from . import packing, scanning
from .interning import Interner
from .machine_code import compile_loop
from .schema import ARMS, LAST_ARM, TraceFileError
from .table import Attributes, ExecutionTrace, SparseRows, Words, concatenate

WINDOW_BYTES = 1 << 20  # bytes that are read at a time
LONGEST_MESSAGE_BYTES = 1 << 25  # bytes of one message at the most
NODES_PER_WRITE = 1 << 15  # nodes that are written at a time
GZIP_MAGIC = b"\x1f\x8b"
WIRES = np.zeros(LAST_ARM + 1, np.int64)
for _arm in ARMS.values():
    WIRES[_arm.field] = _arm.wire


@dataclass(frozen=True, eq=False)
class _Window:
    """The nodes of one window, in the narrowest columns that hold them. Offsets begin at 0; ``io`` [n, 6] are words."""

    ids: np.ndarray
    name: np.ndarray
    kind: np.ndarray
    start: np.ndarray
    duration: np.ndarray
    io: np.ndarray
    control_ends: np.ndarray
    data_ends: np.ndarray
    attr_ends: np.ndarray
    control: np.ndarray
    data: np.ndarray
    attr_name: np.ndarray
    attr_doc: np.ndarray
    attr_arm: np.ndarray
    attr_value: np.ndarray
    list_ends: np.ndarray
    values: np.ndarray


def read(path: Path) -> ExecutionTrace:
    """The whole trace. TraceFileError for what is no trace, or is broken off."""
    interner = Interner()
    windows = list(_read_parts(path, interner))
    words = interner.words()
    return _as_trace(_concatenate_windows(windows), words)


def _read_parts(path: Path, interner: Interner) -> Iterator[_Window]:
    """Windows of a file; the first row of the first one is the file's metadata."""
    with open_unpacked(path) as file:
        pending, first, at_byte = b"", True, 0
        while True:
            block = read_block(file, path, max(WINDOW_BYTES, len(pending)))
            buffer = np.frombuffer(pending + block, np.uint8)
            if not len(buffer):
                break
            window, used_bytes, fault_at = _scan(buffer, first, interner)
            if fault_at >= 0:
                where = f"at byte {at_byte + fault_at:,}" + (", of the unpacked file" if _is_gzip(path) else "")
                raise TraceFileError(f"{path} is no Chakra trace or damaged: no message {where}")
            if len(window.ids):
                first = False
                yield window
            pending, at_byte = buffer[used_bytes:].tobytes(), at_byte + used_bytes
            if not block:
                if pending:
                    raise TraceFileError(
                        f"{path} is broken off: its last message, at byte {at_byte:,}, is not whole; record it again"
                    )
                break
            if len(pending) > LONGEST_MESSAGE_BYTES:
                raise TraceFileError(
                    f"{path} has a message of more than {LONGEST_MESSAGE_BYTES >> 20} MiB at byte {at_byte:,}"
                )
        if first:
            raise TraceFileError(f"{path} is empty: it holds no Chakra trace")


def _scan(buffer: np.ndarray, first: bool, interner: Interner) -> tuple[_Window, int, int]:
    """The whole messages of a buffer, the place after them, and the place of what is no message (-1 for none)."""
    size = len(buffer)
    interner.room(size // 2 + 1, size)
    nodes, ends = np.empty((size // 2 + 1, 11), np.int64), np.empty((size // 2 + 1, 3), np.int64)
    parents, attrs = np.empty((2, size), np.int64), np.empty((size // 2 + 1, 4), np.int64)
    list_ends, values = np.empty(size // 2 + 1, np.int64), np.empty(size, np.int64)
    counts = np.zeros(scanning.SCAN_COUNTS, np.int64)
    loop = compile_loop(scanning.scan, scanning.CALLEES) if size >= scanning.COMPILE_FROM_BYTES else scanning.scan
    with np.errstate(over="ignore"):
        used, wrong = loop(buffer, 0, first, WIRES, counts, nodes, ends, parents, attrs, list_ends, values,
                           *interner.arrays)  # fmt: skip
    n, lists = int(counts[0]), int(counts[4])
    nodes, ends = nodes[:n], ends[:n]
    control, data, attributes = ends[-1].tolist() if n else (0, 0, 0)
    attrs = attrs[:attributes]
    docs = attrs[:, 1].astype(np.int32) if attrs[:, 1].any() else _blank(attributes)
    window = _Window(
        ids=nodes[:, 0].copy(), name=nodes[:, 1].astype(np.int32), kind=nodes[:, 2].astype(np.int32),
        start=nodes[:, 3].copy(), duration=nodes[:, 4].copy(), io=nodes[:, 5:].astype(np.int32),
        control_ends=ends[:, 0].copy(), data_ends=ends[:, 1].copy(), attr_ends=ends[:, 2].copy(),
        control=parents[0, :control].copy(), data=parents[1, :data].copy(),
        attr_name=attrs[:, 0].astype(np.int32), attr_doc=docs,
        attr_arm=attrs[:, 2].astype(np.uint8), attr_value=attrs[:, 3].copy(),
        list_ends=list_ends[:lists].copy(), values=values[: int(counts[5])].copy(),
    )  # fmt: skip
    return window, int(used), int(wrong)


def _concatenate_windows(windows: list[_Window]) -> _Window:
    """One part of all, column by column: each piece is let go as soon as it is copied."""
    if len(windows) == 1:
        return windows[0]
    columns = {
        column_field.name: [getattr(window, column_field.name) for window in windows]
        for column_field in fields(_Window)
    }
    windows.clear()
    begins = {name: np.cumsum([0, *map(len, columns[name])])[:-1] for name in columns}
    for arm, value, shift in zip(columns["attr_arm"], columns["attr_value"], begins["list_ends"], strict=True):
        value[_is_list(arm)] += shift
    ends = {"control_ends": "control", "data_ends": "data", "attr_ends": "attr_name", "list_ends": "values"}
    for name, values in ends.items():
        for column, shift in zip(columns[name], begins[values], strict=True):
            column += shift
    if all(not column.strides[0] for column in columns["attr_doc"]):
        columns["attr_doc"] = [_blank(sum(map(len, columns["attr_doc"])))]
    return _Window(**{name: concatenate(columns.pop(name)) for name in list(columns)})


def _blank(length: int) -> np.ndarray:
    """A column of zeros that takes no memory, of stride 0: hardly any trace explains its attributes."""
    return np.broadcast_to(np.int32(0), length)


def _is_list(arm: np.ndarray) -> np.ndarray:
    """Whether the values of these arms are lists."""
    return (arm > 0) & (arm % 2 == 0)


def _as_trace(window: _Window, words: Words) -> ExecutionTrace:
    """A part as a trace; its first row is the metadata."""
    lists = SparseRows(_offsets(window.list_ends), window.values)
    of_attributes = _offsets(window.attr_ends)

    def attributes(first: int, last: int) -> Attributes:
        cut = slice(int(of_attributes[first]), int(of_attributes[last]))
        offsets = of_attributes[first : last + 1] - of_attributes[first]
        return Attributes(
            offsets, window.attr_name[cut], window.attr_doc[cut], window.attr_arm[cut], window.attr_value[cut], lists
        )

    return ExecutionTrace(
        words=words, version=words[window.name[0]], about=attributes(0, 1),
        ids=window.ids[1:].view(np.uint64), name=window.name[1:], kind=window.kind[1:],
        start_us=window.start[1:].view(np.uint64), duration_us=window.duration[1:].view(np.uint64),
        control=SparseRows(_offsets(window.control_ends[1:]), window.control.view(np.uint64)),
        data=SparseRows(_offsets(window.data_ends[1:]), window.data.view(np.uint64)),
        inputs=window.io[1:, :3], outputs=window.io[1:, 3:], attributes=attributes(1, len(window.ids)),
    )  # fmt: skip


def _offsets(ends: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(ends) + 1, np.int64)
    offsets[1:] = ends
    return offsets


# --- writing -------------------------------------------------------------------------------------------


def write(path: Path, trace: ExecutionTrace | Iterable[ExecutionTrace]) -> Path:
    """Write a trace, or its pieces one after another; gzip where the name ends in ``.gz``. Nothing unfinished stays.

    TraceFileError for a node that a reader would take for the end of the file, and where nothing can be written.
    """
    pieces = [trace] if isinstance(trace, ExecutionTrace) else trace
    return write_packed(path, lambda file: _write(file, pieces, path), TraceFileError, "the trace ")


def _write(file: IO[bytes], pieces: Iterable[ExecutionTrace], path: Path) -> None:
    first = True
    for piece in pieces:
        if first:
            file.write(_pack_metadata(piece))
            first = False
        _refuse_blank(piece, path)
        for begin in range(0, len(piece), NODES_PER_WRITE):
            file.write(_pack_rows(piece, begin, min(begin + NODES_PER_WRITE, len(piece))))
    if first:
        raise TraceFileError(f"there is no node to write to {path}")


def _refuse_blank(trace: ExecutionTrace, path: Path) -> None:
    blank = (trace.ids == 0) & (trace.name == 0) & (trace.kind == 0)
    if blank.any():
        raise TraceFileError(
            f"{path}: node {int(np.argmax(blank))} of the file has neither id, name nor type, which readers take for "
            "the end: count ids from 1"
        )


def _pack_metadata(trace: ExecutionTrace) -> bytes:
    """The metadata's message."""
    words, number = trace.words.with_text(trace.version)
    nodes = np.zeros((1, 11), np.int64)
    nodes[0, 1] = number
    none = SparseRows(np.zeros(2, np.int64), np.zeros(0, np.int64))
    return _pack(True, nodes, none, none, trace.about, words)


def _pack_rows(trace: ExecutionTrace, begin: int, end: int) -> bytes:
    """The messages of some rows."""
    nodes = np.empty((end - begin, 11), np.int64)
    for index, column in enumerate((trace.ids, trace.name, trace.kind, trace.start_us, trace.duration_us)):
        nodes[:, index] = column[begin:end].astype(np.int64)
    nodes[:, 5:8], nodes[:, 8:11] = trace.inputs[begin:end], trace.outputs[begin:end]

    def cut(rows: SparseRows) -> SparseRows:
        offsets = rows.offsets[begin : end + 1]
        return SparseRows(offsets - offsets[0], rows.values[offsets[0] : offsets[-1]].astype(np.int64))

    columns = trace.attributes
    offsets = columns.offsets[begin : end + 1]
    low, high = int(offsets[0]), int(offsets[-1])
    attributes = Attributes(offsets - low, columns.name[low:high], columns.doc[low:high], columns.arm[low:high],
                            columns.value[low:high], columns.lists)  # fmt: skip
    return _pack(False, nodes, cut(trace.control), cut(trace.data), attributes, trace.words)


def _pack(metadata: bool, nodes: np.ndarray, control: SparseRows, data: SparseRows, attributes: Attributes,
          words: Words) -> bytes:  # fmt: skip
    attrs = np.stack([attributes.name, attributes.doc, attributes.arm], axis=1).astype(np.int64)
    size = _size_bound_bytes(nodes, control, data, attributes, attrs, words)
    buffer = np.empty(size, np.uint8)
    loop = compile_loop(packing.pack, packing.CALLEES) if size >= scanning.COMPILE_FROM_BYTES else packing.pack
    with np.errstate(over="ignore"):
        at = loop(buffer, metadata, WIRES, nodes, control.offsets, control.values, data.offsets, data.values,
                  attributes.offsets, attrs, attributes.value, attributes.lists.offsets, attributes.lists.values,
                  words.offsets, words.blob)  # fmt: skip
    return buffer[at:].tobytes()


def _size_bound_bytes(
    nodes: np.ndarray, control: SparseRows, data: SparseRows, attributes: Attributes, attrs: np.ndarray, words: Words
) -> int:
    """Bytes that the rows take at the most."""
    lengths = np.diff(words.offsets)
    texts = [nodes[:, 1], nodes[:, 5:][nodes[:, 5:] >= 0], attrs[:, 0], attrs[:, 1]]
    arm, value = attrs[:, 2], attributes.value
    is_list = _is_list(arm)
    is_text = (arm % 2 == 1) & (WIRES[np.where(arm % 2 == 1, arm, 0)] == 2)
    texts.append(value[is_text])
    lists = value[is_list]
    list_values = 0
    if len(lists):
        begins, ends = attributes.lists.offsets[lists], attributes.lists.offsets[lists + 1]
        list_values = int(np.sum(ends - begins))
        of_texts = np.flatnonzero(is_list & (WIRES[np.maximum(arm - 1, 0)] == 2))
        texts += [attributes.lists.row(int(value[at])) for at in of_texts]
    in_texts = sum(int(np.sum(lengths[column])) + 12 * column.size for column in texts)
    return 160 * len(nodes) + 10 * (len(control.values) + len(data.values) + list_values) + 80 * len(attrs) + in_texts


# --- files ---------------------------------------------------------------------------------------------


def open_unpacked(path: Path) -> IO[bytes]:
    """A file as the bytes that are in it, unpacked. TraceFileError where there is none."""
    try:
        return gzip.open(path, "rb") if _is_gzip(path) else open(path, "rb")  # type: ignore[return-value]
    except OSError as error:
        raise TraceFileError(f"{path} cannot be read: {error.strerror or error}") from None


def _is_gzip(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == GZIP_MAGIC


def read_block(file: IO[bytes], path: Path, size: int) -> bytes:
    try:
        return file.read(size)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceFileError(f"{path} is broken off or damaged: {str(error)[:80]}") from None
