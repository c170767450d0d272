"""A stream of requests: chunks of columns in order of arrival."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .loop import RequestChunk
from .state import NONE

SECOND_US = 1e6


@dataclass(frozen=True)
class RequestStream:
    """Requests to come: chunks in order of arrival, how many they are, and contents of blocks where a trace has them.

    ``longest`` are the most tokens of prompt and answer together that can come, ``outputs`` about how many tokens all
    answers have, ``prompt`` how many a prompt has on average. ``shares``: whether prompts may begin alike. ``notes``:
    what a reader should know of their file. ``classes_named``: its rows say the class of each.
    """

    chunks: Iterator[RequestChunk]
    requests: int
    concurrency: int
    longest: int
    outputs: float
    prompt: float
    shares: bool
    keys: np.ndarray
    key_tokens: int = 1
    notes: tuple[str, ...] = ()
    classes_named: bool = False
    images: Mapping[str, float] = field(default_factory=dict)  # what encoding them took (:mod:`.images`)

    @property
    def cached(self) -> float:
        """Tokens that a request has in the cache, on average over its answer."""
        return self.prompt + self.outputs / max(self.requests, 1) / 2


def chunk(
    arrival_us: np.ndarray,
    prompt: np.ndarray,
    output: np.ndarray,
    prefix: np.ndarray | None = None,
    shared: np.ndarray | None = None,
    **more: Any,
) -> RequestChunk:
    """A chunk from columns; rows that depend on no other unless ``more`` says so."""
    count = len(prompt)
    none = np.zeros(0, np.int64)
    return RequestChunk(
        arrival_us=np.array(arrival_us, float),
        input=np.array(prompt, np.int64),
        output=np.array(output, np.int64),
        prefix=np.full(count, NONE, np.int64) if prefix is None else np.array(prefix, np.int64),
        shared=np.zeros(count, np.int64) if shared is None else np.array(shared, np.int64),
        comes_after=more.get("comes_after", np.zeros(count, np.int8)),
        follower=more.get("follower", none),
        think_us=more.get("think_us", np.zeros(0)),
        kind=more.get("kind", np.zeros(count, np.int64)),
        keys=more.get("keys", none),
        adapter=more.get("adapter", none),
        before_us=np.zeros(0),
        encoder_us=np.zeros(0),
    )
