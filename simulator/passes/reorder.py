"""Operator reordering: communication leaves as early as its inputs exist, and is waited for as late as possible.

Nodes of a section are scheduled as a list. Among those whose inputs are ready, the next is, in this priority,

1. one on a stream other than ``compute`` (a communication: it starts, and costs nobody anything);
2. one that a communication of the section still waits for, directly or not (gradients that data ranks sum apart: they
   have until the step ends);
3. any other that does not wait: that reads nothing of what its stream launched last, or somebody waited for that;
4. one that waits and that a communication waits for;
5. one that waits;

and of equals the one that stood first. Every order of a read after a write, a write after a read, or two writes of a
tensor is kept, and so is the order within a stream of communication, and that of phases.
"""

from __future__ import annotations

from ..graph import Graph, Node
from ..question.plan import Plan
from .rewriting.draft import Draft, Section
from .rewriting.lifetimes import free_after_last_use, freed_tensors

COMPUTE = "compute"


def reorder(graph: Graph, plan: Plan) -> Graph:
    """The graph with the nodes of each section in the documented order; tensors die with their last use.

    Unchanged where nothing communicates beside compute.
    """
    draft = Draft(graph)
    changed = [reorder_section(section) for section in draft.sections]
    if not any(changed):
        return graph
    free_after_last_use(draft, freed_tensors(draft))
    return draft.graph()


def reorder_section(section: Section) -> bool:
    """Put a section's items in order; whether that changed anything."""
    nodes = [item.node for item in section.items]
    if all(node.stream == COMPUTE for node in nodes):
        return False
    order = _order(nodes)
    section.items = [section.items[position] for position in order]
    return order != sorted(order)


def dependences(nodes: list[Node]) -> list[set[int]]:
    """For each node the positions of those it must follow."""
    written: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    queues: dict[str, int] = {}
    before: list[set[int]] = []
    edge = 0  # where the phase under way began
    for position, node in enumerate(nodes):
        needs = {written[t] for t in node.touches if t in written}
        for tensor in node.writes:
            needs.update(readers.pop(tensor, ()))
            written[tensor] = position
        for tensor in set(node.reads).difference(node.writes):
            readers.setdefault(tensor, []).append(position)
        if node.stream != COMPUTE:
            if node.stream in queues:
                needs.add(queues[node.stream])
            queues[node.stream] = position
        if position and node.phase != nodes[position - 1].phase:
            edge = position
        needs.update(range(edge))
        before.append(needs - {position})
    return before


def _order(nodes: list[Node]) -> list[int]:
    before = dependences(nodes)
    after: list[list[int]] = [[] for _ in nodes]
    for position, needs in enumerate(before):
        for need in needs:
            after[need].append(position)
    feeds = [False] * len(nodes)  # whether a communication waits for it
    for position in reversed(range(len(nodes))):
        feeds[position] = any(feeds[p] or _urgent(nodes[p]) for p in after[position])
    calls = [[p for p in needs if nodes[p].stream != COMPUTE] for needs in before]
    missing = [len(needs) for needs in before]
    newest: dict[str, int] = {}  # by stream: what was launched last, until somebody waits for it

    def rank(position: int) -> tuple[int, int]:
        if nodes[position].stream != COMPUTE:
            return 0, position
        waits = any(newest.get(nodes[call].stream) == call for call in calls[position])
        return 1 + 2 * waits + (not feeds[position]), position

    ready = [position for position, count in enumerate(missing) if not count]
    order = []
    while ready:
        position = min(ready, key=rank)
        ready.remove(position)
        order.append(position)
        if nodes[position].stream != COMPUTE:
            newest[nodes[position].stream] = position
        for call in calls[position]:
            if nodes[position].stream == COMPUTE and newest.get(nodes[call].stream) == call:
                del newest[nodes[call].stream]
        for follower in after[position]:
            missing[follower] -= 1
            if not missing[follower]:
                ready.append(follower)
    return order


def _urgent(node: Node) -> bool:
    return node.stream != COMPUTE and not node.stream.startswith("comm:dp")
