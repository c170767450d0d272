"""Steps between two that were simulated: their kernels asked of the engines at the sizes between, all at once.

A step's kernels stay the same from size to size but for their dimensions, each of which grows in proportion. What the
engines answer for a size between two has the jumps of its products' tiles; how cold each kernel is and what the step
says beyond that (clocks, overlap) goes from that of one end to that of the other. Where kernels are others at the two
ends, all sizes between them are simulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from ...datasets.ops import Op
from ..engines import Engine, ask
from ..graph import Node
from ..question.work import Work
from ..step.state import State
from ..timing.phases import ONLY

# Sizes that are simulated, and the last.
FEW = (1, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384)
Executed = tuple[Node, float, float]  # a node, how often it runs, microseconds of once
Simulate = Callable[[Sequence[Work]], list[State]]
Told = Callable[[int, State], tuple[float, list[Executed]]]


@dataclass
class Simulated:
    """Steps by size, of the work of that size, each simulated when it is first asked for."""

    simulate: Simulate
    work_of: Callable[[int], Work]
    known: dict[int, State] = field(default_factory=dict)

    def at(self, *sizes: int) -> list[State]:
        """The steps of some sizes."""
        new = [size for size in sizes if size not in self.known]
        self.known |= zip(new, self.simulate([self.work_of(size) for size in new]), strict=True) if new else {}
        return [self.known[size] for size in sizes]


def executed_nodes(state: State) -> list[Executed]:
    """Every stored node of the only step: executions and microseconds of one."""
    kernels = []
    for times in state.steps[0].times_of:
        costs = times.costs[ONLY]
        kernels += list(zip(costs.nodes, costs.repeats.tolist(), costs.kernel_us.tolist(), strict=True))
    return kernels


def between(
    steps: Simulated, sizes: Sequence[int], few: Sequence[int], engine: Engine, answer: Told
) -> dict[int, float]:
    """Microseconds at all sizes, ascending; those of ``few`` and both ends are simulated, or all where it is empty.

    ``answer`` says what part of a step counts: its microseconds, and its kernels.
    """
    ends = [size for size in sizes if not few or size in (*few, sizes[0], sizes[-1])]
    ends_known = dict(zip(ends, map(answer, ends, steps.at(*ends)), strict=True))
    total_us = {size: took_us for size, (took_us, _) in ends_known.items()}
    for first, last in pairwise(ends):
        inner = [size for size in sizes if first < size < last]
        if not inner:
            continue
        shape = kernel_us_between((first, last), (ends_known[first][1], ends_known[last][1]), inner, engine)
        if shape is None:
            total_us |= {size: answer(size, state)[0] for size, state in zip(inner, steps.at(*inner), strict=True)}
            continue
        if not shape[[0, -1]].all():
            total_us |= dict.fromkeys(inner, 0.0)
            continue
        off = np.interp(inner, (first, last), (total_us[first] / shape[0], total_us[last] / shape[-1]))
        total_us |= dict(zip(inner, (shape[1:-1] * off).tolist(), strict=True))
    return {size: total_us[size] for size in sizes}


def last_layer(steps: Simulated, samples: Sequence[int], engine: Engine) -> dict[int, float]:
    """Microseconds of the last layer by samples: of what differs where nothing else does."""
    ends = samples[0], samples[-1]
    states = steps.at(*ends)
    pairs = [executed_nodes(state) for state in states]
    heads = [_without(pairs[0], pairs[1]), _without(pairs[1], pairs[0])]
    first_us = sum(times * each_us for _, times, each_us in heads[0])
    last_us = first_us + states[1].total_us - states[0].total_us
    shape = kernel_us_between(ends, (heads[0], heads[1]), samples[1:-1], engine)
    if shape is None or not shape.all():
        took_us = [first_us + state.total_us - states[0].total_us for state in steps.at(*samples)]
        return dict(zip(samples, took_us, strict=True))
    off = np.interp(samples, ends, (first_us / shape[0], last_us / shape[-1]))
    return dict(zip(samples, (shape * off).tolist(), strict=True))


def _without(kernels: Sequence[Executed], other: Sequence[Executed]) -> list[Executed]:
    """What a step runs that another does not."""
    unmatched = Counter((node.path, node.source, node.op, times) for node, times, _ in other)
    remaining = []
    for kernel in kernels:
        node, times, _ = kernel
        key = node.path, node.source, node.op, times
        if unmatched[key]:
            unmatched[key] -= 1
        else:
            remaining.append(kernel)
    return remaining


def kernel_us_between(
    ends: tuple[int, int], kernels: tuple[Sequence[Executed], Sequence[Executed]], inner: Sequence[int], engine: Engine
) -> np.ndarray | None:
    """What the engines say of a step's kernels at both ends and the sizes between, microseconds [2 + inner]; None
    where kernels differ in more than dimensions, or engines do not know any."""
    if [_kind(kernel) for kernel in kernels[0]] != [_kind(kernel) for kernel in kernels[1]]:
        return None
    sizes = [ends[0], *inner, ends[1]]
    sums: dict[tuple[Op, Op], np.ndarray] = {}
    for (one, times, first_us), (other, _, last_us) in zip(*kernels, strict=True):
        if one.op is not None and other.op is not None:
            sums[one.op, other.op] = sums.get((one.op, other.op), 0.0) + times * np.array([1.0, first_us, last_us])
    ops = [_sized(one, other, ends, size) for one, other in sums for size in sizes]
    try:
        warm, cold = (ask(engine, ops, state).latency_us.reshape(len(sums), len(sizes)) for state in ("warm", "cold"))
    except ValueError:
        return None
    summed = np.array(list(sums.values())).reshape(-1, 3)
    took_us = summed[:, 1:] / summed[:, :1]
    return np.asarray(summed[:, 0] @ _taking(warm, cold, took_us, np.array(sizes, float)))


def _taking(warm: np.ndarray, cold: np.ndarray, took_us: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Microseconds of kernels [kernels, sizes] that took ``took_us`` at both ends [kernels, 2]: as cold between them
    as they are there, and off by as much."""
    along = (sizes - sizes[0]) / (sizes[-1] - sizes[0])

    def between_ends(values: np.ndarray) -> np.ndarray:
        return np.asarray(values[:, :1] + along * (values[:, 1:] - values[:, :1]))

    low, wide = warm[:, [0, -1]], (cold - warm)[:, [0, -1]]
    share = np.clip((took_us - low) / np.where(wide > 0, wide, np.inf), 0.0, 1.0)
    mixed = warm + between_ends(share) * np.maximum(cold - warm, 0.0)
    return mixed * between_ends(took_us / np.maximum(mixed[:, [0, -1]], 1e-9))


def _kind(kernel: Executed) -> tuple[object, ...]:
    node, times, _ = kernel
    return node.source, times, None if node.op is None else node.op.kind


def _sized(one: Op, other: Op, ends: tuple[int, int], size: int) -> Op:
    """The op between two, each of whose dimensions grows in proportion."""
    if one == other:
        return one
    share = (size - ends[0]) / (ends[1] - ends[0])
    dims = tuple(round(a + share * (b - a)) for a, b in zip(one.dims, other.dims, strict=True))
    return replace(one, dims=dims)
