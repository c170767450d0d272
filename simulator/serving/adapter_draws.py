"""The adapter of each request: drawn by popularity, one for each session."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..question.adapters import ServedAdapters
from ..question.traffic import RequestTraffic
from .loop import RequestChunk
from .state import NONE
from .streams import RequestStream


def with_adapters(source: RequestStream, lora: ServedAdapters, traffic: RequestTraffic) -> RequestStream:
    """The stream with an adapter for each request. What was computed with one adapter is no prefix for another."""
    if not lora.exist:
        return source
    chunks = draw_adapters(source.chunks, lora, traffic)
    if not len(source.keys):
        return replace(source, chunks=chunks)
    (rows,) = chunks  # with contents of blocks there is one chunk
    return replace(source, chunks=iter([rows]), keys=keys_by_adapter(rows, source, lora.adapters))


def draw_adapters(
    chunks: Iterator[RequestChunk], lora: ServedAdapters, traffic: RequestTraffic
) -> Iterator[RequestChunk]:
    """Chunks whose requests have adapters: all turns of a session the same."""
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(traffic.seed).spawn(8)[7]))
    weights = np.arange(1, lora.adapters + 1, dtype=float) ** -lora.exponent
    ends = np.cumsum(weights) / weights.sum() * lora.share
    ends[-1] = lora.share
    for chunk in chunks:
        sessions = chunk.prefix if traffic.turns > 1 else np.arange(len(chunk.input))
        chances = random.random(int(sessions.max()) + 1 if len(sessions) else 0)
        codes = np.searchsorted(ends, chances, side="right").astype(np.int64)
        codes[codes == lora.adapters] = NONE
        adapter = codes[sessions]
        content = np.where(chunk.prefix == NONE, NONE, chunk.prefix * (lora.adapters + 1) + adapter + 1)
        yield chunk._replace(adapter=adapter, prefix=content)


def keys_by_adapter(rows: RequestChunk, source: RequestStream, adapters: int) -> np.ndarray:
    """Contents of blocks, int64 like those of the stream, where the same tokens with another adapter are others."""
    spans = -(-rows.shared // source.key_tokens)
    codes = np.zeros(len(source.keys), np.int64)
    for first, count, adapter in zip(rows.keys.tolist(), spans.tolist(), rows.adapter.tolist(), strict=True):
        if first != NONE and adapter != NONE:
            codes[first : first + count] = adapter + 1
    return np.unique(source.keys * (adapters + 1) + codes, return_inverse=True)[1].astype(np.int64)
