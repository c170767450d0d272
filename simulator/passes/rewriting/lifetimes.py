"""When tensors die: what a pass that changed who reads what has to settle before it closes a draft.

A traced graph says when the framework let go of each tensor. Once nodes are replaced, that is no longer true; then
every tensor that the step let go of at all dies with the last node that touches it (:func:`free_after_last_use`).
Tensors that outlive the step (weights, gradients, what the caller holds) go on doing so.

A pass that only moves some lifetimes leaves the others as the framework had them (:func:`move_frees`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ...graph import ACTIVATION
from .draft import Draft, Item, Section


def freed_tensors(draft: Draft) -> np.ndarray:
    """Which tensors some node lets go of: a flag by tensor id."""
    mask = np.zeros(len(draft.sizes), dtype=bool)
    for section, item in draft.walk():
        last = section.repeat - 1
        firsts = (item.first, 0, 1), (item.last, last, last + 1)
        begin, end = int(item.first is not None), section.repeat - (last > 0 and item.last is not None)
        for tensors, start, stop in ((item.node.frees, begin, end), *firsts):
            for tensor in tensors or ():
                step = section.steps.get(tensor, 0)
                mask[tensor + step * np.arange(start, max(stop, start))] = True
    return mask


def read_counts(draft: Draft, phase: str = "") -> np.ndarray:
    """How many executed nodes (of one phase, or all) read each tensor, by id."""
    counts = np.zeros(len(draft.sizes), dtype=np.int64)
    for section in draft.sections:
        nodes = [item.node for item in section.items if phase in ("", item.node.phase)]
        tensors = [t for node in nodes for t in dict.fromkeys(node.reads)]
        np.add.at(counts, _table(section, tensors), 1)
    return counts


def free_after_last_use(draft: Draft, released: np.ndarray) -> None:
    """Every tensor flagged in ``released`` (by id) is freed by the last node that reads or writes it, and only there.

    So are activations that were added since ``released`` was made, which may be shorter than the tensors are by now.
    Where the last use of a tensor is not the same in all middle repetitions of a section, it lives to the end.
    """
    added = draft.roles[len(released) :] == ACTIVATION
    released = np.concatenate([released, added])
    last = np.full(len(draft.sizes), -1, dtype=np.int64)
    uses, base = [], 0
    for section in draft.sections:
        latest = _latest(section)
        tensors = np.fromiter(latest, dtype=np.int64, count=len(latest))
        places = np.fromiter(latest.values(), dtype=np.int64, count=len(latest))
        ids = _table(section, list(latest))
        at = base + places[:, None] + len(section.items) * np.arange(section.repeat)
        np.maximum.at(last, ids, at)
        uses.append((section, tensors, places, ids, at))
        base += len(section.items) * section.repeat
    for section, tensors, places, ids, at in uses:
        _settle(section, tensors, places, released[ids] & (last[ids] == at))


def move_frees(
    draft: Draft, moved: Sequence[slice], frees: Iterable[tuple[Item, Sequence[int]]], late: Sequence[slice]
) -> None:
    """Items free other tensors than they did: nodes let go of no ids of ``moved``, items of those in ``frees``.

    Those of ``late`` are freed after their last use in the backward pass, where nothing frees them.
    """
    masks = np.zeros((2, len(draft.sizes)), dtype=bool)
    for mask, spans in zip(masks, (moved, late), strict=True):
        for ids in spans:
            mask[ids] = True
    _unfree(draft, masks[0])
    for item, tensors in frees:
        item.free(*tensors)
    _free_late(draft, masks[1])


def _unfree(draft: Draft, moved: np.ndarray) -> None:
    """Nodes no longer free these tensors."""
    for section, item in draft.walk():
        if item.node.frees or item.first or item.last:
            frees = [
                tuple(t for t in tensors if not _flags(moved, section, t)[repetitions].any())
                for tensors, repetitions in _frees(section, item)
            ]
            _set_frees(section, item, frees)


def _free_late(draft: Draft, late: np.ndarray) -> None:
    """Frees these tensors after their last use in the backward pass, where nothing frees them yet."""
    todo = late.copy()
    for section, item in draft.walk():
        for tensors, repetitions in _frees(section, item):
            for tensor in tensors:
                ids = section.span(tensor)
                todo[ids] &= False if tensor not in section.steps else ~_repetition_mask(section, repetitions)
    for section in reversed(draft.sections):
        if any(item.node.phase in ("recompute", "backward") for item in section.items):
            for item in reversed(section.items):
                _free_last(section, item, todo)


def _latest(section: Section) -> dict[int, int]:
    """The position of the last item that touches each tensor."""
    latest: dict[int, int] = {}
    for position, item in enumerate(section.items):
        node = item.node
        latest.update(dict.fromkeys(node.reads, position))
        latest.update(dict.fromkeys(node.writes, position))
    return latest


def _table(section: Section, tensors: list[int]) -> np.ndarray:
    """Ids [tensors, repetitions] that tensors of the first repetition stand for."""
    steps = np.array([section.steps.get(t, 0) for t in tensors], dtype=np.int64)
    return np.array(tensors, dtype=np.int64)[:, None] + steps[:, None] * np.arange(section.repeat)


def _settle(section: Section, tensors: np.ndarray, places: np.ndarray, dies: np.ndarray) -> None:
    """Write what dies, [tensors, repetitions], into the items of a section."""
    repeat, count = section.repeat, len(section.items)
    middle = np.asarray(dies[:, 1:-1].all(axis=1) if repeat > 2 else dies[:, 0])
    usual = _by_place(tensors, places, middle, count)
    first = _by_place(tensors, places, dies[:, 0], count)
    last = _by_place(tensors, places, dies[:, -1], count)
    for position, item in enumerate(section.items):
        item.first = item.last = None
        if item.node.frees != usual[position]:
            item.change(frees=usual[position])
        if repeat > 1:
            item.first = first[position] if first[position] != usual[position] else None
            item.last = last[position] if last[position] != usual[position] else None


def _by_place(tensors: np.ndarray, places: np.ndarray, flags: np.ndarray, count: int) -> list[tuple[int, ...]]:
    tensors_by_place: list[list[int]] = [[] for _ in range(count)]
    for tensor, position in zip(tensors[flags].tolist(), places[flags].tolist(), strict=True):
        tensors_by_place[position].append(tensor)
    return [tuple(sorted(ids)) for ids in tensors_by_place]


def _repetition_mask(section: Section, repetitions: slice) -> np.ndarray:
    mask = np.zeros(section.repeat, dtype=bool)
    mask[repetitions] = True
    return mask


def _free_last(section: Section, item: Item, todo: np.ndarray) -> None:
    """Lets a node free what it uses of ``todo``, and takes that out."""
    for tensor in dict.fromkeys(item.node.touches):
        if not todo[section.span(tensor)].any():
            continue
        due, shared = _flags(todo, section, tensor), section.repeat > 1 and tensor not in section.steps
        frees = []
        for number, (tensors, repetitions) in enumerate(_frees(section, item)):
            ends = len(due[repetitions]) > 0 and bool(due[repetitions].all()) and (not shared or number == 2)
            frees.append((*tensors, tensor) if ends else tensors)
        _set_frees(section, item, frees)
        todo[section.span(tensor)] = False


def _frees(section: Section, item: Item) -> list[tuple[tuple[int, ...], slice]]:
    """What a node frees in the repetitions between, in the first and in the last, and which those are."""
    frees = item.node.frees
    first = frees if item.first is None else item.first
    last = frees if item.last is None else item.last
    if section.repeat == 1:
        return [(first, slice(0, 1))]
    return [(frees, slice(1, section.repeat - 1)), (first, slice(0, 1)), (last, slice(section.repeat - 1, None))]


def _set_frees(section: Section, item: Item, frees: Sequence[tuple[int, ...]]) -> None:
    item.change(frees=frees[0])
    item.first = item.last = None
    if section.repeat > 1:
        middle = frees[0] if section.repeat > 2 else frees[1]
        item.change(frees=middle)
        item.first = None if frees[1] == middle else frees[1]
        item.last = None if frees[2] == middle else frees[2]


def _flags(mask: np.ndarray, section: Section, tensor: int) -> np.ndarray:
    """Whether a tensor is marked, for every repetition."""
    flags = mask[section.span(tensor)]
    return flags if len(flags) == section.repeat else np.repeat(flags, section.repeat)
