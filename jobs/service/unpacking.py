"""How large an Arrow stream is once it is unpacked, read off its messages: nothing is unpacked to know it.

Each message has a header in flatbuffers (arrow.apache.org/docs/format/Columnar.html#ipc-streaming-format; Message.fbs):
a table, whose fields are found through its own list of places. A record batch, or one inside a dictionary batch, lists
its buffers; where it is compressed each of them begins with its size once unpacked (-1: it is not packed).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import pyarrow as pa

DICTIONARY_BATCH, RECORD_BATCH = 2, 3  # of Message.header
HEADER_TYPE, HEADER = 1, 2  # fields of Message
LENGTH, BUFFERS, COMPRESSION = 0, 2, 3  # fields of RecordBatch
OLD_COMPRESSION = b"ARROW:experimental_compression"  # how Arrow 0.17 said it, which Arrow still reads
DATA = 1  # field of DictionaryBatch


@dataclass(frozen=True)
class UnpackedSize:
    """Rows of all batches of a stream, bytes of all its buffers once they are unpacked, and its messages."""

    rows: int
    size_bytes: int
    messages: int


def unpacked_size(stream: bytes) -> UnpackedSize:
    """The size of an Arrow IPC stream. pa.ArrowInvalid for what is none."""
    rows = size = messages = 0
    try:
        for message in pa.ipc.MessageReader.open_stream(pa.BufferReader(stream)):
            head_bytes, buffers = _batch(bytes(message.metadata), memoryview(message.body or b""))
            rows, size, messages = rows + head_bytes, size + buffers, messages + 1
    except (struct.error, IndexError) as error:
        raise pa.ArrowInvalid(f"a message is not whole: {error}") from None
    return UnpackedSize(rows, size, messages)


def _batch(head: bytes, body: memoryview) -> tuple[int, int]:
    """Rows of a message (of a dictionary none), and bytes of its buffers once unpacked; 0 of what holds no batch."""
    message = _Table(head, _at(head, 0))
    kind, header = message.number(HEADER_TYPE, "<B"), message.table(HEADER)
    batch = header.table(DATA) if header and kind == DICTIONARY_BATCH else header
    if batch is None or kind not in (DICTIONARY_BATCH, RECORD_BATCH):
        return 0, 0
    packed, size = batch.table(COMPRESSION) is not None or OLD_COMPRESSION in head, 0
    for offset, length in batch.pairs(BUFFERS):
        unpacked = struct.unpack_from("<q", body, offset)[0] if packed and length else -1
        size += max(length, unpacked, 0)
    return (batch.number(LENGTH, "<q") if kind == RECORD_BATCH else 0), size


@dataclass(frozen=True)
class _Table:
    """A table of flatbuffers at a place of some bytes."""

    head: bytes
    place: int

    def _field(self, number: int) -> int:
        """Where a field lies; 0 where the table has it not."""
        places = self.place - struct.unpack_from("<i", self.head, self.place)[0]
        size = struct.unpack_from("<H", self.head, places)[0]
        if 4 + 2 * number >= size:
            return 0
        offset = struct.unpack_from("<H", self.head, places + 4 + 2 * number)[0]
        return self.place + offset if offset else 0

    def number(self, number: int, form: str) -> int:
        """A field that is a number; 0 is the usual one."""
        offset = self._field(number)
        return int(struct.unpack_from(form, self.head, offset)[0]) if offset else 0

    def table(self, number: int) -> _Table | None:
        """A field that is a table."""
        offset = self._field(number)
        return _Table(self.head, offset + _at(self.head, offset)) if offset else None

    def pairs(self, number: int) -> list[tuple[int, int]]:
        """A field that is a list of pairs of 64 bits."""
        offset = self._field(number)
        if not offset:
            return []
        first = offset + _at(self.head, offset)
        count = _at(self.head, first)
        if first + 4 + 16 * count > len(self.head):
            raise IndexError("a list is longer than its message")
        return list(struct.iter_unpack("<qq", self.head[first + 4 : first + 4 + 16 * count]))


def _at(head: bytes, offset: int) -> int:
    """The unsigned number of 32 bits at a place."""
    return int(struct.unpack_from("<I", head, offset)[0])
