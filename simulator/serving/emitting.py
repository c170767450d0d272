"""Served traffic as execution traces: of each scheduler's rank its iterations, and the KV caches that came to it.

An iteration is a compute node with what its batch held; it waits for the one before. Where it begins later, the time
between is a node of its own (no request was there, or the host was busy). The cache of a request that another pool
prefilled is a load on a lane of its own, which the rank's next iteration waits for.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...datasets.traces import protobuf
from ...datasets.traces.builder import Attribute, TraceBuilder
from ...datasets.traces.classes import GAP, OP
from ...datasets.traces.gaps import ROUNDED_US, filled
from ...datasets.traces.groups import GROUPS_FILE
from ...datasets.traces.schema import NodeKind
from ...datasets.traces.table import ExecutionTrace

ITERATIONS, TRANSFERS = 7, 20
KEPT = ("prefill_tokens", "decodes", "decode_context", "samples")
WHOLE = ("blocks", "waiting")


def emit(iterations: np.ndarray, requests: np.ndarray, bytes_per_token: float, folder: Path) -> list[Path]:
    """Write ``serving.RANK.et`` for each rank that ran an iteration, and an empty ``comm_group.json``: ranks of
    schedulers exchange nothing. TraceFileError where nothing can be written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for rank in np.unique(iterations["rank"]).tolist():
        trace = rank_trace(iterations[iterations["rank"] == rank], requests, rank, bytes_per_token)
        written.append(protobuf.write(folder / f"serving.{rank}.et", trace))
    (folder / GROUPS_FILE).write_text("{}\n")
    return written


def rank_trace(own: np.ndarray, requests: np.ndarray, rank: int, bytes_per_token: float) -> ExecutionTrace:
    """The trace of one rank. ``own`` are its iterations, ``requests`` all that ended (records of :mod:`.state`)."""
    own = own[np.argsort(own["start_us"], kind="stable")]
    moved = requests[(requests["rank"] == rank) & (requests["moved_us"] > 0)]
    came = moved["first_token_us"]  # the prompt's token is there; then its cache is on the way
    start = np.concatenate([own["start_us"], came])
    end = np.concatenate([own["end_us"], came + moved["moved_us"]])
    count = len(own)
    pairs: list[tuple[int, int]] = [
        (place, place - 1) for place in range(1, count) if end[place - 1] <= start[place] + ROUNDED_US
    ]
    for place in range(len(moved)):
        after = int(np.searchsorted(own["start_us"], end[count + place] - ROUNDED_US))
        if after < count:
            pairs.append((after, count + place))
    linked = np.array(pairs, np.int64).reshape(-1, 2)
    timed = filled(start, end, linked[:, 0], linked[:, 1], np.ones(len(start), bool), np.arange(len(start)))
    builder = TraceBuilder([("schema", "string", "opcast serving"), ("rank", "int32", rank)])
    parents: list[list[int]] = [[] for _ in timed.row]
    for child, parent in timed.parents.T.tolist():
        parents[child].append(parent + 1)
    columns = zip(timed.row.tolist(), timed.gap.tolist(), timed.start.tolist(), timed.end.tolist(), strict=True)
    for place, (row, gap, begins, ends) in enumerate(columns):
        name, kind, told = _told(own, moved, row, count, bytes_per_token)
        if gap:
            name, kind, told = GAP, NodeKind.COMP, [(OP, "string", GAP)]
        stream: Attribute = ("stream", "int64", ITERATIONS if row < count else TRANSFERS)
        builder.add(place + 1, name, kind, start_us=begins, duration_us=max(ends - begins, 0.0), data=parents[place],
                    attributes=[("is_cpu_op", "bool", False), stream, *told])  # fmt: skip
    return builder.trace()


def _told(
    own: np.ndarray, moved: np.ndarray, row: int, count: int, bytes_per_token: float
) -> tuple[str, NodeKind, list[Attribute]]:  # fmt: skip
    if row >= count:
        request = moved[row - count]
        size = round(bytes_per_token * int(request["input_tokens"]))
        return "kv transfer", NodeKind.MEM_LOAD, [("tensor_size", "uint64", size),
                                                  ("kv_tokens", "int64", int(request["input_tokens"])),
                                                  ("request", "int64", int(request["request"]))]  # fmt: skip
    each = own[row]
    told: list[Attribute] = [(name, "int64", round(float(each[name]))) for name in KEPT]
    told += [(f"kv_{name}" if name == "blocks" else name, "int64", int(each[name])) for name in WHOLE]
    name = "mixed" if each["prefill_tokens"] and each["decodes"] else "prefill" if each["prefill_tokens"] else "decode"
    return name, NodeKind.COMP, told
