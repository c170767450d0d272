"""Decision trees as a few small arrays that are quick to walk: no ML library, exact, some 60 kB for 300 trees.

A forest is one sequence of nodes, tree after tree, each in pre-order: a bit a node says whether it splits. A split is
a feature and the place of its threshold in that feature's sorted table; leaves are float16. Children need no pointers:
the left one follows its parent, the right one follows the left one's subtree.

Features are float32. ``x <= t`` for a float32 x and a double t is the same question as ``x <= t32`` with t32 the
largest float32 not above t, so thresholds lose nothing. A leaf loses at most 2^-11 of its value: for the 300 leaves
of a boosted correction, about 0.01 % of a latency.

How rows are walked, two ways to the same bits, is in :mod:`.walks`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .compiled import evaluate, loaded
from .walks import Nodes, Steps, TreeProgram

COMPILED_FROM = 2_000_000_000  # rows x splits from which loading numba (about a second, once) pays for itself
COMPILED_ROWS = 512  # from which it is used once loaded
ARRAYS = ("splits", "feature", "cut", "leaf", "threshold", "starts")


class ForestError(ValueError):
    """Trees that these arrays cannot hold, or arrays that are no trees."""


@dataclass(frozen=True, eq=False)
class Forest:
    """The sum of one leaf a tree. With s splits, l leaves and t distinct thresholds over all features:

    ``inner`` bool [s + l]: which nodes split, in pre-order, tree after tree. ``feature`` uint8 or uint16 [s]: of each
    split. ``cut`` uint8 or uint16 [s]: its threshold in the feature's table; a row goes right where its value is above.
    ``leaf`` float16 [l]. ``threshold`` float32 [t]: the tables end to end, each ascending. ``starts`` int32
    [features + 1]: where each table begins.
    """

    inner: np.ndarray
    feature: np.ndarray
    cut: np.ndarray
    leaf: np.ndarray
    threshold: np.ndarray
    starts: np.ndarray

    @property
    def trees(self) -> int:
        return len(self.leaf) - len(self.feature)

    @property
    def features(self) -> int:
        return len(self.starts) - 1

    def predict(self, matrix: np.ndarray, compiled: bool | None = None) -> np.ndarray:
        """float64 [n] for float32 [n, features].

        ``compiled`` forces numba on (True) or off (False); by default it is used where it is loaded
        (:meth:`expect`). Both ways add the same leaves in the same order. ForestError when the matrix has another
        number of columns.
        """
        if matrix.ndim != 2 or matrix.shape[1] != self.features:
            raise ForestError(f"a forest over {self.features} features was given an array of shape {matrix.shape}")
        matrix = matrix.astype(np.float32, copy=False)
        if not self.trees or not len(matrix):
            return np.zeros(len(matrix))
        if compiled is None:
            self.expect(len(matrix))
            compiled = len(matrix) >= COMPILED_ROWS and loaded()
        return self._program.compiled(matrix) if compiled else self._steps.predict(matrix)

    def expect(self, rows: int) -> None:
        """Load the compiled walk when numba is installed and so many rows repay the second that this takes."""
        if rows * len(self.feature) >= COMPILED_FROM:
            compile_walks()

    @property
    def split_threshold(self) -> np.ndarray:
        """float32 [s]: the threshold of each split."""
        return self.threshold[self.starts[self.feature] + self.cut]

    @cached_property
    def _nodes(self) -> Nodes:
        return Nodes.of(self.inner)

    @cached_property
    def _steps(self) -> Steps:
        return Steps.of(self._nodes, self.inner, self.feature, self.split_threshold, self.leaf)

    @cached_property
    def _program(self) -> TreeProgram:
        return TreeProgram.of(self._nodes, self.inner, self.feature, self.cut, self.leaf, self.threshold, self.starts)

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything as plain arrays, ready for ``np.savez``."""
        return {name: getattr(self, name) for name in ARRAYS[1:]} | {"splits": np.packbits(self.inner)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Forest:
        """The inverse of :meth:`arrays`; ForestError when an index points outside (walking would read wild memory)."""
        try:
            splits, *others = (np.asarray(arrays[name]) for name in ARRAYS)
            count = len(others[0]) + len(others[2])
            forest = cls(np.unpackbits(splits, count=count).astype(bool), *others)
        except (KeyError, ValueError, TypeError) as error:
            raise ForestError(f"not the arrays of a forest: {error}") from None
        forest._check(len(splits))
        return forest

    def _check(self, packed: int) -> None:
        codes = ("uint8", "uint16")
        kinds = [codes, codes, ("float16",), ("float32",), ("int32",)]
        arrays = (self.feature, self.cut, self.leaf, self.threshold, self.starts)
        if any(array.ndim != 1 or array.dtype.name not in kind for array, kind in zip(arrays, kinds, strict=True)):
            raise ForestError("not the arrays of a forest: types differ")
        tables = np.diff(self.starts)
        if packed != -(-len(self.inner) // 8) or len(self.cut) != len(self.feature) or not len(self.starts):
            raise ForestError("not the arrays of a forest: lengths differ")
        if self.starts[0] != 0 or self.starts[-1] != len(self.threshold) or (tables < 0).any():
            raise ForestError("not the arrays of a forest: tables do not fill the thresholds")
        if (self.feature >= self.features).any() or (self.cut >= tables[self.feature]).any():
            raise ForestError("not the arrays of a forest: a split points outside")
        same = np.repeat(np.arange(self.features), tables)
        rising = (np.diff(self.threshold) > 0) | (np.diff(same) > 0)
        if not rising.all() or not np.isfinite(self.threshold).all() or not np.isfinite(self.leaf).all():
            raise ForestError("not the arrays of a forest: values are not finite and ascending")
        open_ends = np.cumsum(np.where(self.inner, 1, -1))
        if len(open_ends) and (self.inner.sum() != len(self.feature) or open_ends.argmin() != len(open_ends) - 1):
            raise ForestError("not the arrays of a forest: trees do not fill them")


def compile_walks() -> None:
    """Load the compiled walk where numba is installed: about a second, once."""
    if not loaded() and importlib.util.find_spec("numba") is not None:
        evaluate()


def packed(inner: np.ndarray, feature: np.ndarray, threshold: np.ndarray, leaf: np.ndarray, features: int) -> Forest:
    """A forest from nodes in pre-order: ``feature`` and ``threshold`` (float32) of splits, values of leaves.

    ForestError for a leaf beyond float16.
    """
    tables = [np.unique(threshold[feature == column]) for column in range(features)]
    starts = np.concatenate([[0], np.cumsum([len(table) for table in tables])]).astype(np.int32)
    cut = np.zeros(len(feature), dtype=np.int64)
    for column, table in enumerate(tables):
        of_column = feature == column
        cut[of_column] = np.searchsorted(table, threshold[of_column])
    if len(leaf) and not np.abs(leaf).max() <= np.finfo(np.float16).max:
        raise ForestError(f"a leaf of {np.abs(leaf).max():g} is beyond what a forest holds")
    thresholds = np.concatenate([*tables, np.zeros(0)]).astype(np.float32)
    return Forest(inner, _narrow(feature), _narrow(cut), leaf.astype(np.float16), thresholds, starts)


def joined(first: Forest, second: Forest) -> Forest:
    """All trees of both: the sum of their predictions. ForestError when they read other columns."""
    if first.features != second.features:
        raise ForestError(f"forests over {first.features} and {second.features} features cannot be joined")
    both = (first, second)
    return packed(
        np.concatenate([forest.inner for forest in both]),
        np.concatenate([forest.feature.astype(np.int64) for forest in both]),
        np.concatenate([forest.split_threshold for forest in both]),
        np.concatenate([forest.leaf for forest in both]),
        first.features,
    )


def empty(features: int) -> Forest:
    """A forest without trees: zero everywhere."""
    return packed(np.zeros(0, bool), np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0), features)


def _narrow(codes: np.ndarray) -> np.ndarray:
    largest = int(codes.max(initial=0))
    if largest > 0xFFFF:
        raise ForestError(f"{largest + 1} features, or thresholds of one feature, are beyond what a forest holds")
    return codes.astype(np.uint8 if largest < 256 else np.uint16)
