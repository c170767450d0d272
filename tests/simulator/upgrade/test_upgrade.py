"""Before an upgrade: what it touches, what is worth measuring, and a campaign that the harness runs."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import opcast
from opcast.datasets.drift import FEWEST
from opcast.datasets.launches import Caller
from opcast.datasets.ops import make_op
from opcast.harness.plan import CampaignPlan
from opcast.jobs.cli import main
from opcast.simulator.upgrade.answer import UpgradeReport
from opcast.simulator.upgrade.libraries import ReleaseMoves, library_of, moves_of, touched
from opcast.simulator.upgrade.picture import MOST_ROWS, draw_upgrade
from opcast.simulator.upgrade.run import KindGroup, choose, wider

TINY = "tiny_llama_100m"
GEMM = make_op("gemm", m=64, n=64, k=64)
DECODE = ["workload=decode", f"model={TINY}", "device=h100_sxm", "stack=vllm", "workload.batch=4"]


def group(shares: list[float], common: float = 0.02, within: float = 0.09) -> KindGroup:
    ops = [make_op("gemm", m=64 * (number + 1), n=64, k=64) for number in range(len(shares))]
    return KindGroup("gemm", "cublas", True, ReleaseMoves(common, within, 3), ops, sorted(shares, reverse=True))


@pytest.fixture(scope="module")
def report() -> UpgradeReport:
    return opcast.upgrade(TINY, "decode", device="h100_sxm", stack="vllm", batch=4)


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=12), st.floats(0.001, 0.5), st.floats(0.001, 0.5))
def test_each_measurement_takes_uncertainty_away_and_all_take_it_all(
    shares: list[float], common: float, within: float
) -> None:
    made = group(shares, common, within)
    variances = [made.variance(count) for count in range(len(shares) + 1)]
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(variances))
    assert variances[-1] == pytest.approx(0.0, abs=1e-12)
    assert variances[0] == pytest.approx(sum(shares) ** 2 * common**2 + sum(s**2 for s in shares) * within**2)


@given(st.floats(0.0, 40.0))
def test_a_campaign_keeps_its_budget_and_takes_what_is_worth_most(budget_s: float) -> None:
    large, small = group([0.5, 0.2]), group([0.01, 0.01, 0.01])
    chosen, seconds = choose([large, small], budget_s)
    assert seconds <= budget_s
    assert seconds == pytest.approx(1.2 * len(chosen))
    assert large.measured == min(len(chosen), 2)


def test_an_interval_only_grows_by_what_may_move() -> None:
    assert wider((1.0, 0.8, 1.3), 0.0) == (pytest.approx(0.8), pytest.approx(1.3))
    low, high = wider((1.0, 0.8, 1.3), 0.2)
    assert low == pytest.approx(math.exp(-math.hypot(math.log(1 / 0.8), 0.2)))
    assert high > 1.3


def test_a_change_touches_what_it_brings() -> None:
    """vLLM leaves 16-bit products to PyTorch, whose wheel pins cuBLAS; those of Transformer Engine are cuBLASLt's."""
    vllm = Caller("vllm", "vllm", architecture="hopper")
    assert library_of(GEMM, vllm) == "cublas"
    assert touched("cublas", "gemm", ["torch"])
    assert not touched("cublas", "gemm", ["nccl"])
    assert touched("cublas", "gemm", ["driver"])
    assert touched("transformer_engine", "gemm", ["cublas"])
    assert not touched("transformer_engine", "rms_norm", ["cublas"])
    assert library_of(make_op("all_reduce", size_bytes=2**26, ranks=8), Caller()) == "nccl"
    assert library_of(make_op("all_reduce", size_bytes=2**26, ranks=8), Caller(), "amd") == "rccl"


def test_kinds_without_a_published_pair_move_as_kernels_of_memory_do() -> None:
    assert moves_of("gemm").pairs == 3
    assert moves_of("ep_dispatch") == moves_of("all_reduce")
    assert moves_of("rms_norm") == moves_of("copy")


def test_the_report_ranks_what_may_move_and_says_what_is_left(report: UpgradeReport) -> None:
    assert sum(row.share for row in report.rows) == pytest.approx(1.0)
    before = [row.before_percent for row in report.rows]
    assert before == sorted(before, reverse=True)
    assert all(row.touched and row.measured == row.ops for row in report.rows)
    assert report.unmeasured_low_s < report.low_s < report.measured_low_s < report.step_time_s
    assert report.unmeasured_high_s > report.high_s > report.measured_high_s > report.step_time_s
    assert len(report.measure) == sum(row.measured for row in report.rows)
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["changes"] == ["engine"]


def test_nccl_touches_no_step_of_one_gpu() -> None:
    found = opcast.upgrade(TINY, "decode", device="h100_sxm", stack="vllm", batch=4, changes=["nccl"])
    assert not found.measure
    assert (found.unmeasured_low_s, found.unmeasured_high_s) == pytest.approx((found.low_s, found.high_s))
    assert found.notes[0].startswith("no kernel of this step is of nccl")


def test_the_campaign_is_one_that_the_harness_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "upgrade.json"
    assert main(["upgrade", *DECODE, "minutes=5", f"plan_out={path}"]) == 0
    said = capsys.readouterr()
    assert "cases written to" in said.out + said.err
    plan = CampaignPlan.from_json(path.read_text())
    assert plan.settings.deadline_s == 300.0
    cases = Counter(case.op.kind for case in plan.cases)
    assert cases["attention_decode"] >= FEWEST  # one op of the step, and others around it: drift needs so many
    assert {case.backend for case in plan.cases if case.op.kind == "gemm"} == {"cublas"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["changes=[ncl]"], "did you mean nccl?"),
        (["changes=[]"], "nothing changes: name what gets another version"),
        (["minutes=-1"], "minutes=-1 must be"),
        (["settings.seed=3"], "settings.seed=3 is not read without plan_out=FILE: leave it out"),
        (["plan_out=/no/where/plan.json"], "there is no folder /no/where"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["upgrade", *DECODE, *words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_the_picture_has_a_pair_of_bars_for_each_kind(report: UpgradeReport, tmp_path: Path) -> None:
    drawing = draw_upgrade(report)
    assert drawing.count("<rect") == 2 * min(len(report.rows), MOST_ROWS)
    path = tmp_path / "upgrade.svg"
    assert main(["upgrade", *DECODE, f"picture={path}"]) == 0
    assert path.read_text() == drawing
