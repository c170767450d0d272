"""Streams of requests as columns, in chunks: drawn from distributions, or read from a trace (:mod:`.traces`).

The same traffic and seed give the same requests, whatever the size of the chunks: each column has random numbers of its
own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..question.traffic import Lengths, RequestTraffic
from .arrivals import ArrivalClock, generators, lengths
from .loop import RequestChunk
from .sessions import KEY_TOKENS, with_turns
from .state import NONE
from .streams import RequestStream, chunk

CHUNK = 65_536
# Of its length an answer is longer or shorter, so that clients of a closed loop drift apart: 177 measured closed loops
# of Llama 8B, whose answers had one length, are met alike with 5 to 30 % (tests/evidence/test_served_runs.py)
DRIFT = 0.1


def stream(traffic: RequestTraffic, size: int = CHUNK) -> RequestStream:
    """The requests of a traffic. RequestTraceError, with the row, for a trace that cannot be."""
    if traffic.trace is not None:
        from .traces import trace_stream

        return trace_stream(traffic)
    longest = _most(traffic.input) + _most(traffic.output)
    if traffic.turns > 1:
        sessions, keys = with_turns(traffic)
        longest_request = int((sessions.input + sessions.output).max())
        outputs, prompt = float(sessions.output.sum()), float(sessions.input.mean())
        return RequestStream(
            iter([sessions]), traffic.requests, 0, longest_request, outputs, prompt, True, keys, KEY_TOKENS
        )
    outputs, prompt = traffic.requests * traffic.output.average, traffic.input.average
    chunks, keys = draw_requests(traffic, size), np.zeros(0, np.int64)
    return RequestStream(
        chunks, traffic.requests, traffic.concurrency, longest, outputs, prompt, traffic.prefixes > 0, keys
    )


def drifts(traffic: RequestTraffic) -> bool:
    """Whether clients would stay in step that measured ones do not keep: those of a closed loop that send again, and
    whose answers all have one length, so that prompts that were computed together once come together for ever."""
    again = traffic.arrival == "closed" and traffic.requests > traffic.concurrency > 1
    return again and traffic.trace is None and traffic.output.kind == "fixed" and not traffic.in_step


def out_of_step(traffic: RequestTraffic, most_tokens: int) -> RequestTraffic:
    """The traffic of clients that drift apart. The mean of their answers stays, and no request gets longer than
    ``most_tokens`` by it."""
    mean = round(traffic.output.mean)
    swing = min(int(DRIFT * mean), most_tokens - _most(traffic.input) - mean)
    if swing < 1:
        return traffic
    return replace(traffic, output=Lengths("uniform", low=mean - swing, high=mean + swing))


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


def _most(kind: Lengths) -> int:
    if kind.kind == "fixed":
        return round(kind.mean)
    return max(kind.values) if kind.kind == "empirical" else kind.high


def longest_of(traffic: RequestTraffic) -> int:
    """The most tokens that a request can have, prompt and answer."""
    return stream(traffic).longest
