"""The calls of a trace run again on one rank: operators, ops, collectives and messages, each timed.

``eager`` allocates everything before the first call; ``lazy`` allocates what a call needs when it comes, and lets go of
it after the last call that needs it. A call that cannot be run is left out, and why is told.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..datasets.dtypes import itemsize
from ..datasets.ops import Op, OpError, make_op
from ..datasets.traces.calls import TraceCall
from .cases import backends, prepare
from .cases.base import Unsupported
from .collective_calls import CALLS, CallSetting, ReadyCollective
from .measuring import first_line
from .replay_tensors import Key, Place, TensorPool, arguments_of, operator_of, places_of, recorded_keys

REDUCED, GATHERED, SCATTERED, BARRIER, MESSAGE = "reduce", "gather", "scatter", "barrier", "message"
LEAST_DTYPE = "uint8"
Run = Callable[[], Any]


@dataclass
class Ready:
    """A call that can run. ``places`` are the tensors that it takes, ``external`` those that no call made, ``last``
    those that no later call takes; ``run`` is None until it is made."""

    call: TraceCall
    make: Callable[[], Run]
    places: Sequence[Place] = ()
    external: Sequence[Place] = ()
    last: Sequence[Place] = ()
    run: Run | None = None
    us: list[float] = field(default_factory=list)
    why: str = ""


@dataclass
class Replayer:
    """One rank's replay. ``groups``: the process group of each set of ranks."""

    device: str
    lazy: bool
    groups: dict[tuple[int, ...], ProcessGroup] = field(default_factory=dict)
    rank: int = 0
    pending: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = TensorPool(self.device)
        self.prepared: dict[Any, Run] = {}

    def ready(self, calls: Sequence[TraceCall]) -> list[Ready]:
        """Every call made ready to run, or with the reason why it cannot be."""
        entries = []
        for call in calls:
            entry = Ready(call, lambda: _nothing)
            try:
                entry.places = () if call.communicates or call.op else places_of(call)
                entry.make = self._maker(call)
            except Unsupported as error:
                entry.why = str(error)
            entries.append(entry)
        produced: set[Key] = set()
        for entry in entries:
            for tensor_place in entry.places:
                self.pool.expect(tensor_place)
            entry.external = [tensor_place for tensor_place in entry.places if tensor_place.key not in produced]
            self.pool.wanted |= {tensor_place.key for tensor_place in entry.places}
            produced |= set(recorded_keys(entry.call.outputs))
        outside = {tensor_place.key for entry in entries for tensor_place in entry.external}
        later_used: set[Key] = set()
        for entry in reversed(entries):
            last = [tensor_place for tensor_place in entry.places if tensor_place.key not in later_used]
            later_used |= {tensor_place.key for tensor_place in last}
            entry.last = (
                last if self.lazy else [tensor_place for tensor_place in last if tensor_place.key not in outside]
            )
        if not self.lazy:
            for entry in entries:
                self._make(entry)
        return entries

    def _make(self, entry: Ready) -> None:
        if entry.why or entry.run is not None:
            return
        try:
            for tensor_place in () if self.lazy else entry.external:
                self.pool.get(tensor_place)
            entry.run = entry.make()
        except (Unsupported, RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            entry.why = first_line(error)

    def _maker(self, call: TraceCall) -> Callable[[], Run]:
        if call.communicates:
            return self._communication(call)
        if call.op:
            op = op_of(call)
            return lambda: self._prepared(op)
        if not call.schema:
            raise Unsupported("the trace does not tell what it computes")
        operator, schema = operator_of(call)

        def run() -> Any:
            plain, named = arguments_of(call, schema, self.pool)
            self.pool.keep(call.outputs, operator(*plain, **named))

        return lambda: run

    def _prepared(self, op: Op) -> Run:
        if op not in self.prepared:
            names = backends(op, self.device)
            if not names:
                raise Unsupported(f"{op.kind} in {op.dtype} cannot run on {self.device}")
            prepared = prepare(op, names[0], self.device)

            def run() -> Any:
                with prepared.context():
                    return prepared.run()

            if self.lazy:
                return run
            self.prepared[op] = run
        return self.prepared[op]

    # --- communication -----------------------------------------------------------------------------------

    def _communication(self, call: TraceCall) -> Callable[[], Run]:
        members = tuple(sorted(call.ranks))
        if len(members) < 2:
            raise Unsupported("its group has one rank here")
        if call.collective == MESSAGE:
            return lambda: self._message(call)
        op = collective_op(call)
        group = self.groups[members]
        if op.kind in CALLS:
            setting = CallSetting(op, group, members.index(self.rank), self.device, False)
            return lambda: CALLS[op.kind](setting).run
        return lambda: self._other(call.collective, op, members, group)

    def _message(self, call: TraceCall) -> Run:
        buffer = torch.zeros(max(call.size_bytes, 1), dtype=torch.uint8, device=self.device)

        def run() -> None:
            start = dist.isend if call.sends else dist.irecv
            work = start(buffer, call.peer, tag=call.tag)
            if call.sends:
                self.pending.append(work)
            elif work is not None:
                work.wait()

        return run

    def _other(self, kind: str, op: Op, members: tuple[int, ...], group: ProcessGroup) -> Run:
        """What opcast has no kind for: a reduction to one rank, a gather, a scatter, a barrier."""
        if kind == BARRIER:
            return lambda: dist.barrier(group=group)
        buffer = torch.zeros(op.size_bytes, dtype=torch.uint8, device=self.device)
        root, first = members[0], self.rank == members[0]
        parts = [torch.zeros_like(buffer) for _ in members] if first else None
        if kind == REDUCED:
            numbers = buffer[: buffer.numel() // 4 * 4].view(torch.float32)
            return lambda: dist.reduce(numbers, root, group=group)
        if kind == GATHERED:
            return lambda: dist.gather(buffer, parts, root, group=group)
        return lambda: dist.scatter(buffer, parts, root, group=group)

    # --- running -----------------------------------------------------------------------------------------

    def once(self, entries: Sequence[Ready], keep: bool) -> float:
        """Run everything once; microseconds on the wall. With ``keep`` each call's own time is kept."""
        marks: list[tuple[Ready, Any, Any]] = []
        self.meet()
        began = time.perf_counter()
        with torch.no_grad():
            for entry in entries:
                self._make(entry)
                if entry.run is not None and not entry.why:
                    self._timed(entry, marks, keep)
                self.pool.drop(entry.last)
                if self.lazy:
                    entry.run = None
        for work in self.pending:
            if work is not None:
                work.wait()
        self.pending.clear()
        if self.device == "cuda":
            torch.cuda.synchronize()
        wall_us = (time.perf_counter() - began) * 1e6
        for entry, start, end in marks:
            entry.us.append(start.elapsed_time(end) * 1e3)
        return wall_us

    def _timed(self, entry: Ready, marks: list[tuple[Ready, Any, Any]], keep: bool) -> None:
        assert entry.run is not None
        on_device = self.device == "cuda"
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if on_device else (None, None)
        if start is not None:
            start.record()
        began = time.perf_counter_ns()
        try:
            entry.run()
        except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError) as error:
            if entry.call.communicates:
                raise
            entry.why = first_line(error)
            return
        if not keep:
            return
        if end is not None:
            end.record()
            marks.append((entry, start, end))
        else:
            entry.us.append((time.perf_counter_ns() - began) / 1e3)

    def meet(self) -> None:
        """Wait for the other ranks."""
        if dist.is_initialized():
            dist.barrier()


def _nothing() -> None:
    """A call that is not made ready yet."""


def op_of(call: TraceCall) -> Op:
    """The op of a call. Unsupported for what is none."""
    fields = dict(call.op)
    try:
        return make_op(fields.pop("kind"), **fields)
    except (OpError, TypeError, ValueError, KeyError) as error:
        raise Unsupported(f"no op of opcast: {first_line(error)}") from None


def collective_op(call: TraceCall) -> Op:
    """A collective as nccl-tests sizes it: whole elements for each rank, so that a size may be rounded up."""
    if call.op and call.op.get("kind") in CALLS:
        return op_of(call)
    ranks = len(call.ranks)
    kind = {"reduce_scatter_block": "reduce_scatter"}.get(call.collective, call.collective)
    total_bytes = max(call.size_bytes, 1) * (ranks if kind == "all_gather" else 1)
    dtype = call.dtype or ("fp32" if total_bytes % 4 == 0 else LEAST_DTYPE)
    try:
        unit = int(itemsize(dtype)) * (ranks if kind != "broadcast" else 1)
        name = kind if kind in CALLS else "broadcast"
        return make_op(name, dtype=dtype, size_bytes=-(-total_bytes // unit) * unit, ranks=ranks, ranks_per_node=ranks)
    except (OpError, ValueError, KeyError) as error:
        raise Unsupported(first_line(error)) from None


# --- results -------------------------------------------------------------------------------------------


def result(ready: Sequence[Ready], walls_us: Sequence[float]) -> dict[str, Any]:
    """What a rank measured, as JSON has it."""
    calls = []
    for entry in ready:
        row: dict[str, Any] = {"node": entry.call.node, "name": entry.call.name, "recorded_us": entry.call.recorded_us}
        if entry.call.communicates:
            row |= {"collective": entry.call.collective, "size_bytes": entry.call.size_bytes, "ranks": entry.call.ranks}
            if not entry.why and entry.call.collective not in (MESSAGE, BARRIER, REDUCED, GATHERED, SCATTERED):
                op = collective_op(entry.call)
                row |= {"kind": op.kind, "buffer_bytes": op.size_bytes, "dtype": op.dtype}
        calls.append(
            row | ({"why": entry.why} if entry.why else {"us": statistics.median(entry.us) if entry.us else 0.0})
        )
    return {"wall_us": statistics.median(walls_us), "calls": calls}


def accuracy(
    ops: Sequence[tuple[Op, tuple[int, ...]]], rank: int, groups: tuple[Any, Any], devices: tuple[str, str], dtype: str
) -> list[dict[str, Any]]:
    """Each collective twice, on the same numbers: as recorded, and in another dtype or over another back end.

    ``groups`` and ``devices`` are those of the two; errors are relative to the largest number of the first result.
    """
    rows = []
    for op, members in ops:
        if rank not in members:
            continue
        other = make_op(op.kind, dtype=dtype or op.dtype, ranks=op.ranks, ranks_per_node=op.ranks_per_node,
                        size_bytes=int(op.size_bytes // itemsize(op.dtype) * itemsize(dtype or op.dtype)))  # fmt: skip
        results, why = [], ""
        for op_, by, device in zip((op, other), groups, devices, strict=True):
            try:
                results.append(_outcome(op_, by[members], members.index(rank), device))
            except (Unsupported, RuntimeError) as error:
                why = first_line(error)
        row = {"kind": op.kind, "size_bytes": op.size_bytes, "ranks": len(members), "dtype": op.dtype,
                "other_dtype": other.dtype}  # fmt: skip
        if why:
            rows.append({**row, "why": why})
            continue
        one, two = results
        largest = float(one.abs().max()) if one.numel() else 0.0
        worst = float((one - two).abs().max()) if one.numel() else 0.0
        rows.append({**row, "max_error": worst / largest if largest else worst})
    return rows


def _outcome(op: Op, group: ProcessGroup, position: int, device: str) -> torch.Tensor:
    """What a collective leaves on this rank, of numbers that depend on the rank alone; as fp64 on the host."""
    call: ReadyCollective = CALLS[op.kind](CallSetting(op, group, position, device, False))
    generator = torch.Generator().manual_seed(position)
    numbers = torch.rand(call.source.numel(), generator=generator, dtype=torch.float64) * 2 - 1
    call.source.copy_(numbers.view(call.source.shape).to(call.source.dtype))
    call.run()
    return call.target.double().cpu()
