"""Traces of the PyTorch profiler (Kineto, Chrome's JSON) that were recorded with shapes: one file, its own kernels.

A kernel leads by its correlation to the call that launched it, and by thread and time to the innermost operator call
around that. An operator call's kernels together are its time; each call is a row. NCCL kernels carry their arguments
themselves; their time holds the wait for the other ranks.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..device_names import cuda_device_id
from ..devices import DeviceError
from ..dtypes import itemsize
from ..loading import finite
from ..ops import LINKS
from .kineto_ops import ProfiledCall, ProfiledOp, Unmapped, op_of
from .options import ImportOptions
from .tables import Rejected, RowBatch, SourceError
from .text_files import content, listed, written_at

VERSION = 1
OPTIONS = {
    "device": "device, where its name in the trace is missing or not known",
    "link": f"{', '.join(LINKS)}: slowest link that collectives cross; else nvlink or pcie inside a node, ib between",
}
MEANING = ("device", "link")
KERNELS = frozenset({"kernel", "Kernel"})
LAUNCHES = frozenset({"cuda_runtime", "cuda_driver", "Runtime"})
OPERATORS = frozenset({"cpu_op", "Operator"})
COPIES = frozenset({"gpu_memcpy", "gpu_memset", "Memcpy", "Memset"})
MARKS = frozenset({"user_annotation", "gpu_user_annotation", "python_function", "overhead", "cpu_instant_event",
                   "external_correlation", "cuda_sync", "cuda_event", "Trace"})  # fmt: skip
"""Categories of events that are no work: what else Kineto knows (``ActivityType``) is of a device, and is not read."""
DEVICE_CALLS = re.compile(r"^(?:cuda|hip|cu)(?:[A-Z]\w*)?(?:Launch|Memcpy|Memset)")
EPOCH_US = 1e15  # time stamps above this count from 1970, below from the trace's own start
COLLECTIVES = {
    "allreduce": ("all_reduce", "In msg nelems"),
    "allgather": ("all_gather", "Out msg nelems"),
    "reducescatter": ("reduce_scatter", "In msg nelems"),
    "alltoall": ("all_to_all", "In msg nelems"),
    "broadcast": ("broadcast", "In msg nelems"),
}
NCCL_TYPES = {"Float": "fp32", "Half": "fp16", "BFloat16": "bf16", "Double": "fp64", "Int": "int32", "Long": "int64",
              "Byte": "uint8", "Char": "int8", "Bool": "bool", "Float8_e4m3fn": "fp8"}  # fmt: skip

Event = dict[str, Any]


def files(path: Path | None, options: ImportOptions) -> list[Path]:
    """Traces at or below ``path``."""
    return listed(path, ("*.json", "*.json.gz"), "traces of the PyTorch profiler")


def read(file: Path, options: ImportOptions) -> Iterator[RowBatch]:
    """Rows of one trace. SourceError where it is truncated, is no trace, or was recorded without kernels or shapes."""
    trace = load(file)
    events = spans(trace)
    kernels = [event for event in events if event.get("cat") in KERNELS and "correlation" in event["args"]]
    if not kernels:
        raise SourceError(f"{file.name} has no kernels{of_a_device(events)}: profile with CUDA activities")
    nccl = [kernel for kernel in kernels if is_collective(kernel)]
    calls = operator_calls(events, [kernel for kernel in kernels if not is_collective(kernel)])
    if not nccl and not any(call.shapes for call, _, _ in calls):
        raise SourceError(f"{file.name} has no Input Dims: profile with record_shapes=True")
    about = {"measured_at": _measured_at(trace, kernels, file), **_device(trace, kernels, file, options)}
    yield from _operators(calls, about, file)
    yield from _collectives(nccl, trace, about, file, options)


def load(file: Path) -> dict[str, Any]:
    """The trace as JSON has it."""
    try:
        trace = json.loads(content(file))
    except (ValueError, RecursionError) as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"{file.name} is truncated or no JSON ({str(error)[:80]})") from None
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise SourceError(f"{file.name} has no traceEvents: it is no trace of the PyTorch profiler")
    return trace


def spans(trace: Mapping[str, Any]) -> list[Event]:
    """The events that have a start and a length; ``args`` is there in each."""
    timed = [e for e in trace["traceEvents"] if isinstance(e, dict) and e.get("ph") == "X"]
    timed = [e for e in timed if finite(e.get("ts")) and finite(e.get("dur"))]
    return [
        {**e, "args": e["args"] if isinstance(e.get("args"), dict) else {}, "name": str(e.get("name"))} for e in timed
    ]


def unread(events: Iterable[Event]) -> str:
    """How many events there are of categories that opcast does not read, by category; "" for none."""
    categories = KERNELS | LAUNCHES | OPERATORS | COPIES | MARKS
    counts = Counter(str(event["cat"]) for event in events if event.get("cat") and event["cat"] not in categories)
    return ", ".join(f"{count:,} {category}" for category, count in counts.most_common())


def of_a_device(events: Iterable[Event]) -> str:
    """What in a profile speaks of a device, in brackets; "" for a run on a processor alone."""
    events = list(events)
    calls = sum(event.get("cat") in LAUNCHES and bool(DEVICE_CALLS.search(event["name"])) for event in events)
    copies = sum(event.get("cat") in COPIES for event in events)
    other = unread(events)
    parts = [f"{calls:,} calls of the host that launch or copy"] if calls else []
    parts += [f"{copies:,} copies"] if copies else []
    parts += [f"{other}, which opcast does not read"] if other else []
    return f" ({'; '.join(parts)})" if parts else ""


def is_collective(kernel: Event) -> bool:
    """Whether a kernel is one of NCCL or RCCL, or a collective of gloo."""
    return bool(re.search(r"nccl(Dev)?Kernel|rccl|^gloo:", kernel["name"]))


# --- operators -----------------------------------------------------------------------------------------


def operator_calls(events: Iterable[Event], kernels: Iterable[Event]) -> list[tuple[ProfiledCall, float, int]]:
    """Each operator call that launched kernels: the call, its kernels' microseconds, how many they are.

    Kernels that no operator launched, of CUDA graphs for one, are one call of no name each.
    """
    return [
        (call, sum(float(kernel["dur"]) for kernel in launched), len(launched))
        for call, launched in kernels_of_calls(events, kernels)
    ]


def kernels_of_calls(events: Iterable[Event], kernels: Iterable[Event]) -> list[tuple[ProfiledCall, list[Event]]]:
    """Each operator call that launched kernels, with these; kernels that no operator launched are a call each."""
    launched = _launching_operators(events)
    groups: dict[int, tuple[Event | None, list[Event]]] = {}
    for kernel in kernels:
        operator = launched.get(kernel["args"]["correlation"])
        key = id(operator) if operator is not None else id(kernel)
        groups.setdefault(key, (operator, []))[1].append(kernel)
    return [(call_of(operator, kernels_of_call), kernels_of_call) for operator, kernels_of_call in groups.values()]


def _launching_operators(events: Iterable[Event]) -> dict[int, Event]:
    """Correlation of a launch: the innermost operator call around it on its thread."""
    threads: dict[tuple[str, str], list[tuple[float, int, float, Event]]] = {}
    for event in events:
        category = event.get("cat")
        if category in OPERATORS or (category in LAUNCHES and "correlation" in event["args"]):
            start, launch = float(event["ts"]), int(category in LAUNCHES)
            order = -float(event["dur"]) if not launch else 0.0
            threads.setdefault((str(event.get("pid")), str(event.get("tid"))), []).append((start, launch, order, event))
    by_correlation: dict[int, Event] = {}
    for line in threads.values():
        line.sort(key=lambda entry: entry[:3])
        around: list[tuple[float, Event]] = []
        for start, launch, order, event in line:
            while around and around[-1][0] < start:
                around.pop()
            if not launch:
                around.append((start - order, event))
            elif around:
                by_correlation[event["args"]["correlation"]] = around[-1][1]
    return by_correlation


def call_of(operator: Event | None, kernels: Sequence[Event] = ()) -> ProfiledCall:
    """An operator call with its shapes; one of no name where no operator launched the kernels."""
    names = tuple(kernel["name"] for kernel in kernels)
    if operator is None:
        return ProfiledCall("", (), (), kernels=names)
    arguments = operator["args"]

    def kept(name: str) -> tuple[Any, ...]:
        recorded = arguments.get(name)
        return tuple(recorded) if isinstance(recorded, list) else ()

    return ProfiledCall(
        operator["name"], kept("Input Dims"), kept("Input type"), kept("Input Strides"), kept("Concrete Inputs"), names
    )


def _operators(calls: list[tuple[ProfiledCall, float, int]], about: dict[str, Any], file: Path) -> Iterator[RowBatch]:
    """Rows of the calls that are ops, by kind; the others counted by name and reason."""
    by_kind: dict[str, list[tuple[ProfiledOp, float]]] = {}
    refused: Counter[tuple[str, str]] = Counter()
    for call, microseconds, _ in calls:
        try:
            op = op_of(call) if call.name else None
        except Unmapped as reason:
            refused[call.name, str(reason)] += 1
            continue
        if op is None:
            refused["kernels", "launched by no operator (of a CUDA graph, for one)"] += 1
        else:
            by_kind.setdefault(op.kind, []).append((op, microseconds))
    amd = "AMD" in about["device_name"]
    for kind_name, rows in by_kind.items():
        yield RowBatch(kind_name, {
            **{name: [float(op.dims[name]) for op, _ in rows] for name in rows[0][0].dims},
            "dtype": [op.dtype for op, _ in rows], "out_dtype": [op.out_dtype for op, _ in rows],
            "latency_us": [microseconds for _, microseconds in rows],
            "backend": [_backend(op.library, amd) for op, _ in rows], **about,
        })  # fmt: skip
    for (name, why), count in refused.items():
        yield RowBatch(rejected=(Rejected(f"{name}: {why}", count, file.name),))


def _backend(library: str, amd: bool) -> str:
    """Framework and kernels; a trace does not tell versions."""
    if library in ("vllm", "aiter", "sgl_kernel"):
        return f"{library}:{library}"
    return f"torch:{library if library != 'blas' else 'rocblas' if amd else 'cublas'}"


# --- collectives ---------------------------------------------------------------------------------------


def _collectives(
    kernels: list[Event], trace: Mapping[str, Any], about: dict[str, Any], file: Path, options: ImportOptions
) -> Iterator[RowBatch]:
    """Rows of NCCL kernels that carry their arguments; the others counted."""
    by_kind: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    refused: Counter[str] = Counter()
    for kernel in kernels:
        try:
            kind_name, row = _collective(kernel["args"], trace, about["device_id"], options)
        except Unmapped as reason:
            refused[str(reason)] += 1
            continue
        by_kind.setdefault(kind_name, []).append((str(row.pop("dtype")), {**row, "latency_us": float(kernel["dur"])}))
    library = "rccl" if "AMD" in about["device_name"] else "nccl"
    version = (trace.get("distributedInfo") or {}).get("nccl_version")
    backend = f"{library}{'-' + version if version else ''}:{library}"
    for kind_name, rows in by_kind.items():
        columns = {name: [float(row[name]) for _, row in rows] for name in rows[0][1]}
        dtypes = [dtype for dtype, _ in rows]
        yield RowBatch(kind_name, {**columns, "dtype": dtypes, "backend": backend, "nccl": version, **about})
    for why, count in refused.items():
        yield RowBatch(rejected=(Rejected(why, count, file.name),))


def _collective(
    arguments: Mapping[str, Any], trace: Mapping[str, Any], device_id: str, options: ImportOptions
) -> tuple[str, dict[str, Any]]:
    """Kind and dims of one NCCL kernel, sizes as nccl-tests counts them."""
    if "Collective name" not in arguments:
        raise Unmapped("an NCCL kernel without its arguments")
    name = str(arguments["Collective name"])
    key = re.sub(r"base$|intotensorcoalesced$|v$", "", re.sub(r"[^a-z]", "", name.lower()))
    if key not in COLLECTIVES:
        raise Unmapped(f"NCCL's {name}: no op kind for it")
    if any(arguments.get(f"{side} split size") not in (None, "", "[]", []) for side in ("In", "Out")):
        raise Unmapped(f"NCCL's {name}: uneven splits")
    kind_name, counted = COLLECTIVES[key]
    dtype = NCCL_TYPES.get(str(arguments.get("dtype")))
    elements, ranks = arguments.get(counted), arguments.get("Group size")
    if dtype is None or not isinstance(elements, int) or not isinstance(ranks, int) or elements <= 0 or ranks < 2:
        raise Unmapped(f"NCCL's {name}: size, type or group not told")
    per_node = _per_node(arguments, trace, ranks)
    link = options.link or _link(device_id, ranks, per_node, options)
    dims = {"size_bytes": int(elements * itemsize(dtype)), "ranks": ranks, "ranks_per_node": per_node}
    return kind_name, {**dims, "link": LINKS.index(link), "dtype": dtype}


def _per_node(arguments: Mapping[str, Any], trace: Mapping[str, Any], ranks: int) -> int:
    """Members of a group on one node, as many GPUs to a node as the trace lists."""
    gpus = max(len(trace.get("deviceProperties") or ()), 1)
    try:
        members = ast.literal_eval(str(arguments.get("Process Group Ranks")))
        nodes = Counter(int(rank) // gpus for rank in members)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return min(ranks, gpus)
    return max(nodes.values(), default=min(ranks, gpus))


def _link(device_id: str, ranks: int, per_node: int, options: ImportOptions) -> str:
    if ranks > per_node:
        return "ib"
    try:
        return "nvlink" if options.figures(device_id).link_gbps > 0 else "pcie"
    except DeviceError:
        return "nvlink"


# --- conditions ----------------------------------------------------------------------------------------


def _device(
    trace: Mapping[str, Any], kernels: list[Event], file: Path, options: ImportOptions
) -> dict[str, str | None]:
    """The device that ran the kernels. SourceError where the trace does not name it."""
    listed_gpus = [entry for entry in trace.get("deviceProperties") or () if isinstance(entry, dict)]
    names = {entry.get("id"): str(entry.get("name") or "") for entry in listed_gpus}
    ids = {kernel["args"].get("device") for kernel in kernels}
    used = {names[one] for one in ids} if ids <= set(names) else set(names.values())  # HIP counts them in two ways
    name = next(iter(used)) if len(used) == 1 else ""
    if not name and not options.device:
        raise SourceError(f"{file.name} does not name one device: say device=…")
    return {"device_id": options.device_id or cuda_device_id(name), "device_name": name}


def _measured_at(trace: Mapping[str, Any], kernels: list[Event], file: Path) -> datetime:
    """When the first kernel ran, where the time stamps tell; else when the file was written."""
    first = min(float(kernel["ts"]) for kernel in kernels)
    base = trace.get("baseTimeNanoseconds")
    if first > EPOCH_US:
        seconds = first / 1e6
    elif isinstance(base, int):
        seconds = base / 1e9 + first / 1e6
    else:
        return written_at(file)
    return datetime.fromtimestamp(int(seconds), UTC)
