"""Work that frameworks do not do at every step: masks and positions made anew, buffers zeroed, gradients summed apart.

Three rules that are no kernels: nodes vanish, and their tensors become what they are for the kernels that remain.
"""

from __future__ import annotations

import numpy as np

from ...graph import ROLES, Node
from ..rewriting.draft import Draft, Item, Section
from ..rewriting.nodes import name_of

FILLS = ("zeros", "zeros_like", "new_zeros", "zero_", "fill", "fill_")
RANDOM = ("bernoulli_", "rand", "randn", "normal_", "uniform_", "rand_like", "randn_like", "native_dropout")
FEW_BYTES = 2**20


def compute_once(draft: Draft, released: np.ndarray) -> bool:
    """Masks, positions and rotary tables depend on the lengths of sequences alone: they are there from the start.

    What the forward pass makes from inputs and buffers only, without weights, is dropped; inside repeated layers only
    where it is small. The tensors that others read stay, as buffers.
    """
    known = draft.roles == ROLES.index("input")
    known |= draft.roles == ROLES.index("buffer")
    changed = False
    for section in draft.sections:
        for item in section.items:
            node = item.node
            if not _once(draft, section, node, known):
                continue
            for tensor in node.writes:
                known[section.ids(tensor)] = True
                released[section.ids(tensor)] = False
                draft.roles[section.ids(tensor)] = ROLES.index("buffer")
            item.change(source="")
            changed = True
        _sweep(section)
    return changed


def _once(draft: Draft, section: Section, node: Node, known: np.ndarray) -> bool:
    if node.phase != "forward" or name_of(node) in RANDOM or (node.op is not None and node.op.kind == "embedding"):
        return False
    small = sum(int(draft.sizes[t]) for t in node.writes) < FEW_BYTES
    return all(known[t] for t in node.reads) and (section.repeat == 1 or small)


def skip_fills(draft: Draft, released: np.ndarray) -> bool:
    """Kernels that write a whole result need no zeros first: a fill vanishes where its reader writes the tensor too."""
    changed = False
    for section in draft.sections:
        for position, item in enumerate(section.items):
            node = item.node
            if name_of(node) not in FILLS or len(node.writes) != 1:
                continue
            tensor = node.writes[0]
            user = next((i for i in section.items[position + 1 :] if tensor in (*i.node.reads, *i.node.writes)), None)
            if (user is None and released[section.ids(tensor)].all()) or (user and tensor in user.node.writes):
                item.change(source="")
                changed = True
            if user and tensor in user.node.writes:
                user.change(reads=tuple(t for t in user.node.reads if t != tensor))
        _sweep(section)
    return changed


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
    changed = False
    for section in draft.sections:
        for item in section.items:
            changed |= section.repeat == 1 and _accumulated(draft, item, writers, readers)
        _sweep(section)
    return changed


def _accumulated(draft: Draft, item: Item, writers: dict[int, list[Item]], readers: dict[int, int]) -> bool:
    node = item.node
    if name_of(node) not in ("add", "add_") or len(node.writes) != 1 or draft.role(node.writes[0]) != "gradient":
        return False
    total = node.writes[0]
    parts = [t for t in node.reads if t != total]
    made = [maker for t in node.reads for maker in writers.get(t, []) if maker is not item]
    if any(readers.get(t) != 1 or len(writers.get(t, [])) != 1 for t in parts) or len(made) < 2:
        return False
    for position, maker in enumerate(made):
        reads = maker.node.reads if position == 0 else (*maker.node.reads, total)
        writes = tuple(total if t in parts else t for t in maker.node.writes)
        maker.change(reads=tuple(dict.fromkeys(reads)), writes=writes)
    item.change(source="")
    return True


def _sweep(section: Section) -> None:
    section.items = [item for item in section.items if item.node.source]
