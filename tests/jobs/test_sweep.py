"""``opcast sweep``: all points of some axes in one table, which is gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from opcast.jobs import sweep, sweeping
from opcast.jobs.cli import main

JOB = (
    "plan model=llama3_8b cluster=dgx_h100 workload.global_batch=64 steps=2000 step_time_s=2 checkpoint.size_gb=100 "
    "lives=20"
)
AXES = "cluster.nodes=1,2 checkpoint.every_minutes=5,60"


@pytest.fixture
def swept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """What a sweep of the job prints as JSON, and its table's rows."""

    def ask(words: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        own = [f"table={tmp_path}/jobs.parquet", f"home={tmp_path}", "workers=1", "format=json"]
        main(["sweep", *JOB.split(), *words.split(), *own])
        return json.loads(capsys.readouterr().out), pq.read_table(tmp_path / "jobs.parquet").to_pylist()

    return ask


def test_every_point_is_a_row_with_its_axes_and_figures(swept: Any) -> None:
    told, rows = swept(AXES)
    assert told | {"wall_time_s": 0} == {
        "table": told["table"], "points": 4, "asked": 4, "rows": 4, "failed": 0, "wall_time_s": 0,
    }  # fmt: skip
    axes = [(row["cluster.nodes"], row["checkpoint.every_minutes"]) for row in rows]
    assert axes == [(1, 5), (1, 60), (2, 5), (2, 60)]
    assert all(0 < row["days.p10"] <= row["days.p90"] and row["devices"] == 8 * row["cluster.nodes"] for row in rows)
    assert all(row["days.p50"] < 2000 * 2 / 86400 * 1.5 for row in rows)


def test_a_table_is_gone_on_with(swept: Any) -> None:
    first = swept("cluster.nodes=1,2")[1]
    told, rows = swept("cluster.nodes=1,2,4")
    assert (told["points"], told["asked"]) == (3, 1)
    assert [row["cluster.nodes"] for row in rows] == [1, 2, 4]
    assert rows[:2] == [row | {name: row.get(name) for name in rows[0]} for row in first]


def test_an_answer_of_another_release_is_asked_again(swept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    swept("cluster.nodes=1")
    monkeypatch.setattr(sweeping, "__version__", "0.0.0")
    told, rows = swept("cluster.nodes=1")
    assert told["asked"] == 1
    assert len({row["opcast"] for row in rows}) == 2


def test_a_point_without_an_answer_says_why_and_stops_nothing(swept: Any) -> None:
    told, rows = swept("lives=20,0")
    assert (told["rows"], told["failed"]) == (2, 1)
    assert [row["error"] for row in rows] == [None, rows[1]["error"]]
    assert "lives=0" in rows[1]["error"]
    assert swept("lives=20,0")[0]["asked"] == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["plan", "clutser=dgx_h100"], "clutser"),
        (["paln"], "plan"),
        (["model=llama3_8b"], "needs what is asked first"),
        (["plan", "seed=range(0,400)", "lives=range(1,400)"], "159,600 points"),
        (["plan", *JOB.split()[1:], "table=/nowhere/jobs.parquet"], "there is no folder /nowhere"),
        (["plan", *JOB.split()[1:], "table=1e9"], "must be a path"),
    ],
)
def test_bad_input_is_one_line(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert why in said
    assert "\n" not in said


def test_what_is_no_table_of_a_sweep_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.parquet").write_text("mine")
    assert main(["sweep", *JOB.split(), f"table={tmp_path}/notes.parquet", f"home={tmp_path}"]) == 2
    assert "no table of `opcast sweep`" in capsys.readouterr().err
    assert (tmp_path / "notes.parquet").read_text() == "mine"


def test_values_of_an_axis() -> None:
    assert sweep.values_of("cluster.nodes=1,2") == ["cluster.nodes=1", "cluster.nodes=2"]
    assert sweep.values_of("power_caps_w=[500,400]") == ["power_caps_w=[500,400]"]
    assert sweep.values_of("a=[1,2],[3]") == ["a=[1,2]", "a=[3]"]
    assert sweep.values_of("chips") == ["chips"]
    assert sweeping.column([1, None, 2.5]) == [1.0, None, 2.5]
    assert sweeping.column([1, "x"]) == ["1", "x"]


def test_rows_of_an_answer_are_rows_of_the_table(swept: Any, tmp_path: Path) -> None:
    tiny = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    (tmp_path / "tiny.json").write_text(json.dumps(tiny))
    words = f"compare chips model={tmp_path}/tiny.json cluster=dgx_h100 others=[dgx_h200] workload.seq_len=128"
    own = [f"table={tmp_path}/chips.parquet", f"home={tmp_path}", "workers=1"]
    assert main(["sweep", *words.split(), "workload.global_batch=8,16", *own]) == 0
    rows = pq.read_table(tmp_path / "chips.parquet").to_pylist()
    assert [(row["workload.global_batch"], row["rows.cluster"]) for row in rows] == [
        (8, "dgx_h100"), (8, "dgx_h200"), (16, "dgx_h100"), (16, "dgx_h200"),
    ]  # fmt: skip
