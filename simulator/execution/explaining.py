"""Why a measured step takes longer than predicted: the difference in parts that add up to it, the largest first.

Both runs are read as time of one rank: work of each op on the device, communication while nothing computes, and time in
which the device does neither. Each instant belongs to one part, so that the parts of a run are its time, and their
differences the whole difference.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...datasets.traces.classes import CLASSES, OP, classes, is_network, on_processor, working
from ...datasets.traces.groups import RankedTraces, joined_calls
from ...datasets.traces.table import ExecutionTrace
from .analysis import covered_us, recorded

OP_ERROR, MISSING, EXTRA = "op error", "ops that are only predicted", "ops that are only measured"
COMMUNICATION, WAIT, IDLE = "communication alone", "waiting for late ranks", "device idle"
ADVICE = {
    OP_ERROR: "opcast trace measure path={measured}",
    MISSING: "opcast simulate stack=… of the framework that ran: it may fuse or leave out these ops",
    EXTRA: "opcast simulate stack=… of the framework that ran, or passes=[module:function] for what is added",
    COMMUNICATION: "opcast trace replay path={measured} mode=communication; network=flow where links are shared",
    WAIT: "opcast trace analyse path={measured} shows who comes late; stragglers=[{{device: N, slowdown: 1.2}}]",
    IDLE: "opcast trace calibrate predicted={predicted} measured={measured}; options.cuda_graph=true for graphs",
}
ON_PROCESSOR = {OP_ERROR: "opcast profile campaign=quick, then opcast train device=cpu"}
"""What is different for a run on a processor: its profiles have no kernels to import."""


@dataclass(frozen=True)
class GapCause:
    """One part of the difference: ``difference_us`` is measured less predicted; ``advice`` is what would lessen it."""

    cause: str
    what: str
    predicted_us: float
    measured_us: float
    difference_us: float
    advice: str


@dataclass(frozen=True)
class Explanation:
    """Two steps and the parts of their difference, the largest first; they add up to it."""

    predicted_us: float
    measured_us: float
    causes: tuple[GapCause, ...]


def explain(
    predicted: RankedTraces,
    measured: RankedTraces,
    rank: int | None = None,
    steps: int = 1,
    paths: tuple[str, str] = ("PREDICTED", "MEASURED"),
) -> Explanation:
    """What makes one rank's step, the mean of ``steps`` that were measured, longer than its prediction.

    ``rank`` is the measured one (default: the first); its prediction is that of the same rank, else of the first.
    ``paths`` of both stand in the commands that are advised.
    """
    own = next(iter(measured.traces)) if rank is None else rank
    like = own if own in predicted.traces else next(iter(predicted.traces))
    first = parts(predicted.traces[like], wait_us(predicted, like))
    second = {key: us / steps for key, us in parts(measured.traces[own], wait_us(measured, own)).items()}
    trace = measured.traces[own]
    advice = ADVICE | (ON_PROCESSOR if on_processor(trace) else {})
    said = {cause: text.format(predicted=paths[0], measured=paths[1]) for cause, text in advice.items()}
    causes = [_cause(key, first.get(key), second.get(key), said) for key in {**first, **second}]
    ordered = tuple(sorted(causes, key=lambda each: (-abs(each.difference_us), each.cause, each.what)))
    return Explanation(sum(first.values()), sum(second.values()), ordered)


def _cause(key: tuple[str, str], predicted: float | None, measured: float | None, said: Mapping[str, str]) -> GapCause:
    cause, what = key
    if cause == OP_ERROR:
        cause = MISSING if measured is None else EXTRA if predicted is None else OP_ERROR
    before, after = predicted or 0.0, measured or 0.0
    return GapCause(cause, what, before, after, after - before, said[cause])


def parts(trace: ExecutionTrace, waited_us: float = 0.0) -> dict[tuple[str, str], float]:
    """The time of a rank by part: of each op, of each class of nodes without one, of communication alone, idle.

    ``waited_us`` of the communication is time for other ranks.
    """
    codes, (start, end) = classes(trace), recorded(trace)
    if not len(trace):
        return {}
    work, network = working(trace, codes), is_network(codes)
    found: Counter[tuple[str, str]] = Counter()
    names = op_names(trace, codes)
    rows = np.flatnonzero(work)
    rows = rows[np.argsort(start[rows], kind="stable")]
    before = np.concatenate([[-np.inf], np.maximum.accumulate(end[rows])[:-1]]) if len(rows) else np.zeros(0)
    for row, us in zip(
        rows.tolist(), np.maximum(end[rows] - np.maximum(start[rows], before), 0.0).tolist(), strict=True
    ):
        found[OP_ERROR, names[row]] += us
    busy = covered_us(start[work], end[work])
    exposed = covered_us(start[work | network], end[work | network]) - busy
    waited = min(waited_us, exposed)
    whole = float(end.max() - start.min())
    told = {(COMMUNICATION, "all"): exposed - waited, (WAIT, "all"): waited, (IDLE, "all"): whole - busy - exposed}
    return {**found, **{key: us for key, us in told.items() if us}}


def op_names(trace: ExecutionTrace, codes: np.ndarray) -> list[str]:
    """What each node's work is compared by: its op, else for a host's operator its name, else its class."""
    texts = trace.text(OP)
    known: Mapping[int, str] = {int(n): _op_name(trace.words[n]) for n in np.unique(texts[texts >= 0])}
    host = CLASSES.index("host")
    return [
        known[int(text)] if text >= 0 else trace.name_of(row) if code == host else f"{CLASSES[code]} kernels"
        for row, (text, code) in enumerate(zip(texts.tolist(), codes.tolist(), strict=True))
    ]


def _op_name(text: str) -> str:
    try:
        given = json.loads(text)
        dims = " ".join(f"{name}={value}" for name, value in given.items() if name not in ("kind", "out_dtype"))
        return f"{given['kind']} {dims}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return text


def wait_us(run: RankedTraces, rank: int) -> float:
    """How long a rank's collectives took beyond the shortest of their ranks: that is waiting for who came last."""
    if len(run.traces) < 2:
        return 0.0
    total = 0.0
    for call in joined_calls(run):
        if rank in call.rows:
            us = {each: float(run.traces[each].exact_us[row]) for each, row in call.rows.items()}
            total += us[rank] - min(us.values())
    return total
