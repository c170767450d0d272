"""What a log of steps says of a replica's iteration times, as a correction of their mechanisms.

An iteration is ``Σ factor x part + host``: parts are those of its tables (:mod:`.iteration`), the host takes something
of each iteration, sequence and token. Factors and host are fitted at once, robustly, and drawn towards what was
predicted: what no logged step depends on keeps its prediction, moved with what all factors share. So a log of small
batches says what large ones take as far as they are made of the same parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..question.learned_steps import FACTORS, HOST, LEARNED, LearnedSteps
from .learned import parts_of, predicted_us, slopes
from .replica import ServedReplica
from .step_logs import StepLog

# Judged: ln factors of one set-up lie so far apart from 1 together, and each by itself (errors of known runs are ~20 %)
TOGETHER, APART = 0.12, 0.12
NARROW = 0.5  # judged: what few tokens add hangs on tiles and splits that hardly any law tells
# Judged: what hosts usually take, where the replica says nothing, and ln of how far they lie apart: from engines that
# hide nearly all of it behind the GPU to the 2 to 13 ms a step of those that hide nothing
USUAL_HOST, HOST_SPREAD = {"step_us": 300.0, "seq_us": 4.0, "token_us": 0.1}, 1.2
# Judged: ln of how far kernels of one size are off any law, whichever steps of that size are looked at
MISFIT = 0.02
START_NOISE, LEAST_NOISE = 0.03, 0.003  # of steps of a log, in ln units: judgements
ROUNDS, PARTS = 3, 4
LEAST_LONG = 0.05  # from which a step may count as of another kind, in ln units: a judgement
LONG = 4.0  # times the noise: a step that took so much longer is one of another kind (a pause, a compilation)


class Prior:
    """Where factors and host times are expected, and how they vary together: all of them as ln."""

    def __init__(self, host: Sequence[float]) -> None:
        usual = [max(value, USUAL_HOST[name]) for value, name in zip(host, HOST, strict=True)]
        self.mean = np.concatenate([np.zeros(len(FACTORS)), np.log(usual)])
        spread = np.zeros((len(LEARNED), len(LEARNED)))
        spread[: len(FACTORS), : len(FACTORS)] = TOGETHER**2
        spread[np.diag_indices(len(FACTORS))] += APART**2
        narrow = FACTORS.index("narrow")
        spread[narrow, narrow] += NARROW**2
        for index in range(len(FACTORS), len(LEARNED)):
            spread[index, index] = HOST_SPREAD**2
        self.root = np.linalg.cholesky(spread)


def alike(log: StepLog) -> np.ndarray:
    """How many steps of the log are like each [steps]: of the same make-up, with sizes within an eighth."""
    sizes = (log.decodes, log.decode_context / np.maximum(log.decodes, 1.0), log.prefill_tokens)
    keys = np.stack([np.round(8 * np.log2(1 + size)) for size in sizes], axis=1)
    _, group, count = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    return np.asarray(count[group.reshape(-1)], float)


def solve(parts: np.ndarray, like: np.ndarray, time_us: np.ndarray, prior: Prior) -> tuple[np.ndarray, ...]:
    """(values, their covariance, ln noise) of the fit: few steps that are far off count little, and many that are alike
    say no more than what all of them share."""
    from scipy.optimize import least_squares

    noise, at = START_NOISE, np.zeros(len(LEARNED))
    for _ in range(ROUNDS):
        width = np.sqrt(noise**2 + like * MISFIT**2)

        def off(z: np.ndarray, width: np.ndarray = width) -> np.ndarray:
            steps = np.log(predicted_us(prior.mean + prior.root @ z, parts) / time_us) / width
            return np.concatenate([np.sign(steps) * np.sqrt(2 * (np.sqrt(1 + steps**2) - 1)), z])

        at = least_squares(off, at).x
        values = prior.mean + prior.root @ at
        residual = np.log(time_us / predicted_us(values, parts))
        noise = max(1.4826 * float(np.median(np.abs(residual - np.median(residual)))), LEAST_NOISE)
    grown = slopes(values, parts) @ prior.root / np.sqrt(noise**2 + like * MISFIT**2)[:, None]
    inside = np.linalg.inv(grown.T @ grown + np.eye(len(LEARNED)))
    return values, prior.root @ inside @ prior.root.T, np.array(noise)


def left_out_error(parts: np.ndarray, like: np.ndarray, time_us: np.ndarray, prior: Prior) -> float:
    """ln of one standard deviation of steps of sizes that the fit did not see: a quarter of them, by time, at a
    time."""
    order = np.argsort(time_us, kind="stable")
    errors = []
    for group in np.array_split(order, PARTS):
        rest_rows = np.setdiff1d(order, group)
        values, *_ = solve(parts[rest_rows], like[rest_rows], time_us[rest_rows], prior)
        errors.append(np.median(np.abs(np.log(predicted_us(values, parts[group]) / time_us[group]))))
    return float(np.sqrt(np.mean(np.square(errors))))


def learn(log: StepLog, replica: ServedReplica, about: tuple[str, str, str]) -> tuple[LearnedSteps, np.ndarray]:
    """What a log says of a replica as it is predicted, and which of its steps were like the others [steps].

    ``about``: model, device and engine.
    """
    parts = parts_of(replica.tables, np.array(sorted(replica.graphs)), log)
    prior, like = Prior([replica.host.step_us, replica.host.seq_us, 0.0]), alike(log)
    values, _, noise = solve(parts, like, log.time_us, prior)
    residual = np.log(log.time_us / predicted_us(values, parts))
    usual = np.abs(residual - np.median(residual)) <= max(LONG * float(noise), LEAST_LONG)
    parts, like, steps = parts[usual], like[usual], log.rows(usual)
    values, errors, noise = solve(parts, like, steps.time_us, prior)
    off = np.log(steps.time_us / predicted_us(values, parts))
    spread = max(float(np.sqrt(np.mean(np.square(off)))), float(noise))
    apart = math.hypot(max(left_out_error(parts, like, steps.time_us, prior), spread), MISFIT)
    only, mixed = steps.prefill_tokens == 0, steps.prefill_tokens > 0
    learned = LearnedSteps(
        *about,
        factors=dict(zip(FACTORS, np.exp(values[: len(FACTORS)]).tolist(), strict=True)),
        host=dict(zip(HOST, np.exp(values[len(FACTORS) :]).tolist(), strict=True)),
        errors=tuple(tuple(row) for row in errors.tolist()),
        noise=spread,
        apart=apart,
        rows=int(usual.sum()),
        context=float(steps.decode_context.sum()) / max(float(steps.decodes.sum()), 1.0),
        decodes=span(steps.decodes[only]),
        prompts=span((steps.decodes + steps.prefill_tokens)[mixed]),
        contexts=span((steps.decode_context / np.maximum(steps.decodes, 1.0))[steps.decodes > 0]),
    )
    return learned, usual


def span(sizes: np.ndarray) -> tuple[float, float]:
    """The least and the most; zeros of none."""
    return (float(sizes.min()), float(sizes.max())) if len(sizes) else (0.0, 0.0)
