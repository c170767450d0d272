"""What an evaluation holds out together: whole sites, the far end of a size, one rank count, one head size.

:data:`RECIPES` says it for each kind; a kind without one has its family's. Rows of fold -1 are always trained on and
never scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..datasets.vocabulary import KINDS

MIN_GROUPS = 6  # fewer whole groups than this, and the next finer grouping is used
MIN_TRAIN = 5
MODES = ("groups", "random", "extrapolate", "ranks", "head_dim", "device")
MIB = 2**20


@dataclass(frozen=True)
class SplitRecipe:
    """``groups``: dims that make a site of a model rather than a workload, coarsest first. ``ends``: dims with the
    value above which rows are held out to test extrapolation, 0 = the largest decade. ``inside``: the smallest and
    largest group stay in training, because what lies beyond is asked by ``ends``.
    """

    groups: tuple[tuple[str, ...], ...] = ()
    ends: tuple[tuple[str, int], ...] = ()
    inside: bool = False


HEADS = ("heads_q", "heads_kv", "head_dim")
RECIPES: dict[str, SplitRecipe] = {
    "gemm": SplitRecipe((("n", "k"), ("batch",)), (("m", 0), ("n", 8192))),
    "grouped_gemm": SplitRecipe((("experts", "n", "k"),), (("tokens", 0),)),
    "attention_prefill": SplitRecipe((HEADS, ("seq_q", "seq_kv")), (("seq_q", 0),)),
    "attention_decode": SplitRecipe((HEADS, ("batch", "seq_kv")), (("seq_kv", 0),)),
    "attention_backward": SplitRecipe((HEADS, ("seq_q", "seq_kv")), (("seq_q", 0),)),
    "mla_prefill": SplitRecipe((("heads",), ("seq_q", "seq_kv")), (("seq_q", 0),)),
    "mla_decode": SplitRecipe((("heads",), ("batch", "seq_kv")), (("seq_kv", 0),)),
    **{
        f"linear_attention_{each}": SplitRecipe((("heads", "head_dim", "state_dim"), ("batch", "seq")), (("seq", 0),))
        for each in ("prefill", "backward")
    },
    "linear_attention_decode": SplitRecipe((("heads", "head_dim", "state_dim"),), (("batch", 0),)),
    "sparse_index_prefill": SplitRecipe((("heads",), ("seq_q", "seq_kv")), (("seq_kv", 0),)),
    "sparse_index_decode": SplitRecipe((("heads",), ("batch", "seq_kv")), (("seq_kv", 0),)),
    **{
        f"sparse_attention_{each}": SplitRecipe((("heads_q",), ("seq_q", "seq_kv")), (("seq_q", 0),))
        for each in ("prefill", "backward")
    },
    "sparse_attention_decode": SplitRecipe((("heads_q",), ("batch", "seq_kv")), (("batch", 0),)),
    "embedding": SplitRecipe((("vocab", "hidden"),), (("tokens", 0),)),
    "embedding_backward": SplitRecipe((("vocab", "hidden"),), (("tokens", 0),)),
    "cross_entropy": SplitRecipe((("vocab",),), (("tokens", 0),)),
    "cross_entropy_backward": SplitRecipe((("vocab",),), (("tokens", 0),)),
    "moe_route": SplitRecipe((("experts", "topk"),), (("tokens", 0),)),
    "moe_permute": SplitRecipe((("hidden", "topk"),), (("tokens", 0),)),
    "fused_moe": SplitRecipe((("hidden", "inter", "topk", "experts"), ("tokens",)), (("tokens", 0),)),
    "ep_dispatch": SplitRecipe((("hidden", "topk", "experts"), ("tokens",)), (("tokens", 0),)),
    "ep_combine": SplitRecipe((("hidden", "topk", "experts"), ("tokens",)), (("tokens", 0),)),
    "rope": SplitRecipe((("heads", "head_dim"),), (("tokens", 0),)),
    "elementwise": SplitRecipe((), (("numel", 0),)),
    "adamw": SplitRecipe((), (("numel", 0),)),
    "copy": SplitRecipe((), (("size_bytes", 0),)),
}
FAMILY_RECIPES: dict[str, SplitRecipe] = {
    "norm": SplitRecipe((("cols",),), (("rows", 0),)),
    "pointwise": SplitRecipe((("cols",),), (("rows", 0),)),
    "collective": SplitRecipe((("size_bytes",),), (("size_bytes", 64 * MIB),), inside=True),
}


@dataclass(frozen=True)
class Split:
    """``fold`` int64 [n]: the fold each row is held out in, -1 = none; ``label`` says what was held out together."""

    fold: np.ndarray
    count: int
    label: str

    def held_out(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions of training and of held-out rows of one fold."""
        return np.flatnonzero(self.fold != index), np.flatnonzero(self.fold == index)

    @property
    def scored(self) -> np.ndarray:
        """Positions of the rows that are held out in some fold."""
        return np.flatnonzero(self.fold >= 0)

    def without(self, rows: np.ndarray) -> Split:
        """The same with some rows never scored."""
        fold = self.fold.copy()
        fold[rows] = -1
        return replace(self, fold=fold)


def recipe(kind_name: str) -> SplitRecipe:
    """What is held out together of a kind."""
    return RECIPES.get(kind_name) or FAMILY_RECIPES.get(KINDS[kind_name].family, SplitRecipe())


def splits(
    kind_name: str, mode: str, columns: Mapping[str, np.ndarray], folds: int, seed: int
) -> tuple[dict[str, Split], str]:
    """Splits of one mode of :data:`MODES` by name, and why there is none where there is none."""
    if mode == "groups":
        return {mode: split(kind_name, columns, folds, seed)}, ""
    if mode == "random":
        return {mode: even_folds(codes(columns, KINDS[kind_name].names), folds, seed, "random ops")}, ""
    if mode in ("ranks", "head_dim"):
        return _one_value_out(kind_name, mode, columns)
    return _ends(kind_name, columns)


def split(kind_name: str, columns: Mapping[str, np.ndarray], folds: int, seed: int) -> Split:
    """Folds of whole groups: the coarsest grouping of the kind with enough groups, else whole ops (all dims)."""
    definition, chosen = KINDS[kind_name], recipe(kind_name)
    for names in chosen.groups:
        if not all(name in definition.names for name in names):
            continue
        groups = codes(columns, names)
        if groups.max(initial=-1) + 1 < MIN_GROUPS:
            continue
        by_group = even_folds(groups, folds, seed, f"grouped by ({', '.join(names)})")
        ends = np.flatnonzero((groups == groups.min()) | (groups == groups.max()))
        return (
            replace(by_group, label=f"{by_group.label}, inside the range").without(ends) if chosen.inside else by_group
        )
    return even_folds(codes(columns, definition.names), folds, seed, "grouped by op")


def codes(columns: Mapping[str, np.ndarray], names: Sequence[str]) -> np.ndarray:
    """Which distinct combination of some dims each row has, in their order: int64 [n]."""
    return combined([columns[name] for name in names])


def combined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Which distinct combination of values each row of some columns [n] has, in lexicographic order: int64 [n]."""
    code = np.zeros(len(parts[0]), dtype=np.int64)
    for codes in parts:
        values, own_code = np.unique(codes, return_inverse=True)
        code = np.unique(code * len(values) + own_code.reshape(-1), return_inverse=True)[1].reshape(-1)
    return code


def _one_value_out(kind_name: str, dim: str, columns: Mapping[str, np.ndarray]) -> tuple[dict[str, Split], str]:
    if dim not in columns:
        return {}, f"{kind_name} has no {dim}"
    values, fold = np.unique(columns[dim], return_inverse=True)
    if len(values) < 2:
        return {}, f"all rows have {dim}={values[0]}" if len(values) else "no rows"
    listed = ", ".join(str(value) for value in values[:12])
    return {dim: Split(fold.reshape(-1).astype(np.int64), len(values), f"one {dim} of {listed} left out")}, ""


def _ends(kind_name: str, columns: Mapping[str, np.ndarray]) -> tuple[dict[str, Split], str]:
    folds, why = {}, f"{kind_name} has no size to extrapolate"
    for dim, limit in recipe(kind_name).ends:
        values = np.asarray(columns[dim]) if dim in columns else np.zeros(0)
        if not len(values):
            continue
        bound = limit or values.max() / 10.0
        far = values > bound
        if far.any() and len(far) - far.sum() >= MIN_TRAIN:
            label = f"{dim} > {bound:g} never seen"
            folds[f"extrapolate {dim}"] = Split(np.where(far, 0, -1), 1, label)
        else:
            why = f"no rows on both sides of {dim} = {bound:g}"
    return folds, "" if folds else why


def even_folds(groups: np.ndarray, folds: int, seed: int, label: str) -> Split:
    """Groups (codes from 0, int64 [n]) in random order, each to the fold with fewest rows so far."""
    sizes = np.bincount(groups)
    folds = min(folds, len(sizes))
    order = np.random.default_rng(seed).permutation(len(sizes))
    order = order[np.argsort(-sizes[order], kind="stable")]
    load, home = np.zeros(max(folds, 1)), np.zeros(len(sizes), dtype=np.int64)
    for group in order:
        home[group] = np.argmin(load)
        load[home[group]] += sizes[group]
    return Split(home[groups], folds, f"{folds}-fold, {label}")
