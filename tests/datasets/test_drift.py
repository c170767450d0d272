"""Drift between campaigns: what has moved is found, what has not is not reported, and the advice names it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.drift import drift, holm, judged, median_interval, releases, step_moves
from opcast.datasets.ops import make_op
from opcast.datasets.schema import Measurement
from opcast.datasets.store import Store
from opcast.jobs.cli import main

KINDS = ("gemm", "gelu", "reduce", "softmax", "copy", "rms_norm", "attention_prefill", "embedding")
ROWS = 40


def moves(random: np.random.Generator, shifts: dict[str, float]) -> dict[tuple[str, str, str, str], np.ndarray]:
    """Kinds of a small campaign: 2 % noise with heavy tails, and a third of a percent that a kind's rows share."""
    made = {}
    for name in KINDS:
        noise = 0.02 * random.standard_t(3, ROWS) / 3**0.5
        made[name, "gpu", "torch", ""] = noise + 0.003 * random.standard_normal() + np.log1p(shifts.get(name, 0.0))
    return made


def test_three_percent_in_one_kind_are_found_and_a_hundred_repeats_without_change_report_none() -> None:
    random = np.random.default_rng(1)
    quiet = [judged(moves(random, {})) for _ in range(100)]
    assert not [each for found in quiet for each in found if each.verdict == "drifted"]
    for name in KINDS:
        found = judged(moves(random, {name: 0.03}))
        assert [each.kind for each in found if each.verdict == "drifted"] == [name]
        shift = next(each for each in found if each.kind == name)
        assert shift.percent == pytest.approx(3.0, abs=1.0)


def test_holm_rejects_in_order_and_never_more_than_each_alone() -> None:
    assert holm(np.array([0.001, 0.04, 0.03, 0.005]), 0.05).tolist() == [True, False, False, True]
    assert holm(np.array([0.001, 0.002]), 0.05).all()
    assert not holm(np.zeros(0), 0.05).size


@pytest.mark.parametrize("count", [1, 5, 30])
def test_the_interval_holds_the_median(count: int) -> None:
    middle, low, high = median_interval(np.random.default_rng(count).normal(size=count))
    assert low <= middle <= high


def store_of(path: Path, factor: dict[str, float], backend: str = "torch", driver: str = "570.1", **told: str) -> Store:
    store = Store(path)
    random = np.random.default_rng(5)
    run = f"r{backend.replace(':', '_')}"
    for kind, dims in (("gelu", ("rows", "cols")), ("softmax", ("rows", "cols"))):
        rows = []
        for i in range(20):
            op = make_op(kind, **dict(zip(dims, (2 + i, 64), strict=True)), dtype="bf16")
            latency = (10.0 + i) * factor.get(kind, 1.0) * float(np.exp(0.004 * random.standard_normal()))
            values = {"latency_us": latency, "driver": driver, "device_id": "h100_sxm", "backend": backend}
            values |= told
            rows.append(Measurement(op=op, status="ok", run_id=run, measured_at=datetime.now(UTC), **values))
        store.write(rows, run)
    return store


def test_the_command_names_what_moved_what_changed_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known, fresh = tmp_path / "known", tmp_path / "fresh"
    store_of(known, {}, firmware="96.00.89.00.01")
    store_of(fresh, {"gelu": 1.03}, driver="580.2", firmware="96.00.89.00.02")
    plan = tmp_path / "again.json"
    words = ["data", "drift", f"store={known}", f"against={fresh}", f"plan_out={plan}", "format=json"]
    assert main(words) == 1
    told = json.loads(capsys.readouterr().out)
    assert {each["kind"]: each["verdict"] for each in told["shifts"]} == {"gelu": "drifted", "softmax": "steady"}
    assert told["changed"] == {"h100_sxm": "driver 570.1 -> 580.2; firmware 96.00.89.00.01 -> 96.00.89.00.02"}
    assert "measure gelu on h100_sxm again" in told["advice"][0]
    assert len(json.loads(plan.read_text())["cases"]) == 20
    assert main(["data", "drift", f"store={known}", f"against={known}", "format=json"]) == 0


def test_a_step_becomes_what_its_own_ops_do_and_else_what_their_kind_does(tmp_path: Path) -> None:
    known, fresh = store_of(tmp_path / "known", {}), store_of(tmp_path / "fresh", {"gelu": 1.10})
    shares = {
        make_op("gelu", rows=5, cols=64, dtype="bf16"): 0.2,  # both stores have it
        make_op("gelu", rows=4096, cols=64, dtype="bf16"): 0.3,  # its kind has moved
        make_op("softmax", rows=4096, cols=64, dtype="bf16"): 0.4,  # its kind has not
        make_op("gemm", m=64, n=64, k=64): 0.1,  # nobody measured it
    }
    (found,) = step_moves(known, fresh, drift(known, fresh), shares)
    assert found.device == "h100_sxm"
    assert (found.own, found.by_kind) == (pytest.approx(0.2), pytest.approx(0.3))
    assert found.percent == pytest.approx(5.0, abs=0.2)
    assert found.low < found.percent < found.high


def test_the_command_says_what_steps_become(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known, fresh = tmp_path / "known", tmp_path / "fresh"
    store_of(known, {})
    store_of(fresh, {"softmax": 1.5})
    words = ["data", "drift", f"store={known}", f"against={fresh}", f"home={tmp_path}"]
    step = "steps=['workload=train model=tiny_llama_100m device=h100_sxm workload.seq_len=64']"
    assert main([*words, step, "format=json"]) == 1
    (told,) = json.loads(capsys.readouterr().out)["steps"]
    assert told["device"] == "h100_sxm"
    assert told["percent"] >= 0.0
    assert main([*words, "steps=3"]) == 2
    assert "must be a list" in capsys.readouterr().err


def test_two_releases_of_an_engine_are_compared_kernel_by_kernel(tmp_path: Path) -> None:
    store = store_of(tmp_path / "s", {}, "vllm-0.14.0:linear")
    store_of(tmp_path / "s", {"softmax": 0.9}, "vllm-0.24.0:linear")
    found = {each.kind: each for each in releases(store, "vllm-0.14.0", "vllm-0.24.0")}
    assert (found["softmax"].verdict, found["gelu"].verdict) == ("drifted", "steady")
    assert found["softmax"].against == "vllm-0.14.0:linear"
    assert found["softmax"].percent == pytest.approx(-10.0, abs=0.5)


@pytest.mark.slow
def test_predictors_of_the_release_that_was_left_behind_are_stale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store_of(tmp_path / "s", {}, "vllm-0.14.0:linear")
    store_of(tmp_path / "s", {"softmax": 0.9}, "vllm-0.24.0:linear")
    words = [f"store={tmp_path / 's'}", f"predictors={tmp_path / 'p'}", "format=json"]
    learn = ["op=[gelu,softmax]", "tracking=null", "predictor.folds=2", "predictor.workers=1"]
    assert main(["train", "device=h100_sxm", *learn, "predictor.candidates=[calibrated]", *words]) == 0
    capsys.readouterr()
    assert main(["data", "drift", "releases=[vllm-0.14.0,vllm-0.24.0]", *words]) == 1
    assert json.loads(capsys.readouterr().out)["stale"] == ["softmax@h100_sxm@vllm-0.14.0:linear@1"]
    assert main(["data", "drift", "releases=[vllm-0.24.0,vllm-0.14.0]", *words]) == 1
    assert json.loads(capsys.readouterr().out)["stale"] == ["softmax@h100_sxm@vllm-0.24.0:linear@1"]


def test_two_stores_without_a_common_row_are_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_of(tmp_path / "a", {})
    Store(tmp_path / "b").set_aside("a", None, "x", "empty")
    assert main(["data", "drift", f"store={tmp_path / 'a'}", f"against={tmp_path / 'b'}"]) == 2
    assert "nothing can be compared" in capsys.readouterr().err
    assert not drift(Store(tmp_path / "a"), Store(tmp_path / "b"))
