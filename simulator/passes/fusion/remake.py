"""What a fused kernel keeps for the backward pass: its inputs and statistics, not its intermediates.

An eager chain keeps every tensor that autograd saved on the way (fp32 copies, the normalised rows, silu's result). A
hand-written kernel pair keeps what it cannot cheaply make again: the norm's input and its reciprocal deviations,
SwiGLU's two inputs, the logits. Here each large tensor that a forward kernel writes for backward kernels alone is
replaced, in those, by the kernel's inputs or other results that it is made from, unless that would keep more bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ...graph import Node
from ..rewriting.draft import Draft, Item, Section
from .patterns import Match, Pattern

SMALL = 16  # what is this many times smaller than a kernel's largest input is a statistic, and kept


@dataclass
class Fused:
    """A kernel in the place of what a pattern matched, and whether its intermediates can be made again."""

    section: Section
    item: Item
    match: Match
    pattern: Pattern
    remakes: bool


@dataclass(frozen=True)
class Use:
    """A node that reads a tensor, and the name it has for it."""

    section: Section
    item: Item
    name: int


def remake(draft: Draft, kernels: Sequence[Fused]) -> None:
    """Let backward kernels read what intermediates of forward kernels are made from."""
    forward = [k for k in kernels if k.item.node.phase == "forward" and k.remakes]
    backward = {id(k.item) for k in kernels if k.item.node.phase == "backward" and k.remakes}
    large = [(index, t) for index, kernel in enumerate(forward) for t in _large(draft, kernel.item.node)]
    owner = np.full(len(draft.sizes), -1, dtype=np.int64)
    for number, (index, tensor) in enumerate(large):
        owner[forward[index].section.ids(tensor)] = number
    uses: dict[int, list[Use]] = {}
    saved = np.zeros(len(draft.sizes), dtype=bool)
    for section, item in draft.walk():
        for tensor in item.node.reads:
            if item.node.phase == "backward":
                saved[section.ids(tensor)] = True
            if owner[tensor] >= 0:
                uses.setdefault(int(owner[tensor]), []).append(Use(section, item, tensor))
    spare: dict[int, dict[int, list[Use]]] = {}
    for number, readers in uses.items():
        if all(id(use.item) in backward for use in readers):
            index, tensor = large[number]
            spare.setdefault(index, {})[tensor] = readers
    for index, intermediates in spare.items():
        _remake(draft, forward[index], intermediates, saved)


def _large(draft: Draft, node: Node) -> list[int]:
    largest = max(int(draft.sizes[t]) for t in node.reads)
    return [t for t in node.writes if t not in node.reads and draft.sizes[t] * SMALL > largest]


def _remake(draft: Draft, kernel: Fused, intermediates: dict[int, list[Use]], saved: np.ndarray) -> None:
    """Drop a kernel's intermediates, if their sources are no more to keep."""
    sources = {t: _sources(draft, kernel, t, intermediates) for t in intermediates}
    needed = {s for origins in sources.values() for s in origins if not saved[kernel.section.ids(s)].any()}
    if sum(int(draft.sizes[s]) for s in needed) > sum(int(draft.sizes[t]) for t in intermediates):
        return
    new_names = {
        t: [names_in_section(kernel.section, t, sources[t], use) for use in uses] for t, uses in intermediates.items()
    }
    if any(names is None for origins in new_names.values() for names in origins):
        return
    for tensor, uses in intermediates.items():
        for use, names in zip(uses, new_names[tensor], strict=True):
            use.section.steps.update({name: step for name, step in (names or {}).items() if step})
            reads = [t for t in use.item.node.reads if t != use.name]
            use.item.change(reads=tuple(dict.fromkeys([*reads, *(names or {})])))
    node = kernel.item.node
    kernel.item.change(writes=tuple(t for t in node.writes if t not in intermediates))


def _sources(draft: Draft, kernel: Fused, tensor: int, intermediates: Iterable[int]) -> list[int]:
    """The kernel's large inputs and lasting results that a tensor is made from."""
    stop = {*kernel.item.node.reads, *kernel.item.node.writes} - set(intermediates)
    largest = max(int(draft.sizes[t]) for t in kernel.item.node.reads)
    origins: dict[int, None] = {}
    queue, visited = [tensor], {tensor}
    while queue:
        current = queue.pop()
        for node in kernel.match.nodes:
            if current in node.writes:
                fresh = [t for t in node.reads if t not in visited]
                visited.update(fresh)
                origins.update((t, None) for t in fresh if t in stop)
                queue += [t for t in fresh if t not in stop]
    return [t for t in origins if draft.sizes[t] * SMALL > largest]


def names_in_section(made_in: Section, tensor: int, sources: Iterable[int], use: Use) -> dict[int, int] | None:
    """Names and steps of ``sources`` in the section that knows ``tensor`` as ``use.name``; None where they clash."""
    made_step, used_step = made_in.steps.get(tensor, 0), use.section.steps.get(use.name, 0)
    offset = (use.name - tensor) // made_step if made_step else 0
    direction = used_step // made_step if made_step else 0
    names: dict[int, int] = {}
    for source in sources:
        step = made_in.steps.get(source, 0)
        name = source + step * offset
        if use.section.repeat > 1 and use.section.steps.get(name, direction * step) != direction * step:
            return None
        names[name] = direction * step if use.section.repeat > 1 else 0
    return names
