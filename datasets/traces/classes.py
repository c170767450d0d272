"""What sort of work a node is: the classes of the Chakra paper's Table 5, by op, by operator and by kernel name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import numpy as np

from ..ops import KINDS
from .schema import CollectiveKind, NodeKind
from .table import ExecutionTrace

OP = "opcast_op"
"""The attribute (string, JSON) that keeps the op as opcast has it, so that other devices can be asked for it."""
SHARE = "opcast_share"
"""The attribute (double) that says which part of its op's time a kernel takes; without it all."""
GAP = "host_gap"
"""What stands in :data:`OP` of time in which a stream waits for the host."""
COLLECTIVE_HANDOVER = re.compile(r"c10d::|_?c10d_functional::|record_param_comms|(?:gloo|nccl|mpi|ucc):")
"""Operators of a host that hand a collective over to another thread or a device, or wait for it."""
PROCESSOR = "processor"
"""The attribute (bool) of a trace whose device is the processor that its host runs on."""
NOTE = "note"
"""The attribute (string) of a trace that says what its profile lacks of the device."""
BLIND = "blind"
"""The attribute (bool) of a trace whose profile has no kernels, though a device ran: its compute is not known."""
COMPUTE = ("gemm", "attention", "elementwise", "other")
COLLECTIVES = tuple(kind.name.lower() for kind in CollectiveKind)
CLASSES = (*COMPUTE, "memory", "gap", "host", *COLLECTIVES, "collective", "send_recv", "metadata")
_FAMILIES = {"gemm": "gemm", "attention": "attention", "pointwise": "elementwise", "norm": "elementwise",
             "optimizer": "elementwise", "copy": "memory"}  # fmt: skip
_NAMES = (
    ("attention", "flash fmha attention attn mha_ splitkv paged"),
    ("gemm", r"gemm gemv aten::(?:add|b|badd)?mm\b matmul aten::linear cublas nvjet cijk_ wgmma xmma conv scaled_mm "
             r"implicit winograd sm\d+_.*(?:s|h)\d{3,}"),
    ("memory", "^memcpy ^memset aten::copy_ copydtoh copyhtod"),
    ("elementwise", r"elementwise vectorized norm softmax gelu silu relu act_and_mul multi_tensor adam dropout "
                    r"triton_poi triton_per pointwise aten::(?:add|mul|sub|div|fill|zero)_?\b rotary rope"),
)  # fmt: skip
_PATTERNS = tuple((name, re.compile("|".join(words.split()), re.IGNORECASE)) for name, words in _NAMES)


def class_of_name(name: str) -> str:
    """The class of a compute node by its name."""
    return next((label for label, pattern in _PATTERNS if pattern.search(name)), "other")


def class_of_op(text: str) -> str:
    """The class of a node that opcast wrote."""
    if text == GAP:
        return "gap"
    try:
        family = KINDS[json.loads(text)["kind"]].family
    except (ValueError, KeyError, TypeError):
        return "other"
    return "host" if family == "host" else _FAMILIES.get(family, "other")


def class_codes(trace: ExecutionTrace) -> np.ndarray:
    """The class of each node, as its place in :data:`CLASSES` [n]."""
    codes = _codes_of_words(
        trace.name, {int(n): class_of_name(trace.words[n]) for n in np.unique(trace.name)}, len(trace.words)
    )
    ops = trace.text(OP)
    op_words = np.unique(ops[ops >= 0])
    by_op = _codes_of_words(
        np.maximum(ops, 0), {int(n): class_of_op(trace.words[n]) for n in op_words}, len(trace.words)
    )
    codes = np.where(ops >= 0, by_op, codes)
    host = trace.column("is_cpu_op", False, "bool").astype(bool)
    codes = np.where(host, CLASSES.index("host"), codes)
    memory = np.isin(trace.kind, (NodeKind.MEM_LOAD, NodeKind.MEM_STORE))
    codes = np.where(memory, CLASSES.index("memory"), codes)
    collective = trace.column("comm_type", -1, "int64")
    first = CLASSES.index(COLLECTIVES[0])
    is_known_collective = (
        (trace.kind == NodeKind.COMM_COLL) & (collective >= 0) & (collective < len(COLLECTIVES)) & ~host
    )
    codes = np.where(is_known_collective, first + np.clip(collective, 0, len(COLLECTIVES) - 1), codes)
    is_unknown_collective = (trace.kind == NodeKind.COMM_COLL) & ~is_known_collective & ~host
    codes = np.where(is_unknown_collective, CLASSES.index("collective"), codes)  # which one the trace does not say
    codes = np.where(np.isin(trace.kind, (NodeKind.COMM_SEND, NodeKind.COMM_RECV)), CLASSES.index("send_recv"), codes)
    codes = np.where((ops >= 0) & (by_op == CLASSES.index("gap")), CLASSES.index("gap"), codes)
    return np.where(trace.kind <= NodeKind.METADATA, CLASSES.index("metadata"), codes)


def _codes_of_words(words: np.ndarray, classes: Mapping[int, str], count: int) -> np.ndarray:
    table = np.zeros(count, np.int64)
    for number, name in classes.items():
        table[number] = CLASSES.index(name)
    return table[words]


def is_network(codes: np.ndarray) -> np.ndarray:
    """Whether nodes of these classes communicate."""
    first, last = CLASSES.index(COLLECTIVES[0]), CLASSES.index("send_recv")
    return (codes >= first) & (codes <= last)


def on_processor(trace: ExecutionTrace) -> bool:
    """Whether a trace's device is the processor of its host (:data:`PROCESSOR`)."""
    return any(name == PROCESSOR for name, _, _ in trace.about.items(0, trace.words))


def note_of(trace: ExecutionTrace) -> str:
    """What a trace's profile lacks of the device (:data:`NOTE`); "" for nothing."""
    return next((str(value) for name, _, value in trace.about.items(0, trace.words) if name == NOTE), "")


def is_blind(trace: ExecutionTrace) -> bool:
    """Whether a trace's profile has no kernels, though a device ran (:data:`BLIND`)."""
    return any(name == BLIND for name, _, _ in trace.about.items(0, trace.words))


def is_work(trace: ExecutionTrace, codes: np.ndarray) -> np.ndarray:
    """Whether each node is work: of the device, and of a run on a processor alone (:data:`PROCESSOR`) its operators.

    Operators that hand a collective over, or wait for one, are none: while it runs they only stand still.
    """
    is_working = is_device_work(codes)
    if on_processor(trace):
        hands_over = np.zeros(len(trace.words), bool)
        names = np.unique(trace.name)
        hands_over[names] = [bool(COLLECTIVE_HANDOVER.match(trace.words[int(number)])) for number in names]
        is_working = is_working | ((codes == CLASSES.index("host")) & ~hands_over[trace.name])
    return is_working


def is_device_work(codes: np.ndarray) -> np.ndarray:
    """Whether a device computes or copies in nodes of these classes."""
    device_codes = [CLASSES.index(name) for name in (*COMPUTE, "memory")]
    return np.isin(codes, device_codes)
