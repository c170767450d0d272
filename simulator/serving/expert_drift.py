"""Loads of experts that drift while a model is served: how uneven GPUs are, block of iterations by block, and what an
iteration takes longer for it.

The logarithm of each expert's popularity wanders about 0 (Ornstein-Uhlenbeck: it forgets with the time constant
``drift``). Each of :data:`LAYERS` layers does so for itself, and stands for the others. At each rebalance experts are
shared out anew by the mean loads of the last window (:mod:`.eplb`), and the iteration waits until each GPU has its new
experts. The experts of an iteration take as long as they would if all GPUs had as many tokens as the busiest one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ...datasets.dtypes import BITS
from ..engines import ask
from ..question.canonical import RequestError
from ..question.expert_balance import ExpertBalance
from ..question.work import Work
from .between import executed_nodes
from .eplb import imbalance, most_new, rebalanced
from .tabulate import TOKENS, make_monotone

if TYPE_CHECKING:
    from .steps import ReplicaSteps

LAYERS = 4  # that are drawn: the mean of more hardly differs
BLOCKS, FINEST = 1024, 32  # blocks of iterations that are drawn, then they come again; of a time constant or interval
USUAL_GBPS = 50.0  # of a GPU with a NIC of 400 Gbit/s, where no device is named
MIB = 2**20


@dataclass(frozen=True)
class ExpertCosts:
    """What sharing out experts depends on: ``experts`` of each of ``layers`` on ``ranks`` GPUs, bytes of one, GB/s at
    which they move; microseconds ``us`` [tokens] that all layers' experts take of an iteration."""

    experts: int
    layers: int
    ranks: int
    expert_bytes: float
    gbps: float
    tokens: np.ndarray
    us: np.ndarray


@dataclass(frozen=True)
class ExpertTimeline:
    """Blocks of so many iterations: how uneven GPUs are in each, and microseconds that its first moves weights for."""

    block: int
    imbalance: np.ndarray
    move_us: np.ndarray


def by_hand(balance: ExpertBalance) -> ExpertCosts:
    """The costs where there is no model. RequestError where the number of experts or GPUs is not given."""
    if balance.experts is None or balance.ranks is None:
        raise RequestError("eplb.drift without a model needs eplb.experts and eplb.ranks, the GPUs that share them out")
    unit = np.array([0.0, 1.0])
    size, gbps = (balance.expert_mib or 0.0) * MIB, balance.gbps or USUAL_GBPS
    token_us = unit * (balance.token_us or 0.0)
    return ExpertCosts(balance.experts, balance.layers or 1, balance.ranks, size, gbps, unit, token_us)


def costs_of(balance: ExpertBalance, steps: ReplicaSteps) -> ExpertCosts:
    """The costs of a model's experts. RequestError for a model without any, or with all of them on every GPU."""
    nodes = executed_nodes(steps.simulate(Work("batch", decodes=((1, 1),))))
    fused = [(node.work, times) for node, times, _ in nodes if node.kind == "fused_moe"]
    if not fused:
        raise RequestError("eplb.drift needs experts in one kernel: this model or framework has none; leave it out")
    op = fused[0][0]
    ranks = balance.ranks or op.ep
    if ranks < 2:
        raise RequestError("eplb.drift needs experts on several GPUs: set parallel.ep, or leave it out")
    matrices, layers = 2 + op.gated, sum(times for _, times in fused)
    size = matrices * op.hidden * op.inter / op.tp * BITS[op.dtype] / 8
    tokens = np.array([0, *TOKENS[1:]], float)
    if balance.token_us is None:
        sized = [[kernel.replace(tokens=int(count) * kernel.tokens) for kernel, _ in fused] for count in tokens[1:]]
        answers = [ask(steps.kernels, ops, "cold").latency_us @ [times for _, times in fused] for ops in sized]
        us = make_monotone(np.array([0.0, *answers]))
    else:
        us = tokens * balance.token_us
    return ExpertCosts(
        balance.experts or op.experts,
        balance.layers or round(layers),
        ranks,
        size if balance.expert_mib is None else balance.expert_mib * MIB,
        balance.gbps or steps.device.link_gbps or USUAL_GBPS,
        tokens,
        us,
    )


def slots_of(balance: ExpertBalance, costs: ExpertCosts) -> int:
    """Places for experts on all GPUs. RequestError where they do not come out even."""
    slots, ranks = costs.experts + balance.num_redundant_experts, costs.ranks
    if slots % ranks:
        raise RequestError(
            f"eplb.num_redundant_experts={balance.num_redundant_experts}: {slots} experts do not come out even on "
            f"{ranks} GPUs; take {balance.num_redundant_experts + ranks - slots % ranks}"
        )
    if balance.groups % balance.nodes == 0 and (costs.experts % balance.groups or ranks % balance.nodes):
        raise RequestError(
            f"eplb.groups={balance.groups}, eplb.nodes={balance.nodes}: {costs.experts} experts and {ranks} GPUs do "
            "not come out even"
        )
    return slots


def redundant_bytes(balance: ExpertBalance, costs: ExpertCosts) -> float:
    """Bytes of copies on each GPU, which keys and values lack."""
    return balance.num_redundant_experts / costs.ranks * costs.layers * costs.expert_bytes


def timeline(balance: ExpertBalance, costs: ExpertCosts, seed: int = 0) -> ExpertTimeline:
    """How uneven GPUs are over time, and when weights move. The errors of :func:`slots_of`."""
    block, factors, new_experts = draw_drift(balance, costs.experts, slots_of(balance, costs), costs.ranks, seed)
    return ExpertTimeline(block, factors, new_experts * costs.layers * costs.expert_bytes / (costs.gbps * 1e3))


@lru_cache(16)
def draw_drift(
    balance: ExpertBalance, experts: int, slots: int, gpus: int, seed: int
) -> tuple[int, np.ndarray, np.ndarray]:
    """Iterations of a block; how uneven GPUs are in each, and the most experts of a layer that a GPU gets before it."""
    block = max(min(balance.drift, balance.step_interval or balance.drift) // FINEST, 1)
    every, window = balance.step_interval // block, max(balance.window_size // block, 1)
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed).spawn(9)[8]))
    keeps = np.exp(-block / balance.drift)
    logarithm = balance.spread * random.standard_normal((LAYERS, experts))
    holds = np.tile(np.arange(slots) % experts, (LAYERS, 1))
    factors, moved = np.zeros(BLOCKS), np.zeros(BLOCKS)
    loads: list[np.ndarray] = []
    for number in range(BLOCKS):
        if every and number and number % every == 0:
            means = np.mean(loads[-window:], axis=0)
            new = np.array([rebalanced(row, slots, gpus, balance.groups, balance.nodes) for row in means])
            moved[number] = np.mean([most_new(*pair, gpus) for pair in zip(holds, new, strict=True)])
            holds = new
        popularity = np.exp(logarithm)
        loads.append(popularity / popularity.sum(axis=1, keepdims=True))
        factors[number] = np.mean([imbalance(*pair, gpus) for pair in zip(loads[-1], holds, strict=True)])
        fresh = random.standard_normal(logarithm.shape)
        logarithm = keeps * logarithm + np.sqrt(1 - keeps**2) * balance.spread * fresh
    return block, factors, moved
