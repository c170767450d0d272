"""The replica of a request: iteration times, KV memory and host time of its model on its devices, or as given."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from ..question.plan import Stack, load_stack
from ..question.requests import SimulateRequest, plan_of
from ..question.serving import IterationLaw, KvMemory, ServingRequest
from ..report.account import mixture
from ..trace.models import resolve
from .bench import ServingBench
from .budget import budget
from .context import context_of
from .engines import ServingEngine, UsualLimits, load_serving_engine
from .host import fitted_hosts, host_name, layers_and_experts
from .kv_memory import Overheads
from .link import cache_link
from .requests import sizes
from .setup import HostShare, ServedReplica, by_hand, rules
from .start import longest_served
from .surrogate import surrogate
from .tabulate import Extent

ENGINES = {"sglang": "sglang", "trtllm": "trtllm", "trtllm_max_utilization": "trtllm"}  # of policies; others: vllm
FEW_TOKENS, LONGEST = 2048, 131_072


def replicas_of(request: ServingRequest, bench: ServingBench) -> tuple[ServedReplica, ServedReplica | None]:
    """A replica, and one of the pool that only decodes where there is one. The errors of simulating a step, KvError."""
    pool = request.decode_pool
    own = replica_of(request, request.step, request.law, request.kv, bench, request.attention_dp)
    if not pool.replicas:
        return own, None
    other = decoder_of(request, own, bench)
    way = cache_link(request, own, other, bench)
    price = pool.price_per_gpu_hour
    return own, replace(
        other,
        link=None if way is None else (way.gbps, way.us),
        price_per_hour=other.price_per_hour if price is None else price,
    )


def decoder_of(request: ServingRequest, own: ServedReplica, bench: ServingBench) -> ServedReplica:
    """A replica of the pool that decodes, which may be like those that prefill."""
    pool = request.decode_pool
    alike = pool.step is None and pool.law is None and pool.attention_dp is None
    if alike and pool.kv == KvMemory():
        return own
    same = pool.step is None and pool.law is None
    step, law = (request.step, request.law) if same else (pool.step, pool.law)
    return replica_of(request, step, law, pool.kv if pool.kv.blocks else request.kv, bench, request.decode_dp)


def replica_of(
    request: ServingRequest,
    step: SimulateRequest | None,
    law: IterationLaw | None,
    kv: KvMemory,
    bench: ServingBench,
    ranks: int,
) -> ServedReplica:
    """One replica of so many ``ranks``; its tables are kept on disk beside the traced graphs."""
    price = request.price_per_gpu_hour
    if law is not None or step is None:
        made = by_hand(law or IterationLaw(base_us=1.0), kv.blocks, kv.block_tokens, kv.bytes_per_token)
        return replace(made, price_per_hour=price or 0.0)
    engine = load_serving_engine(ENGINES.get(request.scheduler.policy, "vllm"))
    device, scheduler = bench.device(step.device, step.cluster), request.scheduler
    plan = plan_of(step, device)
    known_engine = scheduler.policy in (*ENGINES, "vllm")
    limits = engine.limits_on(device.name, device.memory_gib) if known_engine else UsualLimits()
    bare = by_hand(IterationLaw(base_us=1.0), 1, kv.block_tokens or engine.kv.block_tokens, 0.0)
    probe = rules(scheduler, replace(bare, limits=limits))
    longest, prompt = sizes(request.traffic)
    seqs = min(probe.max_seqs, request.traffic.concurrency or probe.max_seqs, 1024)
    described = resolve(step.model).language
    extent = Extent(
        sequences=_round(seqs * (1 + request.speculation.tokens), 64),
        tokens=_round(probe.max_tokens, FEW_TOKENS),
        context=min(_round(min(longest, LONGEST), 8192), context_of(described)),
    )
    rule = engine.kv if kv.fraction is None else replace(engine.kv, fraction=kv.fraction)
    memory = budget(step, bench, rule, max_tokens=probe.max_tokens, learned=learned(kv), sequences=seqs)
    if kv.blocks:
        memory = replace(memory, blocks=kv.blocks)
    if kv.block_tokens:
        tokens = memory.tokens
        memory = replace(memory, block_tokens=kv.block_tokens, blocks=kv.blocks or max(1, tokens // kv.block_tokens))
    longest, shortened = context_of(described), ""
    if known_engine:
        longest, shortened = longest_served(engine, scheduler, memory, longest)
    known = surrogate(step, bench, extent, bench.graphs.parent / "surrogates")
    host = fitted_hosts().of(host_name(engine.id, engine.host, overlapped=scheduler.async_scheduling))
    layers = layers_and_experts(described)
    first_us = host.first_token_us(request.traffic.concurrency, prompt, *layers)
    return ServedReplica(
        known.tables,
        memory,
        HostShare(host.step_us, host.seq_us, overlapped=False, ttft_us=first_us),
        stages=plan.parallel.pp,
        devices=plan.parallel.tp * plan.parallel.pp * ranks,
        max_model_len=longest,
        shortened=shortened,
        limits=limits,
        layer_share=1 / layers_of(step.model),
        notes=(*plan.notes, *mixture(known.sources)),
        sources=known.sources,
        figures=known.figures,
        price_per_hour=price if price is not None else plan.cluster.price_per_device_hour,
        graphs=graph_sizes(request, engine, kv, plan.parallel.tp, probe.max_seqs),
    )


def layers_of(model: Any) -> int:
    """Layers of a model by its configuration; 32 where that does not say."""
    from ...datasets.model_names import shipped_model
    from ..trace.models import shipped_config

    known = model if isinstance(model, Mapping) else {}
    if isinstance(model, str):
        with suppress(ValueError):
            known = shipped_config(meant.id) if (meant := shipped_model(model)) else {}
    return int(known.get("num_hidden_layers") or known.get("n_layer") or 32)


def learned(kv: KvMemory) -> Overheads | None:
    """What a start-up log said, where there is one."""
    if not kv.seen:
        return None
    values: dict[str, Any] = dict(kv.seen)
    return Overheads(**values | ({"kv_tokens": int(values["kv_tokens"])} if "kv_tokens" in values else {}))


def graph_sizes(
    request: ServingRequest, engine: ServingEngine, kv: KvMemory, tp: int, max_seqs: int
) -> tuple[int, ...]:
    """Batch sizes of CUDA graphs of an engine; none for policies of no engine of today."""
    if request.scheduler.policy not in (*ENGINES, "vllm") or kv.graphs == 0:
        return ()
    graphs = engine.graphs if kv.graphs is None else replace(engine.graphs, most=kv.graphs, most_below_tp4=0)
    return graphs.sizes(tp, max_seqs)


def usual_engine_stack(policy: str) -> dict[str, Any]:
    """The framework of a policy's engine, as its figures."""
    return asdict(usual_serving_stack(policy))


def usual_serving_stack(policy: str) -> Stack:
    """The framework of a policy's engine."""
    return load_stack(load_serving_engine(ENGINES.get(policy, "vllm")).stack)


def _round(value: int, step: int) -> int:
    """Up to a multiple, so that questions alike share their tables."""
    return -(-value // step) * step
