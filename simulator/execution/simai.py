"""SimAI's and AICB's workload files as traces of all ranks, and traces as such a file.

A file's lines run from the first to the last (compute, then the collective), then backwards: gradients of inputs, then
of weights, then the update. A pipeline stage runs all lines once; it awaits its input from the stage before, and sends
``pp_comm`` bytes on, and the other way round. Traces made here keep what they were made of, so that the file comes back
as it was; of other traces each collective of the lowest rank is a line, with the compute before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...datasets.traces.builder import Attribute, TraceBuilder
from ...datasets.traces.classes import class_codes, is_device_work
from ...datasets.traces.dependencies import sorted_dependencies
from ...datasets.traces.groups import GROUP_LABEL, GroupNumbers, RankedTraces, start_order
from ...datasets.traces.schema import COMMUNICATION, CollectiveKind, NodeKind
from ...datasets.traces.table import ExecutionTrace
from ..formats.simai import COLLECTIVES, PHASES, LayerPhase, SimaiWorkload, WorkloadLayer, group_ranks
from ..network.astra import FormatError

HEADER, LINE_PART = "simai_header", "simai_part"
KINDS = {name: CollectiveKind[name.upper()] for name in COLLECTIVES.values()}
NAMES = {kind: name for name, kind in KINDS.items()} | {CollectiveKind.REDUCE_SCATTER_BLOCK: "reduce_scatter"}
COMPUTE_STREAM, NETWORK_STREAM = 7, 20
FORWARD, BACKWARD = 1, 2  # tags of messages
MAX_RANKS = 1 << 14


def traces_of(workload: SimaiWorkload) -> RankedTraces:
    """The traces of every rank. FormatError for degrees that do not divide the GPUs, or too many of them."""
    gpus = workload.degrees["gpus"]
    if gpus > MAX_RANKS:
        raise FormatError(f"all_gpus: {gpus} are more than the {MAX_RANKS} ranks that traces are written of")
    groups = GroupNumbers()
    traces = {rank: _rank(workload, rank, groups) for rank in range(gpus)}
    return RankedTraces(traces, groups.members)


def group_of(workload: SimaiWorkload, phase: str, work: LayerPhase, rank: int) -> range:
    """The ranks of a collective of one rank: the first group's, moved to where the rank is."""
    first = group_ranks(workload, phase, work)
    stage = workload.degrees["gpus"] // workload.degrees["pp"]
    base, stage_rank = rank // stage * stage, rank % stage
    group_span = len(first) * first.step
    begin = base + stage_rank // group_span * group_span + stage_rank % first.step
    return range(begin, begin + group_span, first.step)


def _rank(workload: SimaiWorkload, rank: int, groups: GroupNumbers) -> ExecutionTrace:
    header = {"degrees": dict(workload.degrees), "pp_bytes": workload.pp_bytes, "extra": dict(workload.extra),
              "lists": {name: list(layers) for name, layers in workload.lists.items()}, "kind": workload.kind,
              "layers": [[layer.name, *(list(getattr(layer, phase)) for phase in PHASES), layer.update_ns]
                       for layer in workload.layers]}  # fmt: skip
    builder = TraceBuilder([("schema", "string", "simai"), ("rank", "int32", rank),
                            *([(HEADER, "string", json.dumps(header))] if rank == 0 else [])])  # fmt: skip
    pp, stage = workload.degrees["pp"], workload.degrees["gpus"] // workload.degrees["pp"]
    stage_index = rank // stage
    last = 0

    def add(name: str, kind: NodeKind, attributes: list[Attribute], duration_us: float = 0.0) -> None:
        nonlocal last
        about: list[Attribute] = [("is_cpu_op", "bool", False), *attributes]
        data = [last] if last else []
        last = builder.add(len(builder) + 1, name, kind, duration_us=duration_us, data=data, attributes=about)

    def message(sends: bool, peer: int, tag: int) -> None:
        source, target = (rank, peer) if sends else (peer, rank)
        add("send" if sends else "recv", NodeKind.COMM_SEND if sends else NodeKind.COMM_RECV,
            [("comm_size", "int64", workload.pp_bytes), ("comm_src", "int32", source), ("comm_dst", "int32", target),
             ("comm_tag", "int32", tag)])  # fmt: skip

    def run(index: int, phase: str) -> None:
        layer = workload.layers[index]
        work: LayerPhase = getattr(layer, phase)
        line_part: Attribute = (LINE_PART, "string", f"{index} {phase}")
        if work.compute_ns:
            add(layer.name, NodeKind.COMP, [("stream", "int64", COMPUTE_STREAM), line_part], work.compute_ns / 1e3)
        ranks = group_of(workload, phase, work, rank) if work.collective else range(0)
        if len(ranks) > 1 and work.size_bytes:
            name = f"{ranks[0]}-{ranks[-1]}x{ranks.step}"
            size = work.size_bytes // len(ranks) if work.collective == "all_gather" else work.size_bytes
            add(layer.name, NodeKind.COMM_COLL,
                [("stream", "int64", NETWORK_STREAM), ("comm_type", "int64", KINDS[work.collective]),
                 ("comm_size", "int64", size), ("pg_name", "string", groups.number(name, ranks)),
                 (GROUP_LABEL, "string", name), line_part])  # fmt: skip

    sends = workload.pp_bytes > 0
    if sends and stage_index > 0:
        message(False, rank - stage, FORWARD)
    for number in range(len(workload.layers)):
        run(number, "forward")
    if sends and stage_index < pp - 1:
        message(True, rank + stage, FORWARD)
        message(False, rank + stage, BACKWARD)
    for number in reversed(range(len(workload.layers))):
        run(number, "input_gradient")
        run(number, "weight_gradient")
        if workload.layers[number].update_ns:
            add(f"{workload.layers[number].name} update", NodeKind.COMP, [("stream", "int64", COMPUTE_STREAM)],
                workload.layers[number].update_ns / 1e3)  # fmt: skip
    if sends and stage_index > 0:
        message(True, rank - stage, BACKWARD)
    return builder.trace()


def workload_of(run: RankedTraces) -> SimaiWorkload:
    """The workload file of traces. FormatError for what SimAI has no word for."""
    rank = min(run.traces)
    trace = run.traces[rank]
    about = {name: value for name, _, value in trace.about.items(0, trace.words)}
    if HEADER in about:
        return _restore_workload(str(about[HEADER]))
    layers = list(_layers_of(run, rank))
    if not layers:
        raise FormatError(f"{run.label(rank)} neither computes nor communicates: there is nothing to write")
    spans = [call for call in _collectives(run, rank) if len(call[3]) > 1]
    tp = max((len(ranks) for _, _, _, ranks in spans if _are_neighbours(ranks)), default=1)
    gpus = max(max(run.traces) + 1, *(max(ranks) + 1 for *_, ranks in spans), 1) if spans else max(run.traces) + 1
    degrees = {"tp": tp, "ep": 1, "pp": 1, "vpp": 1, "ga": 1, "gpus": gpus}
    return SimaiWorkload(degrees, layers)


def _restore_workload(text: str) -> SimaiWorkload:
    try:
        fields: Mapping[str, Any] = json.loads(text)
        layers = [
            WorkloadLayer(name, LayerPhase(*forward), LayerPhase(*inputs), LayerPhase(*weights), update)
            for name, forward, inputs, weights, update in fields["layers"]
        ]
        lists = {name: tuple(layers_list) for name, layers_list in fields["lists"].items()}
        return SimaiWorkload(fields["degrees"], layers, fields["pp_bytes"], fields["extra"], lists, fields["kind"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FormatError(f"the trace's {HEADER} is damaged: {str(error)[:80]}") from None


def _are_neighbours(ranks: tuple[int, ...]) -> bool:
    return ranks[-1] - ranks[0] == len(ranks) - 1


def _collectives(run: RankedTraces, rank: int) -> Iterator[tuple[int, str, int, tuple[int, ...]]]:
    """Row, collective, bytes as nccl-tests count them, and ranks, of each collective. FormatError for unknown ones."""
    trace = run.traces[rank]
    kinds, sizes = trace.column("comm_type", -1, "int64"), trace.column("comm_size", 0, "int64")
    groups = trace.text("pg_name")
    for row in np.flatnonzero(trace.kind == NodeKind.COMM_COLL).tolist():
        if int(kinds[row]) not in NAMES:
            names = ", ".join(KINDS)
            kind_name = (
                CollectiveKind(int(kinds[row])).name if 0 <= kinds[row] <= max(CollectiveKind) else int(kinds[row])
            )
            raise FormatError(f"{run.label(rank)}: node {trace.ids[row]} is {kind_name}; SimAI knows {names}")
        name = NAMES[CollectiveKind(int(kinds[row]))]
        ranks = tuple(sorted(run.group(trace.words[groups[row]] if groups[row] >= 0 else "")))
        yield row, name, int(sizes[row]) * (len(ranks) if name == "all_gather" else 1), ranks


def _layers_of(run: RankedTraces, rank: int) -> Iterator[WorkloadLayer]:
    """Each collective with the compute before it; groups of neighbours are tensor groups, others reduce gradients."""
    trace = run.traces[rank]
    collectives = {row: (name, size, ranks) for row, name, size, ranks in _collectives(run, rank)}
    _, order = sorted_dependencies(trace, run.label(rank), start_order(trace))
    work = is_device_work(class_codes(trace)) & ~np.isin(trace.kind, COMMUNICATION)
    compute_us, no_phase, row = 0.0, LayerPhase(0), -1
    for row in order.tolist():
        compute_us += float(trace.exact_us[row]) if work[row] else 0.0
        if row in collectives:
            name, size, ranks = collectives[row]
            layer_phase = LayerPhase(round(compute_us * 1e3), name, size)
            title = "_".join(trace.name_of(row).split()) or name
            yield (
                WorkloadLayer(title, layer_phase, no_phase, no_phase)
                if _are_neighbours(ranks)
                else WorkloadLayer(title, no_phase, no_phase, layer_phase)
            )
            compute_us = 0.0
    if compute_us:
        yield WorkloadLayer("rest", LayerPhase(round(compute_us * 1e3)), no_phase, no_phase)
