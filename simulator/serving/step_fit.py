"""What a log of steps says of a replica's iteration times, as a correction of their mechanisms.

An iteration is ``Σ factor x part + host``: parts are those of its tables (:mod:`.iteration`), the host takes something
of each iteration, sequence and token. Factors and host are fitted at once, robustly, and drawn towards what was
predicted: what no logged step depends on keeps its prediction, moved with what all factors share. So a log of small
batches says what large ones take as far as they are made of the same parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..question.learned_steps import FACTORS, HOST, LEARNED, LearnedSteps
from .figures import Z90
from .iteration import IterationTables, at_point, at_points
from .replica import ServedReplica
from .step_logs import StepLog

# Judged: ln factors of one set-up lie so far apart from 1 together, and each by itself (errors of known runs are ~20 %)
TOGETHER, APART = 0.12, 0.12
# Judged: what hosts usually take, where the replica says nothing, and ln of how far they lie apart: from engines that
# hide nearly all of it behind the GPU to the 2 to 13 ms a step of those that hide nothing
USUAL_HOST, HOST_SPREAD = {"step_us": 300.0, "seq_us": 4.0, "token_us": 0.1}, 1.2
# Judged: ln of how far kernels of one size are off any law, whichever steps of that size are looked at
MISFIT = 0.02
START_NOISE, LEAST_NOISE = 0.03, 0.003
ROUNDS, PARTS = 3, 4
TINY = 1e-9
LEAST_LONG = 0.05
LONG = 4.0  # times the noise: a step that took so much longer is one of another kind (a pause, a compilation)
BEYOND = 0.025  # judged: ln of what is added for each doubling of batch, tokens or context beyond those logged


def parts_of(tables: IterationTables, graphs: np.ndarray, log: StepLog) -> np.ndarray:
    """What the factors and the host's times of :data:`LEARNED` multiply, of each step [steps, LEARNED]."""
    found = np.zeros((len(log), len(LEARNED)))
    columns = (log.decodes, log.decode_context, log.prefill_tokens, log.prefill_pairs, log.prefill_context, log.samples)
    for index, row in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        found[index, : len(FACTORS)] = step_parts(tables, graphs, *row)
    found[:, len(FACTORS) :] = np.stack([np.ones(len(log)), log.samples, log.decodes + log.prefill_tokens], axis=1)
    return found


def step_parts(
    tables: IterationTables,
    graphs: np.ndarray,
    decodes: float,
    context: float,
    new: float,
    pairs: float,
    cached: float,
    samples: float,
) -> tuple[float, ...]:
    """The parts of one step. Decodes alone are padded to the next CUDA graph."""
    padded = decodes
    if not new and len(graphs) and decodes <= graphs[-1]:
        padded = float(graphs[np.searchsorted(graphs, decodes)])
    axis, values = (tables.mixed_axis, tables.mixed_us) if new else (tables.decode_axis, tables.decode_us)
    whole = at_point(axis, values, padded + new)
    read = min(at_point(axis, values, min(padded + new, balance(axis, values))), whole)
    attend = prompt = 0.0
    if decodes:
        attend = at_points(tables.attend_rows, tables.attend_context, tables.attend_us, padded, context / decodes)
    if new:
        prompt = at_points(tables.prompt_rows, tables.prompt_keys, tables.prompt_us, new, pairs / new)
        prompt += at_point(tables.cached_axis, tables.cached_us, cached)
    return read, whole - read, attend, prompt, at_point(tables.sample_axis, tables.sample_us, max(samples, 1.0))


def balance(axis: np.ndarray, values: np.ndarray) -> float:
    """Tokens up to which token-wise kernels read weights longer than they compute: as many as take the time of one at
    the rate of the largest batch."""
    slope = (values[-1] - values[len(values) // 2]) / (axis[-1] - axis[len(values) // 2])
    return float(values[0] / slope) if slope > 0 else float(axis[-1])


class Prior:
    """Where factors and host times are expected, and how they vary together: all of them as ln."""

    def __init__(self, host: Sequence[float]) -> None:
        usual = [max(own, USUAL_HOST[name]) for own, name in zip(host, HOST, strict=True)]
        self.mean = np.concatenate([np.zeros(len(FACTORS)), np.log(usual)])
        spread = np.zeros((len(LEARNED), len(LEARNED)))
        spread[: len(FACTORS), : len(FACTORS)] = TOGETHER**2
        spread[np.diag_indices(len(FACTORS))] += APART**2
        for index in range(len(FACTORS), len(LEARNED)):
            spread[index, index] = HOST_SPREAD**2
        self.root = np.linalg.cholesky(spread)


def predicted_us(values: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Microseconds of steps of those parts [steps, LEARNED] by ln of what multiplies them."""
    return np.asarray(parts @ np.exp(values))


def slopes(values: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """The shares of a step's time: how its ln grows with each value [steps, LEARNED]."""
    grown = parts * np.exp(values)
    return np.asarray(grown / grown.sum(axis=1, keepdims=True))


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
        each = np.sqrt(noise**2 + like * MISFIT**2)

        def off(z: np.ndarray, each: np.ndarray = each) -> np.ndarray:
            steps = np.log(predicted_us(prior.mean + prior.root @ z, parts) / time_us) / each
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
        kept = np.setdiff1d(order, group)
        values, *_ = solve(parts[kept], like[kept], time_us[kept], prior)
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
    parts, like, kept = parts[usual], like[usual], log.rows(usual)
    values, errors, noise = solve(parts, like, kept.time_us, prior)
    off = np.log(kept.time_us / predicted_us(values, parts))
    spread = max(float(np.sqrt(np.mean(np.square(off)))), float(noise))
    apart = math.hypot(max(left_out_error(parts, like, kept.time_us, prior), spread), MISFIT)
    only, mixed = kept.prefill_tokens == 0, kept.prefill_tokens > 0
    learned = LearnedSteps(
        *about,
        factors=dict(zip(FACTORS, np.exp(values[: len(FACTORS)]).tolist(), strict=True)),
        host=dict(zip(HOST, np.exp(values[len(FACTORS) :]).tolist(), strict=True)),
        errors=tuple(tuple(row) for row in errors.tolist()),
        noise=spread,
        apart=apart,
        rows=int(usual.sum()),
        context=float(kept.decode_context.sum()) / max(float(kept.decodes.sum()), 1.0),
        decodes=span(kept.decodes[only]),
        prompts=span((kept.decodes + kept.prefill_tokens)[mixed]),
        contexts=span((kept.decode_context / np.maximum(kept.decodes, 1.0))[kept.decodes > 0]),
    )
    return learned, usual


def span(sizes: np.ndarray) -> tuple[float, float]:
    """The least and the most; zeros of none."""
    return (float(sizes.min()), float(sizes.max())) if len(sizes) else (0.0, 0.0)


# --- what it makes of a replica ----------------------------------------------------------------------------


def with_learned(replica: ServedReplica, learned: LearnedSteps) -> ServedReplica:
    """The replica with its iteration times, its host and the intervals of its steps as learned."""
    own = [learned.factors[name] for name in FACTORS]
    weights, products, attention, prompts, sampling = own
    tables = replica.tables
    token_us = learned.host["token_us"]
    corrected = tables._replace(
        decode_us=token_wise(tables.decode_axis, tables.decode_us, weights, products) + token_us * tables.decode_axis,
        mixed_us=token_wise(tables.mixed_axis, tables.mixed_us, weights, products) + token_us * tables.mixed_axis,
        attend_us=attention * tables.attend_us,
        prompt_us=prompts * tables.prompt_us,
        cached_us=prompts * tables.cached_us,
        sample_us=sampling * tables.sample_us,
        expert_us=token_wise(tables.expert_axis, tables.expert_us, weights, products),
    )
    host = replace(replica.host, step_us=learned.host["step_us"], seq_us=learned.host["seq_us"])
    note = f"step times learned from {learned.rows:,} steps of {learned.engine}'s own log"
    figures = replica.figures
    if figures is not None:
        graphs = np.array(sorted(replica.graphs))
        figures = figures._replace(
            decode_width=widths(tables, graphs, learned, figures.decode_axis, False),
            prompt_width=widths(tables, graphs, learned, figures.prompt_axis, True),
        )
    return replace(replica, tables=corrected, host=host, figures=figures, notes=(*replica.notes, note))


def token_wise(axis: np.ndarray, values: np.ndarray, weights: float, products: float) -> np.ndarray:
    """Token-wise kernels with factors on what reads weights and on the rest."""
    read = np.minimum(at_point(axis, values, balance(axis, values)), values)
    return np.asarray(weights * read + products * (values - read))


def widths(
    tables: IterationTables, graphs: np.ndarray, learned: LearnedSteps, sizes: np.ndarray, prompts: bool
) -> np.ndarray:
    """ln of how far up and down 90 % of steps of those sizes are [sizes]."""
    if not len(sizes):
        return sizes
    zero = np.zeros(len(sizes))
    decodes, new = (zero, sizes) if prompts else (sizes, zero)
    context = learned.context or 1.0
    log = StepLog(decodes, context * decodes, new, new * (new + 1) / 2, zero, decodes + prompts, zero + 1, {})
    return interval_width(tables, graphs, learned, log)


def interval_width(tables: IterationTables, graphs: np.ndarray, learned: LearnedSteps, log: StepLog) -> np.ndarray:
    """ln of how far up and down 90 % of steps like those are [steps]."""
    grown = slopes(ln_values(learned), parts_of(tables, graphs, log))
    known = np.einsum("ni,ij,nj->n", grown, np.array(learned.errors), grown)
    far = doublings(learned, log)
    width = np.where(far > 0, np.hypot(learned.apart, BEYOND * far), learned.noise)
    return np.asarray(Z90 * np.sqrt(known + width**2))


def doublings(learned: LearnedSteps, log: StepLog) -> np.ndarray:
    """How many times twice as large, or half as large, steps are as the nearest of those logged [steps]."""
    mixed, context = log.prefill_tokens > 0, log.decode_context / np.maximum(log.decodes, 1.0)
    size = log.decodes + log.prefill_tokens
    low, high = (np.where(mixed, learned.prompts[end], learned.decodes[end]) for end in (0, 1))
    by_size = beyond(size, np.maximum(low, 1.0), np.maximum(high, 1.0))
    return by_size + np.where(log.decodes > 0, beyond(context, *map(np.asarray, learned.contexts)), 0.0)


def beyond(value: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Doublings of values outside a range; 0 inside."""
    value = np.maximum(value, 1.0)
    return np.asarray(np.log2(np.maximum(np.maximum(value / np.maximum(high, 1.0), low / value), 1.0)))


def step_us(tables: IterationTables, graphs: np.ndarray, learned: LearnedSteps, log: StepLog) -> np.ndarray:
    """Microseconds of steps as learned, host included; ``tables`` are those that were predicted."""
    return predicted_us(ln_values(learned), parts_of(tables, graphs, log))


def ln_values(learned: LearnedSteps) -> np.ndarray:
    """ln of what was learned, in the order of :data:`LEARNED`."""
    return np.log([*(learned.factors[name] for name in FACTORS), *(max(learned.host[name], TINY) for name in HOST)])
