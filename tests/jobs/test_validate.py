"""``opcast validate``: the promised fields, reasons for rows left out, one line for bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from opcast.jobs.cli import main

OPS = """row_id,op,precision,gpu_canon,M,N,K,latency_ms
a,matmul,FP16,A100-80,4096,12288,12288,4.4576
b,matmul,FP16,A100-80,2048,12288,12288,2.3586
c,matmul,FP16,A100-80,2048,12288,12288,2.3500
d,conv,FP16,A100-80,64,64,64,1.0
e,matmul,FP16,MI9000,64,64,64,1.0
f,matmul,FP16,A100-80,64,,64,1.0
"""
FIELDS = {"table", "rows", "simulated", "unsupported", "metrics", "by_group", "noise_floor"}
ERRORS = {"n", "median_ape", "mean_ape", "p90_ape", "max_ape", "bias"}


@pytest.fixture
def ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPCAST_HOME", str(tmp_path))
    path = tmp_path / "some_table.csv"
    path.write_text(OPS)
    return path


def answer(path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict:
    assert main(["validate", f"truth={path}", "format=json", *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_promised_fields(ops: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(ops, capsys)
    assert set(found) >= FIELDS
    assert "per_row" not in found
    assert (found["rows"], found["simulated"]) == (6, 3)
    assert {row["id"] for row in found["unsupported"]} == {"d", "e", "f"}
    assert set(found["metrics"]["latency"]) == ERRORS
    assert found["metrics"]["latency"]["median_ape"] < 25
    assert found["noise_floor"]["latency"]["groups"] == 1
    assert found["by_group"]["gpu"]["A100-80"] == found["metrics"]


def test_details_and_limit(ops: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(ops, capsys, "details=true", "limit=2")
    assert [row["id"] for row in found["per_row"]] == ["a", "b"]
    for row in found["per_row"]:
        values = row["quantities"]["latency"]
        assert values["ape"] == pytest.approx(abs(values["predicted"] / values["measured"] - 1) * 100)


def test_devices_are_overridden(ops: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = answer(ops, capsys, "details=true")["per_row"][0]["quantities"]["latency"]["predicted"]
    other = answer(ops, capsys, "details=true", "device=h100_sxm")["per_row"][0]["quantities"]["latency"]["predicted"]
    assert other < 0.7 * usual
    slower = answer(ops, capsys, "details=true", "device.memory_gbps=100")["per_row"][0]
    assert slower["quantities"]["latency"]["predicted"] > usual


def test_a_person_sees_tables(ops: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", f"truth={ops}", "details=true"]) == 0
    shown = capsys.readouterr()
    assert "3 of 6 rows simulated" in shown.out
    assert "every row, worst first" in shown.out
    assert "not simulated, 1 rows: no figures of the GPU 'MI9000'" in shown.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name a table"),
        (["truth=/no/such.csv"], "cannot be read"),
        (["truth={ops}", "limit=0"], "at least 1"),
        (["truth={ops}", "rival=nobody"], "choose from table, aiconfigurator"),
        (["truth={ops}", "device.memory_gb=3"], "no figure 'memory_gb'"),
        (["truth={ops}", "device=h100_sx"], "does not exist"),
        (["truth={ops}", "format=xml"], "choose text or json"),
    ],
)
def test_bad_input_is_one_line(ops: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", *(text.format(ops=ops) for text in arguments)]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
