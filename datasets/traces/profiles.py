"""The PyTorch profiler's trace (Kineto) as events in time: threads of the host, streams of the devices.

An event of a thread lasts until the next one begins, often a call inside it: so the host is one node after another, and
what is left of the outer calls is time between them. What the host spends waiting for a device is none of its own time.
"""

from __future__ import annotations

import ast
import bisect
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..dtypes import itemsize
from ..ops import Op, OpError, make_op
from ..sources.kineto import (
    COPIES,
    KERNELS,
    LAUNCHES,
    NCCL_TYPES,
    OPERATORS,
    Event,
    call_of,
    is_collective,
    load,
    of_a_device,
    spans,
    unread,
)
from ..sources.kineto_ops import Unmapped, op_of
from ..sources.tables import SourceError
from .schema import CollectiveKind, TraceFileError

ON_DEVICE = KERNELS | COPIES
ON_HOST = OPERATORS | LAUNCHES
SYNCHRONIZING_CALLS = re.compile(
    r"(?:cuda|hip)(?:Stream|Device|Event)Synchronize|(?:cuda|hip)Memcpy$|cuStreamSynchronize"
)
ON_GLOO = re.compile(r"gloo:([a-z_]+)$")
STEP_MARK = re.compile(r"ProfilerStep#\d+$")
STEP_END_MARK = "opcast step"
OWN_OP = "opcast op"
_KINDS = {
    "allreduce": CollectiveKind.ALL_REDUCE,
    "allgather": CollectiveKind.ALL_GATHER,
    "reducescatter": CollectiveKind.REDUCE_SCATTER,
    "alltoall": CollectiveKind.ALL_TO_ALL,
    "sendrecv": CollectiveKind.ALL_TO_ALL,
    "broadcast": CollectiveKind.BROADCAST,
    "barrier": CollectiveKind.BARRIER,
    "gather": CollectiveKind.GATHER,
    "scatter": CollectiveKind.SCATTER,
    "reduce": CollectiveKind.REDUCE,
}
"""What stands in the name of a collective or its kernel, the longer words first."""


@dataclass(frozen=True)
class Profile:
    """The events of one rank. Times are microseconds of the file's own clock; ``steps`` are begin and end of each step
    that the program marked (``ProfilerStep#N``, or what :func:`opcast.harness.collecting.collect` gives). ``note`` says
    what of the device is missing; ``blind`` that it has no kernels at all, though a device ran."""

    path: Path
    rank: int | None
    host: Sequence[Event]
    device: Sequence[Event]
    groups: Mapping[str, tuple[int, ...]]
    steps: Sequence[tuple[float, float]] = ()
    note: str = ""
    blind: bool = False

    @property
    def begin_us(self) -> float:
        """When the first event begins."""
        return min(float(event["ts"]) for event in (*self.host, *self.device))


def read_profile(path: Path) -> Profile:
    """The events of a trace. TraceFileError where it is none, or has nothing that ran on a device."""
    try:
        trace = load(path)
    except (SourceError, OSError) as error:
        raise TraceFileError(f"{path}: {error}") from None
    events = spans(trace)
    device = [event for event in events if event.get("cat") in ON_DEVICE]
    host = [event for event in events if event.get("cat") in ON_HOST]
    kernels, unread_part = any(event.get("cat") in KERNELS for event in device), unread(events)
    device_traces = "" if kernels else of_a_device(events)
    note = f"no kernels were recorded{device_traces}: what the device did is not known" if device_traces else ""
    note = note or (f"opcast does not read {unread_part} of it" if unread_part else "")
    if not kernels and not device_traces:
        host, collectives = _split_processor_run(host, events)
        device += collectives
    if not host and not device:
        why = f" ({note})" if note else ""
        raise TraceFileError(f"{path} holds neither operators nor kernels: it is no profile of a run{why}")
    about = trace.get("distributedInfo")
    about = about if isinstance(about, dict) else {}
    rank = about.get("rank")
    return Profile(path, rank if isinstance(rank, int) and rank >= 0 else None, host, device,
                   _process_groups(about, device), _marked_steps(events, host), note, bool(device_traces))  # fmt: skip


# --- runs on a processor ---------------------------------------------------------------------------------


def _split_processor_run(host: list[Event], events: Iterable[Event]) -> tuple[list[Event], list[Event]]:
    """Of a run without kernels: host events without those inside an op or a collective, and the collectives.

    An operator that is an op of opcast keeps it (:data:`OWN_OP` among its arguments) and is one event whole. A
    collective of gloo is an event of a stream of its own, as a kernel of NCCL is.
    """
    gloo = [event for event in events if event.get("cat") == "user_annotation" and ON_GLOO.match(event["name"])]
    threads: dict[Any, list[Event]] = {}
    for event in sorted([*host, *gloo], key=lambda event: (float(event["ts"]), -float(event["dur"]))):
        threads.setdefault((event.get("pid"), event.get("tid")), []).append(event)
    operators, collectives = [], []
    for thread_events in threads.values():
        inside_until = float("-inf")
        for event in thread_events:
            if end_us(event) <= inside_until:
                continue
            if event.get("cat") == "user_annotation":
                collectives.append(_gloo_event(event))
                inside_until = end_us(event)
                continue
            op = op_on_processor(event)
            if op is not None:
                event = {**event, "args": {**event["args"], OWN_OP: op}}
                inside_until = end_us(event)
            operators.append(event)
    return operators, collectives


def _gloo_event(event: Event) -> Event:
    arguments = event["args"]
    shapes, types = arguments.get("Input Dims"), arguments.get("Input type")
    elements, dtype = 0, ""
    for shape, kind in zip(shapes or (), types or (), strict=False):
        if isinstance(shape, list) and all(isinstance(size, int) for size in shape):
            elements, dtype = elements + math.prod(shape), dtype or str(kind)
    name = {"float": "Float", "c10::Half": "Half", "c10::BFloat16": "BFloat16", "double": "Double",
            "long int": "Long", "int": "Int"}.get(dtype, "Byte")  # fmt: skip
    nccl_arguments = {
        "device": "gloo", "stream": str(event.get("tid")), "Collective name": event["name"].partition(":")[2],
        "In msg nelems": elements, "dtype": name,
    }  # fmt: skip
    return {**event, "cat": "kernel", "args": nccl_arguments}


def op_on_processor(event: Event) -> Op | None:
    """The op that an operator of a processor is; None for what is no op of ours."""
    if event.get("cat") not in OPERATORS or not event["args"].get("Input Dims"):
        return None
    try:
        op = op_of(call_of(event))
        return make_op(op.kind, op.dtype, op.out_dtype, **op.dims)
    except (Unmapped, OpError):
        return None


def _marked_steps(events: Iterable[Event], host: Sequence[Event]) -> list[tuple[float, float]]:
    """Begin and end of each step: from one ``ProfilerStep#N`` to the next, or between ends that were marked."""
    marks = [event for event in events if event.get("cat") == "user_annotation"]
    steps = sorted((float(e["ts"]), end_us(e)) for e in marks if STEP_MARK.match(e["name"]))
    if steps:
        return [(begin, steps[index + 1][0] if index + 1 < len(steps) else end)
                for index, (begin, end) in enumerate(steps)]  # fmt: skip
    ends = sorted(end_us(e) for e in marks if e["name"] == STEP_END_MARK)
    first = min((float(event["ts"]) for event in host), default=0.0)
    return list(zip([first, *ends], ends, strict=False))


def cut_step(profile: Profile, index: int) -> Profile:
    """One step of a profile: what the host did between its marks, and what that launched. TraceFileError for none."""
    if not 0 <= index < len(profile.steps):
        raise TraceFileError(f"{profile.path} has {len(profile.steps)} marked steps, no step {index}")
    begin, end = profile.steps[index]
    host = [event for event in profile.host if begin <= float(event["ts"]) < end]
    launched = {correlation(event) for event in host if event.get("cat") in LAUNCHES} - {None}
    known_launches = {correlation(event) for event in profile.host if event.get("cat") in LAUNCHES}
    device = [event for event in profile.device if correlation(event) in launched
              or (correlation(event) not in known_launches and begin <= float(event["ts"]) < end)]  # fmt: skip
    return replace(profile, host=host, device=device, steps=(profile.steps[index],))


# --- what events say -------------------------------------------------------------------------------------


def _process_groups(about: Mapping[str, Any], device: Iterable[Event]) -> dict[str, tuple[int, ...]]:
    """The ranks of each process group that the file names."""
    members: dict[str, tuple[int, ...]] = {}
    config = about.get("pg_config")
    for entry in config if isinstance(config, list) else ():
        if isinstance(entry, dict) and (ranks := _ranks(entry.get("ranks"))):
            members[str(entry.get("pg_name"))] = ranks
    for event in device:
        arguments = event["args"]
        if "Process Group Name" in arguments and (ranks := _ranks(arguments.get("Process Group Ranks"))):
            members[str(arguments["Process Group Name"])] = ranks
    return members


def _ranks(value: Any) -> tuple[int, ...]:
    try:
        ranks = ast.literal_eval(value) if isinstance(value, str) else value
        return tuple(int(rank) for rank in ranks)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return ()


def collective_of(event: Event) -> CollectiveKind | None:
    """What a kernel of NCCL or RCCL does, by its arguments, else by its name; None where neither tells."""
    if not is_collective(event):
        return None
    for text in (event["args"].get("Collective name"), event["name"]):
        plain = re.sub(r"[^a-z]", "", str(text or "").lower())
        for word, kind in _KINDS.items():
            if word in plain.replace("gloo", "").replace("ncclkernel", "").replace("nccldevkernel", ""):
                return kind
    return None


def size_of_call(event: Event) -> int:
    """Bytes that a rank puts into a collective; 0 where the profiler did not keep it."""
    arguments = event["args"]
    elements, dtype = arguments.get("In msg nelems"), NCCL_TYPES.get(str(arguments.get("dtype")))
    return int(elements * itemsize(dtype)) if isinstance(elements, int) and elements > 0 and dtype else 0


def continuations(host: Sequence[Event]) -> list[Event]:
    """What calls do after the calls inside them: an event for each stretch of a call's own time but the first."""
    threads: dict[tuple[str, ...], list[Event]] = {}
    for call in sorted(host, key=lambda event: (float(event["ts"]), -float(event["dur"]))):
        threads.setdefault(lane(call), []).append(call)
    stretches: list[Event] = []
    for events in threads.values():
        around: list[tuple[Event, list[float]]] = []  # open calls, each with the ends of the calls inside it
        ends: list[Event | None] = [*events, None]
        for event in ends:
            begin = float(event["ts"]) if event is not None else float("inf")
            while around and end_us(around[-1][0]) <= begin:
                call, inside = around.pop()
                stretches += _own_time(call, inside, end_us(call))
                if around:
                    around[-1][1].append(end_us(call))
            if event is not None:
                if around:
                    stretches += _own_time(*around[-1], begin)
                around.append((event, []))
    return stretches


def _own_time(call: Event, inside: list[float], until_us: float) -> list[Event]:
    """A call's own time from the end of the last call inside it; none before there was one."""
    begin = max(inside, default=until_us)
    if until_us - begin <= 0:
        return []
    inside.append(until_us)
    return [{**call, "cat": "cpu_op", "ts": begin, "dur": until_us - begin, "args": {}}]


def correlation(event: Event) -> Any:
    """What ties a launch to what it launched; None without."""
    return event["args"].get("correlation")


def lane(event: Event) -> tuple[str, ...]:
    """The thread or the stream of an event."""
    if event.get("cat") in ON_DEVICE:
        arguments = event["args"]
        return "device", str(arguments.get("device", event.get("pid"))), str(arguments.get("stream", event.get("tid")))
    return "host", str(event.get("pid")), str(event.get("tid"))


def end_us(event: Event) -> float:
    """When an event ends."""
    return float(event["ts"]) + float(event["dur"])


def last_before(keys: Sequence[float], limit: float) -> int:
    """The place of the last of ascending keys that is at most ``limit``; -1 where none is."""
    return bisect.bisect_right(keys, limit) - 1
