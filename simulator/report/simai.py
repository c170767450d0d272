"""A step as a workload of SimAI: the busiest stage's micro-batches, a line for every communication that it waits for.

Compute of a line is the time before its communication in which no other is waited for, the host's waits included; what
runs beneath communication is not in the file. Gradients that are reduced beside the backward pass stand where SimAI
starts them, as the weight gradient's communication. Lines run from the first to the last, then backwards: the last
backward, which reduces gradients, belongs to the lines of the first micro-batch, and the optimizer to the first lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...datasets.dtypes import itemsize
from ..formats.simai import COLLECTIVES, FormatError, LayerPhase, SimaiWorkload, WorkloadLayer
from ..formats.tracks import TrackSpan
from ..step.state import Step
from ..timing.phases import FIRST, LAST, MIDDLE, Variant
from .timeline import phase_spans

DATA_GROUPS = ("dp", "dp_cp", "edp")
EXPERT_EXCHANGES = ("ep_dispatch", "ep_combine")
NO_PHASE = LayerPhase(0)


class SimaiSegment(NamedTuple):
    """Time without communication, then one that is waited for; beside them what nobody waits for."""

    name: str
    waited: LayerPhase
    beside: tuple[LayerPhase, ...] = ()


def workload(step: Step) -> SimaiWorkload:
    """The step's busiest stage. FormatError for what SimAI has no word for."""
    plan, stage = step.plan, step.busiest
    p = plan.parallel
    check(step)
    chunks = range(len(step.parts(stage)))
    lines: list[WorkloadLayer] = list(optimizer_lines(step, stage))
    lines_of_chunk: dict[tuple[int, Variant, Variant], list[WorkloadLayer]] = {}
    for batch in range(plan.micro_batches):
        forward = FIRST if batch == 0 else MIDDLE
        backward = LAST if batch == 0 else MIDDLE
        for chunk in chunks:
            key = chunk, forward, backward
            if key not in lines_of_chunk:
                first = segments(step, phase_spans(step, stage, chunk, "forward", forward), False)
                lines_of_chunk[key] = pair_lines(
                    first, segments(step, phase_spans(step, stage, chunk, "backward", backward), True)
                )
            lines += lines_of_chunk[key]
    degrees = {"tp": p.tp, "ep": p.ep, "pp": p.pp, "vpp": p.vpp, "ga": plan.micro_batches}
    sent_bytes = max(chunk.send_bytes for chunk in step.chunks) if p.pp > 1 else 0
    return SimaiWorkload({**degrees, "gpus": plan.cluster.devices}, lines, round(sent_bytes))


def check(step: Step) -> None:
    """FormatError for degrees that SimAI does not have."""
    p = step.plan.parallel
    if p.cp > 1:
        raise FormatError(f"SimAI has no context parallelism: parallel.cp={p.cp} cannot be written")
    if p.ep > 1 and p.etp != p.tp:
        raise FormatError(
            f"SimAI cuts experts like tensors: parallel.etp={p.etp} cannot be written, take parallel.etp={p.tp}"
        )


def segments(step: Step, spans: Sequence[TrackSpan], backward: bool) -> list[SimaiSegment]:
    """A phase cut behind every communication that is waited for, and where one begins that nobody waits for."""
    cut: list[SimaiSegment] = []
    now_us = end_us = 0.0
    for span in sorted(spans, key=lambda span: span.start_us):
        is_reduced_late = backward and span.category in DATA_GROUPS
        end_us = end_us if is_reduced_late else max(end_us, span.start_us + span.duration_us)
        if not is_communication(span):
            continue
        gap, now_us = max(span.start_us - now_us, 0.0), max(now_us, span.start_us)
        if is_reduced_late and cut and not round_ns(gap):
            cut[-1] = cut[-1]._replace(beside=(*cut[-1].beside, communication(step, span, 0.0)))
        elif is_reduced_late:
            cut.append(SimaiSegment(name_of(span), LayerPhase(round_ns(gap)), (communication(step, span, 0.0),)))
        else:
            now_us = max(now_us, span.start_us + span.duration_us)
            cut.append(SimaiSegment(name_of(span), communication(step, span, gap)))
    name = name_of(spans[-1]) if spans else "step"
    return [
        *(segment._replace(beside=merge_communications(segment.beside)) for segment in cut),
        SimaiSegment(name, LayerPhase(round_ns(end_us - now_us))),
    ]


def pair_lines(forward: Sequence[SimaiSegment], backward: Sequence[SimaiSegment]) -> list[WorkloadLayer]:
    """Lines that run the forward segments in their order and then, from the last line on, the backward ones."""
    count = max(len(forward), sum(max(len(segment.beside), 1) for segment in backward))
    backward_lines: list[tuple[LayerPhase, LayerPhase]] = []
    for segment in backward:
        backward_lines.append((segment.waited, segment.beside[0] if segment.beside else NO_PHASE))
        backward_lines += [(NO_PHASE, phase) for phase in segment.beside[1:]]
    backward_lines += [(NO_PHASE, NO_PHASE)] * (count - len(backward_lines))
    forward_lines = [*forward, *[SimaiSegment(forward[-1].name, NO_PHASE)] * (count - len(forward))]
    return [
        WorkloadLayer(segment.name, segment.waited, *backward_phases)
        for segment, backward_phases in zip(forward_lines, backward_lines[::-1], strict=True)
    ]


def optimizer_lines(step: Step, stage: int) -> list[WorkloadLayer]:
    """The optimizer and what passes between steps, in the lines that the backward pass comes to last."""
    cut: list[SimaiSegment] = []
    for chunk in range(len(step.parts(stage))):
        cut += segments(step, phase_spans(step, stage, chunk, "optimizer", LAST), False)
    phases = [segment.waited for segment in cut] + [LayerPhase(round_ns(step.overhead_us))]
    kept_phases = [phase for phase in phases if phase.compute_ns or phase.collective]
    return [WorkloadLayer("optimizer", NO_PHASE, NO_PHASE, phase) for phase in reversed(kept_phases)]


def is_communication(span: TrackSpan) -> bool:
    """Whether it is a communication of more than a few bytes: what is shorter than a launch counts as compute."""
    return span.name in COLLECTIVES.values() or span.name in EXPERT_EXCHANGES


def communication(step: Step, span: TrackSpan, gap_us: float) -> LayerPhase:
    """The work of a communication after a gap. FormatError for a group that SimAI does not have."""
    ep = step.plan.parallel.ep
    scopes = {"tp": "", "etp": "", "ep": "EP", "edp": "DP_EP", "dp": "", "dp_cp": ""}
    group = span.category
    optimizer = span.args.get("phase") == "optimizer"
    if group in ("dp", "dp_cp") and not optimizer and span.args.get("phase") == "forward":
        if ep > 1:
            raise FormatError("SimAI gathers no weights over data ranks beside expert parallelism: take zero_stage=1")
        scopes |= {"dp": "DP_EP", "dp_cp": "DP_EP"}
    if group not in scopes:
        raise FormatError(f"SimAI has no {span.name} among {group} ranks")
    if span.name in EXPERT_EXCHANGES:
        return LayerPhase(round_ns(gap_us), "all_to_all", exchanged_bytes(span.args), "EP")
    return LayerPhase(round_ns(gap_us), span.name, int(span.args["size_bytes"]), scopes[group])


def merge_communications(phases: Sequence[LayerPhase]) -> tuple[LayerPhase, ...]:
    """Communications that begin together, those of one kind as one."""
    size_of_kind: dict[tuple[str, str], int] = {}
    for phase in phases:
        key = phase.collective, phase.scope
        size_of_kind[key] = size_of_kind.get(key, 0) + phase.size_bytes
    return tuple(LayerPhase(0, collective, size, scope) for (collective, scope), size in size_of_kind.items())


def exchanged_bytes(args: Mapping[str, Any]) -> int:
    """Bytes of one rank's tokens, sent to all their experts."""
    return int(args["tokens"] * args["hidden"] * args["topk"] * itemsize(str(args["dtype"])))


def name_of(span: TrackSpan) -> str:
    """The module in one word."""
    return str(span.args.get("path") or span.name).replace(" ", "_") or "step"


def round_ns(us: float) -> int:
    """Whole nanoseconds."""
    return round(max(us, 0.0) * 1e3)
