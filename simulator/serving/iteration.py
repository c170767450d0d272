"""How long one iteration of an inference engine takes: tables over six additive numbers of its batch.

A batch is described by ``decodes`` (sequences that decode one token), ``decode_context`` (the sum of their cached
tokens), ``prefill_tokens`` (new tokens of all prompt chunks), ``prefill_pairs`` (the sum over chunks of
new * (cached + (new + 1) / 2): pairs of a query and a key), ``prefill_context`` (tokens cached before each chunk,
summed) and ``samples`` (sequences that yield a token: decodes and chunks that end their prompt). All six add up over
sequences, so that the event loop keeps them without looking at its sequences again.

:func:`iteration_us` is called some million times, by compiled code where numba is installed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class IterationTables(NamedTuple):
    """Five terms that add up to one iteration, in microseconds, each a table over its axes (float64, ascending).

    Between points a table is linear, in each direction where it has two; beyond its ends it goes on as its last piece
    does. Every axis has two points or more. ``decode_us`` [decodes] is all but attention and sampling where no prompt
    is in the batch, ``mixed_us`` [decodes + prefill tokens] the same where one is. ``attend_us``
    [decodes, mean context] is the attention of decoding sequences, ``prompt_us`` [prefill tokens, mean keys of a
    query] that of prompts, ``cached_us`` [prefill context] what reading tokens cached before adds to it.
    ``sample_us`` [samples] is the last layer and the sampler. ``expert_us`` [tokens] is what experts take of all
    that, where each rank of attention data parallelism has so many tokens; 0 where ranks share no experts.

    ``kernels`` [tokens] are those of a pass over prompts. Where no CUDA graph holds them, the host takes ``issue_us``
    for each, while the GPU runs those before: such an iteration takes no less than all of them.
    """

    decode_axis: np.ndarray
    decode_us: np.ndarray
    mixed_axis: np.ndarray
    mixed_us: np.ndarray
    sample_axis: np.ndarray
    sample_us: np.ndarray
    cached_axis: np.ndarray
    cached_us: np.ndarray
    attend_rows: np.ndarray
    attend_context: np.ndarray
    attend_us: np.ndarray
    prompt_rows: np.ndarray
    prompt_keys: np.ndarray
    prompt_us: np.ndarray
    expert_axis: np.ndarray
    expert_us: np.ndarray
    kernel_axis: np.ndarray
    kernels: np.ndarray
    issue_us: float = 0.0


def iteration_us(
    tables: IterationTables,
    decodes: int,
    decode_context: int,
    prefill_tokens: int,
    prefill_pairs: float,
    prefill_context: int,
    samples: int,
    drafts: int = 0,
) -> float:
    """Microseconds of the iteration of a batch; 0 for an empty one.

    With ``drafts`` each decoding sequence has as many tokens more, which share one reading of its cache.
    """
    if decodes + prefill_tokens == 0:
        return 0.0
    tokens = decodes * (1 + drafts)
    if prefill_tokens == 0:
        time_us = at_point(tables.decode_axis, tables.decode_us, tokens)
    else:
        time_us = at_point(tables.mixed_axis, tables.mixed_us, tokens + prefill_tokens)
        keys = prefill_pairs / prefill_tokens
        time_us += at_points(tables.prompt_rows, tables.prompt_keys, tables.prompt_us, prefill_tokens, keys)
        time_us += at_point(tables.cached_axis, tables.cached_us, prefill_context)
    if decodes > 0:
        context = decode_context / decodes
        time_us += at_points(tables.attend_rows, tables.attend_context, tables.attend_us, decodes, context)
    time_us += at_point(tables.sample_axis, tables.sample_us, samples + decodes * drafts)
    if prefill_tokens == 0 or tables.issue_us == 0:
        return time_us
    return max(time_us, tables.issue_us * at_point(tables.kernel_axis, tables.kernels, tokens + prefill_tokens))


def experts_us(tables: IterationTables, tokens: float) -> float:
    """Microseconds of experts where each rank brings so many tokens."""
    return max(at_point(tables.expert_axis, tables.expert_us, tokens), 0.0)


def drafting_us(tables: IterationTables, decodes: int, decode_context: int, share: float) -> float:
    """Microseconds in which a draft of that share of the layers guesses one token of each decoding sequence."""
    if decodes == 0:
        return 0.0
    layers_us = at_point(tables.decode_axis, tables.decode_us, decodes)
    context = decode_context / decodes
    layers_us += at_points(tables.attend_rows, tables.attend_context, tables.attend_us, decodes, context)
    return share * layers_us + at_point(tables.sample_axis, tables.sample_us, decodes)


def piece_of(axis: np.ndarray, position: float) -> int:
    """The index of the piece of a table that a place lies in; the first or the last for one beyond its ends."""
    low, high = 0, len(axis) - 2
    while low < high:
        middle = (low + high + 1) // 2
        if axis[middle] <= position:
            low = middle
        else:
            high = middle - 1
    return low


def at_point(axis: np.ndarray, values: np.ndarray, position: float) -> float:
    """A table [axis] at a place, linear between its points and beyond them."""
    cell = piece_of(axis, position)
    share = (position - axis[cell]) / (axis[cell + 1] - axis[cell])
    return float(values[cell] + share * (values[cell + 1] - values[cell]))


def at_points(rows: np.ndarray, columns: np.ndarray, values: np.ndarray, row: float, column: float) -> float:
    """A table [rows, columns] at a place, linear in each direction between its points and beyond them."""
    above, column_piece = piece_of(rows, row), piece_of(columns, column)
    down = (row - rows[above]) / (rows[above + 1] - rows[above])
    across = (column - columns[column_piece]) / (columns[column_piece + 1] - columns[column_piece])
    first = values[above, column_piece] + across * (values[above, column_piece + 1] - values[above, column_piece])
    second = values[above + 1, column_piece] + across * (
        values[above + 1, column_piece + 1] - values[above + 1, column_piece]
    )
    return float(first + down * (second - first))


def linear_tables(
    base_us: float,
    decode_us: float = 0.0,
    decode_context_us: float = 0.0,
    prefill_token_us: float = 0.0,
    prefill_pair_us: float = 0.0,
    prefill_context_us: float = 0.0,
    sample_us: float = 0.0,
) -> IterationTables:
    """The law ``base + Σ coefficient * number`` as tables of two points, for tests and for laws given by hand."""
    unit, flat = np.array([0.0, 1.0]), np.array([base_us, base_us])

    def per_row(row_us: float, product_us: float) -> np.ndarray:
        return np.array([[0.0, 0.0], [row_us, row_us + product_us]])

    attend, prompt = per_row(decode_us, decode_context_us), per_row(prefill_token_us, prefill_pair_us)
    samples, cached = unit * sample_us, unit * prefill_context_us
    attention = (unit, unit, attend, unit, unit, prompt)
    nothing = unit, 0.0 * unit
    return IterationTables(unit, flat, unit, flat, unit, samples, unit, cached, *attention, *nothing, *nothing)
