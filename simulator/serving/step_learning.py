"""From an engine's log to learned steps: the replica as it is predicted, the fit, and its errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..question.canonical import RequestError
from ..question.learned_steps import FACTORS, HOST, LearnedSteps
from ..question.serving import ServingRequest
from ..trace.models import resolve
from .connect import predicted_replica
from .engines import load_serving_engine
from .learned import interval_width, step_us
from .policies import policy_of
from .replica import ServedReplica
from .step_fit import learn
from .step_logs import StepLog, read_steps

if TYPE_CHECKING:
    from ..engines.bench import Bench

UNLIKE = "pauses, or were of another kind"


@dataclass(frozen=True)
class TaughtSteps:
    """What was learned; errors in percent by name; how many steps were left out, by why."""

    learned: LearnedSteps
    errors: Mapping[str, Mapping[str, float]]
    left_out: Mapping[str, int]


def learn_steps(request: ServingRequest, bench: Bench, path: Path) -> TaughtSteps:
    """What a log says of the model, device and engine of a request. RequestError for a log that says nothing."""
    step = request.step
    if step is None:
        raise RequestError("a log of steps teaches of a model: leave out law")
    traffic = request.traffic
    log = read_steps(path, traffic.input.average + traffic.output.average / 2)
    replica = predicted_replica(request, bench)
    device = bench.device(step.device, step.cluster)
    engine = load_serving_engine(policy_of(request.scheduler.policy).framework)
    learned, usual = learn(log, replica, (resolve(step.model).name, device.id, engine.id))
    left_out = dict(log.left_out) | ({UNLIKE: int((~usual).sum())} if not usual.all() else {})
    return TaughtSteps(learned, errors_of(replica, learned, log.rows(usual)), left_out)


def errors_of(replica: ServedReplica, learned: LearnedSteps, log: StepLog) -> dict[str, dict[str, float]]:
    """Errors of the steps as they were predicted, and as they are learned, by whether prompts are in them."""
    graphs = np.array(sorted(replica.graphs))
    host = {"step_us": replica.host.step_us, "seq_us": replica.host.seq_us, "token_us": 0.0}
    before = replace(learned, factors=dict.fromkeys(FACTORS, 1.0), host={name: host[name] for name in HOST})
    errors = {}
    for name, chosen in (("decodes", log.prefill_tokens == 0), ("with prompts", log.prefill_tokens > 0)):
        if not chosen.any():
            continue
        rows = log.rows(chosen)
        for label, steps in (("predicted", before), ("learned", learned)):
            off = 100 * (step_us(replica.tables, graphs, steps, rows) / rows.time_us - 1)
            errors[f"{name}, {label}"] = {
                "steps": float(len(rows)),
                "median": float(np.median(np.abs(off))),
                "p90": float(np.quantile(np.abs(off), 0.9)),
                "bias": float(np.mean(off)),
            }
        width = interval_width(replica.tables, graphs, learned, rows)
        inside = np.abs(np.log(step_us(replica.tables, graphs, learned, rows) / rows.time_us)) <= width
        errors[f"{name}, learned"]["inside"] = float(inside.mean())
    return errors
