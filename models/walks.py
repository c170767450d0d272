"""From rows to leaves: two ways through a forest that give the same bits.

Few rows step down all trees at once, level by level (:class:`Steps`). Many rows are evaluated node by node, from the
leaves up (:class:`TreeProgram`): a feature becomes the number of its thresholds below it, mostly a byte; each node
then picks, for a whole block of rows at once, the leaf number of its left or right child. These are a handful of
byte-wide SIMD operations, so that the cost follows the number of nodes and not the depth, and no branch depends on
data. (Evaluating all nodes of a tree by bit masks instead of walking it: QuickScorer, Lucchese et al., SIGIR 2015.)
:mod:`.compiled` runs the program with numba; without numba, many rows are stepped as few are, a tenth as fast.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .compiled import TOGETHER, evaluate

STEPPED = 128 * 1024  # row-tree pairs stepped together: temporaries stay in cache


@dataclass(frozen=True, eq=False)
class Nodes:
    """What the bits of a pre-order imply. One entry a node: the right child (itself for a leaf), levels below the
    root, right siblings that wait while it is evaluated, and the number of a leaf in its tree; ``roots`` [trees + 1].
    """

    right: np.ndarray
    level: np.ndarray
    waiting: np.ndarray
    number: np.ndarray
    roots: np.ndarray

    @classmethod
    def of(cls, inner: np.ndarray) -> Nodes:
        step = np.where(inner, 1, -1)
        ends = np.cumsum(step)
        before = ends - step
        last = ends < np.minimum.accumulate(np.append(0, ends))[:-1]  # a tree is complete at each new minimum
        roots = np.append(0, np.flatnonzero(last) + 1)
        tree: np.ndarray = np.cumsum(last) - last
        right = np.arange(len(inner))
        right[inner] = _right_children(inner, before)
        leaves = np.cumsum(~inner) - ~inner
        return cls(right, _levels(inner, right, roots[:-1]), before + tree, leaves - leaves[roots[:-1]][tree], roots)


def _right_children(inner: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Nodes are brackets: a split opens one, a leaf closes the innermost that is open, and the right child follows the
    leaf that closes its parent. Brackets of one nesting alternate, so that sorting by nesting pairs them."""
    order = np.argsort(np.where(inner, before, before - 1).astype(np.int32), kind="stable")
    opens = np.flatnonzero(inner[order])
    right = np.empty(len(inner), dtype=np.int64)
    right[order[opens]] = order[opens + 1] + 1
    return right[inner]


def _levels(inner: np.ndarray, right: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    level = np.zeros(len(inner), dtype=np.int64)
    depth = 0
    while len(nodes := nodes[inner[nodes]]):
        depth += 1
        nodes = np.concatenate([nodes + 1, right[nodes]])
        level[nodes] = depth
    return level


@dataclass(frozen=True, eq=False)
class Steps:
    """One entry a node: ``child`` [2 nodes] left and right (a leaf is its own), feature, threshold, value."""

    child: np.ndarray
    feature: np.ndarray
    threshold: np.ndarray
    value: np.ndarray
    roots: np.ndarray
    depth: int

    @classmethod
    def of(cls, nodes: Nodes, inner: np.ndarray, feature: np.ndarray, threshold: np.ndarray, leaf: np.ndarray) -> Steps:
        here = np.arange(len(inner))
        child = np.stack([np.where(inner, here + 1, here), nodes.right], axis=1).ravel()
        features, thresholds = np.zeros(len(inner), np.int64), np.zeros(len(inner), np.float32)
        value = np.zeros(len(inner))
        features[inner], thresholds[inner], value[~inner] = feature, threshold, leaf
        return cls(child, features, thresholds, value, nodes.roots[:-1], int(nodes.level.max()))

    def predict(self, matrix: np.ndarray) -> np.ndarray:
        """float64 [n] for float32 [n, features]: all trees at once, level by level."""
        out = np.empty(len(matrix))
        rows = max(1, STEPPED // len(self.roots))
        for start in range(0, len(matrix), rows):
            block = np.ascontiguousarray(matrix[start : start + rows])
            flat, offset = block.ravel(), np.arange(len(block)) * block.shape[1]
            node = np.repeat(self.roots[:, None], len(block), axis=1)
            for _ in range(self.depth):
                above = flat.take(self.feature.take(node) + offset) > self.threshold.take(node)
                node = self.child.take(2 * node + above)
            # accumulate adds tree after tree, as the other ways do; sum would add in pairs and differ in the last bit
            out[start : start + rows] = np.add.accumulate(self.value.take(node), axis=0)[-1]
        return out


@dataclass(frozen=True, eq=False)
class TreeProgram:
    """Splits in pre-order, executed last to first: each reads two slots of leaf numbers and writes a third.

    ``code`` uint8 or uint16 [splits, 7]: feature (among ``used``), cut, then slot and leaf number of the left child, of
    the right child (the slot of a leaf is 0 and holds zeros, the number of a split is 0), and the slot written. A slot
    belongs to a count of waiting siblings and to even or odd levels, or to a root, which stays until the leaves of
    :data:`.compiled.TOGETHER` trees are added: what a split writes is never what it reads.
    ``first`` int64 [trees + 1]: where each tree's splits start; ``base``: its leaves; ``root`` its last slot.
    ``tables`` float32 [used, 2^b]: thresholds padded with infinity.
    """

    code: np.ndarray
    used: np.ndarray
    tables: np.ndarray
    first: np.ndarray
    base: np.ndarray
    root: np.ndarray
    leaf: np.ndarray
    slots: int

    @classmethod
    def of(
        cls,
        nodes: Nodes,
        inner: np.ndarray,
        feature: np.ndarray,
        cut: np.ndarray,
        leaf: np.ndarray,
        threshold: np.ndarray,
        starts: np.ndarray,
    ) -> TreeProgram:
        slot = np.where(inner, 1 + 2 * nodes.waiting + nodes.level % 2, 0)
        roots = nodes.roots[:-1]
        slot[roots] = np.where(inner[roots], slot.max() + 1 + np.arange(len(roots)) % TOGETHER, 0)
        number = np.where(inner, 0, nodes.number)
        left, right = np.flatnonzero(inner) + 1, nodes.right[inner]
        used = np.flatnonzero(np.diff(starts))
        column = np.searchsorted(used, feature)
        columns = (column, cut, slot[left], number[left], slot[right], number[right], slot[inner])
        tables = _tables(threshold, starts, used)
        largest = max(nodes.number.max(), slot.max(), column.max(initial=0), tables.shape[1] - 1)
        code = np.stack(columns, axis=1).astype(np.uint8 if largest < 256 else np.uint16)
        splits = np.append(0, np.cumsum(inner))
        return cls(
            code,
            used,
            tables,
            splits[nodes.roots],
            (nodes.roots - splits[nodes.roots])[:-1],
            slot[roots],
            leaf.astype(np.float64),
            int(slot.max()) + 1,
        )

    def compiled(self, matrix: np.ndarray) -> np.ndarray:
        """float64 [n] for float32 [n, features], by numba."""
        columns = matrix.T if matrix.flags.f_contiguous else np.ascontiguousarray(matrix.T)
        out = np.empty(len(matrix))
        evaluate()(
            columns, self.used, self.tables, self.code, self.first, self.base, self.root, self.leaf, self.slots, out
        )
        return out


def _tables(threshold: np.ndarray, starts: np.ndarray, used: np.ndarray) -> np.ndarray:
    longest = int(np.diff(starts).max(initial=0))
    tables = np.full((len(used), 1 << longest.bit_length()), np.inf, dtype=np.float32)
    for row, column in enumerate(used):
        thresholds = threshold[starts[column] : starts[column + 1]]
        tables[row, : len(thresholds)] = thresholds
    return tables
