"""Which ranks run a case of a collective, and the link that they cross: those of one node, or some of each of several.

A *node* is a machine, or all machines of one NVLink domain (NVL72). An *island* is a set of GPUs that NVLinks (on AMD
xGMI) join, directly or through others of the set: the eight of an HGX board, or the two of a bridge.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..datasets.ops import KINDS, LINKS
from .plan import CampaignPlan, Case

FABRICS = ("ib", "roce")  # the links that lie between nodes
DEEP_EP = "deep_ep"
DEEP_EP_NODE = 8  # ranks of a node that DeepEP takes for granted, where there are several nodes


@dataclass(frozen=True)
class RankMap:
    """Node and island of every rank, in order of the ranks, and the links inside a node and between nodes.

    ``inside`` is "" where the islands decide: ``nvlink`` on one, ``pcie`` between them.
    """

    nodes: tuple[int, ...]
    islands: tuple[int, ...]
    inside: str = ""
    between: str = "roce"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RankMap:
        """From :meth:`to_dict`."""
        return cls(tuple(values["nodes"]), tuple(values["islands"]), values["inside"], values["between"])

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    def link(self, members: Sequence[int]) -> str:
        """The slowest link that these ranks cross."""
        if len({self.nodes[rank] for rank in members}) > 1:
            return self.between
        return self.inside or ("nvlink" if len({self.islands[rank] for rank in members}) == 1 else "pcie")

    def members(self, ranks: int, per_node: int) -> tuple[int, ...]:
        """The ranks of a group with ``per_node`` on each node, rank 0 among them; none where there are not so many."""
        here = min(per_node, ranks)
        by_node: dict[int, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            by_node.setdefault(node, []).append(rank)
        full = [node_ranks[:here] for node_ranks in by_node.values() if len(node_ranks) >= here][: ranks // here]
        chosen = sorted(rank for node_ranks in full for rank in node_ranks)
        return tuple(chosen) if len(chosen) == ranks and chosen[0] == 0 else ()

    def spreads(self, ranks: int) -> list[int]:
        """Ranks per node of the ways in which a group is measured: on one node, on several as dense as it goes, and
        with one on each."""
        across = [
            per_node for per_node in range(ranks - 1, 0, -1) if ranks % per_node == 0 and self.members(ranks, per_node)
        ]
        chosen_spreads = dict.fromkeys([*across[:1], *(per_node for per_node in across[-1:] if per_node == 1)])
        return [*([ranks] if self.members(ranks, ranks) else []), *chosen_spreads]


def islands(ranks: int, joined: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """The island of each rank, by the lowest rank on it, where these pairs of ranks have NVLinks between them."""
    lowest = list(range(ranks))
    for first, second in joined:
        one, other = sorted((lowest[first], lowest[second]))
        lowest = [one if label == other else label for label in lowest]
    return tuple(lowest)


def number_names(names: Sequence[Hashable]) -> tuple[int, ...]:
    """Names as numbers, in the order in which they come up."""
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(order[name] for name in names)


def localize(case: Case, ranks: RankMap) -> tuple[Case, ...]:
    """A planned collective in each of the ways in which it can lie on these ranks; other cases as they are."""
    if not KINDS[case.op.kind].collective:
        return (case,)
    op = case.op
    spreads = ranks.spreads(op.ranks)
    if case.backend.startswith(DEEP_EP):
        spreads = [spread for spread in spreads if spread == min(op.ranks, DEEP_EP_NODE)]
    links = {spread: LINKS.index(ranks.link(ranks.members(op.ranks, spread))) for spread in spreads}
    return tuple(replace(case, op=op.replace(link=links[spread], ranks_per_node=spread)) for spread in spreads)


def localize_plan(plan: CampaignPlan, environment: Mapping[str, Any]) -> CampaignPlan:
    """The plan with its collectives as they can lie on the ranks that are here, each with the link that it crosses.

    Those of more ranks than there are are left out, unless that leaves nothing. Cases of DeepEP are put in the order of
    their groups: a group's memory is made anew whenever the group changes.
    """
    if plan.settings.link == "planned" or not environment.get("rank_map"):
        return plan
    ranks = RankMap.from_dict(environment["rank_map"])
    cases = tuple(dict.fromkeys(here for case in plan.cases for here in localize(case, ranks)))
    canaries = tuple(here for case in plan.canaries for here in localize(case, ranks)[:1])
    return replace(plan, cases=_by_group(cases or plan.cases), canaries=canaries)


def _by_group(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """The cases with those of DeepEP, on the places that these have, in the order of what they share memory for."""
    group_order = iter(sorted((case for case in cases if case.backend.startswith(DEEP_EP)), key=_group))
    return tuple(next(group_order) if case.backend.startswith(DEEP_EP) else case for case in cases)


def _group(case: Case) -> tuple[Any, ...]:
    op = case.op
    return case.backend, op.ranks, op.ranks_per_node, op.mode, op.hidden, op.experts, op.dtype
