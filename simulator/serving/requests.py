"""Streams of requests as columns, in chunks: drawn from distributions, or read from a trace (:mod:`.traces`).

The same traffic and seed give the same requests, whatever the size of the chunks: each column has random numbers of its
own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..question.traffic import Lengths, RequestTraffic
from .arrivals import ArrivalClock, generators
from .loop import RequestChunk
from .state import NONE
from .streams import SECOND_US, RequestStream, chunk

CHUNK = 65_536


def stream(traffic: RequestTraffic, size: int = CHUNK) -> RequestStream:
    """The requests of a traffic. RequestTraceError, with the row, for a trace that cannot be."""
    if traffic.trace is not None:
        from .traces import trace_stream

        return trace_stream(traffic)
    longest = _most(traffic.input) + _most(traffic.output)
    if traffic.turns > 1:
        sessions = with_turns(traffic)
        longest_request = int((sessions.input + sessions.output).max())
        outputs, prompt = float(sessions.output.sum()), float(sessions.input.mean())
        return RequestStream(
            iter([sessions]), traffic.requests, 0, longest_request, outputs, prompt, True, np.zeros(0, np.int64)
        )
    outputs, prompt = traffic.requests * traffic.output.average, traffic.input.average
    chunks, keys = draw_requests(traffic, size), np.zeros(0, np.int64)
    return RequestStream(
        chunks, traffic.requests, traffic.concurrency, longest, outputs, prompt, traffic.prefixes > 0, keys
    )


def draw_requests(traffic: RequestTraffic, size: int) -> Iterator[RequestChunk]:
    """Chunks of independent requests."""
    arrivals, inputs, outputs, prefixes = generators(traffic.seed)
    times = ArrivalClock(traffic, arrivals)
    for start in range(0, traffic.requests, size):
        count = min(size, traffic.requests - start)
        prompt = lengths(traffic.input, inputs, count)
        prefix, shared = np.full(count, NONE), np.zeros(count, np.int64)
        if traffic.prefixes:
            prefix = (prefixes.random(count) * traffic.prefixes).astype(np.int64)
            shared = np.minimum(traffic.prefix_tokens, prompt)
        yield chunk(times.take(count), prompt, lengths(traffic.output, outputs, count), prefix, shared)


def lengths(kind: Lengths, random: np.random.Generator, count: int) -> np.ndarray:
    """So many lengths in tokens, int64."""
    if kind.kind == "fixed":
        return np.full(count, round(kind.mean), np.int64)
    if kind.kind == "normal":
        return np.clip(np.rint(random.normal(kind.mean, kind.std, count)), kind.low, kind.high).astype(np.int64)
    share = random.random(count)
    if kind.kind == "uniform":
        return kind.low + (share * (kind.high - kind.low + 1)).astype(np.int64)
    if kind.kind == "empirical":
        return np.array(kind.values, np.int64)[(share * len(kind.values)).astype(np.int64)]
    weights = np.cumsum(np.arange(1, kind.high - kind.low + 2, dtype=float) ** -kind.exponent)
    return kind.low + np.searchsorted(weights, share * weights[-1], side="right").astype(np.int64)


def _most(kind: Lengths) -> int:
    if kind.kind == "fixed":
        return round(kind.mean)
    return max(kind.values) if kind.kind == "empirical" else kind.high


def longest_of(traffic: RequestTraffic) -> int:
    """The most tokens that a request can have, prompt and answer."""
    return stream(traffic).longest


def with_turns(traffic: RequestTraffic) -> RequestChunk:
    """Sessions whose turns follow each other: each prompt begins with all that was said before.

    Rows are ordered turn by turn, so that those of first turns are in order of arrival. Rates and numbers are those of
    requests: sessions begin so much more seldom, and the last of them are a turn shorter where requests do not come out
    even.
    """
    arrivals, inputs, outputs, _ = generators(traffic.seed)
    turns = traffic.turns
    sessions = -(-traffic.requests // turns)
    begun = replace(traffic, turns=1, think_s=0.0, requests=sessions, warmup=None, rate=traffic.rate / turns)
    if traffic.arrival == "ramp":
        begun = replace(begun, rate_end=traffic.rate_end / turns)
    new_tokens = lengths(traffic.input, inputs, sessions * turns).reshape(turns, sessions)
    output = lengths(traffic.output, outputs, sessions * turns).reshape(turns, sessions)
    prompt = np.cumsum(new_tokens, axis=0) + np.cumsum(output, axis=0) - output
    count = traffic.requests
    rows = np.arange(count)
    times = np.zeros(count)
    times[:sessions] = ArrivalClock(begun, arrivals).take(sessions)
    return chunk(
        times,
        prompt.ravel()[:count],
        output.ravel()[:count],
        rows % sessions,
        (prompt + output).ravel()[:count],
        comes_after=(rows >= sessions).astype(np.int8),
        follower=np.where(rows + sessions < count, rows + sessions, NONE),
        think_us=np.full(count, traffic.think_s * SECOND_US),
    )
