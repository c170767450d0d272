"""How long one step of a served model takes, for simulators that run an engine's own scheduler and ask step by step.

The SGLang Simulator (``tools/sglang-simulator``) and HiSim, which also runs vLLM's scheduler, ask a predictor
``predict_infer_time(batch)`` for seconds, where each request of the batch has ``extend_length`` new tokens behind
``past_kv_length`` cached ones. :class:`StepLatency` answers that without a package of theirs. An answer takes some
microseconds: tables are plain lists, searched by bisection.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from .replica import ServedReplica

Line = tuple[list[float], list[float]]
Plane = tuple[list[float], list[float], list[list[float]]]


class AskedRequest(Protocol):
    """A request in a batch that a simulator asks about."""

    extend_length: int
    past_kv_length: int


class AskedBatch(Protocol):
    """A batch that a simulator asks about."""

    reqs: Sequence[AskedRequest]


class StepLatency:
    """The step times of a replica, host included. Every prompt of a batch is taken to end in it, which the last layer
    alone notices."""

    def __init__(self, replica: ServedReplica) -> None:
        tables = replica.tables
        self.graphs = sorted(replica.graphs)
        self.decode = _line(tables.decode_axis, tables.decode_us)
        self.mixed = _line(tables.mixed_axis, tables.mixed_us)
        self.sample = _line(tables.sample_axis, tables.sample_us)
        self.cached = _line(tables.cached_axis, tables.cached_us)
        self.attend = _plane(tables.attend_rows, tables.attend_context, tables.attend_us)
        self.prompt = _plane(tables.prompt_rows, tables.prompt_keys, tables.prompt_us)
        self.step_us, self.seq_us = replica.host.step_us, replica.host.seq_us
        self.kernels, self.issue_us = _line(tables.kernel_axis, tables.kernels), tables.issue_us

    def predict_infer_time(self, batch: AskedBatch) -> float:
        """Seconds of a batch of a simulator; 0 of an empty one. A request with one new token decodes."""
        return self.seconds((request.extend_length, request.past_kv_length) for request in batch.reqs)

    def seconds(self, requests: Iterable[tuple[int, int]]) -> float:
        """Seconds of a step of requests as (new tokens, tokens cached before)."""
        decodes = context = new = prompts = behind = 0
        pairs = 0.0
        for extend, past in requests:
            if extend == 1 and past:
                decodes += 1
                context += past
            elif extend:
                new += extend
                prompts += 1
                behind += past
                pairs += extend * (past + (extend + 1) / 2)
        return self.step(decodes, context, new, pairs, behind, decodes + prompts) / 1e6

    def step(self, decodes: float, context: float, new: float, pairs: float, behind: float, samples: float) -> float:
        """Microseconds of a batch by its sums (:mod:`.iteration`)."""
        if not decodes + new:
            return 0.0
        sequences = samples
        if new:
            us = _on(self.mixed, decodes + new) + _at(self.prompt, new, pairs / new) + _on(self.cached, behind)
        else:
            if self.graphs and decodes <= self.graphs[-1]:
                decodes = self.graphs[bisect_right(self.graphs, decodes - 0.5)]
            us = _on(self.decode, decodes)
        if decodes:
            us += _at(self.attend, decodes, context / decodes)
        us += _on(self.sample, samples)
        if new and self.issue_us:
            us = max(us, self.issue_us * _on(self.kernels, decodes + new))
        return us + self.step_us + self.seq_us * sequences


def _line(axis: Any, values: Any) -> Line:
    return axis.tolist(), values.tolist()


def _plane(rows: Any, columns: Any, values: Any) -> Plane:
    return rows.tolist(), columns.tolist(), values.tolist()


def _piece(axis: list[float], place: float) -> tuple[int, float]:
    """The piece of a table that a place lies in, and how far along it."""
    index = min(max(bisect_right(axis, place) - 1, 0), len(axis) - 2)
    return index, (place - axis[index]) / (axis[index + 1] - axis[index])


def _on(line: Line, place: float) -> float:
    index, share = _piece(line[0], place)
    values = line[1]
    return values[index] + share * (values[index + 1] - values[index])


def _at(plane: Plane, row: float, column: float) -> float:
    above, down = _piece(plane[0], row)
    left, across = _piece(plane[1], column)
    one, other = plane[2][above], plane[2][above + 1]
    first = one[left] + across * (one[left + 1] - one[left])
    return first + down * (other[left] + across * (other[left + 1] - other[left]) - first)
