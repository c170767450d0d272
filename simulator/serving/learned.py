"""A replica with the step times that its engine's own log taught (:class:`..question.learned_steps.LearnedSteps`).

An iteration is ``Σ factor x part + host``: parts are those of its tables (:mod:`.iteration`), the host takes something
of each iteration, sequence and token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...datasets.counts import counted
from ..question.calibration import load_calibration
from ..question.learned_steps import FACTORS, HOST, LEARNED, LearnedSteps
from ..question.requests import SimulateRequest
from ..trace.models import resolve
from .figures import Z90
from .iteration import IterationTables, at_point, at_points
from .replica import ServedReplica
from .step_logs import StepLog

TINY = 1e-9
ACROSS = 1.5  # judged: doublings of tokens over which arithmetic takes over from reading weights
BEYOND = 0.04  # judged: ln of what is added for each doubling of batch, tokens or context beyond those logged


def with_known_steps(replica: ServedReplica, step: SimulateRequest, device: str, engine: str) -> ServedReplica:
    """The replica as the calibration of its step has learned it, if it has: of the same model, device and engine, in
    whatever layout."""
    steps = load_calibration(step.sources.calibration).steps
    if not steps:
        return replica
    about = (resolve(step.model).name, device, engine)
    match = next((entry for entry in steps if (entry.model, entry.device, entry.engine) == about), None)
    if match is not None:
        return with_learned(replica, match)
    others = ", ".join(dict.fromkeys(f"{entry.model} on {entry.device} under {entry.engine}" for entry in steps))
    note = f"the steps of calibration={step.sources.calibration} are of {others}: they say nothing of {about[0]} here"
    return replace(replica, notes=(*replica.notes, note))


def with_learned(replica: ServedReplica, learned: LearnedSteps) -> ServedReplica:
    """The replica with its iteration times, its host and the intervals of its steps as learned."""
    factors = [learned.factors[name] for name in FACTORS]
    token_wise_factors, (attention, prompts, sampling) = factors[:3], factors[3:]
    tables = replica.tables
    token_us = learned.host["token_us"]
    corrected = tables._replace(
        decode_us=token_wise(tables.decode_axis, tables.decode_us, token_wise_factors) + token_us * tables.decode_axis,
        mixed_us=token_wise(tables.mixed_axis, tables.mixed_us, token_wise_factors) + token_us * tables.mixed_axis,
        attend_us=attention * tables.attend_us,
        prompt_us=prompts * tables.prompt_us,
        cached_us=prompts * tables.cached_us,
        sample_us=sampling * tables.sample_us,
        expert_us=token_wise(tables.expert_axis, tables.expert_us, token_wise_factors),
    )
    host = replace(replica.host, step_us=learned.host["step_us"], seq_us=learned.host["seq_us"])
    note = f"step times learned from {counted(learned.rows, 'step')} of {learned.engine}'s own log"
    figures = replica.figures
    if figures is not None:
        graphs = np.array(sorted(replica.graphs))
        figures = figures._replace(
            decode_width=widths(tables, graphs, learned, figures.decode_axis, False),
            prompt_width=widths(tables, graphs, learned, figures.prompt_axis, True),
        )
    return replace(replica, tables=corrected, host=host, figures=figures, notes=(*replica.notes, note))


def token_wise(axis: np.ndarray, values: np.ndarray, factors: Sequence[float]) -> np.ndarray:
    """Token-wise kernels with factors on their parts."""
    parts = token_wise_parts(axis, values)
    return np.asarray(sum(factor * term for factor, term in zip(factors, parts, strict=True)))


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
    variance = np.einsum("ni,ij,nj->n", grown, np.array(learned.errors), grown)
    far = doublings(learned, log)
    width = np.where(far > 0, np.hypot(learned.apart, BEYOND * far), learned.noise)
    return np.asarray(Z90 * np.sqrt(variance + width**2))


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


# --- parts of steps ---


def parts_of(tables: IterationTables, graphs: np.ndarray, log: StepLog) -> np.ndarray:
    """What the factors and the host's times of :data:`LEARNED` multiply, of each step [steps, LEARNED]."""
    amounts = np.zeros((len(log), len(LEARNED)))
    alone = token_wise_parts(tables.decode_axis, tables.decode_us)
    mixed = token_wise_parts(tables.mixed_axis, tables.mixed_us)
    columns = (log.decodes, log.decode_context, log.prefill_tokens, log.prefill_pairs, log.prefill_context, log.samples)
    for index, row in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        decodes, context, new, pairs, cached, samples = row
        padded = decodes
        if not new and len(graphs) and decodes <= graphs[-1]:
            padded = float(graphs[np.searchsorted(graphs, decodes)])
        axis, parts = (tables.mixed_axis, mixed) if new else (tables.decode_axis, alone)
        attend = prompt = 0.0
        if decodes:
            attend = at_points(tables.attend_rows, tables.attend_context, tables.attend_us, padded, context / padded)
        if new:
            prompt = at_points(tables.prompt_rows, tables.prompt_keys, tables.prompt_us, new, pairs / new)
            prompt += at_point(tables.cached_axis, tables.cached_us, cached)
        token_wise = (max(at_point(axis, part, padded + new), 0.0) for part in parts)
        sample = at_point(tables.sample_axis, tables.sample_us, max(samples, 1.0))
        amounts[index, : len(FACTORS)] = (*token_wise, attend, prompt, sample)
    amounts[:, len(FACTORS) :] = np.stack([np.ones(len(log)), log.samples, log.decodes + log.prefill_tokens], axis=1)
    return amounts


def token_wise_parts(axis: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token-wise kernels as reading weights, what few tokens add to it, and arithmetic; each a table as theirs."""
    computed, first = computing(axis, values, axis), np.minimum(values[0], values)
    return (1 - computed) * first, (1 - computed) * (values - first), computed * values


def computing(axis: np.ndarray, values: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """How much of token-wise kernels is arithmetic that hides the reading of weights: 0 for few tokens, 1 for many.

    A roofline has one of both: it changes where the rate of the largest batch takes as long as one token does.
    """
    middle = (len(values) - 1) // 2
    slope = (values[-1] - values[middle]) / (axis[-1] - axis[middle])
    if slope <= 0:
        return np.zeros_like(np.asarray(tokens, float))
    doublings = np.log2(np.maximum(tokens, 1.0) * slope / max(float(values[0]), TINY))
    return np.clip(0.5 + doublings / ACROSS, 0.0, 1.0)


def predicted_us(values: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Microseconds of steps of those parts [steps, LEARNED] by ln of what multiplies them."""
    return np.asarray(parts @ np.exp(values))


def slopes(values: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """The shares of a step's time: how its ln grows with each value [steps, LEARNED]."""
    grown = parts * np.exp(values)
    return np.asarray(grown / grown.sum(axis=1, keepdims=True))
