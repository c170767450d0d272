"""Why a measured step takes longer than predicted: the difference in parts that add up to it, the largest first.

Both runs are read as time of one rank, each instant of which belongs to one part (:mod:`.instants`): the parts of a run
are its time, and their differences the whole difference. Communication that was hidden behind work in one run and is
alone in the other is a part of its own, lost overlap, apart from communication that itself takes longer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ...datasets.traces.classes import CLASSES, OP, class_codes, on_processor
from ...datasets.traces.groups import RankedTraces, join_calls
from ...datasets.traces.table import ExecutionTrace
from ..report.view import dims_text
from .instants import WAITING, Instants, NetworkTime, instants

OP_ERROR, MISSING, EXTRA = "op error", "ops that are only predicted", "ops that are only measured"
COMMUNICATION_ALONE, OVERLAP = "communication alone", "lost overlap"
WAIT, IDLE = "waiting for late ranks", "device idle"
ADVICE = {
    OP_ERROR: "opcast trace measure path={measured}",
    MISSING: "opcast simulate stack=… of the framework that ran: it may fuse or leave out these ops",
    EXTRA: "opcast simulate stack=… of the framework that ran, or passes=[module:function] for what is added",
    COMMUNICATION_ALONE: "opcast trace replay path={measured} mode=communication; network=flow where links are shared",
    OVERLAP: "opcast simulate stack.overlap=[] predicts without overlap; opcast trace view path={measured} "
             "output=timeline.json.gz shows what the collectives wait for",
    WAIT: "opcast trace analyse path={measured} shows who comes late; stragglers=[{{device: N, slowdown: 1.2}}]",
    IDLE: "opcast trace calibrate predicted={predicted} measured={measured}; options.cuda_graph=true for graphs",
}  # fmt: skip
PROCESSOR_ADVICE = {OP_ERROR: "opcast profile campaign=quick, then opcast train device=cpu"}
"""What is different for a run on a processor: its profiles have no kernels to import."""


@dataclass(frozen=True)
class GapCause:
    """One part of the difference: ``difference_us`` is measured less predicted; ``advice`` is what would lessen it.

    Lost overlap is time in which communication is alone that was hidden; of the prediction none is, and less than 0
    means that more is hidden than predicted.
    """

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
    measured_rank = next(iter(measured.traces)) if rank is None else rank
    predicted_rank = measured_rank if measured_rank in predicted.traces else next(iter(predicted.traces))
    trace = measured.traces[measured_rank]
    advice = ADVICE | (PROCESSOR_ADVICE if on_processor(trace) else {})
    advice_texts = {cause: text.format(predicted=paths[0], measured=paths[1]) for cause, text in advice.items()}
    has_peers = len(measured.traces) > 1  # of one rank alone nobody knows how long it waits for others
    parts = difference_parts(
        rank_instants(predicted, predicted_rank, has_peers),
        rank_instants(measured, measured_rank, has_peers),
        1.0 / steps,
    )
    causes = [
        GapCause(cause, what, before, after, after - before, advice_texts[cause])
        for cause, what, before, after in parts
    ]
    by_size = sorted(causes, key=lambda cause: (-abs(cause.difference_us), cause.cause, cause.what))
    totals = (sum(cause.predicted_us for cause in causes), sum(cause.measured_us for cause in causes))
    return Explanation(*totals, tuple(by_size))


def rank_instants(run: RankedTraces, rank: int, waits: bool) -> Instants:
    """The time of one rank of a run; with ``waits`` that of collectives in which it waits for others is told apart."""
    trace = run.traces[rank]
    waited = waited_us(run, rank) if waits else np.zeros(len(trace))
    return instants(trace, op_names(trace, class_codes(trace)), waited)


def difference_parts(before: Instants, after: Instants, scale: float) -> Iterator[tuple[str, str, float, float]]:
    """Cause, what, predicted and measured us of each part; measured times are taken times ``scale``.

    Overlap is lost as far as communication that there is in both was hidden and is not: what is hidden before, at most
    what communicates after, less what is hidden after, at most what communicates before. The rest of the difference is
    communication itself.
    """
    for name in {**before.work_us, **after.work_us}:
        cause = OP_ERROR if name in before.work_us and name in after.work_us else (
            MISSING if name in before.work_us else EXTRA
        )  # fmt: skip
        yield cause, name, before.work_us.get(name, 0.0), after.work_us.get(name, 0.0) * scale
    for name in {**before.network, **after.network}:
        predicted, unscaled = before.network.get(name, NetworkTime()), after.network.get(name, NetworkTime())
        measured = NetworkTime(unscaled.total_us * scale, unscaled.hidden_us * scale)
        lost = min(predicted.hidden_us, measured.total_us) - min(measured.hidden_us, predicted.total_us)
        cause, what = (WAIT, "all") if name == WAITING else (COMMUNICATION_ALONE, name)
        if predicted.exposed_us or measured.exposed_us or lost:
            yield cause, what, predicted.exposed_us, measured.exposed_us - lost
        if lost:
            yield OVERLAP, name, 0.0, lost
    if before.idle_us or after.idle_us:
        yield IDLE, "all", before.idle_us, after.idle_us * scale


def op_names(trace: ExecutionTrace, codes: np.ndarray) -> list[str]:
    """What each node's work is compared by: its op, else for a host's operator its name, else its class."""
    texts = trace.text(OP)
    name_of_word: Mapping[int, str] = {int(n): _op_name(trace.words[n]) for n in np.unique(texts[texts >= 0])}
    host = CLASSES.index("host")
    return [
        name_of_word[int(text)] if text >= 0 else trace.name_of(row) if code == host else f"{CLASSES[code]} kernels"
        for row, (text, code) in enumerate(zip(texts.tolist(), codes.tolist(), strict=True))
    ]


def _op_name(text: str) -> str:
    try:
        fields = json.loads(text)
        return f"{fields['kind']} {dims_text(fields, 'out_dtype')}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return text


def waited_us(run: RankedTraces, rank: int) -> np.ndarray:
    """How long each collective of a rank takes beyond the shortest of its ranks [nodes]: it waits for the last."""
    waits_us = np.zeros(len(run.traces[rank]))
    if len(run.traces) < 2:
        return waits_us
    for call in join_calls(run):
        if rank in call.rows:
            durations_us = {peer: float(run.traces[peer].exact_us[row]) for peer, row in call.rows.items()}
            waits_us[call.rows[rank]] = durations_us[rank] - min(durations_us.values())
    return waits_us
