"""What changes a kernel's time between an engine's answer and the step, in the order in which it is applied.

An engine answers for an op alone: warm or cold, at the clocks and with the library of the table that it learned from.
Each modifier adds one thing that a step does to that. ``options.without`` leaves any of them out
(``options.without=[power_limit]``), as ``tests/benchmarks/ablation.py`` does to see what each is worth.

The order matters where one reads what another made: the power limit acts on what kernels take with the library that
runs them, before frameworks and calibration add to them; the calibration's factors multiply all that kernels take, and
the host's checks, and what it takes for prompts, come after its factor, which was not fitted on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...datasets.devices import Device
from ..question.plan import Plan
from .clocks import limit_power
from .costs import Costs, scale_times
from .hosts import add_collective_checks, add_shard_copies, issue_prompts
from .older_kernels import slow_attention, slow_products
from .rings import add_ring_steps, slow_rings
from .sampling import add_draw

Scales = Sequence[tuple[Mapping[str, float], Mapping[str, float]]]


@dataclass(frozen=True)
class Run:
    """What modifiers look at beside the costs themselves.

    ``busy_us`` says of each graph's costs for how many microseconds of kernels the busiest device has worked without a
    pause when steps of that kind end; ``scales`` are the factors of each graph's costs
    (:meth:`..question.plan.Plan.scales`), ``prompts`` says which graphs are passes over prompts.
    """

    plan: Plan
    device: Device
    busy_us: Callable[[Sequence[Costs]], Sequence[float]]
    scales: Scales
    prompts: Sequence[bool]


Change = Callable[[Sequence[Costs], Run], Sequence[Costs]]


@dataclass(frozen=True)
class Modifier:
    """One thing that changes kernels' or the host's time.

    ``reason`` says what happens, ``source`` where its figures are from. Without a ``change`` it is part of the costs
    from the start (:func:`.costs.cost_graphs`).
    """

    name: str
    reason: str
    source: str
    change: Change | None = None


def each(change: Callable[[Costs, Run], Costs]) -> Change:
    """A change that looks at one graph's costs at a time."""
    return lambda costs, run: [change(one, run) for one in costs]


MODIFIERS: tuple[Modifier, ...] = (
    Modifier(
        "cold_caches",
        "inputs that were not used for a while are read from memory, not from the cache",
        "bytes between two uses, counted (`timing/coldness.py`); on CPUs curves that a campaign measures",
    ),
    Modifier(
        "host_issue",
        "the host's time to issue a kernel: dispatch, launch, autograd, the framework's Python",
        "`host_overhead` of the device, `stack.issue_us`",
    ),
    Modifier(
        "older_products",
        "products of an older library than the tables' (`stack.products`)",
        "Vidur's tables beside aiconfigurator's (`tests/benchmarks/library_age.py`)",
        each(lambda costs, run: slow_products(costs, run.plan.stack.products, run.device)),
    ),
    Modifier(
        "power_limit",
        "clocks fall in steps that keep the device busy for longer than 30 to 100 ms",
        "chips timed for long, energy of a FLOP by clock (`models/clocks.py`, `models/power.py`)",
        lambda costs, run: limit_power(costs, run.device, run.busy_us(costs)),
    ),
    Modifier(
        "older_attention",
        "attention kernels older than the tables' (`stack.attention`)",
        "papers of FlashAttention-2 and 3 (arXiv 2307.08691, 2407.08608)",
        each(lambda costs, run: slow_attention(costs, run.plan.stack.attention, run.device)),
    ),
    Modifier(
        "ring_steps",
        "steps of rings between nodes that wait for each other",
        "`stack.step_us`",
        each(lambda costs, run: add_ring_steps(costs, run.plan.stack.step_us)),
    ),
    Modifier(
        "older_rings",
        "gathers and scatters inside a node by an older NCCL than the tables'",
        "`stack.ring_factor`",
        each(lambda costs, run: slow_rings(costs, run.plan.stack.ring_factor)),
    ),
    Modifier(
        "draw",
        "the next token drawn from the logits, sorted or not (`options.sampling`)",
        "llama.cpp's timings of ARGSORT, bytes of vLLM's sampler (`timing/sampling.py`)",
        each(lambda costs, run: add_draw(costs, run.plan.settings.sampling, run.plan.parallel.tp, run.device)),
    ),
    Modifier(
        "calibration",
        "factors of known runs, by kind or family of ops, and the user's own (`stack.scale`)",
        "`conf/calibration.json`, made by `opcast calibrate`",
        lambda costs, run: [scale_times(one, *scales) for one, scales in zip(costs, run.scales, strict=True)],
    ),
    Modifier(
        "shard_copies",
        "the host cuts each weight and gradient in shares of ranks, one by one (ZeRO-1)",
        "`stack.share_us`",
        each(lambda costs, run: add_shard_copies(costs, run.plan.stack.share_us)),
    ),
    Modifier(
        "collective_checks",
        "every rank checks a collective before it is issued",
        "`stack.check_us`, `stack.check_inside_us`",
        each(lambda costs, run: add_collective_checks(costs, run.plan.stack)),
    ),
    Modifier(
        "prompt_issue",
        "the host issues a pass over prompts kernel by kernel, where CUDA graphs are for decoding alone",
        "`stack.prompt_issue_us`",
        lambda costs, run: [
            issue_prompts(one, run.plan.prompt_issue_us if prompt else 0.0, run.device)
            for one, prompt in zip(costs, run.prompts, strict=True)
        ],
    ),
)


def modify(costs: Sequence[Costs], run: Run, only: Sequence[str] = ()) -> list[Costs]:
    """The costs after every modifier that the plan does not leave out; after those named alone where any are."""
    without = run.plan.settings.without
    for modifier in MODIFIERS:
        if modifier.change is not None and modifier.name not in without and (not only or modifier.name in only):
            costs = modifier.change(costs, run)
    return list(costs)


def table() -> str:
    """The modifiers as the table of docs/how-it-works.md."""
    lines = ["| modifier | what it adds | figures from |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| `{one.name}` | {one.reason} | {one.source} |" for one in MODIFIERS)])
