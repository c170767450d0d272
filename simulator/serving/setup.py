"""From a question about serving to the numbers of the event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..passes.custom import called, load
from ..question.canonical import RequestError
from ..question.plan import PlanError
from ..question.serving import (
    MOST_SEQS,
    MOST_TOKENS,
    POLICIES,
    ROUTERS,
    SWAP_GBPS,
    DecodePool,
    IterationLaw,
    Scheduler,
    ServingRequest,
    Speculation,
)
from .engines import UsualLimits
from .figures import StepFigures
from .iteration import IterationTables, linear_tables
from .kv import KvBudget
from .rules import OWN, OWN_ROUTER, IterationTiming, SchedulerRules, ServingSetup
from .state import StateSizes

BLOCK_TOKENS = {"lightllm": 1, "sglang": 1, "trtllm": 32, "trtllm_max_utilization": 32}
CHUNKS = {"sarathi": 512, "sglang": 8192}
NOT_CHUNKED = ("trtllm", "trtllm_max_utilization")
LAGGING = ("vllm", "sglang", "trtllm", "trtllm_max_utilization")
WATERMARK = {"vllm_v0": 0.01, "sarathi": 0.01, "splitwise": 0.01}
LONGEST = 1 << 30
USUAL_LINK = 50.0, 20.0  # of a GPU with a NIC of 400 Gbit/s, where no cluster is named


@dataclass(frozen=True)
class HostShare:
    """What the host adds to an iteration, beside the GPU or after it, and to the first token."""

    serial_us: float = 0.0
    serial_seq_us: float = 0.0
    overlapped: bool = True
    ttft_us: float = 0.0


@dataclass(frozen=True)
class ServedReplica:
    """What a replica is to the event loop: how long its iterations take, its KV memory, its host, its pipeline."""

    tables: IterationTables
    kv: KvBudget
    host: HostShare = HostShare()
    stages: int = 1
    devices: int = 1
    max_model_len: int = LONGEST
    shortened: str = ""  # what to say where that is less than its model's
    limits: UsualLimits = field(default_factory=UsualLimits)
    graphs: tuple[int, ...] = ()
    figures: StepFigures | None = None
    price_per_hour: float = 0.0  # of a device
    layer_share: float = 1 / 32  # of its model that one layer is
    notes: tuple[str, ...] = ()  # what was chosen of its model's formats
    sources: Mapping[str, float] = field(default_factory=dict)  # share of kernel time by whose measurements
    link: tuple[float, float] | None = None  # of one that decodes: GB/s and microseconds of the way of a cache to it


def by_hand(law: IterationLaw, blocks: int | None, block_tokens: int | None, bytes_per_token: float) -> ServedReplica:
    """The replica of a law that a user gives. RequestError without KV blocks."""
    if blocks is None:
        raise RequestError("iteration times given by hand need kv.blocks, the KV memory of a replica")
    return ServedReplica(linear_tables(**asdict(law)), KvBudget(blocks, block_tokens or 16, bytes_per_token))


def rules(
    scheduler: Scheduler,
    replica: ServedReplica,
    max_seqs: int | None = None,
    drafts: int = 0,
    answers: bool = False,
) -> SchedulerRules:
    """The rules of an engine's scheduler on a replica, with the engine's own defaults for what is null."""
    policy, kv, usual = scheduler.policy, replica.kv, replica.limits
    longest = scheduler.max_model_len
    seqs = max_seqs or scheduler.max_seqs or usual.max_seqs or MOST_SEQS.get(policy, 256)
    tokens = scheduler.max_tokens or usual.max_tokens or MOST_TOKENS.get(policy, 8192)
    share = scheduler.watermark if scheduler.watermark is not None else WATERMARK.get(policy, 0.0)
    chunked, lag, padded = scheduler.chunked_prefill, scheduler.async_scheduling, scheduler.padded
    swap_us = 1e6 * kv.bytes_per_token / (SWAP_GBPS * 1e9)
    return SchedulerRules(
        policy=OWN if scheduler.own else POLICIES.index(policy),
        max_tokens=tokens,
        max_seqs=seqs,
        chunk=scheduler.chunk or usual.chunk or CHUNKS.get(policy, 8192),
        max_model_len=longest if isinstance(longest, int) else replica.max_model_len,
        blocks=kv.blocks,
        block_tokens=kv.block_tokens,
        watermark=int(share * kv.blocks),
        long_prefill=scheduler.long_prefill_tokens,
        whole_prompt=int(scheduler.whole_prompt),
        chunked=int(policy not in NOT_CHUNKED if chunked is None else chunked),
        padded=int(policy == "faster_transformer" if padded is None else padded),
        mixed=int(scheduler.mixed_chunk),
        lag=int(policy in LAGGING and replica.stages == 1 if lag is None else lag),
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
    )


def timing(replica: ServedReplica, scheduler: Scheduler, guessing: Speculation) -> IterationTiming:
    """How long the iterations of a replica take, host included."""
    share = replica.layer_share if guessing.draft_share is None else guessing.draft_share
    host, graphs = replica.host, scheduler.cuda_graphs or replica.graphs
    return IterationTiming(
        replica.tables,
        np.array(sorted(graphs), np.int64),
        float(host.serial_us),
        float(host.serial_seq_us),
        int(host.overlapped),
        guessing.tokens,
        float(share),
    )


def setup(request: ServingRequest, replica: ServedReplica, decoder: ServedReplica | None) -> ServingSetup:
    """All that stays as it is during a run. ``decoder`` is a replica of the pool that decodes, where there is one."""
    pool, scheduler, guessing = request.decode_pool, request.scheduler, request.speculation
    other = decoder or replica
    replicas = request.replicas + pool.replicas
    way = way_of(pool, other)
    return ServingSetup(
        rules=rules(scheduler, replica, drafts=guessing.tokens),
        timing=timing(replica, scheduler, guessing),
        decode_rules=rules(
            scheduler, other, pool.max_seqs if decoder else None, guessing.tokens, pool.first_token == "decode"
        ),
        decode_timing=timing(other, scheduler, guessing),
        router=OWN_ROUTER if ":" in request.router else ROUTERS.index(request.router),
        replicas=replicas,
        ranks_per_replica=request.attention_dp,
        decode_ranks=request.decode_dp,
        stages=replica.stages,
        decode_stages=other.stages,
        first_decode=request.replicas if pool.replicas else replicas,
        concurrency=request.traffic.concurrency,
        accept=np.array(guessing.chances, np.float64),
        move_us=way[1],
        move_token_us=1e6 * other.kv.bytes_per_token / (way[0] * 1e9),
        move_exposed=1.0 / pool.layers,
    )


def way_of(pool: DecodePool, decoder: ServedReplica) -> tuple[float, float]:
    """GB/s and microseconds of a cache's way to the pool that decodes: as given, else of the network."""
    gbps, us = decoder.link or USUAL_LINK
    return (gbps if pool.link_gbps is None else pool.link_gbps), (us if pool.link_us is None else pool.link_us)


def shape(
    request: ServingRequest, made: ServingSetup, requests: int, longest: int, logged: int, bins: int
) -> StateSizes:
    """How large the arrays of the state are."""
    most = max(made.rules.blocks, made.decode_rules.blocks)
    tokens = min(longest, made.rules.max_model_len)
    return StateSizes(
        replicas=made.replicas,
        ranks_per_replica=made.ranks_per_replica,
        stages=max(made.stages, made.decode_stages),
        seats=min(max(made.rules.max_seqs, made.decode_rules.max_seqs), max(requests, 1)),
        blocks=most,
        caching=bool(request.scheduler.prefix_caching),
        block_tokens=max(made.rules.block_tokens, made.decode_rules.block_tokens),
        most_blocks=min(most, -(-tokens // made.rules.block_tokens)) + 1,
        pools=2 if request.decode_pool.replicas else 1,
        logged=logged,
        bins=bins,
        decoders=made.replicas - made.first_decode,
        decode_ranks=made.decode_ranks,
    )


def own_function(where: str, name: str) -> Callable[..., Any]:
    """The function that ``module:function`` names, of a module that is installed or in the current folder.

    RequestError, with the setting, where there is none; and from the function, where it raises anything.
    """
    try:
        function = load(where, name)
    except PlanError as error:
        why = str(error).removeprefix(f"{name} {where!r}").lstrip(": ")
        raise RequestError(f"{name}={where} cannot be loaded: {why}") from None

    def guarded(*given: Any) -> Any:
        try:
            return called(lambda: function(*given), f"{name}={where}")
        except PlanError as error:
            raise RequestError(str(error)) from error

    return guarded


def own_router(where: str) -> Callable[..., int]:
    """The same for a router, which returns one of the ranks that it is asked about."""
    function = own_function(where, "router")

    def route(state: Any, made: ServingSetup, slot: int, first: int, last: int) -> int:
        rank = function(state, made, slot, first, last)
        if not isinstance(rank, (int, np.integer)) or not first <= rank < last:
            raise RequestError(f"router={where} returned {rank!r}, not a rank from {first} to {last - 1}")
        return int(rank)

    return route


def with_room_for(made: ServingSetup, seats: int) -> ServingSetup:
    """The set-up with no more requests at a time than there are seats for."""
    own, other = made.rules, made.decode_rules
    return made._replace(
        rules=own._replace(max_seqs=min(own.max_seqs, seats)),
        decode_rules=other._replace(max_seqs=min(other.max_seqs, seats)),
    )
