"""One command for a new device: what it is asked, and what it says is to be trusted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opcast.datasets.ops import make_op
from opcast.datasets.store import Store
from opcast.jobs.cli import main
from opcast.jobs.onboard import judge_kinds, seconds
from opcast.jobs.show import BadInputError
from opcast.tests.at_hand import figures_at_hand

LIMITS = {"median_ape": 10.0, "coverage": 0.8}


def test_budgets_are_times() -> None:
    assert [seconds(text) for text in ("90s", "30min", "1.5h")] == [90.0, 1800.0, 5400.0]
    for text in ("", "30", "0min", "-1s", "two hours"):
        with pytest.raises(BadInputError, match="budget="):
            seconds(text)


def test_a_kind_is_trusted_for_its_error_and_its_intervals() -> None:
    gemm, gelu, copy = (
        make_op("gemm", m=8, n=8, k=8, dtype="fp32"),
        make_op("gelu", rows=8, cols=8, dtype="fp32"),
        make_op("copy", size_bytes=8, dtype="uint8"),
    )
    good = {"n": 50, "test_median_ape": 4.0, "test_p90_ape": 12.0, "coverage": 0.92}
    results = {"gemm": good, "gelu": {**good, "test_median_ape": 30.0, "coverage": 0.5}}
    found = judge_kinds({gelu: 0.3, gemm: 0.6, copy: 0.1}, results, LIMITS)
    assert [(each.kind, each.trusted) for each in found] == [("gemm", True), ("gelu", False), ("copy", False)]
    assert found[1].why == "errs by more than 10 %; its interval holds less than 80%"
    assert found[2].why == "not measured"


@pytest.mark.parametrize(
    ("words", "says"), [(["device=h100_sxm"], "device=local"), (["budget=soon"], "budget=soon"), (["steps=3"], "steps")]
)
def test_what_it_cannot_be_asked(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["onboard", f"home={tmp_path}", "+settings.device=cpu", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_this_machine_is_on_board_within_a_minute(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its figures are known: measuring them has tests of its own."""
    pytest.importorskip("torch")
    Store(tmp_path / "store").save_device(figures_at_hand())
    settings = ["+settings.device=cpu", "+settings.case_budget_s=0.01", "active.points=24", "active.per_round=12"]
    settings += ["active.stop_gain=0"]  # how much a round is to gain depends on what was measured, on any machine
    steps = 'steps=["workload=prefill workload.batch=1 workload.input_len=64 device=local"]'
    assert main(["onboard", f"home={tmp_path}", "budget=5min", steps, *settings, "format=json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sum(each["points"] for each in told["rounds"]) == 24
    assert told["rounds"][0]["expected_after"] < told["rounds"][0]["expected_error"]
    assert sum(each["share"] for each in told["kinds"]) == pytest.approx(1.0)
