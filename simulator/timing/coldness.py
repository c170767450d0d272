"""How cold every stored node of a graph is, on average over its repetitions: its data, its code, Python around it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...datasets.devices import Device
from ...datasets.ops import KINDS
from ...datasets.reuse import USUAL, ReuseCurves
from ..graph import Graph
from .residency import CODE_BYTES, Reuse, cold_blocks, reuse_of

LEAST_WALKED = 2  # repetitions of a block
MIB_A_THREAD = 16.0  # of a last-level cache: a guest that is told of more shares it with threads that it does not see
FAR = 4.0  # times the cache's size: of what was touched so many bytes ago, 2 % is left in it


@dataclass(frozen=True)
class Coldness:
    """Shares of the way from warm to cold [nodes], of what data makes of it and of the ``code_us`` that code does.

    ``python_us`` is the Python of modelling code around each node. All but ``data`` is 0 where no curves were measured.
    """

    data: np.ndarray
    code: np.ndarray
    code_us: np.ndarray
    python_us: np.ndarray


def warm(count: int) -> Coldness:
    """That of so many nodes whose data and code are in the caches."""
    return Coldness(*np.zeros((4, count)))


def concatenate(parts: Sequence[Coldness]) -> Coldness:
    """Those of several graphs, one after the other."""
    names = ("data", "code", "code_us", "python_us")
    return Coldness(*(np.concatenate([np.zeros(0), *(getattr(piece, name) for piece in parts)]) for name in names))


def coldness_of(graph: Graph, device: Device) -> Coldness:
    """The coldness of every stored node.

    A block is walked as often as its traffic needs to push what it touched first out of the cache; the repetitions
    that are left out are like the middle one of those walked. Of a cache that a CPU claims, so much counts as its
    threads may have (:data:`MIB_A_THREAD`); curves measured in a larger one hold for as long as nobody else uses it.
    """
    own_mib = MIB_A_THREAD * device.compute_units if device.synchronous else math.inf
    claimed = device.l2_mib > own_mib
    cache_bytes = min(device.l2_mib, own_mib) * 2**20
    walked: list[int] = []
    places: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    first = 0
    for block in graph.blocks:
        count, traffic = len(block.nodes), sum(node.bytes_moved for node in block.nodes)
        run = min(block.repeat, max(LEAST_WALKED, math.ceil(FAR * cache_bytes / max(traffic, 1)) + 1))
        share = np.ones(run)
        share[run // 2] += block.repeat - run
        walked.append(run)
        places.append(np.tile(np.arange(first, first + count), run))
        weights.append(np.repeat(share / block.repeat, count))
        first += count
    if not first:
        return Coldness(*np.zeros((4, 0)))
    position, weight = np.concatenate(places), np.concatenate(weights)

    def mean(values: np.ndarray) -> np.ndarray:
        return np.bincount(position, weight * values, first)

    curves = device.curves
    code_bytes = CODE_BYTES if device.synchronous else 0
    if curves is None or not device.synchronous or claimed:
        counted = mean(cold_blocks(graph.blocks, walked, graph.tensor_bytes, cache_bytes, code_bytes))
    if curves is None or not device.synchronous:
        return Coldness(counted, *np.zeros((3, first)))
    families = np.array([family_of_node(node.op) for block in graph.blocks for node in block.nodes])
    reuse = reuse_of(graph.blocks, walked, graph.tensor_bytes)
    data, code = by_curves(reuse, families[position], curves)
    data_share = np.maximum(mean(data), counted) if claimed else mean(data)
    return Coldness(data_share, mean(code), np.full(first, curves.code_us), mean(curves.host(reuse.python)))


def family_of_node(op: object) -> str:
    """The family of curves of a node; the usual one for an operator without a kind."""
    return KINDS[op.kind].family if op is not None else USUAL  # type: ignore[attr-defined]


def by_curves(reuse: Reuse, families: np.ndarray, curves: ReuseCurves) -> tuple[np.ndarray, np.ndarray]:
    """Shares of data and of code of each execution [n], by its family's curves."""
    touches, code = np.zeros(len(reuse.at)), np.zeros(len(reuse.total))
    for family in np.unique(families):
        reused, mine = families[reuse.at] == family, families == family
        touches[reused] = curves.share("data", str(family), reuse.distance[reused])
        code[mine] = curves.share("code", str(family), reuse.code[mine])
    return reuse.mean(touches), code
