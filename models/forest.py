"""Decision trees as flat numpy arrays: LightGBM boosters and scikit-learn forests alike, without either library.

All trees lie in one set of arrays. Nodes of a tree are laid out by levels and the two children of a node are
neighbours, so that one step down is ``node = left[node] + (x > threshold[node])``. A leaf is its own left child with
an infinite threshold: stepping from it stays, and every row takes the same number of steps without a branch.

Features are float32. ``x <= t`` for a float32 x and a double t is the same question as ``x <= t32`` with t32 the
largest float32 not above t, so thresholds are float32 as well and the answers equal the library's to the last bit.
"""

from __future__ import annotations

import importlib.util
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
class _Tree:
    """One tree as a library keeps it: children by index, leaves marked by ``left < 0``."""

    feature: np.ndarray
    threshold: np.ndarray
    left: np.ndarray
    right: np.ndarray
    value: np.ndarray


def from_lightgbm(booster: lightgbm.Booster) -> Forest:
    """The trees of a LightGBM booster. ForestError for what these arrays lack: categorical splits, missing values.

    Read from the text format, which is many times quicker than the JSON dump and exact (17 digits).
    """
    head, *sections = booster.model_to_string().split("\nTree=")
    trees = [_lightgbm_tree(_fields(section.partition("\n\n")[0])) for section in sections]
    divisor = float(len(trees)) if "\naverage_output" in head else 1.0
    return _pack(trees, int(_fields(head)["max_feature_idx"]) + 1, divisor)


def from_sklearn(model: sklearn.ensemble.RandomForestRegressor) -> Forest:
    """The trees of a scikit-learn random forest (or extra trees) with one output."""
    trees = []
    for estimator in model.estimators_:
        tree = estimator.tree_
        if tree.value.shape[1:] != (1, 1):
            raise ForestError("a forest holds one output")
        trees.append(_Tree(tree.feature, tree.threshold, tree.children_left, tree.children_right, tree.value[:, 0, 0]))
    return _pack(trees, model.n_features_in_, float(len(trees)))


def empty(features: int) -> Forest:
    """A forest without trees: zero everywhere."""
    return _pack([], features, 1.0)


def _fields(text: str) -> dict[str, str]:
    """The ``name=value`` lines of a section of LightGBM's text format."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def _lightgbm_tree(fields: Mapping[str, str]) -> _Tree:
    """Inner nodes as LightGBM numbers them, then the leaves, which it counts down from -1."""

    def numbers(name: str, kind: type) -> np.ndarray:
        return np.array(fields.get(name, "").split(), dtype=kind)

    decisions, values = numbers("decision_type", np.int64), numbers("leaf_value", np.float64)
    if fields.get("is_linear", "0") != "0" or (decisions & 0b1101).any():  # categorical, or missing as zero or NaN
        raise ForestError("a forest holds numeric splits without missing values only")
    inner, leaves = len(decisions), len(values)
    children = [numbers(name, np.int64) for name in ("left_child", "right_child")]
    left, right = (np.where(each < 0, inner + ~each, each) for each in children)
    none = np.full(leaves, -1)
    return _Tree(
        np.concatenate([numbers("split_feature", np.int64), np.zeros(leaves, np.int64)]),
        np.concatenate([numbers("threshold", np.float64), np.zeros(leaves)]),
        np.concatenate([left, none]),
        np.concatenate([right, none]),
        np.concatenate([np.zeros(inner), values]),
    )


def _pack(trees: list[_Tree], features: int, divisor: float) -> Forest:
    parts = []
    roots, depths = [0], []
    for tree in trees:
        part, levels = _by_levels(tree, roots[-1])
        parts.append(part)
        depths.append(levels)
        roots.append(roots[-1] + len(tree.left))
    columns = [np.concatenate(each) for each in zip(*parts, strict=True)] if parts else [np.zeros(0)] * 4
    feature, threshold, left, value = columns
    return Forest(
        feature.astype(np.int32),
        threshold.astype(np.float32),
        left.astype(np.int32),
        value.astype(np.float64),
        np.array(roots, dtype=np.int32),
        np.array(depths, dtype=np.int32),
        features,
        divisor,
    )


def _by_levels(tree: _Tree, start: int) -> tuple[tuple[np.ndarray, ...], int]:
    """A tree's arrays with siblings side by side from index ``start`` on, and its number of levels below the root."""
    order, levels, level = [np.array([0])], 0, np.array([0])
    while (inner := level[tree.left[level] >= 0]).size:
        level = np.stack([tree.left[inner], tree.right[inner]], axis=1).ravel()
        order.append(level)
        levels += 1
    old = np.concatenate(order)
    new = np.empty(len(old), dtype=np.int64)
    new[old] = np.arange(len(old)) + start
    leaf = tree.left[old] < 0
    left = np.where(leaf, np.arange(len(old)) + start, new[tree.left[old]])
    threshold = np.where(leaf, np.float32(np.inf), _float32_below(tree.threshold[old]))
    value = np.where(leaf, tree.value[old], 0.0)
    return (np.where(leaf, 0, tree.feature[old]), threshold, left, value), levels


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
