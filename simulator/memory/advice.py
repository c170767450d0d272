"""What to shrink where a step does not fit: the cheapest change that is enough, from what memory is spent on."""

from __future__ import annotations

from collections.abc import Iterator

from ...datasets.devices import Device
from ..question.plan import Plan
from ..question.work import Work
from .amounts import Memory

SHOWN = 3  # changes that are named where none is enough alone


def advice(memory: Memory, plan: Plan, device: Device, work: Work) -> str:
    """The cheapest change of which the step fits; the largest ones where no single change is enough."""
    over = memory.peak_gib - device.memory_gib
    changes = _training if work.kind == "train" else _serving
    options = [each for each in changes(memory, plan, device, work) if each[0] > 0]
    enough = [text for saved, text in options if saved >= over]
    chosen = enough[:1] or [text for _, text in sorted(options, reverse=True)[:SHOWN]]
    return f"{over:.1f} GiB too much for {device.memory_gib:g} GiB; shrink " + " and ".join(chosen)


def _training(memory: Memory, plan: Plan, device: Device, work: Work) -> Iterator[tuple[float, str]]:
    """(GiB saved, what to do) of a training step, what costs least time and money first."""
    p, whole = plan.parallel, 1 - 1 / plan.group("dp_cp").ranks
    kept = memory.by_class.get("activations kept for the backward pass", 0.0)
    state = memory.weights_gib + memory.gradients_gib
    activations = f"activations {memory.activations_gib:.1f} GiB"
    optimizer = f"optimizer {memory.optimizer_gib:.1f} GiB"
    if p.zero_stage < 1:
        yield memory.optimizer_gib * whole, f"{optimizer}: parallel.zero_stage=1"
    if work.micro_batch > 1:
        yield memory.activations_gib / 2, f"{activations}: workload.micro_batch={work.micro_batch // 2}"
    if p.zero_stage < 3:
        sharded = state + memory.optimizer_gib * (p.zero_stage < 1)
        yield sharded * whole, f"weights and gradients {state:.1f} GiB: parallel.zero_stage=3"
    if plan.recompute != "full":
        yield 0.9 * kept, f"activations {kept:.1f} GiB: workload.recompute=full"
    if "optimizer" not in plan.offload:
        yield memory.optimizer_gib, f"{optimizer}: offload=[optimizer]"
    everything = state + memory.optimizer_gib
    yield from _spread(everything, "weights, gradients and optimizer", memory, plan, device)
    shorter = f"workload.seq_len={work.seq_len // 2}, or parallel.cp={2 * p.cp}"
    yield memory.activations_gib / 2, f"{activations}: {shorter}"


def _serving(memory: Memory, plan: Plan, device: Device, work: Work) -> Iterator[tuple[float, str]]:
    """(GiB saved, what to do) of an inference step, what costs least first."""
    cache_gib = memory.by_class.get("KV cache", 0.0)
    over = memory.peak_gib - device.memory_gib
    fitting = int(work.batch * (cache_gib - over) / cache_gib) if cache_gib > over else 0
    if fitting >= 1:
        yield over, f"the KV cache {cache_gib:.1f} GiB: workload.batch={fitting}"
    yield from _spread(memory.weights_gib + cache_gib, "weights and KV cache", memory, plan, device)


def _spread(spread_gib: float, what: str, memory: Memory, plan: Plan, device: Device) -> Iterator[tuple[float, str]]:
    """(GiB saved, what to do) by spreading a model over more devices: twice as many each time until it fits."""
    p = plan.parallel
    shards = p.tp * p.pp
    for factor in (2**power for power in range(1, 24)):
        saved = spread_gib * (1 - 1 / factor)
        if memory.peak_gib - saved <= device.memory_gib or factor == 2**23:
            more = "" if shards * factor <= plan.cluster.devices else f" on {shards * factor} devices or more"
            yield saved, f"{what} {spread_gib:.1f} GiB: tp x pp = {shards * factor} instead of {shards}{more}"
            return
