"""The class of each request: drawn by shares, one for each session, or as a trace says it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..question.traffic import RequestTraffic
from .loop import RequestChunk
from .streams import RequestStream


def with_classes(source: RequestStream, traffic: RequestTraffic) -> RequestStream:
    """The stream with a class for each request, as ``traffic.classes`` has them."""
    if not traffic.classes or source.classes_named:
        return source
    return replace(source, chunks=draw_classes(source.chunks, traffic))


def draw_classes(chunks: Iterator[RequestChunk], traffic: RequestTraffic) -> Iterator[RequestChunk]:
    """Chunks whose requests have classes: all turns of a session the same."""
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(traffic.seed).spawn(7)[6]))
    ends = np.cumsum([kind.share for kind in traffic.classes])
    for chunk in chunks:
        sessions = chunk.prefix if traffic.turns > 1 else np.arange(len(chunk.input))
        weights = random.random(int(sessions.max()) + 1 if len(sessions) else 0) * ends[-1]
        kinds = np.searchsorted(ends, weights, side="right").astype(np.int64)
        yield chunk._replace(kind=kinds[sessions])
