"""Work that frameworks do not do at every step: masks and positions made anew, buffers zeroed, gradients summed apart.

Three rules that are no kernels: nodes vanish, and their tensors become what they are for the kernels that remain.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...graph import BUFFER, INPUT, Node
from ..rewriting.draft import Draft, Item, Section
from ..rewriting.match import distinct, drop
from ..rewriting.nodes import name_of

FILLS = ("zeros", "zeros_like", "new_zeros", "zero_", "fill", "fill_")
RANDOM = ("bernoulli_", "rand", "randn", "normal_", "uniform_", "rand_like", "randn_like", "native_dropout")
FEW_BYTES = 2**20


def compute_once(draft: Draft, released: np.ndarray) -> bool:
    """Masks, positions and rotary tables depend on the lengths of sequences alone: they are there from the start.

    What the forward pass makes from inputs and buffers only, without weights, is dropped; inside repeated layers only
    where it is small. The tensors that others read stay, as buffers.
    """
    constant = draft.roles == INPUT
    constant |= draft.roles == BUFFER

    def precomputed(section: Section, item: Item) -> bool:
        once = _is_precomputed(draft, section, item.node, constant)
        for tensor in item.node.writes if once else ():
            constant[section.ids(tensor)] = True
            released[section.ids(tensor)] = False
            draft.roles[section.ids(tensor)] = BUFFER
        return once

    changed = [_drop_where(section, precomputed) for section in draft.sections]
    return any(changed)


def _is_precomputed(draft: Draft, section: Section, node: Node, constant: np.ndarray) -> bool:
    if node.phase != "forward" or name_of(node) in RANDOM or node.kind == "embedding":
        return False
    small = sum(int(draft.sizes[t]) for t in node.writes) < FEW_BYTES
    return all(constant[t] for t in node.reads) and (section.repeat == 1 or small)


def skip_fills(draft: Draft, released: np.ndarray) -> bool:
    """Kernels that write a whole result need no zeros first: a fill vanishes where its reader writes the tensor too."""

    def needless(section: Section, item: Item) -> bool:
        node = item.node
        if name_of(node) not in FILLS or len(node.writes) != 1:
            return False
        tensor = node.writes[0]
        after = section.items[section.place(item) + 1 :]
        user = next((i for i in after if tensor in i.node.touches), None)
        if user is None:
            return bool(released[section.ids(tensor)].all())
        overwritten = tensor in user.node.writes
        if overwritten:
            user.change(reads=tuple(t for t in user.node.reads if t != tensor))
        return overwritten

    changed = [_drop_where(section, needless) for section in draft.sections]
    return any(changed)


def accumulate(draft: Draft, released: np.ndarray) -> bool:
    """Each product adds its share to the one gradient of a weight: sums of partial gradients vanish.

    As Megatron-LM's fused weight-gradient accumulation. It applies where a partial gradient is read by the sum alone.
    """
    writers: dict[int, list[Item]] = {}
    readers: dict[int, int] = {}
    for _, item in draft.walk():
        for tensor in item.node.writes:
            writers.setdefault(tensor, []).append(item)
        for tensor in item.node.reads:
            readers[tensor] = readers.get(tensor, 0) + 1
    once = [section for section in draft.sections if section.repeat == 1]
    changed = [
        _drop_where(section, lambda _, item: _accumulate_in_place(draft, item, writers, readers)) for section in once
    ]
    return any(changed)


def _accumulate_in_place(draft: Draft, item: Item, writers: dict[int, list[Item]], readers: dict[int, int]) -> bool:
    node = item.node
    if name_of(node) not in ("add", "add_") or len(node.writes) != 1 or draft.role(node.writes[0]) != "gradient":
        return False
    total = node.writes[0]
    parts = [t for t in node.reads if t != total]
    makers = [maker for t in node.reads for maker in writers.get(t, []) if maker is not item]
    if any(readers.get(t) != 1 or len(writers.get(t, [])) != 1 for t in parts) or len(makers) < 2:
        return False
    for position, maker in enumerate(makers):
        reads = maker.node.reads if position == 0 else (*maker.node.reads, total)
        writes = tuple(total if t in parts else t for t in maker.node.writes)
        maker.change(reads=distinct(reads), writes=writes)
    return True


def _drop_where(section: Section, condition: Callable[[Section, Item], bool]) -> bool:
    """Drop the nodes for which a condition holds, one after the other; says whether there were any."""
    gone = [item for item in section.items if condition(section, item)]
    drop(section, gone)
    return bool(gone)
