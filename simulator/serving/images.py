"""Images of requests before their prompts are computed: on GPUs of their own, or on those that prefill.

GPUs of their own (vLLM's encoder instances, Dynamo's encode workers) take one image after the other, first come first
served; a request goes on to a replica when all of its images are encoded and their embeddings have come. On GPUs that
prefill the first iteration of a request takes as much longer, as vLLM's encoder runs before the model in a step.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..engines import ask
from ..question.image_requests import ENCODERS, ImageRequests
from ..question.serving import ServingRequest
from ..question.work import Work
from .between import executed_nodes
from .loop import RequestChunk
from .streams import RequestStream

if TYPE_CHECKING:
    from .steps import ReplicaSteps


@dataclass(frozen=True)
class EncoderCosts:
    """Microseconds of one image, and bytes of one of its tokens as they move to a GPU that prefills."""

    image_us: float = 0.0
    token_bytes: float = 0.0


def costs_of(images: ImageRequests, steps: ReplicaSteps | None) -> EncoderCosts:
    """What encoding takes: as given, else the products of the encoder's layers as the engines answer them."""
    hidden = 0 if steps is None else int(steps.config.get("hidden_size", 0))
    token_bytes = 2.0 * hidden if images.embedding_bytes is None else images.embedding_bytes
    if images.encode_ms is not None or steps is None:
        return EncoderCosts(1e3 * (images.encode_ms or 0.0), token_bytes)
    tower = ENCODERS[images.encoder]
    nodes = executed_nodes(steps.simulate(Work("batch", decodes=((1, 1),))))
    like = next(node.work for node, _, _ in nodes if node.kind == "gemm")
    head, heads, patches = tower.hidden // tower.heads, tower.heads, tower.patches
    sizes = [  # batch, m, n, k: query, key and value, the two products of attention, its output, both of the MLP
        (1, patches, 3 * tower.hidden, tower.hidden),
        (heads, patches, patches, head),
        (heads, patches, head, patches),
        (1, patches, tower.hidden, tower.hidden),
        (1, patches, tower.inter, tower.hidden),
        (1, patches, tower.hidden, tower.inter),
    ]
    ops = [like.replace(batch=batch, m=m, n=n, k=k, dtype="bf16") for batch, m, n, k in sizes]
    return EncoderCosts(tower.layers * float(ask(steps.kernels, ops, "cold").latency_us.sum()), token_bytes)


def with_images(source: RequestStream, request: ServingRequest, encoder: EncoderCosts | None) -> RequestStream:
    """The stream with images: longer prompts, and what encoding them takes."""
    images, seed = request.images, request.traffic.seed
    if not images.exist:
        return source
    costs = encoder or costs_of(images, None)
    rows = joined(list(source.chunks))
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed).spawn(10)[9]))
    with_some = random.random(len(rows.input)) < images.share
    counts = np.where(with_some, images.count, 0)
    rows = rows._replace(input=rows.input + counts * images.tokens)
    longest = source.longest + images.most_tokens
    mean = source.prompt + float(counts.mean()) * images.tokens
    figures = {
        "requests": int(np.count_nonzero(counts)),
        "images": int(counts.sum()),
        "encode_ms": costs.image_us / 1e3,
    }
    if not images.gpus:
        rows = rows._replace(encoder_us=counts * costs.image_us)
        return replace(source, chunks=iter([rows]), longest=longest, prompt=mean, images=figures)
    done_us = encoded_us(rows.arrival_us, counts, images.gpus, costs.image_us)
    move_us = images.us + images.count * images.tokens * costs.token_bytes / (images.gbps * 1e3)
    ready_us = np.where(with_some, done_us + move_us, rows.arrival_us)
    waits_us = (done_us - rows.arrival_us)[with_some]
    last_us = max(float(done_us.max()), 1e-9)
    figures |= {
        "gpus": images.gpus,
        "wait_ms": float(waits_us.mean()) / 1e3 if len(waits_us) else 0.0,
        "transfer_ms": move_us / 1e3,
        "utilisation": float(counts.sum()) * costs.image_us / images.gpus / last_us,
    }
    rows = rows._replace(before_us=ready_us - rows.arrival_us, arrival_us=ready_us)
    order = np.argsort(ready_us, kind="stable")
    rows = RequestChunk(*(column[order] if len(column) == len(order) else column for column in rows))
    return replace(source, chunks=iter([rows]), longest=longest, prompt=mean, images=figures)


def joined(chunks: Sequence[RequestChunk]) -> RequestChunk:
    """All chunks as one."""
    return RequestChunk(*(np.concatenate(columns) for columns in zip(*chunks, strict=True)))


def encoded_us(arrival_us: np.ndarray, counts: np.ndarray, gpus: int, image_us: float) -> np.ndarray:
    """When the last image of each request is encoded, by GPUs that take one after the other; its arrival where it has
    none."""
    free_us, done_us = [0.0] * gpus, arrival_us.copy()
    for row in np.flatnonzero(counts).tolist():
        for _ in range(int(counts[row])):
            end_us = max(heapq.heappop(free_us), float(arrival_us[row])) + image_us
            heapq.heappush(free_us, end_us)
            done_us[row] = max(done_us[row], end_us)
    return done_us
