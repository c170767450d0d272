"""What an answer says of whose measurements it is made of: in text, JSON and the page of a step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from opcast.jobs.cli import main
from opcast.models.choice import TABLE

STEP = ["simulate", "workload=decode", "model=tiny_llama_100m", "device=h100_sxm", "stack=vllm", "workload.batch=64"]
OP = ["predict", "op=gemm", "op.m=4096", "op.n=4096", "op.k=4096", "device=h100_sxm"]


@pytest.fixture
def said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function: what a command prints, where nobody has measured anything."""

    def ask(words: list[str], *more: str) -> str:
        assert main([*words, f"home={tmp_path}", *more]) == 0
        return capsys.readouterr().out

    return ask


def test_a_step_says_whose_measurements_it_is_made_of_and_in_detail_by_which_clause(
    said: Callable[..., str], tmp_path: Path
) -> None:
    page = tmp_path / "step.html"
    text = said(STEP, "detail=true", f"report={page}")
    assert "measured by" in text
    assert "aiconfigurator" in text
    assert "which measurements answered" in text
    assert TABLE in text
    assert "Measured by" in page.read_text("utf-8")
    assert "which measurements answered" not in said(STEP)
    found = json.loads(said(STEP, "format=json"))
    assert sum(found["sources"].values()) == pytest.approx(1.0)
    for share in found["breakdown"]["by_op"]:
        assert sum(each["time_s"] for each in share["known_by"]) == pytest.approx(share["time_s"])
        assert all(each["clause"] and each["source"] and each["predictor"] for each in share["known_by"])


def test_a_prediction_says_by_which_clause_it_was_answered(said: Callable[..., str]) -> None:
    assert "which is" in said(OP)
    found = json.loads(said(OP, "format=json"))
    assert found["source"] == "aiconfigurator"
    assert found["clause"] == "a table of the op"
