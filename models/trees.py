"""Trained trees as forests: LightGBM boosters and scikit-learn forests alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .forest import Forest, ForestError, packed

if TYPE_CHECKING:
    import lightgbm
    import sklearn.ensemble


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
    """The trees of a LightGBM booster. ForestError for what a forest lacks: categorical splits, missing values.

    Read from the text format, which is many times quicker than the JSON dump and exact (17 digits).
    """
    head, _, text = booster.model_to_string().partition("\nTree=")
    lines = _lines(text)
    leaves = _numbers(lines, "num_leaves", np.int64)
    decisions = _numbers(lines, "decision_type", np.int64)
    if _numbers(lines, "is_linear", np.int64).any() or (decisions & 0b1101).any():  # categorical, missing: zero or NaN
        raise ForestError("a forest holds numeric splits without missing values only")
    features = int(_numbers(_lines(head), "max_feature_idx", np.int64)[0]) + 1
    divisor = float(len(leaves)) if "\naverage_output" in head else 1.0
    return _pack(_lightgbm_trees(lines, leaves), features, divisor)


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


def _lines(text: str) -> dict[str, list[str]]:
    """What follows ``name=`` in every line of LightGBM's text format, by name."""
    by_name: dict[str, list[str]] = {}
    for line in text.split("\n"):
        name, _, values = line.partition("=")
        by_name.setdefault(name, []).append(values)
    return by_name


def _numbers(lines: Mapping[str, list[str]], name: str, kind: type) -> np.ndarray:
    """The values of every ``name=…`` line, end to end."""
    return np.array(" ".join(lines.get(name, ())).split(), dtype=kind)


def _lightgbm_trees(lines: Mapping[str, list[str]], leaves: np.ndarray) -> _Trees:
    """Each tree as its inner nodes, as LightGBM numbers them, then its leaves, which it counts down from -1."""
    sizes = 2 * leaves - 1
    roots = np.concatenate([[0], np.cumsum(sizes)])
    tree = np.repeat(np.arange(len(leaves)), sizes)
    leaf = np.arange(roots[-1]) - roots[tree] >= leaves[tree] - 1
    start, inner = roots[tree][~leaf], leaves[tree][~leaf] - 1
    numbers, real = np.zeros(roots[-1], np.int64), np.zeros(roots[-1])
    out = _Trees(numbers, real, numbers.copy(), numbers.copy(), real.copy(), roots)
    out.feature[~leaf] = _numbers(lines, "split_feature", np.int64)
    out.threshold[~leaf] = _numbers(lines, "threshold", np.float64)
    out.value[leaf] = _numbers(lines, "leaf_value", np.float64)
    for side, name in ((out.left, "left_child"), (out.right, "right_child")):
        child = _numbers(lines, name, np.int64)
        side[~leaf] = start + np.where(child < 0, inner + ~child, child)
        side[leaf] = -1
    return out


def _pack(trees: _Trees, features: int, divisor: float) -> Forest:
    """The same trees in pre-order; leaves are divided by ``divisor``."""
    position = _pre_order(trees)
    old = np.empty_like(position)
    old[position] = np.arange(len(position))
    inner = trees.left[old] >= 0
    splits, leaves = old[inner], old[~inner]
    threshold = _float32_below(trees.threshold[splits])
    return packed(inner, trees.feature[splits], threshold, trees.value[leaves] / divisor, features)


def _pre_order(trees: _Trees) -> np.ndarray:
    """Where each node comes: after its parent, left subtree first."""
    levels = [trees.roots[:-1]]
    while len(split := levels[-1][trees.left[levels[-1]] >= 0]):
        levels.append(np.concatenate([trees.left[split], trees.right[split]]))
    size = np.ones(len(trees.left), dtype=np.int64)
    position = np.zeros_like(size)
    position[trees.roots[:-1]] = trees.roots[:-1]
    splits = [level[trees.left[level] >= 0] for level in levels]
    for split in reversed(splits):
        size[split] += size[trees.left[split]] + size[trees.right[split]]
    for split in splits:
        left, right = trees.left[split], trees.right[split]
        position[left] = position[split] + 1
        position[right] = position[split] + 1 + size[left]
    return position


def _float32_below(values: np.ndarray) -> np.ndarray:
    """The largest float32 not above each double."""
    with np.errstate(over="ignore"):
        near = values.astype(np.float32)
    above = near.astype(np.float64) > values
    return np.where(above, np.nextafter(near, np.float32(-np.inf)), near)
