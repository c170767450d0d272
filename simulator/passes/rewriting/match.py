"""Nodes of a section by what they are, and one in the place of several: the steps of every pass that rewrites nodes.

A rewrite finds nodes by kind, source or module (:func:`find`), then drops them (:func:`drop`), lets their readers read
something else (:func:`read_instead`), or runs one kernel in their place (:func:`merge`). :func:`rewrite` opens a graph
for it, section by section, and settles lifetimes afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ....datasets.ops import Op
from ...graph import Graph, Node
from .draft import Draft, Item, Section
from .lifetimes import free_after_last_use, freed_tensors
from .nodes import Ids, Location, kernel


def rewrite(graph: Graph, *changes: Callable[[Draft, Section], object]) -> Graph:
    """The graph with each section changed by each of ``changes`` in turn; the same one where all return False."""
    draft = Draft(graph)
    released = freed_tensors(draft)
    results = [change(draft, section) for section in draft.sections for change in changes]
    if all(result is False for result in results):
        return graph
    free_after_last_use(draft, released)
    return draft.graph()


def find(
    section: Section,
    kinds: Collection[str] = (),
    sources: Collection[str] = (),
    path: str | None = None,
    below: str | None = None,
) -> list[Item]:
    """Nodes of a section in order: of one of the kinds, of one of the sources, of a module, inside of a module."""
    return [
        item
        for item in section.items
        if (not kinds or item.node.kind in kinds)
        and (not sources or item.node.source in sources)
        and path in (None, item.node.path)
        and (below is None or item.node.path.startswith(f"{below}."))
    ]


def weights_of(draft: Draft, node: Node) -> Ids:
    """The weights that a node reads, trained or not."""
    return tuple(t for t in node.reads if draft.role(t) in ("weight", "frozen"))


def distinct(tensors: Iterable[int]) -> Ids:
    """Each tensor once, in order of appearance."""
    return tuple(dict.fromkeys(tensors))


def writes_of(items: Iterable[Item]) -> set[int]:
    """What any of the nodes writes."""
    return {t for item in items for t in item.node.writes}


def inputs_of(items: Collection[Item]) -> Ids:
    """What nodes read that none of them writes."""
    written = writes_of(items)
    return distinct(t for item in items for t in item.node.reads if t not in written)


def outputs_of(section: Section, items: Collection[Item]) -> set[int]:
    """What nodes write and others of the section read."""
    inside, written = {id(item) for item in items}, writes_of(items)
    return {t for item in section.items if id(item) not in inside for t in item.node.reads if t in written}


def drop(section: Section, items: Iterable[Item]) -> None:
    """Take nodes out of a section."""
    gone = {id(item) for item in items}
    if gone:
        section.items = [item for item in section.items if id(item) not in gone]


def insert(section: Section, position: int, items: Iterable[Item]) -> None:
    """Put nodes at a position of a section."""
    section.items[position:position] = items


def expand(sections: Iterable[Section], items_for: Callable[[Section, Item], Sequence[Item]]) -> bool:
    """Put the nodes that ``items_for`` has for a node of a section in its place; says whether there are others now."""
    changed = False
    for section in sections:
        items = [items_for(section, item) for item in section.items]
        changed |= any(len(new) != 1 or new[0] is not item for new, item in zip(items, section.items, strict=True))
        section.items = [item for new in items for item in new]
    return changed


def read_instead(section: Section, names: Mapping[int, Iterable[int]]) -> None:
    """Let every reader of a tensor read those that ``names`` has for it."""
    for item in section.items if names else ():
        if not names.keys().isdisjoint(item.node.reads):
            item.change(reads=distinct(new for t in item.node.reads for new in names.get(t, (t,))))


def merge(section: Section, items: Collection[Item], op: Op, source: str, path: str, at: int = -1) -> None:
    """One kernel in the place of the last of several nodes, or of the one ``at`` a position among them.

    It reads what they read from outside, and writes what others read of them, or what the last one wrote.
    """
    members = list(items)
    outputs = outputs_of(section, members)
    writes = distinct(t for item in members for t in item.node.writes if t in outputs) or members[-1].node.writes
    inputs, like = inputs_of(members), members[at]
    like.node = kernel(op, source, Location(like.node.phase, path), inputs, writes)
    drop(section, [item for item in members if item is not like])


def bypass(section: Section, items: Collection[Item]) -> None:
    """Take nodes out of a section; who read what they wrote reads what they read from outside."""
    written, inputs = writes_of(items), inputs_of(items)
    drop(section, items)
    for reader in section.items:
        if written.intersection(reader.node.reads):
            reader.change(reads=distinct((*inputs, *(t for t in reader.node.reads if t not in written))))
