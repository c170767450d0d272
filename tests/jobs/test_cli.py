"""The command line: answers, one clear line and exit code 2 for bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from opcast.datasets.ops import make_op
from opcast.datasets.schema import Measurement
from opcast.datasets.store import Store
from opcast.jobs.cli import VERBS, main

GEMM = ["predict", "op=gemm", "op.m=4096", "op.n=4096", "op.k=4096"]
PREDICT_FIELDS = {
    "op",
    "device",
    "latency_us",
    "low_us",
    "high_us",
    "coverage",
    "engine",
    "predictor",
    "in_envelope",
    "roofline_us",
    "bound",
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPCAST_HOME", str(tmp_path))
    return tmp_path


def answer(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main([*arguments, "format=json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_predict_prints_the_promised_fields(home: Path, capsys: pytest.CaptureFixture[str]):
    found = answer([*GEMM, "op.dtype=bf16", "device=h100_sxm"], capsys)
    assert set(found) >= PREDICT_FIELDS
    assert found["low_us"] < found["latency_us"] < found["high_us"]
    assert found["bound"] == "compute"
    assert found["latency_us"] >= found["roofline_us"]


def test_a_what_if_changes_the_answer(home: Path, capsys: pytest.CaptureFixture[str]):
    decode = ["predict", "op=gemm", "op.m=1", "op.n=8192", "op.k=8192", "device=h100_sxm", "cache=cold"]
    usual = answer(decode, capsys)["latency_us"]
    throttled = answer([*decode, "device.memory_gbps=1000"], capsys)["latency_us"]
    assert throttled > 2 * usual


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["predcit"], "did you mean predict"),
        (["predict", "op=gem", "op.m=3"], "did you mean gemm"),
        (["predict", "op=gemm", "op.m=5"], "needs op.n=…, op.k=…"),
        (["predict", "op=gemm", "op.m=0", "op.n=1", "op.k=1"], "gemm.m=0 must be at least 1"),
        (["predict", "op=gemm", "op.m=-4", "op.n=1", "op.k=1"], "gemm.m=-4 must be at least 1"),
        (["predict", "op=gemm", "op.mm=3"], "op.mm is no setting"),
        ([*GEMM, "device=h100_sx"], "did you mean h100_sxm"),
        ([*GEMM, "device=h100_sxm", "op.dtype=bf17"], "unknown dtype 'bf17'"),
        ([*GEMM, "device=a100_sxm_80gb", "op.dtype=fp8"], "has no fp8 matrix units"),
        ([*GEMM, "device=h100_sxm", "device.memory_gbps=-3"], "must be positive"),
        ([*GEMM, "device=cpu"], "not measured yet"),
        ([*GEMM, "device=h100_sxm", "format=xml"], "choose text or json"),
        ([*GEMM, "device=h100_sxm", "cache=hot"], "choose warm or cold"),
        (["predict", "device=h100_sxm"], "name an op"),
        (["predict", "device=h100_sxm", "shapes=/no/such.csv"], "cannot be read"),
        (["simulate", "model=llama3_9b", "device=h100_sxm"], "did you mean llama3_8b"),
        (["simulate", "device=h100_sxm", "workload.seq_len=0"], "workload.seq_len=0 must be"),
        (["simulate", "workload=fly", "device=h100_sxm"], "workload=fly does not exist"),
        (["list", "everything"], "devices, chips, clusters, models, ops, predictors"),
        (["data", "store=/no/such/store"], "does not exist"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_store_that_is_a_file_is_one_line(home: Path, capsys: pytest.CaptureFixture[str]):
    (home / "store").write_text("not a directory")
    assert main(["data"]) == 2
    assert "opcast:" in capsys.readouterr().err


def test_shapes_are_predicted_in_order(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    table = tmp_path / "shapes.csv"
    table.write_text("m,n,k,dtype\n64,4096,4096,bf16\n8192,4096,4096,bf16\n")
    found = answer(["predict", "op=gemm", f"shapes={table}", "device=h100_sxm"], capsys)["predictions"]
    assert [p["op"]["m"] for p in found] == [64, 8192]
    assert found[0]["latency_us"] < found[1]["latency_us"]


def test_a_bad_row_of_shapes_is_named(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    table = tmp_path / "shapes.csv"
    table.write_text("m,n,k\n64,4096,4096\n-1,4096,4096\n")
    assert main(["predict", "op=gemm", f"shapes={table}", "device=h100_sxm"]) == 2
    assert "row 2" in capsys.readouterr().err


@pytest.mark.parametrize("measured", [False, True], ids=["no store", "a store of another device"])
def test_predict_starts_without_torch_and_pandas(measured: bool, home: Path):
    if measured:
        store_with_a_row(home)
    code = (
        "import sys; from opcast.jobs.cli import main; "
        f"code = main({[*GEMM, 'device=h100_sxm', 'format=json']!r}); "
        "heavy = {'torch', 'mlflow', 'sklearn', 'lightgbm', 'pandas', 'transformers', 'numba'} & set(sys.modules); "
        "print(sorted(heavy), file=sys.stderr); sys.exit(code or bool(heavy))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, home: Path, capsys: pytest.CaptureFixture[str]):
    assert main([verb, "--help"]) == 0
    assert "format: text" in capsys.readouterr().out


def test_a_sweep_runs_every_combination(home: Path, capsys: pytest.CaptureFixture[str]):
    assert main([*GEMM, "device=h100_sxm,a100_sxm_80gb", "--multirun"]) == 0
    assert capsys.readouterr().out.count("latency") == 2


def test_a_plan_is_derived_from_a_model(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plan = tmp_path / "plan.json"
    shape = ["model.config.num_hidden_layers=2", "model.config.vocab_size=2000"]
    wanted = ["campaign=model", "precision=fp32", *shape, f"plan_out={plan}", "+settings.device=cpu"]
    assert main(["profile", *wanted]) == 0
    cases = json.loads(plan.read_text())["cases"]
    assert {"gemm", "attention_decode", "adamw"} <= {case["kind"] for case in cases}
    assert {case["dtype"] for case in cases if case["kind"] == "gemm"} == {"fp32"}


@pytest.mark.parametrize("kinds", ["op=gemm", "op=[gemm,copy]"])
def test_train_takes_one_kind_or_several(home: Path, capsys: pytest.CaptureFixture[str], kinds: str):
    assert main(["train", "device=h100_sxm", kinds]) == 2
    assert "has no measurements of h100_sxm" in capsys.readouterr().err


def test_list_knows_its_kinds(home: Path, capsys: pytest.CaptureFixture[str]):
    assert len(answer(["list", "ops"], capsys)["ops"]) > 30
    assert any(d["id"] == "h200_sxm" for d in answer(["list", "devices"], capsys)["devices"])


@pytest.mark.parametrize("form", ["text", "json"])
def test_data_names_a_file_that_it_cannot_read(home: Path, capsys: pytest.CaptureFixture[str], form: str):
    (kept,) = store_with_a_row(home)
    assert main(["data", f"format={form}"]) == 0
    kept.write_bytes(kept.read_bytes()[:100])
    capsys.readouterr()
    assert main(["data", f"format={form}"]) == 1
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert f"{kept} is damaged" in err
    assert "measure again" in err
    if form == "json":
        assert json.loads(out)["damaged"][0]["where"] == str(kept)


def store_with_a_row(home: Path) -> list[Path]:
    """The files of the usual store of this home after one measurement."""
    now = datetime(2026, 1, 1, tzinfo=UTC)
    row = Measurement(
        op=make_op("gemm", m=4096, n=4096, k=4096),
        device_id="l4",
        run_id="r",
        measured_at=now,
        latency_us=3.0,
        backend="torch",
    )
    return Store(home / "store").write([row], "r")
