"""Where tensors are let go of, moved about: every repetition of a section, its first and its last, has its own say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .draft import Draft, Item, Section


def release(item: Item, tensors: tuple[int, ...]) -> None:
    """Let a node free these tensors too, in every repetition."""
    item.change(frees=(*item.node.frees, *tensors))
    item.first = None if item.first is None else (*item.first, *tensors)
    item.last = None if item.last is None else (*item.last, *tensors)


def rename(item: Item, names: dict[int, int]) -> None:
    """Let a node read and free other tensors."""

    def renamed(tensors: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(names.get(t, t) for t in tensors)

    node = item.node
    if not names.keys().isdisjoint((*node.reads, *node.frees, *(item.first or ()), *(item.last or ()))):
        item.change(reads=renamed(node.reads), frees=renamed(node.frees))
        item.first = None if item.first is None else renamed(item.first)
        item.last = None if item.last is None else renamed(item.last)


def _freed(section: Section, item: Item) -> list[tuple[tuple[int, ...], slice]]:
    """What a node frees in the repetitions between, in the first and in the last, and which those are."""
    frees = item.node.frees
    first = frees if item.first is None else item.first
    last = frees if item.last is None else item.last
    if section.repeat == 1:
        return [(first, slice(0, 1))]
    return [(frees, slice(1, section.repeat - 1)), (first, slice(0, 1)), (last, slice(section.repeat - 1, None))]


def _set(section: Section, item: Item, frees: Sequence[tuple[int, ...]]) -> None:
    item.change(frees=frees[0])
    item.first = item.last = None
    if section.repeat > 1:
        middle = frees[0] if section.repeat > 2 else frees[1]
        item.change(frees=middle)
        item.first = None if frees[1] == middle else frees[1]
        item.last = None if frees[2] == middle else frees[2]


def span(section: Section, tensor: int) -> slice:
    """The ids of a tensor over the repetitions, as a slice: one where all share it."""
    step = section.steps.get(tensor, 0)
    after = tensor + step * section.repeat
    return slice(tensor, after if after >= 0 else None, step) if step else slice(tensor, tensor + 1)


def _marked(mask: np.ndarray, section: Section, tensor: int) -> np.ndarray:
    """Whether a tensor is marked, for every repetition."""
    found = mask[span(section, tensor)]
    return found if len(found) == section.repeat else np.repeat(found, section.repeat)


def unfree(draft: Draft, moved: np.ndarray) -> None:
    """Nodes no longer free these tensors."""
    for section, item in draft.items():
        if item.node.frees or item.first or item.last:
            made = [
                tuple(t for t in tensors if not _marked(moved, section, t)[repetitions].any())
                for tensors, repetitions in _freed(section, item)
            ]
            _set(section, item, made)


def free_late(draft: Draft, late: np.ndarray) -> None:
    """Frees these tensors after their last use in the backward pass, where nothing frees them yet."""
    todo = late.copy()
    for section, item in draft.items():
        for tensors, repetitions in _freed(section, item):
            for tensor in tensors:
                ids = span(section, tensor)
                todo[ids] &= False if tensor not in section.steps else ~_within(section, repetitions)
    for section in reversed(draft.sections):
        if any(item.node.phase in ("recompute", "backward") for item in section.items):
            for item in reversed(section.items):
                _free_last(section, item, todo)


def _within(section: Section, repetitions: slice) -> np.ndarray:
    mask = np.zeros(section.repeat, dtype=bool)
    mask[repetitions] = True
    return mask


def _free_last(section: Section, item: Item, todo: np.ndarray) -> None:
    """Lets a node free what it uses of ``todo``, and takes that out."""
    for tensor in dict.fromkeys((*item.node.reads, *item.node.writes)):
        if not todo[span(section, tensor)].any():
            continue
        due, shared = _marked(todo, section, tensor), section.repeat > 1 and tensor not in section.steps
        made = []
        for number, (tensors, repetitions) in enumerate(_freed(section, item)):
            ends = len(due[repetitions]) > 0 and bool(due[repetitions].all()) and (not shared or number == 2)
            made.append((*tensors, tensor) if ends else tensors)
        _set(section, item, made)
        todo[span(section, tensor)] = False
