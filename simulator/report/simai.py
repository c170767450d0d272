"""A step as a workload of SimAI: the busiest stage's micro-batches, a line for every communication that it waits for.

Compute of a line is the time before its communication in which no other is waited for, the host's waits included; what
runs beneath communication is not in the file. Gradients that are reduced beside the backward pass stand where SimAI
starts them, as the weight gradient's communication. Lines run from the first to the last, then backwards: the last
backward, which reduces gradients, belongs to the lines of the first micro-batch, and the optimizer to the first lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..formats.simai import COLLECTIVES, FormatError, LayerPhase, SimaiWorkload, WorkloadLayer
from ..formats.tracks import TrackSpan
from ..step.state import Step
from ..timing.phases import FIRST, LAST, MIDDLE, Variant
from .timeline import phase_spans

DATA = ("dp", "dp_cp", "edp")
EXPERT_EXCHANGES = ("ep_dispatch", "ep_combine")
NONE = LayerPhase(0)


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
    made: dict[tuple[int, Variant, Variant], list[WorkloadLayer]] = {}
    for batch in range(plan.micro_batches):
        forward = FIRST if batch == 0 else MIDDLE
        backward = LAST if batch == 0 else MIDDLE
        for chunk in chunks:
            key = chunk, forward, backward
            if key not in made:
                first = segments(step, phase_spans(step, stage, chunk, "forward", forward), False)
                made[key] = paired(first, segments(step, phase_spans(step, stage, chunk, "backward", backward), True))
            lines += made[key]
    degrees = {"tp": p.tp, "ep": p.ep, "pp": p.pp, "vpp": p.vpp, "ga": plan.micro_batches}
    sent = max(chunk.send_bytes for chunk in step.chunks) if p.pp > 1 else 0
    return SimaiWorkload({**degrees, "gpus": plan.cluster.devices}, lines, round(sent))


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
    found: list[SimaiSegment] = []
    now = end = 0.0
    for span in sorted(spans, key=lambda each: each.start_us):
        apart = backward and span.category in DATA
        end = end if apart else max(end, span.start_us + span.duration_us)
        if not moves(span):
            continue
        gap, now = max(span.start_us - now, 0.0), max(now, span.start_us)
        if apart and found and not ns(gap):
            found[-1] = found[-1]._replace(beside=(*found[-1].beside, communication(step, span, 0.0)))
        elif apart:
            found.append(SimaiSegment(name_of(span), LayerPhase(ns(gap)), (communication(step, span, 0.0),)))
        else:
            now = max(now, span.start_us + span.duration_us)
            found.append(SimaiSegment(name_of(span), communication(step, span, gap)))
    name = name_of(spans[-1]) if spans else "step"
    return [
        *(each._replace(beside=merged(each.beside)) for each in found),
        SimaiSegment(name, LayerPhase(ns(end - now))),
    ]


def paired(forward: Sequence[SimaiSegment], backward: Sequence[SimaiSegment]) -> list[WorkloadLayer]:
    """Lines that run the forward segments in their order and then, from the last line on, the backward ones."""
    count = max(len(forward), sum(max(len(each.beside), 1) for each in backward))
    behind: list[tuple[LayerPhase, LayerPhase]] = []
    for each in backward:
        behind.append((each.waited, each.beside[0] if each.beside else NONE))
        behind += [(NONE, more) for more in each.beside[1:]]
    behind += [(NONE, NONE)] * (count - len(behind))
    ahead = [*forward, *[SimaiSegment(forward[-1].name, NONE)] * (count - len(forward))]
    return [WorkloadLayer(each.name, each.waited, *back) for each, back in zip(ahead, behind[::-1], strict=True)]


def optimizer_lines(step: Step, stage: int) -> list[WorkloadLayer]:
    """The optimizer and what passes between steps, in the lines that the backward pass comes to last."""
    found: list[SimaiSegment] = []
    for chunk in range(len(step.parts(stage))):
        found += segments(step, phase_spans(step, stage, chunk, "optimizer", LAST), False)
    works = [each.waited for each in found] + [LayerPhase(ns(step.overhead_us))]
    kept = [each for each in works if each.compute_ns or each.collective]
    return [WorkloadLayer("optimizer", NONE, NONE, each) for each in reversed(kept)]


def moves(span: TrackSpan) -> bool:
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
        return LayerPhase(ns(gap_us), "all_to_all", exchanged(span.args), "EP")
    return LayerPhase(ns(gap_us), span.name, int(span.args["size_bytes"]), scopes[group])


def merged(works: Sequence[LayerPhase]) -> tuple[LayerPhase, ...]:
    """Communications that begin together, those of one kind as one."""
    found: dict[tuple[str, str], int] = {}
    for work in works:
        key = work.collective, work.scope
        found[key] = found.get(key, 0) + work.size_bytes
    return tuple(LayerPhase(0, collective, size, scope) for (collective, scope), size in found.items())


def exchanged(args: Mapping[str, Any]) -> int:
    """Bytes of one rank's tokens, sent to all their experts."""
    from ...datasets.dtypes import itemsize

    return int(args["tokens"] * args["hidden"] * args["topk"] * itemsize(str(args["dtype"])))


def name_of(span: TrackSpan) -> str:
    """The module in one word."""
    return str(span.args.get("path") or span.name).replace(" ", "_") or "step"


def ns(us: float) -> int:
    """Whole nanoseconds."""
    return round(max(us, 0.0) * 1e3)
