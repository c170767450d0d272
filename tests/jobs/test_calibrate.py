"""``opcast calibrate``: a table of one's own becomes a file that steps are answered with; bad input is one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from opcast.datasets.truth import read_table
from opcast.jobs.cli import main
from opcast.simulator.question.calibration import SHIPPED
from opcast.simulator.question.plan import Plan
from opcast.simulator.question.sources import Sources
from opcast.simulator.validation.answers import Engines
from opcast.simulator.validation.observed import observe
from opcast.simulator.workbench import workbench
from opcast.tests.evidence.steps import read_steps

ROWS = 8
HEAD = (
    "source,row_id,kind,model,model_canon,gpu,gpu_canon,num_gpus,precision,gbs_seqs,mbs_seqs,seq_len_tokens,"
    "tp,pp,vp,cp,dp,layers,hidden,heads,ffn_hidden,vocab,step_time_s"
)
SLOWER = 1.5


def rows(times: list[float]) -> str:
    """A table of steps of small models under Megatron, which took so many seconds."""
    made = [
        f"Megatron-LM,r{at},train_dense_pretrain,gpt-{at},gpt-{at},A100,A100-80,8,FP16,{16 * (1 + at % 2)},2,1024,"
        f"2,1,1,1,4,{2 + at // 2},1024,16,4096,51200,{seconds}"
        for at, seconds in enumerate(times)
    ]
    return "\n".join([HEAD, *made, ""])


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPCAST_HOME", str(tmp_path / "home"))
    path = tmp_path / "mine.csv"
    path.write_text(rows([1.0] * ROWS))
    return path


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main([*arguments, "format=json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_steps_are_answered_as_ones_own_runs_were(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    physics = ask(capsys, "validate", f"truth={table}", "details=true", "calibration=none")
    assert physics["simulated"] == ROWS, physics["unsupported"]
    predicted = [row["quantities"]["step_time"]["predicted"] for row in physics["per_row"]]
    table.write_text(rows([seconds * SLOWER for seconds in predicted]))
    written = ("mine.json", "scores.json", "steps.parquet", "errors.svg")
    output, scores, steps, picture = (table.parent / name for name in written)
    files = (f"output={output}", f"scores={scores}", f"steps={steps}", f"picture={picture}")
    made = ask(capsys, "calibrate", f"tables=[{table}]", *files)
    assert json.loads(scores.read_text()) == made["scores"]
    assert made["scores"]["all"]["physics"]["rows"] == ROWS
    assert picture.read_text().count("h0") == ROWS
    names = pq.read_table(steps).column("id").to_pylist()
    found, errors = read_steps(steps, dict.fromkeys(names[1:], 2.0))  # the first was not measured
    assert [each.id for each in found] == names[1:]
    assert {each.measured for each in found} == {2.0}
    assert all(sum(each.parts.values()) == pytest.approx(1.0) for each in found)
    without_effects = [2.0 / float(np.exp(errors["physics"][name])) for name in names[1:]]
    setting = workbench(Sources()).validation()

    def without(plan: Plan) -> Plan:
        return replace(plan, calibration="none", stack=replace(plan.stack, issue_us={}))  # read off published runs

    bare = observe("mine", read_table(table).rows, setting, Engines(setting), without)
    answers = [each.predicted for each in bare]
    assert without_effects == pytest.approx(answers[1:], rel=1e-6)
    assert all(np.array(answers) < predicted)
    assert made["scores"]["all"]["fitted"]["median"] < made["scores"]["all"]["physics"]["median"] / 3
    again = ask(capsys, "validate", f"truth={table}", f"calibration={output}")
    assert again["metrics"]["step_time"]["median_ape"] < 0.6 * made["scores"]["all"]["physics"]["median"]


def test_ones_own_runs_join_what_ships(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table.write_text(rows([1.0] * ROWS) + rows([2.0]).splitlines()[1].replace("A100-80", "A999") + "\n")
    output = table.parent / "mine.json"
    made = ask(capsys, "calibrate", f"tables=[{table}]", "start=shipped", f"output={output}")
    assert made["unanswered"] == {"mine": 1}
    known, shipped = (json.loads(path.read_text()) for path in (output, SHIPPED))
    at = {(each["of"], each["family"]): each for each in known["effects"]}
    assert {(each["of"], each["family"]) for each in shipped["effects"]} <= set(at)
    assert all(at[each["of"], each["family"]] == each for each in shipped["effects"] if "chip=ada" in each["of"])
    assert at["framework=megatron", "gemm"]["rows"] > ROWS
    assert set(shipped["widths"]) <= set(known["widths"])


def test_tables_without_runs_are_one_line(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table.write_text("\n".join(rows([1.0] * 3).splitlines()))
    assert main(["calibrate", f"tables=[{table}]"]) == 2
    assert "3 rows of mine.csv are steps with a time" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name tables of known runs"),
        (["tables=[/no/such.csv]"], "tables=/no/such.csv cannot be read"),
        (["rows=3"], "rows=3 must be a whole number of at least 8"),
        (["output=/no/folder/x.json"], "there is no folder"),
        (["start=nothing.json"], "start=nothing.json does not exist"),
    ],
)
def test_bad_input_is_one_line(
    table: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named = arguments if not arguments or "tables" in arguments[0] else [f"tables=[{table}]", *arguments]
    assert main(["calibrate", *named]) == 2
    assert said in capsys.readouterr().err
    assert main(["simulate", "model=llama3_8b", "device=h100_sxm", f"calibration={table}"]) == 2
    assert "is no JSON" in capsys.readouterr().err


def test_rows_of_an_unknown_framework_are_left_out(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, *lines = rows([1.0] * 5).splitlines()
    stacks = ("another", *["megatron"] * 4)
    named = (f"{line},{stack}" for line, stack in zip(lines, stacks, strict=True))
    table.write_text("\n".join([f"{head},stack", *named, ""]))
    assert ask(capsys, "calibrate", f"tables=[{table}]")["scores"]["all"]["physics"]["rows"] == 4


def test_runs_of_tables_that_number_them_alike_are_kept_apart(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = table.with_name("other.csv")
    table.write_text(rows([1.0] * 4))
    other.write_text(rows([9.0] * 4))
    scores = ask(capsys, "calibrate", f"tables=[{table},{other}]")["scores"]
    assert scores["mine"]["physics"]["median"] != scores["other"]["physics"]["median"]
