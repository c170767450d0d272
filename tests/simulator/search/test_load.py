"""The load at which ways to serve keep what users expect: the queue agrees with known laws, and the event loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.simulator.question.canonical import RequestError
from opcast.simulator.question.request_classes import ServingTargets
from opcast.simulator.search.rank import Row
from opcast.simulator.search.result import SearchReport
from opcast.simulator.search.served import shortlist
from opcast.simulator.search.served.estimate import with_load
from opcast.simulator.search.served.kept import PlayedWays
from opcast.simulator.search.served.load import Expected, curve, highest, together_load
from opcast.simulator.search.served.played import highest_rate
from opcast.simulator.search.served.request import ServedSearchRequest
from opcast.simulator.search.served.shown import WAYS
from opcast.simulator.search.served.waiting import waiting
from opcast.simulator.search.view import tables
from opcast.simulator.workbench import Workbench

WIDER = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}
SLO = ServingTargets(ttft_ms=4.0, tpot_ms=0.5)
Asking = Callable[..., ServedSearchRequest]


@pytest.mark.parametrize("busy", [0.3, 0.6, 0.8])
def test_one_server_waits_as_the_law_of_pollaczek_and_khinchine_has_it(busy: float) -> None:
    mean, most = waiting(np.array([1]), np.array([busy]), 0.9)
    assert mean[0] == pytest.approx(busy / (2 * (1 - busy)), rel=0.12)
    assert most[0] > mean[0]


@given(servers=st.integers(1, 64), busy=st.floats(0.05, 0.98))
def test_waits_grow_with_load_and_fall_with_servers(servers: int, busy: float) -> None:
    (here, busier, more), _ = waiting(
        np.array([servers, servers, servers + 1]), np.array([busy, busy + 0.01, busy]), 0.9
    )
    assert busier >= here
    assert more <= here * 1.1 + 0.02
    assert np.isinf(waiting(np.array([servers]), np.array([1.0]), 0.9)[0][0])


@given(st.floats(0.01, 0.99))
def test_the_highest_load_is_where_it_ends_to_be_met(limit: float) -> None:
    found = highest(np.array([1.0, 1.0, limit / 2]), lambda load: load <= limit)
    assert found == pytest.approx([limit, limit, limit / 2], abs=1e-3)
    assert highest(np.array([1.0]), lambda load: load < 0)[0] == 0


def test_what_users_expect_more_strictly_has_less_load() -> None:
    loads = list(range(1, 65))
    own = curve(loads, [(10e3 + 200 * n, 50e3 + 200 * n, 5e3) for n in loads], 100, decodes=False)
    ranks, batch = np.array([1, 1]), np.array([16.0, 64.0])
    rates = []
    for tpot_ms in (15, 18, 30):
        expected = Expected(ServingTargets(ttft_ms=500, tpot_ms=tpot_ms), 100)
        rates.append(together_load(own, ranks, batch, expected))
    assert (np.diff(np.array(rates), axis=0) >= 0).all()
    assert rates[0][1] < 64, "more run at a time than what is expected of TPOT allows"


def without_times(report: SearchReport) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "reason"} for row in report.best]


def test_the_event_loop_says_what_the_best_serve(serving: Asking, bench: Workbench) -> None:
    slo, axes = ServingTargets(ttft_ms=20.0, tpot_ms=2.0), {"pools": "together", "batch": (8, 16)}
    found = bench.search(serving(axes, slo=slo, confirm=3))
    assert found.best
    assert all(row["meets_slo"] for row in found.best)
    best = found.best[0]
    assert best["confirmed"]["slo_attainment"] >= slo.share
    low, high = best["confirmed"]["interval"]
    assert low <= best["requests_per_s"] <= high
    assert (
        0.5 < best["requests_per_s"] / best["closed_form_rate"] < 2
    )  # steps of a small model are shorter than its host
    again = bench.search(serving(axes, slo=slo, confirm=3))
    assert without_times(again) == without_times(found)


def test_a_way_too_slow_at_full_load_is_judged_at_less(serving: Asking, bench: Workbench) -> None:
    fixed = {"pools": "together", "tp": (1,), "batch": (32,)}
    full = bench.search(serving(fixed)).best[0]
    slo = ServingTargets(tpot_ms=0.97 * full["tpot_ms"])
    (row,) = bench.search(serving(fixed, slo=slo, confirm=0)).best
    assert row["tpot_ms"] <= slo.tpot_ms
    assert 0 < row["requests_per_s"] < 1.01 * full["requests_per_s"]  # vLLM's server sends no faster at either
    assert row["kv_share"] < full["kv_share"]


def test_less_than_a_sequence_a_rank_is_shown_as_it_is(serving: Asking, bench: Workbench) -> None:
    one = {"pools": "together", "tp": (1,), "batch": (1,)}
    full = bench.search(serving(one)).best[0]
    slo = ServingTargets(ttft_ms=1.02 * full["ttft_ms"])
    (row,) = bench.search(serving(one, slo=slo, confirm=0)).best
    assert 0 < row["requests_per_s"] < 0.9 * full["requests_per_s"]
    assert row["concurrency"] < row["devices"]


def test_a_rate_has_the_fewest_gpus_that_serve_it(serving: Asking, bench: Workbench) -> None:
    whole = bench.search(serving({"pools": "together"}, slo=SLO, confirm=0)).best[0]
    rate = 0.4 * whole["requests_per_s"]
    asked = serving({"pools": "together"}, slo=SLO, confirm=0, rate=rate)
    assert asked.objectives[:2] == ("gpus", "hourly_cost")
    found = bench.search(asked).best[0]
    assert found["requests_per_s"] >= rate
    assert found["devices"] < whole["devices"]
    assert found["hourly_cost"] == pytest.approx(2.0 * found["devices"])
    fewer = found["replicas"] - 1
    # a smaller pool serves less than its share: its requests wait for fewer ranks
    assert fewer * found["requests_per_s"] / found["replicas"] < rate * 1.06
    nothing = bench.search(replace(asked, rate=1e3 * rate))
    assert not nothing.best


def test_what_is_recommended_was_played_and_stands_once(serving: Asking, bench: Workbench) -> None:
    axes = {"pools": "together", "batch": (8, 16, 32), "max_tokens": (256, 512)}
    whole = bench.search(serving(axes, slo=SLO, confirm=0)).best[0]
    rate = 0.4 * whole["requests_per_s"]
    found = bench.search(serving(axes, slo=SLO, confirm=1, rate=rate))
    first = found.best[0]
    assert first["confirmed"]["rate"] == first["requests_per_s"] >= rate
    assert first["confirmed"]["slo_attainment"] >= SLO.share
    hardware = [tuple(row[name] for name in ("pools", "tp", "ratio", "devices")) for row in found.best]
    assert len(set(hardware)) == len(hardware) > 1
    assert "needs as many GPUs with batch=" in found.pruned_by["tied"].why
    assert found.evaluated + found.pruned == found.points
    for row, after in zip(found.best, found.best[1:], strict=False):
        figures = {"gpus": "devices", "hourly_cost": "hourly_cost", "tokens_per_s_per_user": "tokens_per_s_per_user"}
        objective = row["reason"].partition(" better in ")[2].partition(":")[0].replace(" ", "_")
        assert row[figures[objective]] != after[figures[objective]]


def test_dear_chips_are_not_the_cheapest(serving: Asking, bench: Workbench) -> None:
    two = {"pools": "together", "cluster": ("dgx_h100", "dgx_h200"), "tp": (1,)}
    usual = {"slo": SLO, "confirm": 0, "rate": 5.0, "objectives": ("hourly_cost",)}
    for prices, cheap in (
        ({"dgx_h100": 9.0, "dgx_h200": 1.0}, "dgx_h200"),
        ({"dgx_h100": 1.0, "dgx_h200": 9.0}, "dgx_h100"),
    ):
        found = bench.search(serving(two, **usual, prices=prices))
        best = found.best[0]
        assert best["cluster"] == cheap
        assert {row["cluster"] for row in found.chips} == set(prices)  # the dear one is shown, too, and behind
        assert found.chips[0]["rank"] == 1
        assert found.chips[1]["hourly_cost"] > best["hourly_cost"]
        assert any(table.caption == "best of each chip" and len(table.rows) == 2 for table in tables(found, WAYS))
        assert best["hourly_cost"] == best["devices"] * 1.0


def test_ways_that_cost_the_same_are_as_good(serving: Asking, bench: Workbench) -> None:
    two = {"pools": "together", "cluster": ("dgx_h100", "dgx_h200"), "tp": (1,)}
    found = bench.search(serving(two, slo=SLO, confirm=0, rate=5.0, objectives=("hourly_cost",)))
    assert [row["hourly_cost"] for row in found.best[:2]] == [2.0, 2.0]
    assert found.best[0]["reason"].startswith("as good in hourly cost")
    assert "cluster" in found.best[0]["differs_from_next"]


def test_a_price_of_a_cluster_that_is_not_searched_is_refused(serving: Asking) -> None:
    with pytest.raises(RequestError, match="prices has nosuch, which is not searched: dgx_h100"):
        serving({"cluster": ("dgx_h100",)}, prices={"nosuch": 2.0})


def test_room_that_is_never_taken_is_shown_once(serving: Asking, bench: Workbench) -> None:
    axes = {"pools": "apart", "tp": (1,), "batch": (256, 512), "ratio": ("1:7",)}
    found = bench.search(serving(axes, slo=SLO, confirm=0))
    assert found.pruned_by["alike"].count == 1
    assert "does the same with batch=256" in found.pruned_by["alike"].why
    assert found.evaluated + found.pruned == found.points


def test_the_chance_of_a_rate_falls_with_it(serving: Asking, bench: Workbench) -> None:
    fixed = {"pools": "together", "tp": (1,), "batch": (32,)}
    most = bench.search(serving(fixed, slo=SLO, confirm=0)).best[0]["requests_per_s"]
    chances = []
    for share in (0.2, 30.0):
        asked = serving(fixed, slo=SLO, objectives=("chance",), rate=share * most, confirm=1)
        chances.append(bench.search(asked).best[0]["p_p99_ttft_met"])
    assert chances[0] > 0.75
    assert chances[1] < 0.1
    with pytest.raises(ValueError, match="stands first"):
        serving({}, slo=SLO, objectives=("chance",))


def play_best(
    request: ServedSearchRequest,
    rows: Sequence[Row],
    highest_rate: Callable[..., float],
    monkeypatch: pytest.MonkeyPatch,
) -> Row:
    """The best of some rows where an event loop of one line says the highest rate of each."""
    monkeypatch.setattr(shortlist, "part_of", lambda request, row, replicas, *_: row)
    monkeypatch.setattr(shortlist, "highest_rate", highest_rate)
    monkeypatch.setattr(shortlist, "figures_at", lambda row, rate: {"rate": rate, "ttft_ms": 1.0, "tpot_ms": 1.0})

    def again(row: Row, changes: Mapping[str, Any], rate: float | None) -> Row:
        return {**row, **changes}

    ways = shortlist.Shortlist(request, {}, again, lambda row: (1.0, 1.0), PlayedWays(None, request))
    return max(ways.played(rows), key=lambda row: row["requests_per_s"])


def test_room_that_a_crowd_needs_is_tried(serving: Asking, bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The closed form says that no more run at a time; the event loop serves less until the batch is twice as large."""
    request = serving({"pools": "together", "tp": 1, "max_tokens": 512, "batch": 8}, slo=SLO)
    first = bench.search(replace(request, confirm=0)).best[0]
    request = replace(request, space=replace(request.space, batch=()), confirm=None)
    enough, asked = 2 * first["batch"], []

    def highest_rate(row: dict[str, Any], start: float, *_: float) -> float:
        asked.append(row["batch"])
        return start if row["batch"] >= enough else start / 2

    best = play_best(request, [first], highest_rate, monkeypatch)
    assert asked[:2] == [first["batch"], enough]
    assert best["batch"] == enough
    assert best["requests_per_s"] == pytest.approx(first["requests_per_s"])


def test_another_way_to_take_prompts_is_played_where_the_first_is_slow(
    serving: Asking, bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More ways than are played take prompts as the first does, and all serve half of what their closed forms say."""
    request = serving({"pools": "apart", "tp": 1, "max_tokens": 512, "batch": 8}, slo=SLO)
    first = bench.search(replace(request, confirm=0)).best[0]

    def way(share: float, **changes: int) -> Row:
        times = {"rate": share * first["requests_per_s"], "ttft_ms": first["ttft_ms"], "tpot_ms": first["tpot_ms"]}
        return with_load(request, {**first, **changes}, times)

    slow = [way(1 - 0.001 * dp, dp=dp) for dp in range(2 * shortlist.WAYS)]

    def highest_rate(row: dict[str, Any], start: float, *_: float) -> float:
        return start if row["prefill_tp"] == 2 else start / 2

    best = play_best(request, [*slow, way(0.8, prefill_tp=2)], highest_rate, monkeypatch)
    assert best["prefill_tp"] == 2
    assert best["confirmed"]


@pytest.mark.parametrize("kept", [9.75, 10.4, 10.6])
def test_a_rate_between_the_least_of_use_and_the_start_is_looked_for(kept: float) -> None:
    asked: list[float] = []

    class Part:
        def keeps(self, rate: float) -> bool:
            asked.append(rate)
            return rate <= kept

    assert highest_rate(Part(), 10.65, 9.7) == pytest.approx(kept, rel=0.011)  # type: ignore[arg-type]
    assert highest_rate(Part(), 10.65, 10.62) == 0.0  # type: ignore[arg-type]
    assert min(asked) >= 9.7, "no run of a rate that is of no use"


def test_other_requests_are_played_at_a_time(
    serving: Asking, bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads play at once, and the rates are those that one finds, in the same order."""
    request = serving({"pools": "together", "tp": 1, "max_tokens": 512, "batch": 8}, slo=SLO, confirm=1)
    alone, play, both = bench.search(request), shortlist.highest_rate, threading.Barrier(2, timeout=60)

    def highest_rate(part: Any, *of: float) -> float:
        if part.request.traffic.seed in shortlist.SEEDS:
            both.wait()  # BrokenBarrierError where one plays after the other
        return play(part, *of)

    monkeypatch.setattr(shortlist, "highest_rate", highest_rate)
    two = bench.search(request, 2)
    assert len(set(alone.best[0]["confirmed"]["rates"])) > 1
    assert two.best[0]["confirmed"]["rates"] == alone.best[0]["confirmed"]["rates"]
