"""Chakra's messages into columns: loops over bytes, as machine code where numba is installed and the file is not small.

All integers are int64, also where the schema has unsigned ones: the bits are the same. A loop ends with the place of
what it could not read. Lengths are compared with what is there before anything is made of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Int = Any  # int64 of numpy, in machine code; what is added to it may be an int

COMPILE_FROM_BYTES = 1 << 16  # bytes from which loading numba pays
FNV_PRIME, FNV_BASIS = np.int64(0x100000001B3), np.int64(-3750763034362895579)  # FNV-1a
SCAN_COUNTS = 6  # of a scan: nodes, control, data, attributes, lists, list values


def read_varint(buffer: np.ndarray, at: Int, end: Int) -> tuple[Int, Int]:
    """The number at ``at`` and the place after it; place -1 where it does not end before ``end``."""
    value, shift = np.int64(0), np.int64(0)
    while at < end:
        byte = np.int64(buffer[at])
        at += 1
        value |= (byte & np.int64(127)) << shift
        if byte < 128:
            return value, at
        shift += np.int64(7)
        if shift > 63:
            return value, -1
    return value, -1


def skip_value(buffer: np.ndarray, at: Int, end: Int, wire: Int) -> Int:
    """The place after a field's value; -1 where it does not end before ``end`` or is of no known wire type."""
    if wire == 0:
        return read_varint(buffer, at, end)[1]
    if wire == 1 or wire == 5:
        length = 8 if wire == 1 else 4
        return at + length if at + length <= end else -1
    if wire == 2:
        size, at = read_varint(buffer, at, end)
        return at + size if at >= 0 and 0 <= size <= end - at else -1
    return -1


def read_fixed(buffer: np.ndarray, at: Int, length: Int) -> Int:
    """The little-endian number of some bytes."""
    value = np.int64(0)
    for i in range(length):
        value |= np.int64(buffer[at + i]) << np.int64(8 * i)
    return value


def intern_word(buffer: np.ndarray, at: Int, end: Int, table: np.ndarray, hashes: np.ndarray, offsets: np.ndarray,
         blob: np.ndarray, used: np.ndarray) -> Int:  # fmt: skip
    """The number of the text at ``at`` to ``end``, a new one where it was not seen yet; ``used[0]`` is their count.

    The arrays have room: ``table`` is a power of two long and open (-1), ``blob`` holds the texts themselves.
    """
    digest = FNV_BASIS
    for i in range(at, end):
        digest = (digest ^ np.int64(buffer[i])) * FNV_PRIME
    mask = np.int64(len(table) - 1)
    slot = (digest ^ (digest >> np.int64(32))) & mask
    while table[slot] >= 0:
        number = np.int64(table[slot])
        begin = offsets[number]
        if hashes[number] == digest and offsets[number + 1] - begin == end - at:
            is_equal = True
            for i in range(end - at):
                if blob[begin + i] != buffer[at + i]:
                    is_equal = False
                    break
            if is_equal:
                return number
        slot = (slot + np.int64(1)) & mask
    number = np.int64(used[0])
    table[slot] = number
    hashes[number] = digest
    begin = offsets[number]
    for i in range(end - at):
        blob[begin + i] = buffer[at + i]
    offsets[number + 1] = begin + end - at
    used[0] = number + 1
    return number


def read_scalar(buffer: np.ndarray, at: Int, wire: Int, zigzag: bool, boolean: bool) -> Int:
    """One number of an attribute as bits; the caller has seen that it is there."""
    if wire == 1:
        return read_fixed(buffer, at, 8)
    if wire == 5:
        return read_fixed(buffer, at, 4)
    value = read_varint(buffer, at, len(buffer))[0]
    if zigzag:
        return ((value >> np.int64(1)) & np.int64(0x7FFFFFFFFFFFFFFF)) ^ -(value & np.int64(1))
    if boolean:
        return np.int64(value != 0)
    return value


def read_numbers(buffer: np.ndarray, at: Int, end: Int, values: np.ndarray, count: Int) -> Int:
    """Packed varints into ``values`` from ``count`` on; the new count, -1 where they do not end."""
    while at < end:
        value, at = read_varint(buffer, at, end)
        if at < 0:
            return -1
        values[count] = value
        count += 1
    return count


def read_list(buffer: np.ndarray, at: Int, end: Int, field: Int, wires: np.ndarray, values: np.ndarray, count: Int,
                table: np.ndarray, hashes: np.ndarray, offsets: np.ndarray, blob: np.ndarray,
                used: np.ndarray) -> Int:  # fmt: skip
    """The values of a list message, packed or one by one; the new count, -1 where they do not end."""
    wire = wires[field]
    zigzag, boolean = field == 15 or field == 17, field == 27
    while at < end:
        tag, at = read_varint(buffer, at, end)
        stop = skip_value(buffer, at, end, tag & 7) if at >= 0 else -1
        if stop < 0:
            return -1
        if tag >> 3 == 1 and tag & 7 == 2:
            at = read_varint(buffer, at, end)[1]
            if wire == 2:
                values[count] = intern_word(buffer, at, stop, table, hashes, offsets, blob, used)
                count += 1
            while wire != 2 and at < stop:
                next_at = skip_value(buffer, at, stop, wire)
                if next_at < 0:
                    return -1
                values[count] = read_scalar(buffer, at, wire, zigzag, boolean)
                count += 1
                at = next_at
        elif tag >> 3 == 1 and tag & 7 == wire:
            values[count] = read_scalar(buffer, at, wire, zigzag, boolean)
            count += 1
        at = stop
    return count


def read_attribute(buffer: np.ndarray, at: Int, end: Int, wires: np.ndarray, counts: np.ndarray, attrs: np.ndarray,
              list_ends: np.ndarray, values: np.ndarray, table: np.ndarray, hashes: np.ndarray, offsets: np.ndarray,
              blob: np.ndarray, used: np.ndarray) -> bool:  # fmt: skip
    """One attribute into row ``counts[3]`` of ``attrs`` [name, doc, arm, value]; false where it does not end."""
    row = counts[3]
    attrs[row, 0] = attrs[row, 1] = attrs[row, 2] = attrs[row, 3] = 0
    while at < end:
        tag, at = read_varint(buffer, at, end)
        stop = skip_value(buffer, at, end, tag & 7) if at >= 0 else -1
        if stop < 0:
            return False
        field, wire = tag >> 3, tag & 7
        begin = read_varint(buffer, at, end)[1] if wire == 2 else at
        if (field == 1 or field == 2) and wire == 2:
            attrs[row, field - 1] = intern_word(buffer, begin, stop, table, hashes, offsets, blob, used)
        elif 3 <= field <= 32 and field % 2 == 1 and wires[field] == wire:
            attrs[row, 2] = field
            if wire == 2:
                attrs[row, 3] = intern_word(buffer, begin, stop, table, hashes, offsets, blob, used)
            else:
                attrs[row, 3] = read_scalar(buffer, at, wire, field == 15 or field == 17, field == 27)
        elif 3 <= field <= 32 and field % 2 == 0 and wire == 2:
            total = read_list(buffer, begin, stop, field - 1, wires, values, counts[5], table, hashes, offsets, blob,
                                used)  # fmt: skip
            if total < 0:
                return False
            counts[5] = total
            attrs[row, 2] = field
            attrs[row, 3] = counts[4]
            list_ends[counts[4]] = total
            counts[4] += 1
        at = stop
    counts[3] = row + 1
    return True


def read_io(buffer: np.ndarray, at: Int, end: Int, out: np.ndarray, table: np.ndarray, hashes: np.ndarray,
           offsets: np.ndarray, blob: np.ndarray, used: np.ndarray) -> bool:  # fmt: skip
    """An IOInfo into ``out`` [values, shapes, types]; false where it does not end."""
    out[0] = out[1] = out[2] = 0
    while at < end:
        tag, at = read_varint(buffer, at, end)
        stop = skip_value(buffer, at, end, tag & 7) if at >= 0 else -1
        if stop < 0:
            return False
        if tag & 7 == 2 and 1 <= tag >> 3 <= 3:
            begin = read_varint(buffer, at, end)[1]
            out[(tag >> 3) - 1] = intern_word(buffer, begin, stop, table, hashes, offsets, blob, used)
        at = stop
    return True


def scan(buffer: np.ndarray, at: Int, first: bool, wires: np.ndarray, counts: np.ndarray, nodes: np.ndarray,
         ends: np.ndarray, parents: np.ndarray, attrs: np.ndarray, list_ends: np.ndarray, values: np.ndarray,
         table: np.ndarray, hashes: np.ndarray, offsets: np.ndarray, blob: np.ndarray,
         used: np.ndarray) -> tuple[Int, Int]:  # fmt: skip
    """All whole messages from ``at`` on. Returns the place after the last, and -1 or where a message is no message.

    ``first``: the first message is the file's metadata, which becomes a node whose name is the version. A row of
    ``nodes`` is [id, name, kind, start, duration, inputs 3, outputs 3], one of ``ends`` its ends in ``parents[0]``
    (control), ``parents[1]`` (data) and ``attrs``. A length of 0 is the end, as the reference reader has it.
    """
    end = len(buffer)
    while at < end:
        begin = at
        size, at = read_varint(buffer, at, end)
        if at < 0:
            return begin, -1 if end - begin < 10 else begin
        if size < 0:
            return begin, begin
        if size > end - at:
            return begin, -1
        if size == 0 and not first:
            return begin, begin
        row, stop = counts[0], at + size
        for column in range(5):
            nodes[row, column] = 0
        for column in range(5, 11):
            nodes[row, column] = -1
        while at < stop:
            tag, at = read_varint(buffer, at, stop)
            following = skip_value(buffer, at, stop, tag & 7) if at >= 0 else -1
            if following < 0:
                return begin, begin
            field, wire = tag >> 3, tag & 7
            inner = read_varint(buffer, at, stop)[1] if wire == 2 else at
            good = True
            if ((first and field == 1) or (not first and field == 2)) and wire == 2:
                nodes[row, 1] = intern_word(buffer, inner, following, table, hashes, offsets, blob, used)
            elif ((first and field == 2) or (not first and field == 10)) and wire == 2:
                good = read_attribute(buffer, inner, following, wires, counts, attrs, list_ends, values, table, hashes,
                                 offsets, blob, used)  # fmt: skip
            elif first:
                pass
            elif wire == 0 and (field == 1 or field == 3 or field == 6 or field == 7):
                value = read_varint(buffer, at, stop)[0]
                nodes[row, field - 1 if field < 6 else field - 3] = value
            elif field == 4 or field == 5:
                if wire == 2:
                    total = read_numbers(buffer, inner, following, parents[field - 4], counts[field - 3])
                    good = total >= 0
                    counts[field - 3] = max(total, 0)
                elif wire == 0:
                    parents[field - 4, counts[field - 3]] = read_varint(buffer, at, stop)[0]
                    counts[field - 3] += 1
            elif (field == 8 or field == 9) and wire == 2:
                column = 5 if field == 8 else 8
                good = read_io(buffer, inner, following, nodes[row, column : column + 3], table, hashes, offsets, blob,
                              used)  # fmt: skip
            if not good:
                return begin, begin
            at = following
        for column in range(3):
            ends[row, column] = counts[column + 1]
        counts[0] = row + 1
        first = False
    return at, -1


def rehash(hashes: np.ndarray, count: Int, table: np.ndarray) -> None:
    """The first ``count`` words into an open table."""
    mask = np.int64(len(table) - 1)
    for number in range(count):
        digest = hashes[number]
        slot = (digest ^ (digest >> np.int64(32))) & mask
        while table[slot] >= 0:
            slot = (slot + np.int64(1)) & mask
        table[slot] = number


CALLEES = (
    read_varint, skip_value, read_fixed, intern_word, read_scalar, read_numbers, read_list, read_attribute, read_io,
)  # fmt: skip
"""What :func:`scan` calls, for :func:`.machine_code.compile_loop`."""
