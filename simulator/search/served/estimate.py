"""What users of a replica wait for, and how much it serves, in steady state: closed forms over its tables.

Replicas that do both: as many requests as fit stay under way (:mod:`...serving.closed_form`), so that by Little's law a
rank serves ``batch / (TTFT + TPOT x (output - 1))`` requests a second. Ranks of attention data parallelism wait for
each other: an iteration has a prompt where any of them has one.

Pools apart: a prompt waits for its replica as in an M/D/1 queue (both pools
are at most :data:`BUSIEST` of the time busy), moves its cache, and joins a batch that only decodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...serving.closed_form import ClosedLoop, closed_form
from ...serving.iteration import iteration_us
from ...serving.policies import policy_of
from .replicas import LayoutReplica
from .request import ServedSearchRequest, ratio_of

BUSIEST = 0.9  # share of the time that a pool may be busy, so that queues of requests by chance end
SECOND_US = 1e6
ROUNDS = 8  # until clients wait as long as they make each other wait


@dataclass(frozen=True)
class Prefilling:
    """One iteration of a replica that only prefills: microseconds, and the requests in it."""

    us: float
    requests: float


def held_tokens(request: ServedSearchRequest, policy: str, prefilled: bool = False) -> float:
    """Tokens of KV memory that a request holds on average; all of its length where its engine reserves them."""
    if policy_of(policy).reserves:
        return request.input_len + request.output_len
    return request.input_len + (0.0 if prefilled else request.output_len / 2)


def together(
    request: ServedSearchRequest, own: LayoutReplica, policy: str, batch: int, max_tokens: int
) -> dict[str, Any]:
    """Figures of one replica that prefills and decodes; ``requests_per_s`` are those of a replica."""
    layout, tables, outputs = own.layout, own.served.tables, request.output_len
    graphs = own.engine.graphs.sizes(layout.tp, batch)
    loop = ClosedLoop(
        concurrency=batch,
        input_len=request.input_len,
        output_len=outputs,
        max_tokens=max_tokens,
        mixed=policy_of(policy).mixed,
        reserves=policy_of(policy).reserves,
        graphs=graphs,
        burst=0.0,
    )
    ttft_us, tpot_us = closed_form(tables, loop)
    decode_us = decode_iteration_us(request, own, batch)
    share = min(batch / outputs, 1.0)
    waiting = (1 - (1 - share) ** layout.dp) / share  # for ranks beside it whose prompts are computed
    prompt_us = (tpot_us - decode_us) * waiting
    tpot_us = own.served.host.iteration_us(decode_us + prompt_us, batch)
    ttft_us += own.served.first_token_us(batch * layout.dp * layout.pp, request.input_len)
    e2e_us = ttft_us + tpot_us * (outputs - 1)
    return {
        "ttft_ms": ttft_us / 1e3,
        "tpot_ms": tpot_us / 1e3,
        "decode_ms": decode_us / 1e3,
        "prompt_ms": prompt_us / 1e3,
        "queue_ms": 0.0,
        "transfer_ms": 0.0,
        "requests_per_s": batch * layout.dp * layout.pp * SECOND_US / e2e_us,
        "kv_share": batch * held_tokens(request, policy) / own.served.kv.tokens,
    }


def decode_iteration_us(request: ServedSearchRequest, own: LayoutReplica, batch: int) -> float:
    """Microseconds of an iteration in which ``batch`` sequences decode, padded to a CUDA graph."""
    padded = next((size for size in own.engine.graphs.sizes(own.layout.tp, batch) if size >= batch), batch)
    context = round(batch * (request.input_len + request.output_len / 2))
    return iteration_us(own.served.tables, padded, context, 0, 0.0, 0, padded)


def prefilling(request: ServedSearchRequest, own: LayoutReplica, max_tokens: int) -> Prefilling:
    """An iteration of prompts: as many as fit into ``max_tokens``, or one of them chunk after chunk."""
    length = request.input_len
    if length <= max_tokens:
        count = max(min(max_tokens // length, own.served.kv.tokens // length), 1)
        pairs = count * length * (length + 1) / 2
        return Prefilling(iteration_us(own.served.tables, 0, 0, count * length, pairs, 0, count), count)
    total, done = 0.0, 0
    while done < length:
        new = min(max_tokens, length - done)
        total += iteration_us(
            own.served.tables, 0, 0, new, new * (done + (new + 1) / 2), done, int(done + new == length)
        )
        done += new
    return Prefilling(total, 1.0)


def transfer_us(request: ServedSearchRequest, prefill: LayoutReplica, decode: LayoutReplica) -> float:
    """Microseconds that the cache of a prompt takes to the pool that decodes: the bytes that land there, over the links
    of the ranks of whichever side has fewer."""
    links = min(each.layout.tp * each.layout.pp for each in (prefill, decode))
    landing = decode.served.kv.bytes_per_token * request.input_len
    return request.link_us + SECOND_US * landing / (links * request.link_gbps * 1e9)


def apart(
    request: ServedSearchRequest,
    prefill: LayoutReplica,
    decode: LayoutReplica,
    policy: str,
    batch: int,
    max_tokens: int,
    devices: int,
) -> list[dict[str, Any]]:
    """Figures of pools apart, for each ratio asked for, or the best one; ``requests_per_s`` are those of all replicas.

    The best ratio serves most on all devices among those that give users what they expect, where any does. Empty where
    no ratio fits the devices.
    """
    own, moved_us = prefilling(request, prefill, max_tokens), transfer_us(request, prefill, decode)
    decode_us = decode_iteration_us(request, decode, batch)
    tpot_us = decode.served.host.iteration_us(decode_us, batch)
    first, second = ratios(request, prefill.layout.devices, decode.layout.devices, devices)
    if not len(first):
        return []
    prefills = first * prefill.layout.dp * prefill.layout.pp * own.requests / own.us
    decodes = second * decode.layout.dp * decode.layout.pp * batch / (tpot_us * (request.output_len - 1))
    rate = BUSIEST * np.minimum(prefills, decodes)
    busy = rate / prefills
    queue_us = busy / (2 * (1 - busy)) * own.us
    before_us = queue_us + own.us + moved_us
    ttft_us = before_us + host_us(request, prefill, rate / first, before_us + tpot_us * (request.output_len - 1))
    used = first * prefill.layout.devices + second * decode.layout.devices
    met = ttft_us <= (np.inf if request.slo.ttft_ms is None else 1e3 * request.slo.ttft_ms)
    chosen = range(len(rate)) if request.space.ratio else [int(np.lexsort([used, -rate, ~met])[0])]
    return [
        {
            "ratio": f"{first[at]}:{second[at]}",
            "prefill_replicas": int(first[at]),
            "replicas": int(second[at]),
            "ttft_ms": float(ttft_us[at]) / 1e3,
            "tpot_ms": tpot_us / 1e3,
            "decode_ms": decode_us / 1e3,
            "prompt_ms": 0.0,
            "queue_ms": float(queue_us[at]) / 1e3,
            "transfer_ms": moved_us / 1e3,
            "requests_per_s": float(rate[at]) * SECOND_US,
            "kv_share": batch * held_tokens(request, policy) / decode.served.kv.tokens,
            "devices": int(used[at]),
        }
        for at in chosen
    ]


def host_us(request: ServedSearchRequest, prefill: LayoutReplica, rate: np.ndarray, stay_us: np.ndarray) -> np.ndarray:
    """Microseconds that the host adds to first tokens of replicas that prefill at a ``rate`` of requests a microsecond,
    which stay for so long beside that: by Little's law those that are under way are the clients."""
    waits_us: Any = np.zeros_like(rate)
    for _ in range(ROUNDS):
        waits_us = prefill.served.first_token_us(rate * (stay_us + waits_us), request.input_len)
    return np.asarray(waits_us)


def ratios(request: ServedSearchRequest, own: int, other: int, devices: int) -> tuple[np.ndarray, np.ndarray]:
    """Replicas that prefill and that decode, of ``own`` and ``other`` GPUs each, that fit the devices."""
    if request.space.ratio:
        pairs = [ratio_of(text) for text in request.space.ratio]
    else:
        most = (devices - other) // own
        pairs = [(x, y) for x in range(1, most + 1) for y in range(1, (devices - x * own) // other + 1)]
    fits = [(x, y) for x, y in pairs if x * own + y * other <= devices]
    made = np.array(fits, dtype=np.int64).reshape(-1, 2)
    return made[:, 0], made[:, 1]


def completed(request: ServedSearchRequest, found: Mapping[str, Any], price: float, devices: int) -> dict[str, Any]:
    """The figures that follow from the others: rates by user and by GPU (of all ``devices``, idle ones too), cost."""
    slo, outputs = request.slo, request.output_len
    e2e_ms = found["ttft_ms"] + found["tpot_ms"] * (outputs - 1)
    tokens = found["requests_per_s"] * outputs
    times = ((found["ttft_ms"], slo.ttft_ms), (found["tpot_ms"], slo.tpot_ms), (e2e_ms, slo.e2e_ms))
    met = all(most is None or time_ms <= most for time_ms, most in times)
    return {
        **found,
        "e2e_ms": e2e_ms,
        "concurrency": found["requests_per_s"] * e2e_ms / 1e3,
        "tokens_per_s": tokens,
        "tokens_per_s_per_gpu": tokens / devices,
        "tokens_per_s_per_user": 1e3 / found["tpot_ms"],
        "goodput": found["requests_per_s"] if met else 0.0,
        "meets_slo": met,
        "cost_per_million_tokens": price * found["devices"] / 3600.0 / tokens * 1e6,
    }
