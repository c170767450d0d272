"""What users of a replica wait for, and how much it serves, in steady state: closed forms over its tables.

Replicas that do both: so many requests stay under way (:mod:`...serving.closed_form`), so that by Little's law a
rank serves ``n / (TTFT + TPOT x (output - 1))`` requests a second. Ranks of attention data parallelism wait for
each other: an iteration has a prompt where any of them has one.

Pools apart: a prompt waits for its replica in a queue (:mod:`.waiting`), moves its cache, and joins a batch that only
decodes. Where users expect something, the load is the highest that keeps it (:mod:`.load`); else all that replicas
have room for, with pools that prefill at most :data:`BUSIEST` of the time busy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...serving.closed_form import ClosedLoop, closed_form
from ...serving.iteration import iteration_us
from ...serving.policies import policy_of
from .load import Expected, LoadCurve, PoolsApart, apart_load, beyond, curve, loads_up_to, together_load
from .replicas import LayoutReplica
from .request import ServedSearchRequest, ratio_of
from .waiting import waiting

BUSIEST = 0.9  # share of the time that a pool may be busy, so that queues of requests by chance end
SECOND_US = 1e6
ROUNDS = 8  # until clients wait as long as they make each other wait


@dataclass(frozen=True)
class Prefilling:
    """One iteration of a replica that only prefills: microseconds, the requests in it, and those of a prompt alone."""

    us: float
    requests: float
    alone_us: float


@dataclass(frozen=True)
class LoadCurves:
    """The curves of replicas, each looked up once: at the loads up to the largest of ``batches``."""

    request: ServedSearchRequest
    batches: Sequence[int]
    known: dict[tuple[Any, ...], LoadCurve] = field(default_factory=dict)

    def both(self, way: ServedWay) -> LoadCurve:
        """What a rank of a replica does that prefills and decodes."""
        key = way.decode.layout, way.policy, way.max_tokens
        if key not in self.known:
            loads = loads_up_to(self.batches)
            figures = [together(way, n, max(loads)) for n in loads]
            rows = [(1e3 * figure["tpot_ms"], 1e3 * figure["ttft_ms"], figure["busy_us"]) for figure in figures]
            self.known[key] = curve(loads, rows, self.request.output_len, decodes=False)
        return self.known[key]

    def decoding(self, replica: LayoutReplica) -> LoadCurve:
        """What a rank of a replica does that only decodes."""
        key = replica.layout, replica.engine.id
        if key not in self.known:
            loads = loads_up_to(self.batches)
            steps = [decode_iteration_us(self.request, replica, n, max(loads)) for n in loads]
            rows = [(replica.served.host.iteration_us(us, n), 0.0, 0.0) for us, n in zip(steps, loads, strict=True)]
            self.known[key] = curve(loads, rows, self.request.output_len, decodes=True)
        return self.known[key]


@dataclass(frozen=True)
class ServedWay:
    """A way to serve but for its batch and its number of replicas: replicas that decode, or do both, their policy and
    chunk, and those that prefill (None: the same)."""

    curves: LoadCurves
    decode: LayoutReplica
    policy: str
    max_tokens: int
    prefill: LayoutReplica | None = None

    @property
    def request(self) -> ServedSearchRequest:
        """What is asked."""
        return self.curves.request


def held_tokens(request: ServedSearchRequest, policy: str, prefilled: bool = False) -> float:
    """Tokens of KV memory that a request holds on average; all of its length where its engine reserves them."""
    if policy_of(policy).reserves:
        return request.input_len + request.output_len
    return request.input_len + (0.0 if prefilled else request.output_len / 2)


def together(way: ServedWay, running: float, batch: int = 0) -> dict[str, Any]:
    """Figures of one replica that prefills and decodes where so many sequences run on each rank, of ``batch`` that may
    (0: as many); ``requests_per_s`` are those of a replica."""
    request, replica, policy, max_tokens = way.request, way.decode, way.policy, way.max_tokens
    layout, tables, outputs = replica.layout, replica.served.tables, request.output_len
    batch = batch or round(running)
    loop = ClosedLoop(
        concurrency=running,
        input_len=request.input_len,
        output_len=outputs,
        max_tokens=max_tokens,
        mixed=policy_of(policy).mixed,
        reserves=policy_of(policy).reserves,
        graphs=replica.engine.graphs.sizes(layout.tp, batch),
        burst=0.0,
    )
    ttft_us, tpot_us = closed_form(tables, loop)
    prompt_us = ttft_us - tpot_us / 2
    decode_us = decode_iteration_us(request, replica, running, batch)
    share = min(running / outputs, 1.0)
    waits = (1 - (1 - share) ** layout.dp) / share  # for ranks beside it whose prompts are computed
    beside_us = (tpot_us - decode_us) * waits
    behind_us = replica.served.host.behind_us(decode_us + beside_us, running, outputs)
    tpot_us = replica.served.host.iteration_us(decode_us + beside_us, round(running)) - behind_us / outputs
    ttft_us += behind_us + replica.served.first_token_us(running * layout.dp * layout.pp, request.input_len)
    e2e_us = ttft_us + tpot_us * (outputs - 1)
    return {
        "ttft_ms": ttft_us / 1e3,
        "tpot_ms": tpot_us / 1e3,
        "decode_ms": decode_us / 1e3,
        "prompt_ms": beside_us / 1e3,
        "queue_ms": 0.0,
        "transfer_ms": 0.0,
        "busy_us": prompt_us * min(request.input_len / max(max_tokens - running, 1.0), 1.0),
        "requests_per_s": running * layout.dp * layout.pp * SECOND_US / e2e_us,
        "kv_share": running * held_tokens(request, policy) / replica.served.kv.tokens,
    }


def loads(way: ServedWay, batches: Sequence[int], replicas: int) -> np.ndarray:
    """How many sequences run on each rank of so many replicas that do both, at the highest load that keeps what users
    expect [batches]: 0 where none does, all that have room where nothing is expected."""
    most, slo = np.array(batches, dtype=float), way.request.slo
    if not slo.named:
        return most
    ranks = np.full(len(most), replicas * way.decode.layout.dp * way.decode.layout.pp)
    return together_load(way.curves.both(way), ranks, most, Expected(slo, way.request.output_len))


def loaded(way: ServedWay, batch: int, replicas: int, load: float) -> dict[str, Any]:
    """Figures of so many replicas that do both at a ``load`` of :func:`loads`; at all that they have room for where
    that is 0. ``requests_per_s`` are those of all."""
    layout, wait_us = way.decode.layout, 0.0
    running = load or float(batch)
    if way.request.slo.named and running < batch:
        curve, ranks = way.curves.both(way), np.array([replicas * layout.dp * layout.pp])
        busy_us = curve.at("prompt_us", running)
        wait_us = float((waiting(ranks, curve.at("rate", running) * busy_us, 0.5)[0] * busy_us)[0])
    figures = together(way, max(running, 1.0), batch)
    figures["ttft_ms"] += wait_us / 1e3
    busy = min(running, 1.0)  # share of the time in which a rank has a sequence at all
    figures["kv_share"] *= busy
    figures |= {"queue_ms": wait_us / 1e3, "requests_per_s": figures["requests_per_s"] * busy * replicas}
    figures["meets_slo"] = load > 0
    del figures["busy_us"]
    return figures


def decode_iteration_us(request: ServedSearchRequest, replica: LayoutReplica, running: float, batch: int) -> float:
    """Microseconds of an iteration in which ``running`` sequences decode, of ``batch`` that may, padded to a CUDA
    graph."""
    sizes = replica.engine.graphs.sizes(replica.layout.tp, batch)
    padded = next((size for size in sizes if size >= running), round(running))
    context = round(running * (request.input_len + request.output_len / 2))
    return iteration_us(replica.served.tables, padded, context, 0, 0.0, 0, padded)


def prefilling(request: ServedSearchRequest, replica: LayoutReplica, max_tokens: int) -> Prefilling:
    """An iteration of prompts: as many as fit into ``max_tokens``, or one of them chunk after chunk."""
    length = request.input_len
    if length <= max_tokens:
        count = max(min(max_tokens // length, replica.served.kv.tokens // length), 1)
        tables = replica.served.tables
        full_us, alone = (
            iteration_us(tables, 0, 0, n * length, n * length * (length + 1) / 2, 0, n) for n in (count, 1)
        )
        return Prefilling(full_us, count, alone)
    total, done = 0.0, 0
    while done < length:
        new = min(max_tokens, length - done)
        total += iteration_us(
            replica.served.tables, 0, 0, new, new * (done + (new + 1) / 2), done, int(done + new == length)
        )
        done += new
    return Prefilling(total, 1.0, total)


def transfer_us(request: ServedSearchRequest, prefill: LayoutReplica, decode: LayoutReplica) -> float:
    """Microseconds that the cache of a prompt takes to the pool that decodes: the bytes that land there, over the links
    of the ranks of whichever side has fewer."""
    links = min(replica.layout.tp * replica.layout.pp for replica in (prefill, decode))
    landing = decode.served.kv.bytes_per_token * request.input_len
    return request.link_us + SECOND_US * landing / (links * request.link_gbps * 1e9)


def apart(way: ServedWay, batches: Sequence[int], room: tuple[int, int, int]) -> list[list[dict[str, Any]]]:
    """Figures of pools apart [batches], for each ratio asked for, or the best one; ``requests_per_s`` are those of all
    replicas. ``room`` is how many GPUs may prefill, decode, and do either.

    The best ratio serves most on all devices; of those that serve ``request.rate`` it has the fewest. Empty where
    no ratio fits the devices.
    """
    request, prefill, decode = way.request, way.prefill, way.decode
    assert prefill is not None
    prompts, moved_us = prefilling(request, prefill, way.max_tokens), transfer_us(request, prefill, decode)
    first, second = ratios(request, prefill.layout.devices, decode.layout.devices, room)
    if not len(first):
        return [[] for _ in batches]
    count, first, second = len(first), np.tile(first, len(batches)), np.tile(second, len(batches))
    curve, outputs = way.curves.decoding(decode), request.output_len - 1

    def hosts(rate: np.ndarray, before_us: np.ndarray) -> np.ndarray:
        return host_us(request, prefill, rate / first, before_us)

    pools = PoolsApart(
        first * prefill.layout.dp * prefill.layout.pp,
        second * decode.layout.dp * decode.layout.pp,
        curve,
        np.repeat(np.array(batches, dtype=float), count),
        *(prompts.alone_us, prompts.us / prompts.requests, prompts.us, moved_us),
        request.output_len,
        hosts,
    )
    full = BUSIEST * np.minimum(*pools.most)
    load = apart_load(pools, Expected(request.slo, request.output_len), BUSIEST) if request.slo.named else full
    rate = np.where(load > 0, load, full)
    queue_us, _, _, prompt_us = pools.times(rate, request.slo.share, beyond(request.slo))
    running = np.minimum(curve.running(rate / pools.second), pools.batch) if request.slo.named else pools.batch
    tpot_us = curve.at("tpot_us", running)
    before_us = queue_us + prompt_us + moved_us
    ttft_us = before_us + hosts(rate, before_us + tpot_us * outputs)
    used = first * prefill.layout.devices + second * decode.layout.devices
    columns = {
        "prefill_replicas": first,
        "replicas": second,
        "ttft_ms": ttft_us / 1e3,
        "tpot_ms": tpot_us / 1e3,
        "running": running,  # sequences, whose iteration is looked up for the rows that are chosen
        "prompt_ms": np.zeros(len(rate)),
        "queue_ms": queue_us / 1e3,
        "transfer_ms": np.full(len(rate), moved_us / 1e3),
        "requests_per_s": rate * SECOND_US,
        "kv_share": running * held_tokens(request, way.policy) / decode.served.kv.tokens,
        "devices": used,
        "meets_slo": load > 0,
    }
    return chosen_rows(request, decode, batches, columns, (load, rate, used))


def chosen_rows(
    request: ServedSearchRequest,
    decode: LayoutReplica,
    batches: Sequence[int],
    columns: Mapping[str, np.ndarray],
    merits: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> list[list[dict[str, Any]]]:
    """The rows of ``columns`` by batch: of each ratio that was asked for, or of the best by ``merits``
    (:func:`best_ratio`). Their iterations that decode are looked up."""
    enough = np.inf if request.size_for is None else request.size_for / SECOND_US
    results: list[list[dict[str, Any]]] = []
    by_batch = [np.split(values, len(batches)) for values in merits]
    for batch, load, rate, used in zip(batches, *by_batch, strict=True):
        first = len(results) * len(load)
        chosen: Sequence[int] = range(len(load)) if request.space.ratio else best_ratio(load, rate, used, enough)
        rows = []
        for at in chosen:
            row = {name: values[first + at].item() for name, values in columns.items()}
            row["decode_ms"] = decode_iteration_us(request, decode, row.pop("running"), batch) / 1e3
            rows.append({"ratio": f"{row['prefill_replicas']}:{row['replicas']}", **row})
        results.append(rows)
    return results


def best_ratio(in_limits: np.ndarray, rate: np.ndarray, used: np.ndarray, enough: float) -> Sequence[int]:
    """The place of the ratio that serves most, with the fewest GPUs among those that serve alike; where some serve
    ``enough`` that of the fewest GPUs among them."""
    if (in_limits >= enough).any():
        return [int(np.lexsort([-in_limits, used, in_limits < enough])[0])]
    return [int(np.lexsort([used, -rate, -in_limits])[0])]


def host_us(request: ServedSearchRequest, prefill: LayoutReplica, rate: np.ndarray, stay_us: np.ndarray) -> np.ndarray:
    """Microseconds that the host adds to first tokens of replicas that prefill at a ``rate`` of requests a microsecond,
    which stay for so long beside that: by Little's law those that are under way are the clients."""
    waits_us: Any = np.zeros_like(rate)
    for _ in range(ROUNDS):
        waits_us = prefill.served.first_token_us(rate * (stay_us + waits_us), request.input_len)
    return np.asarray(waits_us)


def ratios(
    request: ServedSearchRequest, of_prefill: int, of_decode: int, room: tuple[int, int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Replicas that prefill and that decode, of so many GPUs each, that have room on those that may prefill, decode,
    and do either."""
    first, second, both = room
    if request.space.ratio:
        pairs = [ratio_of(text) for text in request.space.ratio]
    else:
        counts = [range(1, most // of + 1) for most, of in ((first, of_prefill), (second, of_decode))]
        pairs = [(x, y) for x in counts[0] for y in counts[1]]
    fits = [
        (x, y)
        for x, y in pairs
        if x * of_prefill <= first and y * of_decode <= second and x * of_prefill + y * of_decode <= both
    ]
    pools = np.array(fits, dtype=np.int64).reshape(-1, 2)
    return pools[:, 0], pools[:, 1]


def completed(request: ServedSearchRequest, figures: Mapping[str, Any], hour: float, devices: float) -> dict[str, Any]:
    """The figures that follow from the others and from the cost of an ``hour``: rates by user and by GPU (of all
    ``devices``, idle ones too), the cost of tokens."""
    outputs = request.output_len
    e2e_ms = figures["ttft_ms"] + figures["tpot_ms"] * (outputs - 1)
    tokens = figures["requests_per_s"] * outputs
    return {
        **figures,
        "e2e_ms": e2e_ms,
        "concurrency": figures["requests_per_s"] * e2e_ms / 1e3,
        "tokens_per_s": tokens,
        "tokens_per_s_per_gpu": tokens / devices,
        "tokens_per_s_per_user": 1e3 / figures["tpot_ms"],
        "goodput": figures["requests_per_s"] if figures["meets_slo"] else 0.0,
        "hourly_cost": hour,
        "cost_per_million_tokens": hour / 3600.0 / tokens * 1e6,
    }


def with_load(request: ServedSearchRequest, row: Mapping[str, Any], figures: Mapping[str, Any]) -> dict[str, Any]:
    """A row with the load and the times that were ``found`` for it."""
    devices = row["tokens_per_s"] / row["tokens_per_s_per_gpu"]
    moved = {**row, "requests_per_s": figures["rate"], "ttft_ms": figures["ttft_ms"], "tpot_ms": figures["tpot_ms"]}
    return completed(request, {**moved, "meets_slo": True}, row["hourly_cost"], devices)
