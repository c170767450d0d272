"""The replica of a request: iteration times, KV memory and host time of its model on its devices, or as given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..memory.breakdown import GIB
from ..question.plan import Stack, load_stack
from ..question.requests import SimulateRequest
from ..question.serving import IterationLaw, KvMemory, Scheduler, ServingRequest
from ..question.work import Work
from ..trace.context import context_of
from . import adapter_costs, afd, expert_drift, images
from .engines import ServingEngine, UsualLimits, load_serving_engine
from .host import host_name, host_time
from .kv import KvBudget
from .kv_memory import Overheads
from .learned import with_known_steps
from .link import cache_link
from .policies import policy_of
from .replica import ServedReplica, by_hand, replica
from .requests import longest_of, stream
from .setup import rules
from .start import longest_served
from .steps import ReplicaSteps, steps_of
from .surrogate import surrogate
from .tabulate import Extent

if TYPE_CHECKING:
    from ..engines.bench import Bench

FEW_TOKENS, LONGEST = 2048, 131_072
MOST_SEQUENCES = 512  # of tables of attention alone: beyond, they go on as straight lines


def replicas_of(request: ServingRequest, bench: Bench) -> tuple[ServedReplica, ServedReplica | None]:
    """A replica, and one of the pool that only decodes where there is one. The errors of simulating a step, KvError."""
    pool = request.second_pool
    prefiller = replica_of(request, request.step, request.law, request.kv, bench, request.attention_dp)
    if not pool.replicas:
        return prefiller, None
    other = with_ffn_apart(second_of(request, prefiller, bench), request, bench)
    way = None if request.second_kind.replicas else cache_link(request, prefiller, other, bench)
    price = pool.price_per_gpu_hour
    return prefiller, replace(
        other,
        link=None if way is None else (way.gbps, way.us),
        price_per_hour=other.price_per_hour if price is None else price,
    )


def predicted_replica(request: ServingRequest, bench: Bench) -> ServedReplica:
    """A replica as it is predicted, whatever was learned of its steps."""
    return replica_of(request, request.step, request.law, request.kv, bench, request.attention_dp, learned=False)


def with_ffn_apart(served: ServedReplica, request: ServingRequest, bench: Bench) -> ServedReplica:
    """A replica that decodes without its feed-forward layers, which are on GPUs of their own; the same where they are
    not. Memory of their weights is left to keys and values."""
    pool, apart = request.decode_pool, request.afd
    if not apart.exist:
        return served
    step = pool.step or (None if pool.law else request.step)
    costs = afd.by_hand(apart) if step is None else afd.costs_of(apart, steps_of(step, bench))
    longest = longest_of(request.traffic) + request.images.most_tokens
    sequences = pool.max_seqs or request.scheduler.max_seqs or served.limits.max_seqs or MOST_SEQUENCES
    ranks, kv = pool.replicas * request.second_dp, served.kv
    if step is not None and leaves_memory(pool.kv if pool.kv.blocks else request.kv):
        devices = served.devices // request.second_dp
        more_blocks = costs.weight_bytes * devices / (kv.bytes_per_token * kv.block_tokens)
        kv = replace(kv, blocks=kv.blocks + int(more_blocks))
    tables = afd.apart_tables(served.tables, apart, costs, ranks, min(sequences, MOST_SEQUENCES), min(longest, LONGEST))
    return replace(served, tables=tables, kv=kv)


def second_of(request: ServingRequest, prefiller: ServedReplica, bench: Bench) -> ServedReplica:
    """A replica of the pool that decodes, or of another kind; which may be like the first ones."""
    pool, limits = request.second_pool, request.second_kind.limits
    alike = pool.step is None and pool.law is None and pool.attention_dp is None and not limits
    request = replace(request, scheduler=replace(request.scheduler, **limits)) if limits else request
    if alike and pool.kv == KvMemory():
        return prefiller
    same = pool.step is None and pool.law is None
    step, law = (request.step, request.law) if same else (pool.step, pool.law)
    return replica_of(request, step, law, pool.kv if pool.kv.blocks else request.kv, bench, request.second_dp)


def replica_by_hand(request: ServingRequest, law: IterationLaw, kv: KvMemory) -> ServedReplica:
    """One replica whose iteration times are given."""
    return replace(
        by_hand(law, kv.blocks, kv.block_tokens, kv.bytes_per_token),
        price_per_hour=request.price_per_gpu_hour or 0.0,
        adapters=adapter_costs.by_hand(request.lora) if request.lora.exist else None,
        moving_experts=expert_drift.by_hand(request.eplb) if request.eplb.exist else None,
        encoder=encoder_of(request, None),
    )


def replica_of(
    request: ServingRequest,
    step: SimulateRequest | None,
    law: IterationLaw | None,
    kv: KvMemory,
    bench: Bench,
    ranks: int,
    learned: bool = True,
) -> ServedReplica:
    """One replica of so many ``ranks``; its tables are kept on disk beside the traced graphs. ``learned``: as logs of
    its engine's steps say, where its calibration has learned from any."""
    if law is not None or step is None:
        return replica_by_hand(request, law or IterationLaw(base_us=1.0), kv)
    scheduler, policy = request.scheduler, policy_of(request.scheduler.policy)
    engine = load_serving_engine(policy.framework)
    steps = steps_of(step, bench)
    limits = engine.limits_on(steps.device.name, steps.device.memory_gib) if policy.engine else UsualLimits()
    bare = by_hand(IterationLaw(base_us=1.0), 1, kv.block_tokens or engine.kv.block_tokens, 0.0)
    probe = rules(scheduler, replace(bare, limits=limits))
    seqs = min(probe.max_seqs, request.traffic.concurrency or probe.max_seqs, 1024)
    context, coming = context_of(steps.config), stream(request.traffic)
    extent = Extent(
        sequences=_round(seqs * (1 + request.speculation.tokens), 64),
        tokens=_round(probe.max_tokens, FEW_TOKENS),
        context=min(_round(min(coming.longest + request.images.most_tokens, LONGEST), 8192), context),
    )
    rule = engine.kv if kv.fraction is None else replace(engine.kv, fraction=kv.fraction)
    most_tokens = rule.pass_tokens(probe.max_tokens, probe.chunk)
    memory = steps.kv_budget(rule, most_tokens, overheads_seen(kv), seqs, coming.cached)
    block = kv.block_tokens or memory.block_tokens
    memory = replace(memory, block_tokens=block, blocks=kv.blocks or max(1, memory.tokens // block))
    memory, extras = with_extras(request, steps, kv, memory, probe.max_tokens)
    longest, shortened = longest_served(engine, scheduler, memory, context) if policy.engine else (context, "")
    tables = surrogate(step, bench, extent, bench.graphs.parent / "surrogates")
    named = host_name(engine.id, engine.host, overlapped=scheduler.async_scheduling)
    served = replica(steps, engine, host_time(named, engine.host), tables, memory, ranks)
    stack = steps.plan.stack
    served = replace(
        served,
        weights_gb=weights_gb(steps, served.devices) if request.cold_start.store_gbps else 0.0,
        run={
            "engine": named if stack.id == engine.stack else stack.name,
            "system": steps.device.id,
            "model": str(step.model.get("name", "") if isinstance(step.model, Mapping) else step.model),
        },
        max_model_len=longest,
        shortened=shortened,
        limits=limits,
        price_per_hour=served.price_per_hour if request.price_per_gpu_hour is None else request.price_per_gpu_hour,
        graphs=graph_sizes(request, engine, kv, steps.plan.parallel.tp, probe.max_seqs),
        **extras,
    )
    return with_known_steps(served, step, steps.device.id, engine.id) if learned else served


def weights_gb(steps: ReplicaSteps, devices: int) -> float:
    """GB of weights that the devices of a replica hold together."""
    memory = steps.lay_out(Work("decode", batch=1, input_len=1, cache="static")).memory
    return float(memory.by_class["weights"]) * GIB / 1e9 * devices


def with_extras(
    request: ServingRequest, steps: ReplicaSteps, kv: KvMemory, memory: KvBudget, most_tokens: int
) -> tuple[KvBudget, dict[str, Any]]:
    """What adapters, copies of experts and encoders of images take, as fields of a replica; and the KV memory that they
    leave."""
    extras: dict[str, Any] = {"encoder": encoder_of(request, steps)}
    devices = steps.plan.parallel.tp * steps.plan.parallel.pp
    if request.eplb.exist:
        extras["moving_experts"] = experts = expert_drift.costs_of(request.eplb, steps)
        if leaves_memory(kv):
            size = expert_drift.redundant_bytes(request.eplb, experts) * devices
            memory = adapter_costs.less_memory(memory, size, "copies of experts", "eplb.num_redundant_experts")
    if request.lora.exist:
        most = adapter_costs.most_loras(request.lora, request.scheduler.policy)
        extras["adapters"] = adapters = adapter_costs.costs_of(request.lora, steps, most, most_tokens)
        if leaves_memory(kv):
            size = most * adapters.gpu_bytes * devices
            memory = adapter_costs.less_memory(memory, size, "adapters", "lora.max_loras")
    return memory, extras


def encoder_of(request: ServingRequest, steps: ReplicaSteps | None) -> images.EncoderCosts | None:
    """What encoding an image takes; None where no request has any."""
    return images.costs_of(request.images, steps) if request.images.exist else None


def leaves_memory(kv: KvMemory) -> bool:
    """Whether adapters and copies of experts take memory from keys and values: where nobody says how many fit."""
    return not kv.blocks and not kv.seen.keys() & {"kv_gib", "kv_tokens"}


def overheads_seen(kv: KvMemory) -> Overheads | None:
    """What a start-up log said, where there is one."""
    if not kv.seen:
        return None
    values: dict[str, Any] = dict(kv.seen)
    return Overheads(**values | ({"kv_tokens": int(values["kv_tokens"])} if "kv_tokens" in values else {}))


def graph_sizes(
    request: ServingRequest, engine: ServingEngine, kv: KvMemory, tp: int, max_seqs: int
) -> tuple[int, ...]:
    """Batch sizes of CUDA graphs of an engine; none for policies of no engine of today."""
    if not policy_of(request.scheduler.policy).engine or kv.graphs == 0:
        return ()
    graphs = engine.graphs if kv.graphs is None else replace(engine.graphs, most=kv.graphs, most_below_tp4=0)
    return graphs.sizes(tp, max_seqs)


def usual_serving_stack(policy: str) -> Stack:
    """The framework of a policy's engine; of a policy of one's own the usual one: its module is not asked yet.

    RequestError for a policy that does not exist.
    """
    policy_facts = policy_of(Scheduler.policy if ":" in policy else policy)
    return load_stack(load_serving_engine(policy_facts.framework).stack)


def _round(value: int, step: int) -> int:
    """Up to a multiple, so that questions alike share their tables."""
    return -(-value // step) * step
