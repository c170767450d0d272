"""One workload on several chips: what a token costs, when a chip is worth it, and the front of power caps."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import opcast
from opcast.jobs.cli import main
from opcast.simulator.chips.answer import ChipRow, ChipsReport
from opcast.simulator.chips.run import on_front, widths
from opcast.simulator.report.worth import worth_of

TINY = "tiny_llama_100m"
WORK: dict[str, Any] = {"cluster": "dgx_h100", "seq_len": 256, "micro_batch": 8, "global_batch": 64}


@pytest.fixture(scope="module")
def priced() -> ChipsReport:
    return opcast.compare_chips(TINY, others=["dgx_h200"], power_caps_w=[400.0], price_per_gpu_hour=2.0, **WORK)


def test_rows_are_what_simulate_says(priced: ChipsReport) -> None:
    assert [(row.cluster, row.cap_w) for row in priced.rows] == [
        ("dgx_h100", None), ("dgx_h100", 400.0), ("dgx_h200", None), ("dgx_h200", 400.0)
    ]  # fmt: skip
    for row in priced.rows:
        step = opcast.simulate(TINY, "train", **WORK | {"cluster": row.cluster}, power_cap_w=row.cap_w)
        assert (row.time_s, row.low_s, row.high_s) == (step.step_time_s, step.low_s, step.high_s)
        assert row.joules == pytest.approx(step.energy_j / (64 * 256), rel=1e-6)


def test_at_its_break_even_price_a_chip_costs_as_much(priced: ChipsReport) -> None:
    first = priced.rows[0]
    assert first.price == pytest.approx(1e6 * 2.0 / 3600 / first.tokens_per_s_per_gpu)
    assert first.break_even == 2.0
    for row in priced.rows[1:]:
        assert row.break_even is not None
        assert 1e6 * row.break_even / 3600 / row.tokens_per_s_per_gpu == pytest.approx(first.price)
        assert row.break_even_low < row.break_even < row.break_even_high
        assert row.speed_low < row.speed < row.speed_high


def test_electricity_makes_a_frugal_chip_worth_more() -> None:
    paid = opcast.compare_chips(TINY, power_caps_w=[300.0], price_per_gpu_hour=2.0, price_per_kwh=0.5, pue=1.5, **WORK)
    free = opcast.compare_chips(TINY, power_caps_w=[300.0], price_per_gpu_hour=2.0, **WORK)
    own, capped = paid.rows
    assert own.price == pytest.approx(free.rows[0].price + 1e6 * own.joules * 1.5 * 0.5 / 3.6e6)
    assert capped.joules < own.joules
    assert capped.break_even > free.rows[1].break_even


@given(st.lists(st.tuples(st.floats(1, 10), st.floats(1, 10)), min_size=1, max_size=8))
def test_the_front_has_no_row_that_another_beats(points: list[tuple[float, float]]) -> None:
    rows = [_row(time_s, joules) for time_s, joules in points]
    front = [row for row in rows if on_front(row, rows)]
    assert front
    for row in rows:
        beaten = any(other.time_s <= row.time_s and other.joules <= row.joules and other != row for other in front)
        assert (row in front) != beaten


def test_an_interval_of_a_ratio_has_the_errors_of_both() -> None:
    assert widths((2.0, 1.0, 4.0), (3.0, 3.0, 3.0)) == pytest.approx((0.6931, 0.6931), rel=1e-3)
    assert widths((2.0, 2.0, 2.0), (3.0, 3.0, 3.0)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster=dgx_h100"], "nothing to compare: name others=[dgx_h200]"),
        (["others=[dgx_h200]"], "chips are compared on clusters: cluster=dgx_h100"),
        (["cluster=dgx_h100", "others=[dgx_h201]"], "dgx_h201"),
        (["cluster=dgx_h100", "others=[dgx_h100]"], "names a cluster twice"),
        (["cluster=dgx_h100", "others=[dgx_h200]", "prices.dgx_a100=1"], "prices has dgx_a100, which is not compared"),
        (["cluster=dgx_h100", "others=[[dgx_h200]]"], "others has ['dgx_h200']: name clusters"),
        (["cluster=dgx_h100", "power_caps_w=[-5]"], "-5"),
        (["cluster=dgx_h100", "power_caps_w=[400]", "power_cap_w=500"], "leave power_cap_w out"),
        (["cluster=pcie_4xa100", "others=[dgx_h200]"], "dgx_h200 has 8 GPUs a node, and no number of nodes has the 4"),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "chips", f"model={TINY}", *words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_a_price_of_null_is_none() -> None:
    none = opcast.compare_chips(TINY, others=["dgx_h200"], prices={"dgx_h100": 2.0, "dgx_h200": None}, **WORK)
    assert [row.price is None for row in none.rows] == [False, True]


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "chips", f"model={TINY}", "workload=decode", "cluster=dgx_h100", "others=[dgx_h200]"]
    assert main(words) == 0
    told = capsys.readouterr()
    assert "break-even" in told.out
    assert "no break-even price without one of the first cluster" in told.err
    assert main([*words, "format=json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["cluster"] for row in rows] == ["dgx_h100", "dgx_h200"]
    assert rows[0]["break_even"] is None


def _row(time_s: float, joules: float) -> ChipRow:
    """A row of one chip."""
    return ChipRow(
        "c", "d", 8, None, time_s, time_s, time_s, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, joules,
        *[None] * 5, 1.0,
        fits=True, front=False,
    )  # fmt: skip


def test_measuring_narrows_a_comparison_and_no_time_leaves_it_as_it_is(priced: ChipsReport) -> None:
    hour = next(row for row in priced.rows if row.cluster == "dgx_h200")
    assert hour.speed_low < hour.measured_speed_low < hour.speed < hour.measured_speed_high < hour.speed_high
    none = opcast.compare_chips(TINY, others=["dgx_h200"], measure_minutes=0, **WORK).rows[1]
    assert (none.measured_speed_low, none.measured_speed_high) == (none.speed_low, none.speed_high)
    some = opcast.compare_chips(TINY, others=["dgx_h200"], measure_minutes=1.1, **WORK).rows[1]
    assert hour.measured_speed_high <= some.measured_speed_high <= none.measured_speed_high


def test_caps_of_one_chip_share_its_errors(priced: ChipsReport) -> None:
    """What is left is the law of clocks, 4 % on a chip that somebody timed for long, and what the capped step is surer
    of by itself."""
    free, capped = priced.rows[:2]
    assert (capped.cluster, capped.cap_w) == ("dgx_h100", 400.0)
    assert capped.speed < 1.0
    apart = math.log(capped.time_s / capped.low_s) - math.log(free.time_s / free.low_s)
    assert abs(apart) < 0.06
    assert capped.speed_high / capped.speed == pytest.approx(math.exp(math.hypot(0.04, apart)))
    other = priced.rows[3]
    assert other.speed_high / other.speed > 1.2


def test_an_hour_leaves_what_a_step_adds_to_its_ops() -> None:
    """Of ops that are all measured on the chip: 3 %, the law of clocks, and what is not known of the host."""
    step = opcast.simulate("llama3_8b", "prefill", device="h100_sxm", stack="vllm", seq_len=2048)
    worth = worth_of(step.state, 60)
    assert worth.share == pytest.approx(1.0)
    assert worth.seconds < 3600
    assert 0.02 < math.log(worth.high_s / (step.e2e_ms / 1e3)) < 0.12
    assert worth.high_s < step.high_ms / 1e3
    begun = worth_of(step.state, 0.5)
    assert (begun.share, begun.seconds) == (0.0, 0.0)
    assert begun.high_s == pytest.approx(step.high_ms / 1e3)
