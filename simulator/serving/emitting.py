"""Served traffic as execution traces: of each scheduler's rank its iterations, and the KV caches that moved.

An iteration is a compute node with what its batch held; it waits for the one before. Where it begins later, the time
between is a node of its own (no request was there, or the host was busy). The cache of a request that another pool
prefilled is a load on a lane of its own, which the rank's next iteration waits for. Caches that were swapped to host
memory are a store before the iteration that they make room in, those that come back a load.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...datasets.traces import protobuf
from ...datasets.traces.builder import Attribute, TraceBuilder
from ...datasets.traces.classes import GAP, OP
from ...datasets.traces.gaps import FLOAT_ROUNDING_US, fill_gaps
from ...datasets.traces.groups import write_groups
from ...datasets.traces.schema import NodeKind
from ...datasets.traces.table import ExecutionTrace
from ..question.serving import SWAP_GBPS

ITERATIONS, SWAPS, TRANSFERS = 7, 1007, 2007  # streams: the first of those that run beside each other
KEPT = ("prefill_tokens", "decodes", "decode_context", "samples")
WHOLE = ("blocks", "waiting")
SWAPPED = (("swapped_out", "kv swap out", NodeKind.MEM_STORE), ("swapped_in", "kv swap in", NodeKind.MEM_LOAD))


class _Event(NamedTuple):
    """A node before it has an id: when it runs, on which lane, what a trace says of it, which events it waits for."""

    start_us: float
    end_us: float
    stream: int
    name: str
    kind: NodeKind
    told: list[Attribute]
    after: list[int]


def emit(iterations: np.ndarray, requests: np.ndarray, bytes_per_token: float, folder: Path) -> list[Path]:
    """Write ``serving.RANK.et`` for each rank that ran an iteration, and an empty ``comm_group.json``: ranks of
    schedulers exchange nothing. TraceFileError where nothing can be written."""
    written = []
    for rank in np.unique(iterations["rank"]).tolist():
        trace = rank_trace(iterations[iterations["rank"] == rank], requests, rank, bytes_per_token)
        written.append(protobuf.write(folder / f"serving.{rank}.et", trace))
    write_groups(folder, "{}\n")
    return written


def rank_trace(log: np.ndarray, requests: np.ndarray, rank: int, bytes_per_token: float) -> ExecutionTrace:
    """The trace of one rank. ``log`` are its iterations, ``requests`` all that ended (records of :mod:`.state`)."""
    log = log[np.argsort(log["start_us"], kind="stable")]
    events = _moved(requests[(requests["rank"] == rank) & (requests["moved_us"] > 0)], bytes_per_token)
    _iterations(log, bytes_per_token, events)
    start, end = (np.array([getattr(an_event, name) for an_event in events]) for name in ("start_us", "end_us"))
    pairs = [(index, earlier) for index, event in enumerate(events) for earlier in event.after
             if end[earlier] <= start[index] + FLOAT_ROUNDING_US]  # fmt: skip
    linked = np.array(pairs, np.int64).reshape(-1, 2)
    timed = fill_gaps(start, end, linked[:, 0], linked[:, 1], np.ones(len(start), bool), np.arange(len(start)))
    builder = TraceBuilder([("schema", "string", "opcast serving"), ("rank", "int32", rank)])
    parents: list[list[int]] = [[] for _ in timed.row]
    for child, parent in timed.parents.T.tolist():
        parents[child].append(parent + 1)
    columns = zip(timed.row.tolist(), timed.gap.tolist(), timed.start.tolist(), timed.end.tolist(), strict=True)
    for index, (row, gap, begins, ends) in enumerate(columns):
        event = events[row]
        name, kind, attributes = (GAP, NodeKind.COMP, [(OP, "string", GAP)]) if gap else event[3:6]
        at: list[Attribute] = [("is_cpu_op", "bool", False), ("stream", "int64", event.stream)]
        builder.add(index + 1, name, kind, start_us=begins, duration_us=max(ends - begins, 0.0), data=parents[index],
                    attributes=[*at, *attributes])  # fmt: skip
    return builder.trace()


def _moved(moved: np.ndarray, bytes_per_token: float) -> list[_Event]:
    """The caches that came from the pool that prefills: on their way when the prompt's token is there."""
    events, last = list[_Event](), list[int]()  # the last one of each lane
    for request in moved[np.argsort(moved["prefilled_us"], kind="stable")]:
        begin, tokens = float(request["prefilled_us"]), int(request["input_tokens"])
        attributes = [*_cache(tokens, bytes_per_token), ("request", "int64", int(request["request"]))]
        end = begin + float(request["moved_us"])
        lane = next((index for index, at in enumerate(last) if events[at].end_us <= begin), len(last))
        events.append(
            _Event(begin, end, TRANSFERS + lane, "kv transfer", NodeKind.MEM_LOAD, attributes, last[lane : lane + 1])
        )
        last[lane:] = [len(events) - 1, *last[lane + 1 :]]
    return events


def _cache(tokens: int, bytes_per_token: float) -> list[Attribute]:
    return [("tensor_size", "uint64", round(bytes_per_token * tokens)), ("kv_tokens", "int64", tokens)]


def _iterations(log: np.ndarray, bytes_per_token: float, events: list[_Event]) -> None:
    """Each iteration behind the one before on its lane, the transfers that are there, and its own swaps, which its time
    holds."""
    first = int(log["lane"].min())
    arrived: dict[int, list[int]] = {}
    for index, event in enumerate(events):
        arrived.setdefault(int(np.searchsorted(log["start_us"], event.end_us - FLOAT_ROUNDING_US)), []).append(index)
    last: dict[int, int] = {}
    for index, iteration in enumerate(log):
        begin, end = float(iteration["start_us"]), float(iteration["end_us"])
        lane = int(iteration["lane"])
        behind = [last[lane]] if lane in last else []
        for column, name, kind in SWAPPED:
            tokens = int(iteration[column])
            if tokens:
                attributes = _cache(tokens, bytes_per_token)
                until = min(begin + tokens * bytes_per_token / (SWAP_GBPS * 1e3), end)
                events.append(_Event(begin, until, SWAPS + lane - first, name, kind, attributes, behind))
                begin, behind = until, [len(events) - 1]
        events.append(_Event(begin, end, ITERATIONS + lane - first, _name(iteration), NodeKind.COMP, _batch(iteration),
                             [*behind, *arrived.get(index, ())]))  # fmt: skip
        last[lane] = len(events) - 1


def _name(iteration: np.void) -> str:
    return (
        "mixed"
        if iteration["prefill_tokens"] and iteration["decodes"]
        else "prefill"
        if iteration["prefill_tokens"]
        else "decode"
    )


def _batch(iteration: np.void) -> list[Attribute]:
    attributes: list[Attribute] = [(name, "int64", round(float(iteration[name]))) for name in KEPT]
    return attributes + [(f"kv_{name}" if name == "blocks" else name, "int64", int(iteration[name])) for name in WHOLE]
