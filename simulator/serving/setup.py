"""From a question about serving to the numbers of the event loop."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import ceil
from typing import Any, get_type_hints

import numpy as np

from ..memory.breakdown import GIB
from ..question.canonical import RequestError
from ..question.fleet import LOST, ColdStart
from ..question.kv_tiers import LOADS
from ..question.serving import (
    POLICIES,
    ROUTERS,
    SWAP_GBPS,
    DecodePool,
    Scheduler,
    SecondKind,
    ServingRequest,
    Speculation,
)
from . import adapter_costs, expert_drift, routing
from .adapter_costs import most_in_host, most_loras
from .iteration import IterationTables
from .policies import policy_of
from .queues import nobody_new
from .replica import ServedReplica
from .rules import OWN, OWN_ROUTER, IterationTiming, SchedulerRules, ServingSetup
from .state import OWN_TIERS, StateSizes

USUAL_LINK = 50.0, 20.0  # of a GPU with a NIC of 400 Gbit/s, where no cluster is named


def rules(
    scheduler: Scheduler,
    replica: ServedReplica,
    max_seqs: int | None = None,
    drafts: int = 0,
    answers: bool = False,
    repeats: bool = False,
    loads: int = 0,
) -> SchedulerRules:
    """The rules of an engine's scheduler on a replica, with the engine's own defaults for what is null."""
    policy, kv, usual = policy_of(scheduler.policy), replica.kv, replica.limits
    longest = scheduler.max_model_len
    tokens = scheduler.max_tokens or usual.max_tokens or policy.max_tokens
    share = policy.watermark if scheduler.watermark is None else scheduler.watermark
    chunked = policy.chunked if scheduler.chunked_prefill is None else scheduler.chunked_prefill
    padded = policy.padded if scheduler.padded is None else scheduler.padded
    ahead = policy.lag and replica.stages == 1 if scheduler.async_scheduling is None else scheduler.async_scheduling
    waits = policy.holds_back and (scheduler.wait_iterations > 0 or scheduler.balance_iterations > 0)
    swap_us = 1e6 * kv.bytes_per_token / (SWAP_GBPS * 1e9)
    return SchedulerRules(
        policy=OWN if scheduler.own else POLICIES.index(scheduler.policy),
        max_tokens=tokens,
        max_seqs=max_seqs or scheduler.max_seqs or usual.max_seqs or policy.max_seqs,
        chunk=scheduler.chunk or usual.chunk or policy.chunk,
        max_model_len=longest if isinstance(longest, int) else replica.max_model_len,
        blocks=kv.blocks,
        block_tokens=kv.block_tokens,
        watermark=int(share * kv.blocks),
        long_prefill=scheduler.long_prefill_tokens,
        whole_prompt=int(scheduler.whole_prompt),
        spare=policy.spare,
        chunked=int(chunked),
        uncut=int(policy.refuses == "long" or (policy.refuses == "uncut" and not chunked)),
        padded=int(padded),
        mixed=int(scheduler.mixed_chunk),
        reserves=int(policy.reserves),
        lag=int(ahead),
        swap_us_per_token=swap_us if scheduler.preemption == "swap" else -1.0,
        conservativeness=scheduler.conservativeness,
        ignore_eos=int(scheduler.ignore_eos),
        drafts=drafts,
        prefill_every=scheduler.prefill_every,
        wait_iterations=scheduler.wait_iterations,
        balance_iterations=scheduler.balance_iterations,
        gather_iterations=scheduler.gather_iterations,
        wait_tokens=scheduler.wait_share * tokens,
        answers=int(answers),
        lasting=int(not waits),
        asks=int(policy.again is not nobody_new),
        repeats=int(policy.repeats and repeats),
        loads=loads,
        layer_share=replica.layer_share,
    )


def timing(replica: ServedReplica, scheduler: Scheduler, guessing: Speculation) -> IterationTiming:
    """How long the iterations of a replica take, host included."""
    share = replica.layer_share if guessing.draft_share is None else guessing.draft_share
    host, graphs = replica.host, scheduler.cuda_graphs or replica.graphs
    return IterationTiming(
        replica.tables,
        np.array(sorted(graphs), np.int64),
        float(host.step_us),
        float(host.seq_us),
        float(host.stream_us),
        guessing.tokens,
        float(share),
    )


def timing_of(replica: ServedReplica, request: ServingRequest) -> IterationTiming:
    """The same, with what adapters and uneven experts add."""
    usual = timing(replica, request.scheduler, request.speculation)
    return usual._replace(**adapter_timing(replica, request), **expert_timing(replica, request))


def expert_timing(replica: ServedReplica, request: ServingRequest) -> dict[str, Any]:
    """How uneven experts are over time; nothing where they are even for ever."""
    if not request.eplb.exist:
        return {}
    costs = replica.moving_experts or expert_drift.by_hand(request.eplb)
    drift = expert_drift.timeline(request.eplb, costs, request.traffic.seed)
    return {
        "imbalance": drift.imbalance,
        "drift_block": drift.block,
        "move_us": drift.move_us,
        "expert_tokens": costs.tokens,
        "expert_us": costs.us,
    }


def adapter_timing(replica: ServedReplica, request: ServingRequest) -> dict[str, Any]:
    """What adapters add to iterations, and how long one takes to load; nothing where there are none."""
    lora = request.lora
    if not lora.exist:
        return {}
    costs = replica.adapters or adapter_costs.by_hand(lora)
    tiers_gbps = replica.host_gbps if request.tiers.host_gbps is None else request.tiers.host_gbps
    gbps = tiers_gbps if lora.host_gbps is None else lora.host_gbps
    return {
        "adapter_counts": costs.counts,
        "adapter_tokens": costs.tokens,
        "adapter_us": costs.extra_us,
        "adapter_load_us": costs.host_us + costs.gpu_bytes / (gbps * 1e3),
        "adapter_read_us": costs.file_bytes / (lora.disk_gbps * 1e3),
    }


def setup(request: ServingRequest, replica: ServedReplica, decoder: ServedReplica | None) -> ServingSetup:
    """All that stays as it is during a run. ``decoder`` is a replica of the pool that decodes, where there is one."""
    pool, scheduler, guessing = request.decode_pool, request.scheduler, request.speculation
    other, gate, mixed = decoder or replica, request.admission, request.second_kind.replicas > 0
    replicas = request.most_replicas + request.second_pool.replicas
    way = way_of(pool, other)
    weights = request.scorers
    loads = LOADS.index(request.tiers.load or policy_of(scheduler.policy).loads)
    again = replica.stages == other.stages == 1 and guessing.tokens == 0 and not looked_at(request)
    numbers = ServingSetup(
        rules=rules(
            scheduler,
            replica,
            drafts=guessing.tokens,
            repeats=again,
            loads=loads,
        ),
        timing=timing_of(replica, request),
        decode_rules=rules(
            other_scheduler(scheduler, request.second_kind),
            other,
            pool.max_seqs if decoder and not mixed else None,
            guessing.tokens,
            pool.first_token == "decode" and not mixed,
            again,
            loads,
        ),
        decode_timing=timing_of(other, request),
        router=OWN_ROUTER if ":" in request.router else ROUTERS.index(request.router),
        replicas=replicas,
        ranks_per_replica=request.attention_dp,
        decode_ranks=request.second_dp,
        stages=replica.stages,
        decode_stages=other.stages,
        first_decode=request.most_replicas,
        concurrency=request.traffic.concurrency,
        accept=np.array(guessing.chances, np.float64),
        move_us=way[1],
        move_token_us=1e6 * other.kv.bytes_per_token / (way[0] * 1e9),
        move_exposed=1.0 / pool.layers,
        limited=int(any(limit is not None for limit in (gate.max_requests, gate.max_prompt_tokens, gate.max_queue))),
        most_requests=-1 if gate.max_requests is None else gate.max_requests,
        most_prompt_tokens=-1 if gate.max_prompt_tokens is None else gate.max_prompt_tokens,
        most_queue=-1 if gate.max_queue is None else gate.max_queue,
        bucket_rate=(gate.rate or 0.0) / 1e6,
        bucket_size=float(gate.burst),
        mixed=int(mixed),
        choosy=int(mixed or request.changing),
        changing=int(request.changing),
        weights=(float(weights.queue), float(weights.kv), float(weights.prefix)),
        begin_with=request.replicas,
        start_us=1e6 * start_s(request.cold_start, replica) if request.changing else 0.0,
        tick_us=1e6 * float(request.autoscale.seconds) if request.autoscale.policy else 0.0,
        repair_us=1e6 * float(request.failures.repair_s),
        lost=LOST.index(request.failures.requests),
    )
    return of_one_kind(numbers)


@cache
def field_kinds(named: Any) -> dict[str, Any]:
    """What the fields of a named tuple are."""
    return get_type_hints(named)


def of_one_kind(values: Any) -> Any:
    """A named tuple whose numbers are whole or real as its fields say, and whose tables are all real: the same machine
    code is for all of them."""
    kinds, changed = field_kinds(values.__class__), {}
    for name, value in values._asdict().items():
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            changed[name] = of_one_kind(value)
        elif kinds[name] in (int, float):
            changed[name] = kinds[name](value)
        elif isinstance(values, IterationTables) and isinstance(value, np.ndarray):
            changed[name] = np.array(value, np.float64, order="C")
    return values._replace(**changed)


def other_scheduler(scheduler: Scheduler, kind: SecondKind) -> Scheduler:
    """The scheduler of replicas of another kind: the same with limits of its own."""
    return replace(scheduler, **kind.limits) if kind.replicas else scheduler


def start_s(start: ColdStart, replica: ServedReplica) -> float:
    """Seconds that a replica takes until it serves. RequestError where nobody knows how large its weights are."""
    if start.seconds is not None or start.store_gbps is None:
        return float(start.seconds or 0.0)
    weights_gb = replica.weights_gb if start.weights_gb is None else start.weights_gb
    if not weights_gb:
        raise RequestError(
            "cold_start.store_gbps reads weights, and no model says how large: give cold_start.weights_gb"
        )
    return float(weights_gb / start.store_gbps + start.engine_s)


def fill_shelves(
    shelves: np.ndarray, request: ServingRequest, pools: tuple[tuple[ServedReplica, int, int], ...]
) -> None:
    """How long loads from tiers take: ``pools`` are replicas, their ranks, and how many ranks there are of them."""
    tiers, first = request.tiers, 0
    for replica, ranks, count in pools:
        host_gbps = replica.host_gbps if tiers.host_gbps is None else tiers.host_gbps
        gbps = host_gbps * replica.devices / ranks, tiers.ssd_gbps / ranks
        rows = shelves[first * OWN_TIERS : (first + count) * OWN_TIERS].reshape(count, OWN_TIERS)
        rows["token_us"] = replica.kv.bytes_per_token / (np.array(gbps) * 1e3)
        first += count
    replica, ranks, _ = pools[0]
    shelves[-1]["first_us"] = tiers.remote_us
    shelves[-1]["token_us"] = replica.kv.bytes_per_token / (tiers.remote_gbps / ranks * 1e3)


def tier_blocks(request: ServingRequest, replica: ServedReplica, tokens: float) -> tuple[int, ...]:
    """Blocks of host memory and drives of a rank, and of the shared store: none more than ``tokens`` could fill."""
    tiers, kv = request.tiers, replica.kv
    if not tiers.exist:
        return ()
    if kv.bytes_per_token == 0:
        raise RequestError("tiers hold bytes: give kv.bytes_per_token, what a token takes")
    if policy_of(request.scheduler.policy).loads != "async" and (tiers.load or "") == "async":
        raise RequestError(
            f"tiers.load=async does not go with scheduler.policy={request.scheduler.policy}: take layers or blocking"
        )
    sizes = tiers.host_gib / request.attention_dp, tiers.ssd_gib / request.attention_dp, tiers.remote_gib
    most, block_bytes = int(tokens // kv.block_tokens) + 1, kv.bytes_per_token * kv.block_tokens
    for name, gib in zip(("host_gib", "ssd_gib", "remote_gib"), sizes, strict=True):
        if 0 < gib * GIB < block_bytes:
            raise RequestError(f"tiers.{name}={getattr(tiers, name):g} holds not one block of {block_bytes:,.0f} bytes")
    return tuple(min(int(gib * GIB / block_bytes), most) for gib in sizes)


def looked_at(request: ServingRequest) -> bool:
    """Whether a router may look at blocks or requests that are only brought up to date when a batch ends repeating."""
    if ":" in request.router:
        return True
    return bool(request.scheduler.prefix_caching) and routing.TABLE[request.router].reads_blocks


def way_of(pool: DecodePool, decoder: ServedReplica) -> tuple[float, float]:
    """GB/s and microseconds of a cache's way to the pool that decodes: as given, else of the network."""
    gbps, us = decoder.link or USUAL_LINK
    return (gbps if pool.link_gbps is None else pool.link_gbps), (us if pool.link_us is None else pool.link_us)


def shape(
    request: ServingRequest,
    setup_: ServingSetup,
    requests: int,
    longest: int,
    logged: int,
    bins: int,
    tiers: tuple[int, ...] = (),
) -> StateSizes:
    """How large the arrays of the state are."""
    most = max(setup_.rules.blocks, setup_.decode_rules.blocks)
    tokens, lora, policy = min(longest, setup_.rules.max_model_len), request.lora, request.scheduler.policy
    return StateSizes(
        replicas=setup_.replicas,
        ranks_per_replica=setup_.ranks_per_replica,
        stages=max(setup_.stages, setup_.decode_stages),
        seats=min(max(setup_.rules.max_seqs, setup_.decode_rules.max_seqs), max(requests, 1)),
        blocks=most,
        caching=bool(request.scheduler.prefix_caching),
        block_tokens=max(setup_.rules.block_tokens, setup_.decode_rules.block_tokens),
        most_blocks=min(most, -(-tokens // setup_.rules.block_tokens)) + 1,
        pools=2 if request.second_pool.replicas else 1,
        logged=logged,
        bins=bins,
        decoders=setup_.replicas - setup_.first_decode,
        decode_ranks=setup_.decode_ranks,
        classes=max(len(request.traffic.classes), 1),
        tiers=tiers,
        changing=request.changing,
        starts=ceil(setup_.start_us / setup_.tick_us) if setup_.tick_us else 0,
        adapters=lora.adapters if lora.exist else 0,
        adapter_places=most_loras(lora, policy) + most_in_host(lora, policy) if lora.exist else 0,
    )


def with_room_for(base: ServingSetup, seats: int) -> ServingSetup:
    """The set-up with no more requests at a time than there are seats for."""
    rules_, other = base.rules, base.decode_rules
    return base._replace(
        rules=rules_._replace(max_seqs=min(rules_.max_seqs, seats)),
        decode_rules=other._replace(max_seqs=min(other.max_seqs, seats)),
    )
