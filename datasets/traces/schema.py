"""The schema of Chakra execution traces (MLCommons, protobuf package ChakraProtoMsg): numbers and names as on the wire.

A file is ``[varint length][message]`` again and again: one GlobalMetadata, then Nodes. Dependencies list parents.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class TraceFileError(ValueError):
    """A trace that cannot be read, written or used. The message names the file, and the node where one is to blame."""


class NodeKind(IntEnum):
    """What a node is."""

    INVALID = 0
    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


class CollectiveKind(IntEnum):
    """What a collective node does: the value of its attribute ``comm_type``."""

    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9


class Arm(NamedTuple):
    """One arm of an attribute's value: its field number is ``field``, its list's the next.

    ``wire``: 0 varint, 1 eight bytes, 2 length and bytes, 5 four bytes.
    """

    name: str
    field: int
    wire: int


_WIRES = {"double": 1, "float": 5, "fixed32": 5, "sfixed32": 5, "fixed64": 1, "sfixed64": 1, "string": 2, "bytes": 2}
_NAMES = (
    "double float int32 int64 uint32 uint64 sint32 sint64 fixed32 fixed64 sfixed32 sfixed64 bool string bytes"
).split()
ARMS = {name: Arm(name, 3 + 2 * index, _WIRES.get(name, 0)) for index, name in enumerate(_NAMES)}
FIRST_ARM, LAST_ARM = 3, 2 + 2 * len(_NAMES)
VERSION = "1.0.0"
"""What we write as version of the metadata."""

# What ASTRA-sim's feeder reads, each in the arm that it reads it from; of another arm it takes 0.
FEEDER_ARMS = {
    "is_cpu_op": "bool",
    "num_ops": "int64",
    "tensor_size": "uint64",
    "comm_type": "int64",
    "comm_size": "int64",
    "comm_priority": "int32",
    "comm_src": "int32",
    "comm_dst": "int32",
    "comm_tag": "int32",
    "pg_name": "string",
}
EXACT_DURATION = "duration_us"
"""Our own attribute (double): microseconds with their fraction, which ``duration_micros`` cannot hold."""
EXACT_START = "start_us"
COMMUNICATION = (NodeKind.COMM_SEND, NodeKind.COMM_RECV, NodeKind.COMM_COLL)


def arm_name(field: int) -> str:
    """``int64`` of field 9, ``int64_list`` of field 10."""
    return _NAMES[(field - FIRST_ARM) // 2] + ("" if field % 2 else "_list")
