"""One profile of one's own run becomes a calibration that later answers use, held out on other steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opcast.datasets.traces.profiles import Profile
from opcast.datasets.traces.schema import TraceFileError
from opcast.jobs.cli import main
from opcast.simulator.execution.calibration import calibrate
from opcast.simulator.execution.run import read_run
from opcast.simulator.question.calibration import Calibration, load_calibration, own_calibration

ASKED = ["model=tiny_llama_100m", "device=h100_sxm", "workload=prefill", "workload.input_len=128",
         "engine.order=[analytical]"]  # fmt: skip
SLOWER = {"gemm": 1.5, "elementwise": 2.0, "attention_prefill": 1.25}  # what the run takes longer than predicted


def answer(*more: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["simulate", *ASKED, *more, "format=json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def profile_of(folder: Path, steps: int, noise: float = 0.01) -> Path:
    """A profile of steps like the predicted one, kernel by kernel, with ops slower by :data:`SLOWER`, gaps as long."""
    trace = read_run(folder).traces[0]
    texts, events, now, correlation = trace.text("opcast_op"), [], 0.0, 0
    for step in range(steps):
        begin = now
        for row in range(len(trace)):
            op = json.loads(trace.words[texts[row]]) if trace.words[texts[row]].startswith("{") else {}
            us = float(trace.exact_us[row]) * SLOWER.get(op.get("kind", ""), 1.0) * (1 + noise * (step % 3 - 1))
            if op:
                correlation += 1
                told = {"correlation": correlation}
                events.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1,
                               "ts": now, "dur": 0.001, "args": told})  # fmt: skip
                if op["kind"] == "gemm":
                    dims = [[op["m"], op["k"]], [op["k"], op["n"]]]
                    shapes = {"Input Dims": dims, "Input type": ["c10::BFloat16"] * 2}
                    events.append({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1,
                                   "ts": now - 0.001, "dur": 0.003, "args": shapes})  # fmt: skip
                name = {"gemm": "nvjet_gemm", "attention_prefill": "flash_fwd"}.get(
                    op["kind"], "vectorized_elementwise"
                )
                events.append({"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": now, "dur": us,
                               "args": {**told, "device": 0, "stream": 7}})  # fmt: skip
            now += us
        events.append({"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 1, "tid": 1,
                       "ts": begin, "dur": now - begin, "args": {}})  # fmt: skip
    path = folder / "profile.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


def test_a_profile_makes_a_calibration_that_answers_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPCAST_HOME", str(tmp_path / "home"))
    before = answer(f"chakra={tmp_path / 'run'}", capsys=capsys)
    profile = profile_of(tmp_path / "run", 6)
    assert main(["trace", "calibrate", f"predicted={tmp_path / 'run'}", f"measured={profile}", "format=json"]) == 0
    found = json.loads(capsys.readouterr().out)
    factors = {each["family"]: each["factor"] for each in found["families"]}
    assert factors["gemm"] == pytest.approx(1.5, rel=0.02)
    assert (found["fitted"], [each["step"] for each in found["held_out"]]) == ([0, 1, 2], [3, 4, 5])
    for each in found["held_out"]:
        before_off, after_off = (abs(each[name] / each["measured_us"] - 1) for name in ("before_us", "after_us"))
        assert after_off < 0.02
        assert after_off < before_off
    assert found["output"] == own_calibration(str(tmp_path / "home"))
    after = answer(capsys=capsys)
    gemm = {each["kind"]: each for each in after["breakdown"]["by_op"]}["gemm"]
    gemm_before = {each["kind"]: each for each in before["breakdown"]["by_op"]}["gemm"]
    assert gemm["time_s"] / gemm_before["time_s"] == pytest.approx(factors["gemm"], rel=1e-3)
    assert answer("calibration=shipped", capsys=capsys)["ttft_ms"] == before["ttft_ms"]
    other = answer("stack=vllm", capsys=capsys)  # another stack is as it was
    assert other["ttft_ms"] == answer("stack=vllm", "calibration=shipped", capsys=capsys)["ttft_ms"]


@pytest.mark.essential
def test_what_cannot_be_calibrated_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer(f"chakra={tmp_path / 'run'}", capsys=capsys)
    profile = profile_of(tmp_path / "run", 1)
    predicted = f"predicted={tmp_path / 'run'}"
    assert main(["trace", "calibrate", predicted, f"measured={profile}", f"output={tmp_path / 'c.json'}"]) == 2
    assert "has 1 marked steps" in capsys.readouterr().err
    assert main(["trace", "calibrate", predicted]) == 2
    assert not (tmp_path / "c.json").exists()
    empty = Profile(profile, 0, [], [], {}, ((0.0, 1.0), (1.0, 2.0)))
    with pytest.raises(TraceFileError, match="no events"):
        calibrate(read_run(tmp_path / "run"), empty, Calibration())
    assert load_calibration("none").effects == ()
