"""Splits: what is held out together stays together, whatever the mode."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.datasets.ops import KINDS
from opcast.models.splits import MODES, RECIPES, codes, combined, recipe, split, splits


def columns_of(kind: str, count: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {dim.name: max(dim.low, 1) + rng.integers(0, 30, count) for dim in KINDS[kind].dims}


def test_recipes_name_dims_that_exist() -> None:
    for kind, chosen in RECIPES.items():
        named = {name for names in chosen.groups for name in names} | {name for name, _ in chosen.ends}
        assert named <= set(KINDS[kind].names), kind


@given(st.sampled_from(sorted(KINDS)), st.integers(2, 5), st.integers(0, 3))
def test_groups_never_straddle_folds(kind: str, folds: int, seed: int) -> None:
    columns = columns_of(kind, 200, seed)
    made = split(kind, columns, folds, seed)
    names = made.label.partition("(")[2].partition(")")[0].split(", ") if "(" in made.label else KINDS[kind].names
    groups = codes(columns, names)
    assert all(len(set(made.fold[groups == group])) == 1 for group in np.unique(groups))
    assert set(made.fold) <= {-1, *range(made.count)}


def test_folds_are_even() -> None:
    made = split("gemm", columns_of("gemm", 500), 5, 0)
    assert made.label == "5-fold, grouped by (n, k)"
    assert np.bincount(made.fold).min() > 80


def test_few_groups_fall_back_to_a_finer_grouping() -> None:
    columns = {"batch": np.arange(60), "heads_q": np.full(60, 32), "heads_kv": np.full(60, 8)}
    columns |= {name: np.full(60, 128) for name in ("head_dim", "v_head_dim")}
    columns |= {"seq_q": np.arange(60), "seq_kv": np.arange(60), "causal": np.ones(60), "window": np.zeros(60)}
    assert split("attention_prefill", columns, 5, 0).label == "5-fold, grouped by (seq_q, seq_kv)"


def test_sizes_of_collectives_are_asked_inside_their_range() -> None:
    sizes = np.repeat(2 ** np.arange(10, 30), 3)
    columns = {
        "size_bytes": sizes,
        "ranks": np.tile([2, 4, 8], 20),
        "ranks_per_node": sizes * 0 + 8,
        "link": sizes * 0,
        "norm": sizes * 0,
    }
    made = split("all_reduce", columns, 5, 0)
    assert set(sizes[made.fold == -1]) == {2**10, 2**29}
    assert made.label.endswith("inside the range")
    (far,) = splits("all_reduce", "extrapolate", columns, 5, 0)[0].values()
    assert sizes[far.scored].min() == 2**27
    assert far.label == "size_bytes > 6.71089e+07 never seen"


def test_each_value_of_a_rank_count_is_left_out_once() -> None:
    columns = {"size_bytes": np.arange(60), "ranks": np.tile([2, 4, 8], 20), "link": np.zeros(60)}
    made = splits("all_reduce", "ranks", columns, 5, 0)[0]["ranks"]
    for index in range(made.count):
        seen, unseen = made.held_out(index)
        assert not set(columns["ranks"][seen]) & set(columns["ranks"][unseen])
    assert len(made.scored) == 60


def test_large_gemms_are_a_split_of_their_own() -> None:
    columns = {name: np.ones(40, dtype=int) for name in KINDS["gemm"].names}
    columns |= {"n": np.repeat([4096, 8192, 9000, 16384], 10), "m": np.tile([1, 10, 100, 999, 1000], 8)}
    made = splits("gemm", "extrapolate", columns, 5, 0)[0]
    assert set(columns["n"][made["extrapolate n"].scored]) == {9000, 16384}
    assert set(columns["m"][made["extrapolate m"].scored]) == {999, 1000}


@pytest.mark.parametrize(
    ("kind", "mode"), [("gemm", "ranks"), ("rms_norm", "head_dim"), ("host_overhead", "extrapolate")]
)
def test_a_mode_that_does_not_apply_says_so(kind: str, mode: str) -> None:
    made, why = splits(kind, mode, columns_of(kind, 20), 3, 0)
    assert not made
    assert kind in why


def test_one_value_cannot_be_left_out() -> None:
    columns = columns_of("attention_decode", 20) | {"head_dim": np.full(20, 128)}
    assert splits("attention_decode", "head_dim", columns, 3, 0) == ({}, "all rows have head_dim=128")


def test_rows_never_scored_are_always_trained_on() -> None:
    made = split("gemm", columns_of("gemm", 100), 4, 0).without(np.arange(10))
    for index in range(made.count):
        seen, unseen = made.held_out(index)
        assert set(range(10)) <= set(seen)
        assert len(seen) + len(unseen) == 100


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30))
def test_combinations_are_numbered_in_their_order(pairs: list[tuple[int, int]]) -> None:
    left, right = (np.array(each) for each in zip(*pairs, strict=True))
    order = {pair: index for index, pair in enumerate(sorted(set(pairs)))}
    assert combined([left, right]).tolist() == [order[pair] for pair in pairs]


def test_every_kind_has_a_recipe_and_every_mode_an_answer() -> None:
    for kind in KINDS:
        assert recipe(kind) is not None
        for mode in MODES[:-1]:
            made, why = splits(kind, mode, columns_of(kind, 60), 3, 0)
            assert made or why
