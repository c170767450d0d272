"""Columns into Chakra's messages: one loop that writes from the end of a buffer to its start, as machine code where
numba is installed and there are many nodes.

Written backwards, the length of what a message holds is known when its own head is due, so that nothing is measured
beforehand.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Int = Any  # int64 of numpy, in machine code; what is added to it may be an int


def put(buffer: np.ndarray, at: Int, value: Int) -> Int:
    """A varint that ends before ``at``; its own place."""
    size, high_bits = 1, (value >> np.int64(7)) & np.int64(0x01FFFFFFFFFFFFFF)
    while high_bits:
        size += 1
        high_bits >>= np.int64(7)
    at -= size
    for i in range(size - 1):
        buffer[at + i] = (value & np.int64(127)) | np.int64(128)
        value = (value >> np.int64(7)) & np.int64(0x01FFFFFFFFFFFFFF)
    buffer[at + size - 1] = value
    return at


def put_number(buffer: np.ndarray, at: Int, value: Int, wire: Int, zigzag: bool) -> Int:
    """A number of an attribute, without its tag."""
    if wire == 0:
        return put(buffer, at, (value << np.int64(1)) ^ (value >> np.int64(63)) if zigzag else value)
    length = 8 if wire == 1 else 4
    at -= length
    for i in range(length):
        buffer[at + i] = (value >> np.int64(8 * i)) & np.int64(255)
    return at


def put_word(buffer: np.ndarray, at: Int, number: Int, field: Int, offsets: np.ndarray, blob: np.ndarray) -> Int:
    """A text with tag and length."""
    begin, length = offsets[number], offsets[number + 1] - offsets[number]
    at -= length
    for i in range(length):
        buffer[at + i] = blob[begin + i]
    return put(buffer, put(buffer, at, length), np.int64(field << 3 | 2))


def put_list(buffer: np.ndarray, at: Int, number: Int, field: Int, wires: np.ndarray, list_offsets: np.ndarray,
             values: np.ndarray, offsets: np.ndarray, blob: np.ndarray) -> Int:  # fmt: skip
    """A list's message with tag and length; ``field`` is that of the list."""
    wire, end = wires[field - 1], at
    first, last = list_offsets[number], list_offsets[number + 1]
    for index in range(last - 1, first - 1, -1):
        if wire == 2:
            at = put_word(buffer, at, values[index], 1, offsets, blob)
        else:
            at = put_number(buffer, at, values[index], wire, field == 16 or field == 18)
    if wire != 2 and last > first:
        at = put(buffer, put(buffer, at, np.int64(end - at)), np.int64(10))
    return put(buffer, put(buffer, at, np.int64(end - at)), np.int64(field << 3 | 2))


def put_attribute(
    buffer: np.ndarray, at: Int, attr: np.ndarray, value: Int, field: Int, wires: np.ndarray,
    list_offsets: np.ndarray, values: np.ndarray, offsets: np.ndarray, blob: np.ndarray,
) -> Int:  # fmt: skip
    """An attribute with tag and length; ``attr`` is [name, doc, arm]."""
    end, arm = at, attr[2]
    if arm >= 3 and arm % 2 == 0:
        at = put_list(buffer, at, value, arm, wires, list_offsets, values, offsets, blob)
    elif arm >= 3 and wires[arm] == 2:
        at = put_word(buffer, at, value, arm, offsets, blob)
    elif arm >= 3:
        at = put_number(buffer, at, value, wires[arm], arm == 15 or arm == 17)
        at = put(buffer, at, np.int64(arm << 3 | wires[arm]))
    for field_of_text in (2, 1):
        if attr[field_of_text - 1]:
            at = put_word(buffer, at, attr[field_of_text - 1], field_of_text, offsets, blob)
    return put(buffer, put(buffer, at, np.int64(end - at)), np.int64(field << 3 | 2))


def put_packed(buffer: np.ndarray, at: Int, values: np.ndarray, first: Int, last: Int, field: Int) -> Int:
    """Packed varints with tag and length; nothing for none."""
    if first == last:
        return at
    end = at
    for index in range(last - 1, first - 1, -1):
        at = put(buffer, at, values[index])
    return put(buffer, put(buffer, at, np.int64(end - at)), np.int64(field << 3 | 2))


def pack(buffer: np.ndarray, metadata: bool, wires: np.ndarray, nodes: np.ndarray, control_offsets: np.ndarray,
         control: np.ndarray, data_offsets: np.ndarray, data: np.ndarray, attr_offsets: np.ndarray, attrs: np.ndarray,
         attr_values: np.ndarray, list_offsets: np.ndarray, values: np.ndarray, offsets: np.ndarray,
         blob: np.ndarray) -> Int:  # fmt: skip
    """Messages of all rows, each with its length, at the end of ``buffer``; returns where they begin.

    Rows of ``nodes`` are as :func:`.scanning.scan` has them; ``metadata``: one row, the file's own.
    """
    at = len(buffer)
    for row in range(len(nodes) - 1, -1, -1):
        end = at
        for index in range(attr_offsets[row + 1] - 1, attr_offsets[row] - 1, -1):
            at = put_attribute(buffer, at, attrs[index], attr_values[index], 2 if metadata else 10, wires, list_offsets,
                               values, offsets, blob)  # fmt: skip
        for field in (9, 8):
            first = 5 if field == 8 else 8
            if nodes[row, first] >= 0 and not metadata:
                stop = at
                for side_part in (2, 1, 0):
                    if nodes[row, first + side_part]:
                        at = put_word(buffer, at, nodes[row, first + side_part], side_part + 1, offsets, blob)
                at = put(buffer, put(buffer, at, np.int64(stop - at)), np.int64(field << 3 | 2))
        for field in (7, 6):
            if nodes[row, field - 3]:
                at = put(buffer, put(buffer, at, nodes[row, field - 3]), np.int64(field << 3))
        at = put_packed(buffer, at, data, data_offsets[row], data_offsets[row + 1], 5)
        at = put_packed(buffer, at, control, control_offsets[row], control_offsets[row + 1], 4)
        if nodes[row, 2]:
            at = put(buffer, put(buffer, at, nodes[row, 2]), np.int64(3 << 3))
        if nodes[row, 1]:
            at = put_word(buffer, at, nodes[row, 1], 1 if metadata else 2, offsets, blob)
        if nodes[row, 0]:
            at = put(buffer, put(buffer, at, nodes[row, 0]), np.int64(1 << 3))
        at = put(buffer, at, np.int64(end - at))
    return at


CALLEES = (put, put_number, put_word, put_list, put_attribute, put_packed)
"""What :func:`pack` calls, for :func:`.machine_code.compile_loop`."""
