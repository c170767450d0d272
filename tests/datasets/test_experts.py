"""Loads of experts against random draws from the same law, and what any load must satisfy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.datasets.experts import expert_loads, power_law, rows_and_touched


def drawn(tokens: int, topk: int, experts: int, ep: int, skew: int) -> tuple[float, float, float]:
    """Rows, touched experts and busiest load of the busiest rank, mean of random draws."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(300):
        load = power_law(random.random(experts), tokens, topk, experts, skew)
        ranks = np.round(load / load.sum() * tokens * topk).reshape(ep, -1)
        busiest = ranks[ranks.sum(1).argmax()]
        found.append((busiest.sum(), (busiest > 0).sum(), busiest.max()))
    return tuple(np.mean(found, axis=0))


@pytest.mark.parametrize(
    ("tokens", "topk", "experts", "ep"),
    [(16384, 8, 256, 1), (16384, 8, 256, 8), (16384, 2, 8, 8), (1024, 8, 128, 16), (64, 8, 256, 1), (2048, 22, 512, 8)],
)
@pytest.mark.parametrize("skew", [101, 120])
def test_loads_are_the_mean_of_random_draws(tokens: int, topk: int, experts: int, ep: int, skew: int) -> None:
    count, rows = expert_loads(tokens, topk, experts, ep, skew)
    total, touched = rows_and_touched(count, rows)
    wanted = drawn(tokens, topk, experts, ep, skew)
    assert total == pytest.approx(wanted[0], rel=0.2)
    assert touched == pytest.approx(wanted[1], rel=0.1)
    assert rows[0] == pytest.approx(wanted[2], rel=0.25)


@given(
    st.integers(1, 65536),
    st.integers(1, 8),
    st.sampled_from([8, 16, 128, 160, 256, 384]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([0, 50, 100, 101, 120, 200]),
)
def test_a_rank_has_its_share_at_least_and_all_rows_at_most(
    tokens: int, topk: int, experts: int, ep: int, skew: int
) -> None:
    count, rows = expert_loads(tokens, topk, experts, ep, skew)
    total, touched = rows_and_touched(count, rows)
    mean = tokens * topk / ep
    assert 0.9 * min(mean, 1.0) <= total <= 1.1 * max(tokens * topk, 1.0)
    assert total >= 0.9 * mean
    assert touched <= 1.01 * experts / ep
    if skew == 0:
        assert touched == pytest.approx(min(experts / ep, max(mean, 1.0)))
    if ep == 1:
        assert total == pytest.approx(tokens * topk, rel=0.05)


def test_columns_answer_as_single_ops_do() -> None:
    columns = [np.array(each) for each in ([1, 64, 4096], [2, 8, 8], [8, 128, 256], [8, 1, 64], [0, 101, 120])]
    together = expert_loads(*columns)
    for place in range(3):
        alone = expert_loads(*(each[place] for each in columns))
        for all_of, one in zip(together, alone, strict=True):
            assert np.array_equal(all_of[:, place], one)
