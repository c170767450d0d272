"""Decision trees as flat numpy arrays: LightGBM boosters and scikit-learn forests alike, without either library.

All trees lie in one set of arrays. Nodes of a tree are laid out by levels and the two children of a node are
neighbours, so that one step down is ``node = left[node] + (x > threshold[node])``. A leaf is its own left child with
an infinite threshold: stepping from it stays, and every row takes the same number of steps without a branch.

Features are float32. ``x <= t`` for a float32 x and a double t is the same question as ``x <= t32`` with t32 the
largest float32 not above t, so thresholds are float32 as well and the answers equal the library's to the last bit.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import lightgbm
    import sklearn.ensemble

COMPILED_FROM = 2_000_000  # rows x trees from which loading numba (about a second, once) pays for itself
BLOCK = 2048  # row-tree pairs stepped together in numpy times 64: temporaries stay in cache


class ForestError(ValueError):
    """Trees that these arrays cannot hold, or arrays that are no trees."""


@dataclass(frozen=True, eq=False)
class Forest:
    """``trees`` trees over ``features`` columns. Prediction: sum of one leaf a tree, divided by ``divisor``.

    ``feature`` int32, ``threshold`` float32, ``left`` int32 (absolute index of the left child; the right one follows
    it), ``value`` float64 (of leaves): one entry a node. ``roots`` int32 [trees + 1]: where each tree starts;
    ``depths`` int32 [trees]: its levels below the root.
    """

    feature: np.ndarray
    threshold: np.ndarray
    left: np.ndarray
    value: np.ndarray
    roots: np.ndarray
    depths: np.ndarray
    features: int
    divisor: float = 1.0

    @property
    def trees(self) -> int:
        return len(self.roots) - 1

    def predict(self, matrix: np.ndarray, compiled: bool | None = None) -> np.ndarray:
        """float64 [n] for float32 [n, features].

        ``compiled`` forces numba on (True) or off (False); by default it is used for large batches where it is
        installed. Both walk the same arrays and add leaves in the same order: the same bits. ForestError when the
        matrix has another number of columns.
        """
        matrix = np.ascontiguousarray(matrix, dtype=np.float32)
        if matrix.ndim != 2 or matrix.shape[1] != self.features:
            raise ForestError(f"a forest over {self.features} features was given an array of shape {matrix.shape}")
        if not self.trees or not len(matrix):
            return np.zeros(len(matrix))
        if compiled is None:
            compiled = len(matrix) * self.trees >= COMPILED_FROM and importlib.util.find_spec("numba") is not None
        total = self._compiled(matrix) if compiled else self._stepped(matrix)
        return total / self.divisor

    def _compiled(self, matrix: np.ndarray) -> np.ndarray:
        return walk()(matrix, self.feature, self.threshold, self.left, self.value, self.roots, self.depths)

    def _stepped(self, matrix: np.ndarray) -> np.ndarray:
        """All trees at once, level by level."""
        out = np.empty(len(matrix))
        rows = max(1, BLOCK * 64 // self.trees)
        for start in range(0, len(matrix), rows):
            block = matrix[start : start + rows]
            flat, offset = block.ravel(), np.arange(len(block), dtype=np.int64) * self.features
            node = np.repeat(self.roots[:-1, None], len(block), axis=1)
            for _ in range(int(self.depths.max())):
                above = flat.take(self.feature.take(node) + offset) > self.threshold.take(node)
                node = self.left.take(node) + above
            # accumulate adds tree after tree, as the libraries do; sum would add in pairs and differ in the last bit
            out[start : start + rows] = np.add.accumulate(self.value.take(node), axis=0)[-1]
        return out

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything as plain arrays, ready for ``np.savez``."""
        return {
            "feature": self.feature,
            "threshold": self.threshold,
            "left": self.left,
            "value": self.value,
            "roots": self.roots,
            "depths": self.depths,
            "features": np.array(self.features),
            "divisor": np.array(self.divisor),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Forest:
        """The inverse of :meth:`arrays`; ForestError when an index points outside (walking would read wild memory)."""
        try:
            columns = {name: arrays[name] for name in ("feature", "threshold", "left", "value", "roots", "depths")}
            forest = cls(**columns, features=int(arrays["features"]), divisor=float(arrays["divisor"]))
        except (KeyError, ValueError, TypeError) as error:
            raise ForestError(f"not the arrays of a forest: {error}") from None
        forest._check()
        return forest

    def _check(self) -> None:
        nodes = len(self.feature)
        sizes = {len(self.threshold), len(self.left), len(self.value)}
        arrays = (self.feature, self.threshold, self.left, self.value, self.roots, self.depths)
        types = tuple(each.dtype for each in arrays)
        if types != (np.int32, np.float32, np.int32, np.float64, np.int32, np.int32) or sizes != {nodes}:
            raise ForestError("not the arrays of a forest: lengths or types differ")
        inner = self.left != np.arange(nodes)
        inside = (self.left >= 0) & (self.left + inner < nodes)
        if nodes and not (inside.all() and (self.feature >= 0).all() and (self.feature < self.features).all()):
            raise ForestError("not the arrays of a forest: a node points outside")
        starts = self.roots
        if starts[0] != 0 or starts[-1] != nodes or (np.diff(starts) <= 0).any() or len(self.depths) != self.trees:
            raise ForestError("not the arrays of a forest: trees do not fill them")


@dataclass
class _Trees:
    """Trees as a library keeps them, end to end: children by absolute index, leaves marked by ``left < 0``."""

    feature: np.ndarray
    threshold: np.ndarray
    left: np.ndarray
    right: np.ndarray
    value: np.ndarray
    roots: np.ndarray  # int64 [trees + 1]


def from_lightgbm(booster: lightgbm.Booster) -> Forest:
    """The trees of a LightGBM booster. ForestError for what these arrays lack: categorical splits, missing values.

    Read from the text format, which is many times quicker than the JSON dump and exact (17 digits).
    """
    head, _, text = booster.model_to_string().partition("\nTree=")
    leaves = _numbers(text, "num_leaves", np.int64)
    decisions = _numbers(text, "decision_type", np.int64)
    if _numbers(text, "is_linear", np.int64).any() or (decisions & 0b1101).any():  # categorical, missing: zero or NaN
        raise ForestError("a forest holds numeric splits without missing values only")
    features = int(_numbers(head, "max_feature_idx", np.int64)[0]) + 1
    divisor = float(len(leaves)) if "\naverage_output" in head else 1.0
    return _pack(_lightgbm_trees(text, leaves), features, divisor)


def from_sklearn(model: sklearn.ensemble.RandomForestRegressor) -> Forest:
    """The trees of a scikit-learn random forest (or extra trees) with one output."""
    trees = [estimator.tree_ for estimator in model.estimators_]
    if any(tree.value.shape[1:] != (1, 1) for tree in trees):
        raise ForestError("a forest holds one output")
    roots = np.concatenate([[0], np.cumsum([tree.node_count for tree in trees])])
    left, right = (
        np.concatenate(
            [
                np.where(getattr(tree, side) < 0, -1, getattr(tree, side) + start)
                for tree, start in zip(trees, roots[:-1], strict=True)
            ]
        )
        for side in ("children_left", "children_right")
    )
    feature, threshold = (np.concatenate([getattr(tree, name) for tree in trees]) for name in ("feature", "threshold"))
    value = np.concatenate([tree.value[:, 0, 0] for tree in trees])
    return _pack(_Trees(feature, threshold, left, right, value, roots), model.n_features_in_, float(len(trees)))


def empty(features: int) -> Forest:
    """A forest without trees: zero everywhere."""
    none, whole = np.zeros(0), np.zeros(0, dtype=np.int64)
    return _pack(_Trees(whole, none, whole, whole, none, np.zeros(1, dtype=np.int64)), features, 1.0)


def _numbers(text: str, name: str, kind: type) -> np.ndarray:
    """The values of every ``name=…`` line of LightGBM's text format, end to end."""
    return np.array(" ".join(re.findall(rf"^{name}=(.*)$", text, re.MULTILINE)).split(), dtype=kind)


def _lightgbm_trees(text: str, leaves: np.ndarray) -> _Trees:
    """Each tree as its inner nodes, as LightGBM numbers them, then its leaves, which it counts down from -1."""
    sizes = 2 * leaves - 1
    roots = np.concatenate([[0], np.cumsum(sizes)])
    tree = np.repeat(np.arange(len(leaves)), sizes)
    leaf = np.arange(roots[-1]) - roots[tree] >= leaves[tree] - 1
    start, inner = roots[tree][~leaf], leaves[tree][~leaf] - 1
    whole, real = np.zeros(roots[-1], np.int64), np.zeros(roots[-1])
    out = _Trees(whole, real, whole.copy(), whole.copy(), real.copy(), roots)
    out.feature[~leaf] = _numbers(text, "split_feature", np.int64)
    out.threshold[~leaf] = _numbers(text, "threshold", np.float64)
    out.value[leaf] = _numbers(text, "leaf_value", np.float64)
    for side, name in ((out.left, "left_child"), (out.right, "right_child")):
        child = _numbers(text, name, np.int64)
        side[~leaf] = start + np.where(child < 0, inner + ~child, child)
        side[leaf] = -1
    return out


def _pack(trees: _Trees, features: int, divisor: float) -> Forest:
    """The same trees by levels, siblings side by side, leaves as their own children."""
    old, depths = _by_levels(trees)
    new = np.empty_like(old)
    new[old] = np.arange(len(old))
    leaf = trees.left[old] < 0
    left = np.where(leaf, np.arange(len(old)), new[trees.left[old]])
    return Forest(
        np.where(leaf, 0, trees.feature[old]).astype(np.int32),
        np.where(leaf, np.float32(np.inf), _float32_below(trees.threshold[old])).astype(np.float32),
        left.astype(np.int32),
        np.where(leaf, trees.value[old], 0.0).astype(np.float64),
        trees.roots.astype(np.int32),
        depths.astype(np.int32),
        features,
        divisor,
    )


def _by_levels(trees: _Trees) -> tuple[np.ndarray, np.ndarray]:
    """Nodes tree by tree, each level by level with siblings side by side; and the levels below each root."""
    level, owner = trees.roots[:-1], np.arange(len(trees.roots) - 1)
    order, owners = [level], [owner]
    depths = np.zeros(len(owner), dtype=np.int64)
    while (inner := trees.left[level] >= 0).any():
        owner = np.repeat(owner[inner], 2)
        level = np.stack([trees.left[level[inner]], trees.right[level[inner]]], axis=1).ravel()
        order.append(level)
        owners.append(owner)
        depths[owner] = len(order) - 1
    nodes = np.concatenate(order)
    return nodes[np.argsort(np.concatenate(owners), kind="stable")], depths


def _float32_below(values: np.ndarray) -> np.ndarray:
    """The largest float32 not above each double."""
    with np.errstate(over="ignore"):
        near = values.astype(np.float32)
    above = near.astype(np.float64) > values
    return np.where(above, np.nextafter(near, np.float32(-np.inf)), near)


@lru_cache(maxsize=1)
def walk() -> Callable[..., np.ndarray]:
    """The compiled walk, cached on disk where the package's folder or the user's cache can be written."""
    import numba

    try:
        return numba.njit(_SIGNATURE, cache=True, nogil=True)(_walk)
    except RuntimeError:  # no folder for the cache
        return numba.njit(_SIGNATURE, nogil=True)(_walk)


_SIGNATURE = "float64[::1](float32[:,::1],int32[::1],float32[::1],int32[::1],float64[::1],int32[::1],int32[::1])"


def _walk(
    matrix: np.ndarray,
    feature: np.ndarray,
    threshold: np.ndarray,
    left: np.ndarray,
    value: np.ndarray,
    roots: np.ndarray,
    depths: np.ndarray,
) -> np.ndarray:
    """Sum of leaves for each row. 64 rows step together, so that their loads overlap; the block is column-major."""
    rows, columns = matrix.shape
    out = np.zeros(rows)
    node = np.empty(64, np.int32)
    block = np.zeros((columns, 64), np.float32)
    for start in range(0, rows, 64):
        count = min(64, rows - start)
        for row in range(count):
            for column in range(columns):
                block[column, row] = matrix[start + row, column]
        for tree in range(roots.shape[0] - 1):
            for row in range(count):
                node[row] = roots[tree]
            for _ in range(depths[tree]):
                for row in range(count):
                    here = node[row]
                    node[row] = left[here] + np.int32(block[feature[here], row] > threshold[here])
            for row in range(count):
                out[start + row] += value[node[row]]
    return out
