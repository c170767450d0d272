"""The layers of a draft, and which forward layer a backward layer belongs to, repetition by repetition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ...graph import layer_of
from .draft import Draft, Section


@dataclass(frozen=True)
class Layer:
    """The nodes of one layer in a section, ``first`` in its first repetition; positions in order."""

    section: Section
    stack: str
    first: int
    positions: tuple[int, ...]

    @property
    def last(self) -> int:
        """The layer of the last repetition."""
        return self.first + (self.section.repeat - 1) * self.section.stride


def layers_of(draft: Draft, phases: tuple[str, ...], stack: str) -> Iterator[Layer]:
    """The layers of every section; nodes without a layer of their own go with the one before them."""
    for section in draft.sections:
        positions: dict[int, list[int]] = {}
        current: int | None = None
        for position, item in enumerate(section.items):
            if item.node.phase not in phases:
                continue
            layer = layer_of(item.node.path)
            if layer is not None and layer[0] == stack:
                current = layer[1]
            elif section.repeat == 1 and not item.node.group:
                current = None
            if current is not None:
                positions.setdefault(current, []).append(position)
        for first, members in positions.items():
            yield Layer(section, stack, first, tuple(members))


def layer_pairs(draft: Draft, phases: tuple[str, ...], stack: str) -> list[tuple[Layer, list[Layer]]]:
    """Every forward layer with those of ``phases`` that go over it again, where each repetition has one."""
    again = list(layers_of(draft, phases, stack))
    pairs = [(ahead, [b for b in again if _covers(ahead, b)]) for ahead in layers_of(draft, ("forward",), stack)]
    return [(ahead, back) for ahead, back in pairs if sum(b.section.repeat for b in back) == ahead.section.repeat]


def _covers(forward: Layer, backward: Layer) -> bool:
    """Whether all layers of a backward section are repetitions of this forward layer."""
    stride = forward.section.stride or 1
    low, high = sorted((forward.first, forward.last))
    inside = all(low <= layer <= high for layer in (backward.first, backward.last))
    return inside and (backward.first - forward.first) % stride == 0


def mapping(forward: Layer, backward: Layer) -> Callable[[int], int]:
    """From a tensor of a layer's forward section to its id in the backward section, whose steps learn of it."""
    source, target = forward.section, backward.section
    at = (backward.first - forward.first) // source.stride if source.repeat > 1 else 0
    turn = target.stride // source.stride if source.repeat > 1 else 1

    def there(tensor: int) -> int:
        step = source.steps.get(tensor, 0)
        if step and target.repeat > 1:
            target.steps[tensor + at * step] = step * turn
        return tensor + at * step

    return there


def read_ids(draft: Draft) -> dict[int, np.ndarray]:
    """Which tensors nodes of each section read, by the section's own id: a flag by id of the tensor."""
    masks = {id(section): np.zeros(len(draft.sizes), dtype=bool) for section in draft.sections}
    for section in draft.sections:
        for tensor in {t for item in section.items for t in item.node.reads}:
            masks[id(section)][section.span(tensor)] = True
    return masks


def read_elsewhere(draft: Draft, reads: Mapping[int, np.ndarray], layers: Iterable[Layer]) -> np.ndarray:
    """Which tensors nodes read outside of the sections of some layers: a flag by id."""
    inside, others = {id(layer.section) for layer in layers}, np.zeros(len(draft.sizes), dtype=bool)
    for key, mask in reads.items():
        if key not in inside:
            others[: len(mask)] |= mask
    return others
