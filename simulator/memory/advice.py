"""What may make a step fit: changes of its question, what costs least first, from what memory is spent on.

They are proposals: :mod:`..step.advice` tries each before it is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...datasets.devices import Device
from ..question.plan import Plan
from ..question.work import Work
from .breakdown import Memory

CHUNK = 8192  # tokens of prompts in an iteration: vLLM's and SGLang's default on GPUs of 80 GB
MAX_MULTIPLE = 64  # as many devices or nodes as there are, at most


@dataclass(frozen=True)
class MemoryChange:
    """A question changed: ``spent`` says on what memory goes, ``settings`` what to set, ``saves_gib`` about how much.

    ``alone`` says that it is more devices, which nothing is added to.
    """

    spent: str
    settings: str
    work: Work
    plan: Plan
    saves_gib: float
    alone: bool = False


def propose_changes(memory: Memory, work: Work, plan: Plan, device: Device) -> Iterator[MemoryChange]:
    """Changes of a step that does not fit, what costs least time and money first."""
    over_gib = memory.peak_gib - device.memory_gib
    if work.kind == "train":
        yield from _shard_states(memory, work, plan)
        yield from _shrink_activations(memory, work, plan)
        yield from _offload_optimizer(memory, work, plan)
        held_gib = memory.weights_gib + memory.gradients_gib + memory.optimizer_gib
        yield from _spread_ranks(f"weights, gradients and optimizer {held_gib:.1f} GiB", held_gib, work, plan)
        yield from _split_sequence(memory, work, plan)
    else:
        cache_gib = memory.by_class.get("KV cache", 0.0)
        yield from _chunk_prompt(memory, work, plan)
        yield from _shrink_cache(cache_gib, over_gib, work, plan)
        held_gib = memory.weights_gib + cache_gib
        yield from _spread_ranks(f"weights and KV cache {held_gib:.1f} GiB", held_gib, work, plan)
        if not plan.quantization and device.supports("fp8"):
            spent = f"weights {memory.weights_gib:.1f} GiB"
            yield MemoryChange(spent, "precision=fp8", work, replace(plan, quantization="fp8"), memory.weights_gib / 2)


def replace_degrees(plan: Plan, **degrees: int) -> Plan:
    """The plan with other degrees; data ranks are what they leave, where they were given."""
    changed: dict[str, Any] = dict(degrees)
    p = replace(plan.parallel, **changed)
    return replace(plan, parallel=replace(p, dp=max(plan.cluster.devices // p.model_ranks, 1) if p.dp else 0))


def degrees_text(plan: Plan, *names: str) -> str:
    """Degrees of a plan as they are typed, with data ranks where they were given."""
    p = plan.parallel
    return " ".join(f"parallel.{name}={getattr(p, name)}" for name in (*names, *(("dp",) if p.dp else ())))


def _shard_states(memory: Memory, work: Work, plan: Plan) -> Iterator[MemoryChange]:
    p, saved_share = plan.parallel, 1 - 1 / plan.group("dp_cp").ranks
    if not saved_share:
        return
    if not p.shards_optimizer:
        spent, saves = f"optimizer {memory.optimizer_gib:.1f} GiB", memory.optimizer_gib * saved_share
        yield MemoryChange(
            spent, "parallel.zero_stage=1", work, replace(plan, parallel=replace(p, zero_stage=1)), saves
        )
    if not p.shards_weights:
        state = memory.weights_gib + memory.gradients_gib
        saves = (state + memory.optimizer_gib * (not p.shards_optimizer)) * saved_share
        sharded = replace(plan, parallel=replace(p, zero_stage=3))
        yield MemoryChange(f"weights and gradients {state:.1f} GiB", "parallel.zero_stage=3", work, sharded, saves)


def _shrink_activations(memory: Memory, work: Work, plan: Plan) -> Iterator[MemoryChange]:
    spent, size = f"activations {memory.activations_gib:.1f} GiB", work.micro_batch // 2
    while size >= 1:
        saves = memory.activations_gib * (1 - size / work.micro_batch)
        yield MemoryChange(spent, f"workload.micro_batch={size}", replace(work, micro_batch=size), plan, saves)
        size //= 2
    saved_gib = memory.by_class.get("activations kept for the backward pass", 0.0)
    if plan.recompute != "full":
        recomputed = replace(plan, recompute="full")
        yield MemoryChange(f"activations {saved_gib:.1f} GiB", "workload.recompute=full", work, recomputed, saved_gib)


def _offload_optimizer(memory: Memory, work: Work, plan: Plan) -> Iterator[MemoryChange]:
    if "optimizer" not in plan.offload:
        offloaded = replace(plan, offload=(*plan.offload, "optimizer"))
        spent = f"optimizer {memory.optimizer_gib:.1f} GiB"
        yield MemoryChange(spent, f"offload=[{','.join(offloaded.offload)}]", work, offloaded, memory.optimizer_gib)


def _chunk_prompt(memory: Memory, work: Work, plan: Plan) -> Iterator[MemoryChange]:
    """A long prompt as engines compute it: what its last chunk needs, which finds all others in the cache."""
    if work.kind != "prefill" or work.batch > 1 or work.images or work.input_len <= CHUNK:
        return
    gib = memory.by_class.get("activations of the moment", 0.0)
    last = (CHUNK, work.input_len - CHUNK)
    chunked = replace(work, kind="batch", cache="static", prompts=(last,))
    settings = f"workload=batch 'workload.prompts=[[{last[0]},{last[1]}]]', its last chunk where engines cut it"
    saves = gib * (1 - CHUNK / work.input_len)
    yield MemoryChange(f"activations {gib:.1f} GiB", settings, chunked, plan, saves, alone=True)


def _shrink_cache(cache_gib: float, over_gib: float, work: Work, plan: Plan) -> Iterator[MemoryChange]:
    spent = f"the KV cache {cache_gib:.1f} GiB"
    fewer = int(work.batch * (cache_gib - over_gib) / cache_gib) if cache_gib > over_gib else 0
    for batch in dict.fromkeys((fewer, int(0.98 * fewer), fewer * 9 // 10)) if work.kind != "batch" else ():
        batch_size = batch // plan.micro_batches * plan.micro_batches
        if batch_size >= 1:
            saves = cache_gib * (1 - batch_size / work.batch)
            yield MemoryChange(spent, f"workload.batch={batch_size}", replace(work, batch=batch_size), plan, saves)
    if plan.kv_dtype in ("", "same") and cache_gib:
        yield MemoryChange(spent, "precision.kv_dtype=fp8", work, replace(plan, kv_dtype="fp8"), cache_gib / 2)


def _spread_ranks(spent: str, held_gib: float, work: Work, plan: Plan) -> Iterator[MemoryChange]:
    """More tensor and pipeline ranks on the devices that there are, then more devices."""
    p, cluster, model_ranks = plan.parallel, plan.cluster, plan.parallel.tp * plan.parallel.pp
    if cluster.devices == 1:
        for count in (2, 4, 8):
            spread = replace_degrees(replace(plan, cluster=replace(cluster, devices_per_node=count)), tp=count)
            settings = f"{count} such devices (cluster=…) and parallel.tp={count}"
            yield MemoryChange(spent, settings, work, spread, held_gib * (1 - 1 / count), alone=True)
        return
    for nodes in (cluster.nodes * 2**power for power in range(MAX_MULTIPLE.bit_length())):
        wider = replace(plan, cluster=replace(cluster, nodes=nodes))
        cluster_text = "" if nodes == cluster.nodes else f"cluster.nodes={nodes} "
        for tp in (p.tp * 2**power for power in range(MAX_MULTIPLE.bit_length())):
            pp = max(p.pp, p.pp * nodes // cluster.nodes)
            for stages in dict.fromkeys((p.pp, pp)):
                if (
                    model_ranks < tp * stages
                    and tp <= cluster.devices_per_node
                    and tp * stages * p.cp <= wider.cluster.devices
                ):
                    spread = replace_degrees(wider, tp=tp, pp=stages)
                    changed = [name for name in ("tp", "pp") if getattr(spread.parallel, name) != getattr(p, name)]
                    saves = held_gib * (1 - model_ranks / (tp * stages))
                    yield MemoryChange(
                        spent,
                        cluster_text + degrees_text(spread, *changed),
                        work,
                        spread,
                        saves,
                        alone=bool(cluster_text),
                    )


def _split_sequence(memory: Memory, work: Work, plan: Plan) -> Iterator[MemoryChange]:
    spent, p = f"activations {memory.activations_gib:.1f} GiB", plan.parallel
    for times in (2, 4, 8):
        share = memory.activations_gib * (1 - 1 / times)
        if p.model_ranks * times <= plan.cluster.devices:
            split = replace_degrees(plan, cp=p.cp * times)
            yield MemoryChange(spent, degrees_text(split, "cp"), work, split, share, alone=True)
        length = work.seq_len // times
        if length:
            yield MemoryChange(
                spent, f"workload.seq_len={length}", replace(work, seq_len=length), plan, share, alone=True
            )
