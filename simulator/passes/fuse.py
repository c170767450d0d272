"""Fusion: the kernels that a framework runs in place of eager operators, by match-and-replace rules.

``plan.stack.fusion`` names rules of :mod:`.fusion.rules`, or functions of the user's own (``module:function``,
returning a :class:`.fusion.patterns.Rule` or several). A rule's patterns find nodes by dataflow within a section; they
are replaced by one node that reads what they read from outside and writes what others read. Between forward and
backward a fused kernel keeps its inputs and small statistics instead of intermediates, as hand-written kernels do;
memory follows, because every tensor is let go of after its last use (:mod:`.rewriting.lifetimes`).

A match is left alone where the kernel would move more bytes than its nodes do, or could stand nowhere in their order.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ...datasets.ops import Op
from ..graph import CACHE, Graph, HostCalls, Node
from ..question.plan import Plan
from .fusion.patterns import Match, Pattern, Rule, matches_path, name_of
from .fusion.remake import Fused, remake
from .fusion.rules import rules_named
from .rewriting.draft import Draft, Item, Section
from .rewriting.lifetimes import free_after_last_use, freed_tensors, read_counts
from .rewriting.match import drop


class Fusing:
    """A draft with what fusion must know of it: who is read how often, what the step lets go of, what was fused."""

    def __init__(self, draft: Draft) -> None:
        self.draft, self.released = draft, freed_tensors(draft)
        self.cached = draft.roles == CACHE  # keys and values between steps: whoever keeps them moves them
        self.makers = {t: item.node.path for _, item in draft.walk() for t in item.node.writes}
        self.fused: list[Fused] = []
        self.recount()

    def recount(self) -> None:
        """Count readers anew, after a change that was not noted."""
        self.reads = read_counts(self.draft)
        self.ahead = read_counts(self.draft, "forward")

    def count(self, section: Section, node: Node, change: int) -> None:
        """Note that a node of a section came (1) or went (-1)."""
        for tensor in dict.fromkeys(node.reads):
            ids, times = section.span(tensor), 1 if section.steps.get(tensor, 0) else section.repeat
            self.reads[ids] += change * times
            if node.phase == "forward":
                self.ahead[ids] += change * times

    def only_within(self, section: Section, tensor: int, members: Sequence[Node], phase: str = "") -> bool:
        """Whether nobody but ``members`` reads a tensor of theirs (in a phase, or at all), and it dies."""
        ids = section.span(tensor)
        count = sum(tensor in node.reads for node in members) * (1 if section.steps.get(tensor, 0) else section.repeat)
        counts = self.ahead if phase == "forward" else self.reads
        return bool(np.all(counts[ids] == count) and np.all(self.released[ids]))


def fuse(graph: Graph, plan: Plan) -> Graph:
    """The graph with the kernels of ``plan.stack.fusion``; PlanError names a rule that does not exist."""
    rules = rules_named(plan.stack.fusion)
    if not rules:
        return graph
    state = Fusing(Draft(graph))
    changed = False
    for rule in rules:
        if rule.rewrite is not None and rule.rewrite(state.draft, state.released):
            changed = True
            state.recount()
        for pattern in rule.patterns:
            for section in state.draft.sections:
                changed |= _apply(state, section, rule, pattern)
    if not changed:
        return graph
    remake(state.draft, state.fused)
    state.recount()
    for kernel in state.fused:
        _settle(state, kernel)
    for kernel in state.fused:
        if kernel.pattern.in_place:
            _overwrite(state.draft, state.released, kernel)
    free_after_last_use(state.draft, state.released)
    return state.draft.graph()


def _apply(state: Fusing, section: Section, rule: Rule, pattern: Pattern) -> bool:
    """Replace every match of a pattern in a section."""
    groups = list(_groups(state, section, pattern))
    replaced = [_replace(state, section, rule, pattern, members) for members in groups]
    drop(section, [item for item in section.items if not item.node.source])
    return any(replaced)


# --- finding -------------------------------------------------------------------------------------------


def _groups(state: Fusing, section: Section, pattern: Pattern) -> Iterator[list[int]]:
    """Members that belong together, each group in order of execution."""
    accepted = [
        position
        for position, item in enumerate(section.items)
        if item.node.phase == pattern.phase
        and name_of(item.node) in pattern.members
        and matches_path(pattern.path, item.node.path)
        and matches_path(pattern.within, item.node.path)
        and not any(state.cached[t] for t in item.node.touches)
    ]
    names = {name_of(section.items[position].node) for position in accepted}
    if not names.issuperset(pattern.needs):
        return
    for positions in (_grow_groups if pattern.grow else _connected_groups)(state, section, accepted, pattern):
        members = positions if pattern.updates else _without_updates(section, positions)
        nodes = [section.items[position].node for position in members]
        if nodes and {name_of(n) for n in nodes}.issuperset(pattern.needs) and _source_fits(state, nodes, pattern):
            yield members


def _connected_groups(_: Fusing, section: Section, accepted: Sequence[int], pattern: Pattern) -> list[list[int]]:
    """Accepted positions in connected components."""
    parent = {position: position for position in accepted}

    def root(position: int) -> int:
        while parent[position] != position:
            position = parent[position]
        return position

    meeting: dict[object, int] = {}
    for position in accepted:
        node = section.items[position].node
        for tensor in node.touches:
            key = (tensor, node.path if pattern.module else "")
            if key in meeting:
                parent[root(position)] = root(meeting[key])
            elif tensor in node.writes or pattern.siblings:
                meeting[key] = position
    groups: dict[int, list[int]] = {}
    for position in accepted:
        groups.setdefault(root(position), []).append(position)
    return list(groups.values())


def _grow_groups(state: Fusing, section: Section, accepted: Sequence[int], pattern: Pattern) -> list[list[int]]:
    """Accepted positions in groups that grow along the order of execution, as long as one kernel can stand for all."""
    groups: list[list[int]] = []
    left_out: set[int] = set()
    meeting: dict[object, int] = {}  # by tensor: the group that last wrote it, or, between siblings, read it
    for position in accepted:
        node = section.items[position].node
        module = node.path if pattern.module else ""
        if pattern.first is not None and not pattern.first(state.draft, node):
            begun = any((t, module) in meeting for t in node.reads)
            if not begun or not left_out.isdisjoint(node.reads):
                left_out.update(node.writes)
                continue
        near = {meeting[t, module] for t in node.touches if (t, module) in meeting}
        newest = sorted(near, reverse=True)
        for choice in [newest, *([n] for n in newest), []]:
            together = sorted([*(p for n in choice for p in groups[n]), position])
            if not choice or _kernel_position(section, together) is not None:
                break
        for n in choice:
            groups[n] = []
        groups.append(together)
        for p in together:
            member = section.items[p].node
            for tensor in (*member.writes, *(member.reads if pattern.siblings else ())):
                meeting[tensor, module] = len(groups) - 1
    return [group for group in groups if group]


def _without_updates(section: Section, positions: list[int]) -> list[int]:
    """Without nodes that update what somebody else made: they belong to whoever made it."""
    while True:
        written: set[int] = set()
        members = []
        for position in positions:
            node = section.items[position].node
            if written.issuperset(set(node.reads) & set(node.writes)):
                members.append(position)
                written.update(node.writes)
        if len(members) == len(positions):
            return members
        positions = members


def _source_fits(state: Fusing, nodes: Sequence[Node], pattern: Pattern) -> bool:
    if not pattern.reads:
        return True
    return any(matches_path(pattern.reads, state.makers.get(t, "\n")) for node in nodes for t in node.reads)


# --- replacing -----------------------------------------------------------------------------------------


def _replace(state: Fusing, section: Section, rule: Rule, pattern: Pattern, positions: list[int]) -> bool:
    """Put one kernel in the place of a group; False where that cannot be."""
    item_of_kernel = _kernel_position(section, positions) if len(positions) > 1 else None
    if item_of_kernel is None:
        return False
    members = [section.items[position] for position in positions]
    nodes = tuple(item.node for item in members)
    written = list(dict.fromkeys(t for node in nodes for t in node.writes))
    outputs = tuple(t for t in written if not state.only_within(section, t, nodes))
    inputs = tuple(_external(nodes))
    results = tuple(t for t in outputs if not state.only_within(section, t, nodes, pattern.phase))
    match = Match(state.draft, section, nodes, inputs, outputs, results or outputs)
    op = pattern.kernel(match) if inputs and outputs else None
    if op is None or int(op.cost.bytes) > sum(node.bytes_moved for node in nodes):
        return False
    node = _kernel(op, rule, match)
    for item in members:
        state.count(section, item.node, -1)
        item.change(source="")
    item_of_kernel.node = node
    state.count(section, node, 1)
    state.fused = [kernel for kernel in state.fused if all(kernel.item is not item for item in members)]
    state.fused.append(Fused(section, item_of_kernel, match, pattern, rule.remakes))
    if rule.lets_go and pattern.phase == "forward":
        _release_inputs(state, section, match)
    return True


def _external(nodes: Sequence[Node]) -> list[int]:
    """Tensors that a node reads before one of them wrote it."""
    written: set[int] = set()
    outside: dict[int, None] = {}
    for node in nodes:
        outside.update((t, None) for t in node.reads if t not in written)
        written.update(node.writes)
    return list(outside)


def _kernel_position(section: Section, positions: Sequence[int]) -> Item | None:
    """The member where one kernel for all can stand: the last, or the first, whichever keeps every dependence."""
    items, inside = section.items, set(positions)
    late = early = True
    read_before: set[int] = set()
    written_before: set[int] = set()
    reads_after = Counter(t for position in positions for t in items[position].node.reads)
    writes_after = Counter(t for position in positions for t in items[position].node.writes)
    for position in range(positions[0], positions[-1]):
        node = items[position].node
        if position in inside:
            read_before.update(node.reads)
            written_before.update(node.writes)
            reads_after.subtract(node.reads)
            writes_after.subtract(node.writes)
            continue
        touched = node.touches
        late = late and written_before.isdisjoint(touched) and read_before.isdisjoint(node.writes)
        early = early and not any(writes_after[t] > 0 and t not in written_before for t in touched)
        early = early and not any(reads_after[t] > 0 for t in node.writes)
        if not (late or early):
            return None
    return items[positions[-1] if late else positions[0]]


def _settle(state: Fusing, kernel: Fused) -> None:
    """Size the kernel by what it now reads and writes; what nobody reads any more, it does not write."""
    section, node = kernel.section, kernel.item.node
    kernel.item.change(writes=tuple(t for t in node.writes if not state.only_within(section, t, ())))
    node = kernel.item.node
    results = tuple(t for t in kernel.match.results if t in node.writes) or node.writes
    match = replace(kernel.match, inputs=node.reads, outputs=node.writes, results=results)
    op = kernel.pattern.kernel(match) if node.reads and node.writes else None
    if op is not None and int(op.cost.bytes) <= node.bytes_moved:
        kernel.item.compute(op)


def _kernel(op: Op, rule: Rule, match: Match) -> Node:
    nodes, path = match.nodes, _common_module([node.path for node in match.nodes])
    host = HostCalls(modules=sum(n.host.modules for n in nodes), autograd=int(any(n.host.autograd for n in nodes)))
    one = replace(nodes[0], op=op, bytes_moved=int(op.cost.bytes), frees=(), host=host)
    return replace(one, source=f"fused.{rule.name}", path=path, reads=match.inputs, writes=match.outputs)


def _common_module(paths: Sequence[str]) -> str:
    """The innermost module that all paths lie in."""
    return os.path.commonpath([path.replace(".", "/") or "." for path in paths]).replace("/", ".").strip(".")


def _release_inputs(state: Fusing, section: Section, match: Match) -> None:
    """Free the kernel's largest input, and what in the section is as long (it in another dtype)."""
    elements = match.elements(match.largest(match.inputs))
    for tensor in {t for item in section.items for t in item.node.writes if match.elements(t) == elements}:
        state.released[section.ids(tensor)] = True


def _overwrite(draft: Draft, released: np.ndarray, kernel: Fused) -> None:
    """Let a kernel's largest result take over the storage of an input of its size and dtype."""
    node, section = kernel.item.node, kernel.section
    result = max(node.writes, key=lambda t: int(draft.sizes[t]))
    alike = [t for t in node.reads if draft.sizes[t] == draft.sizes[result] and draft.dtype(t) == draft.dtype(result)]
    if section.repeat > 1 or not alike or not released[result]:
        return
    for item in section.items:
        item.touch_instead({result: alike[0]})
