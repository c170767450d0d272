"""Experts whose load drifts: how they are shared out anew, and what iterations take longer; laws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.simulator.html.serving import page
from opcast.simulator.question.canonical import RequestError
from opcast.simulator.question.expert_balance import ExpertBalance
from opcast.simulator.question.serving import IterationLaw, KvMemory, ServingRequest
from opcast.simulator.question.traffic import Lengths, RequestTraffic
from opcast.simulator.serving import serve as serving
from opcast.simulator.serving.eplb import imbalance, most_new, rebalanced
from opcast.simulator.serving.expert_drift import by_hand, redundant_bytes, slots_of, timeline
from opcast.simulator.serving.replica import by_hand as replica_by_hand

LAW = IterationLaw(base_us=1000.0, decode_us=5.0, prefill_token_us=2.0)
TRAFFIC = RequestTraffic(rate=20.0, requests=30, input=Lengths(mean=50), output=Lengths(mean=20))
PUBLISHED_LOADS = np.array(  # the example of DeepSeek's README (deepseek-ai/EPLB) and what it prints
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ],
    float,
)
PUBLISHED = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(serving, "worth_compiling", lambda outputs: False)

    def play(**eplb: Any) -> Any:
        request = ServingRequest(law=LAW, kv=KvMemory(500, 16), traffic=TRAFFIC, eplb=ExpertBalance(**eplb))
        replica = replica_by_hand(LAW, 500, 16, 0.0)
        if request.eplb.exist:
            replica = replace(replica, moving_experts=by_hand(request.eplb))
        return serving.serve(request, replica).report

    return play


def test_the_published_example_comes_out_the_same() -> None:
    for loads, expected in zip(PUBLISHED_LOADS, PUBLISHED, strict=True):
        assert rebalanced(loads, 16, 8, groups=4, nodes=2).tolist() == expected


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(0.01, 100.0), min_size=16, max_size=16),
    st.sampled_from([0, 4, 8, 16]),
    st.sampled_from([(1, 1), (4, 2), (4, 4), (3, 2)]),
)
def test_every_expert_has_a_place_and_every_gpu_as_many(
    loads: list[float], redundant: int, shape: tuple[int, int]
) -> None:
    holds = (
        rebalanced(np.array(loads), 16 + redundant, 4, *shape) if 16 % shape[0] == 0 or shape[0] % shape[1] else None
    )
    assert holds is not None
    assert len(holds) == 16 + redundant
    assert set(holds.tolist()) == set(range(16))
    assert imbalance(np.array(loads), holds, 4) >= 1 - 1e-9
    assert most_new(holds, holds, 4) == 0


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.5, 2.0), min_size=32, max_size=32), st.sampled_from([8, 16, 32]))
def test_what_is_shared_out_anew_is_no_less_even(loads: list[float], redundant: int) -> None:
    weights, as_they_come = np.array(loads), np.arange(32 + redundant) % 32
    assert imbalance(weights, rebalanced(weights, 32 + redundant, 8), 8) <= imbalance(weights, as_they_come, 8) + 1e-9


BALANCE = ExpertBalance(drift=2000, num_redundant_experts=16, step_interval=640, window_size=320, experts=64, ranks=8)


def test_rebalancing_evens_out_what_drifts() -> None:
    never = timeline(replace(BALANCE, step_interval=0), by_hand(BALANCE))
    often = timeline(BALANCE, by_hand(BALANCE))
    slow = timeline(replace(BALANCE, drift=200_000), by_hand(BALANCE))
    assert 1 < often.imbalance.mean() < never.imbalance.mean()
    assert slow.imbalance[200:].mean() < often.imbalance[200:].mean()
    assert often.block == 20
    assert never.move_us.max() == 0


def test_moving_weights_is_bytes_over_bandwidth() -> None:
    costs = replace(by_hand(BALANCE), expert_bytes=1e6, layers=3, gbps=10.0)
    moved = timeline(BALANCE, costs)
    faster = timeline(BALANCE, replace(costs, gbps=20.0))
    assert moved.move_us.max() == pytest.approx(2 * faster.move_us.max())
    assert 0 < moved.move_us.max() <= 10 * 3 * 1e6 / 1e4  # ten places of a GPU at most
    assert redundant_bytes(BALANCE, costs) == 2 * 3 * 1e6


def test_without_drift_nothing_changes_and_with_it_iterations_take_longer(played: Callable[..., Any]) -> None:
    def figures(**eplb: Any) -> dict[str, Any]:
        values = played(**eplb).to_dict()
        return {name: value for name, value in values.items() if name not in ("wall_time_s", "expert_balance")}

    sized: dict[str, Any] = {"experts": 64, "ranks": 8}
    without = figures()
    assert figures(spread=0.0, drift=100, **sized) == without
    assert figures(drift=100, **sized) == without  # experts that take no time
    drifts = played(drift=100, step_interval=64, token_us=50.0, expert_mib=10.0, **sized)
    calm = played(drift=100, step_interval=64, token_us=50.0, expert_mib=10.0, gbps=1e9, **sized)
    assert drifts.tpot_ms.mean > calm.tpot_ms.mean > without["tpot_ms"]["mean"]
    assert drifts.expert_balance["rebalances"] > 0
    assert drifts.expert_balance["longer_ms"] > 0


@pytest.mark.parametrize(
    ("eplb", "message"),
    [
        ({"drift": 10}, r"eplb\.experts and eplb\.ranks"),
        ({"drift": 10, "experts": 64, "ranks": 8, "num_redundant_experts": 3}, "take 8"),
        ({"drift": 10, "experts": 64, "ranks": 8, "groups": 3}, "come out even"),
    ],
)
def test_what_does_not_come_out_even_is_one_line(eplb: dict[str, Any], message: str) -> None:
    balance = ExpertBalance(**eplb)
    with pytest.raises(RequestError, match=message):
        slots_of(balance, by_hand(balance))


def test_the_page_shows_how_uneven_experts_were(played: Callable[..., Any]) -> None:
    report = played(drift=100, step_interval=64, token_us=50.0, experts=64, ranks=8)
    names = [section.id for section in page(report, "served").sections]
    assert "experts" in names
    assert len(report.expert_balance["over_time"]) > 10
