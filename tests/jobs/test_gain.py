"""``opcast data gain``: rows of a machine unlike its sheet make answers better, and the page and the JSON say so."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.ops import make_op
from opcast.datasets.schema import Measurement
from opcast.datasets.store import Store
from opcast.jobs.cli import main

STEP = "workload=decode model=tiny_llama_100m device=h100_sxm workload.batch=2 workload.input_len=64"


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """A store of activations that take three times as long as the sheet of an H100 has it."""
    random, rows = np.random.default_rng(0), []
    for i in range(60):
        op = make_op("gelu", rows=2 ** (4 + i % 10), cols=128 * (1 + i // 10), dtype="bf16")
        latency_us = (9.0 + op.rows * op.cols * 6e-6) * float(np.exp(0.01 * random.standard_normal()))
        told = {"device_id": "h100_sxm", "backend": "torch", "source": "harness", "run_id": "full-1"}
        rows.append(Measurement(op=op, status="ok", measured_at=datetime.now(UTC), latency_us=latency_us, **told))
    Store(tmp_path / "store").write(rows, "full-1")
    names = ("store", "predictors", "graphs")
    return [f"home={tmp_path}", *(f"{name}={tmp_path}/{name}" for name in names)]


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    capsys.readouterr()
    assert main(["data", "gain", *words, "format=json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_was_trained_is_better_than_what_was_known(folders, tmp_path: Path, capsys) -> None:
    usual = [word for word in folders if not word.startswith("graphs=")]
    (nothing_learned,) = asked(capsys, *folders)["kinds"]
    assert nothing_learned["verdict"].startswith("not trained")
    assert nothing_learned["after_ape"] is None
    assert main(["train", "device=h100_sxm", *usual, "tracking=null"]) == 0
    page = tmp_path / "gain.html"
    told = asked(capsys, *folders, f"report={page}")
    (kind,) = told["kinds"]
    assert (kind["kind"], kind["rows"], kind["verdict"]) == ("gelu", 60, "better")
    assert kind["after_ape"] < 5.0 < kind["before_ape"]
    assert kind["before_ape"] == nothing_learned["before_ape"]
    assert told["steps"] == []
    assert all(text in page.read_text() for text in ("What became better", "gelu", "1 of 1 tables are better"))


def test_steps_stand_side_by_side(folders, tmp_path: Path, capsys) -> None:
    page = tmp_path / "gain.html"
    (step,) = asked(capsys, *folders, f"report={page}", f"steps=['{STEP}']")["steps"]
    assert step["step"] == STEP
    for ms, low, high in (step["before_ms"], step["after_ms"]):
        assert 0 < low < ms < high
    assert STEP in page.read_text()


def test_a_step_that_is_none_is_refused_in_one_line(folders, capsys) -> None:
    assert main(["data", "gain", *folders, "steps=['workload=decode model=no_such_model device=h100_sxm']"]) == 2
    assert "no_such_model" in capsys.readouterr().err
