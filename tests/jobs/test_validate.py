"""``opcast validate``: the promised fields, reasons for rows left out, one line for bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opcast.datasets.devices import Device
from opcast.datasets.truth import published
from opcast.datasets.truth.halves import half_of
from opcast.jobs.cli import main
from opcast.simulator import workbench
from opcast.simulator.engines import Engine, build_engine

OPS = """row_id,op,precision,gpu_canon,M,N,K,latency_ms
a,matmul,FP16,A100-80,4096,12288,12288,4.4576
b,matmul,FP16,A100-80,2048,12288,12288,2.3586
c,matmul,FP16,A100-80,2048,12288,12288,2.3500
d,conv,FP16,A100-80,64,64,64,1.0
e,matmul,FP16,MI9000,64,64,64,1.0
f,matmul,FP16,A100-80,64,,64,1.0
"""
FIELDS = {"table", "rows", "simulated", "unsupported", "failed", "metrics", "by_group", "noise_floor"}
ERRORS = {"n", "median_ape", "mean_ape", "p90_ape", "max_ape", "bias", "coverage", "interval_width", "interval_score"}


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


def test_of_unseen_sources_scores_alone_are_said(ops: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = {half_of(f"page {number}"): f"page {number}" for number in range(20)}
    head, *lines = OPS.splitlines()
    told = [f"{sides['unseen' if at < 2 else 'looked_at']},{line}" for at, line in enumerate(lines)]
    ops.write_text("\n".join([f"source,{head}", *told, f"{sides['unseen']},{lines[3]}".replace("d,", "g,", 1), ""]))
    unseen, looked_at = (answer(ops, capsys, f"half={half}") for half in ("unseen", "looked_at"))
    assert (unseen["half"], unseen["rows"], unseen["simulated"]) == ("unseen", 3, 2)
    assert unseen["metrics"]["latency"]["n"] == 2
    assert (unseen["unsupported"], unseen["by_group"], list(unseen["refused"].values())) == ([], {}, [1])
    assert "per_row" not in unseen
    assert (looked_at["rows"], looked_at["simulated"]) == (4, 1)
    assert looked_at["unsupported"]
    assert main(["validate", f"truth={ops}", "half=unseen"]) == 0
    said = "".join(capsys.readouterr())
    assert "not simulated, 1 row:" in said
    assert "unseen sources" in said


def test_rows_refused_by_their_result_count_once_with_and_once_without(
    ops: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "rules"
    folder.mkdir()
    (folder / "ops.yaml").write_text(
        "of: [operator]\nsaid: ''\nrules:\n  - when: {latency_ms: {above: 4}}\n    refuse: slow\n"
        "    basis: read off some_table\n    source: its times\n"
    )
    found = answer(ops, capsys, f"rules={folder}")
    assert (found["simulated"], found["refused_by_outcome"]) == (2, 1)
    assert found["metrics"]["latency"]["n"] == 2
    assert found["with_refused"]["latency"]["n"] == 3
    assert found["refused"]["slow"] == 1
    assert main(["validate", f"truth={ops}", f"rules={folder}"]) == 0
    assert "with 1 refused by result: latency" in capsys.readouterr().out


def test_details_and_limit(ops: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(ops, capsys, "details=true", "limit=2")
    assert [row["id"] for row in found["per_row"]] == ["a", "b"]
    told = [row["quantities"]["latency"] for row in found["per_row"]]
    for values in told:
        assert values["ape"] == pytest.approx(abs(values["predicted"] / values["measured"] - 1) * 100)
        assert values["low"] < values["predicted"] < values["high"]
    inside = [values["low"] <= values["measured"] <= values["high"] for values in told]
    widths = [(values["high"] - values["low"]) / values["predicted"] for values in told]
    assert found["metrics"]["latency"]["coverage"] == sum(inside) / 2
    assert found["metrics"]["latency"]["interval_width"] == pytest.approx(sum(widths) / 2)
    outside = [
        max(values["low"] - values["measured"], values["measured"] - values["high"], 0.0) / values["predicted"]
        for values in told
    ]
    score = sum(width + 20 * missed for width, missed in zip(widths, outside, strict=True)) / 2
    assert found["metrics"]["latency"]["interval_score"] == pytest.approx(score)


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
    assert "in interval %" in shown.out
    assert "not simulated, 1 row: no figures of the GPU 'MI9000'" in shown.err


STEPS = """row_id,model_canon,gpu_canon,num_gpus,precision,gbs_seqs,mbs_seqs,seq_len_tokens,tp,pp,step_time_s
a,gpt2,A100-80,1,BF16,1,1,64,1,1,0.1
b,gpt2,H100,1,BF16,1,1,64,1,1,0.1
c,gpt2,MI9000,1,BF16,1,1,64,1,1,0.1
"""


@pytest.mark.parametrize(("text", "quantity"), [(OPS, "latency"), (STEPS, "step_time")])
def test_a_row_that_fails_leaves_the_others_answered(
    text: str, quantity: str, ops: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine(device: Device, *arguments: Any) -> Engine:
        if device.id == "h100_sxm":
            raise RuntimeError("a fault of\nopcast's own")
        return build_engine(device, *arguments)

    monkeypatch.setattr(workbench, "build_engine", engine)
    ops.write_text(text.replace("b,matmul,FP16,A100-80", "b,matmul,FP16,H100"))
    assert main(["validate", f"truth={ops}", "format=json", "details=true"]) == 1
    found = json.loads(capsys.readouterr().out)
    (failed,) = found["failed"]
    assert (failed["id"], failed["error"]) == ("b", "RuntimeError: a fault of opcast's own")
    answered = [row["id"] for row in found["per_row"]]
    assert answered == [row for row in ("a", "c") if row not in {left["id"] for left in found["unsupported"]}]
    assert found["metrics"][quantity]["n"] == found["simulated"] == len(answered)
    assert found["rows"] == found["simulated"] + len(found["unsupported"]) + 1
    assert main(["validate", f"truth={ops}"]) == 1
    assert "failed, 1 row (the first is b): RuntimeError: a fault of opcast's own" in capsys.readouterr().err


def test_a_published_run_needs_rules_or_a_framework_told(
    ops: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where pip installed opcast: the folder of a checkout is not there."""
    rules = published.CHECKOUT
    source, *rest = STEPS.splitlines()
    ops.write_text("\n".join([f"source,{source}", *(f"PyTorch benchmarks,{line}" for line in rest), ""]))
    usual = answer(ops, capsys)
    monkeypatch.setattr(published, "CHECKOUT", tmp_path / "none")
    published.publications.cache_clear()
    try:
        assert main(["validate", f"truth={ops}"]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert "the framework is not told: a column stack names one" in said
        assert "rules=FOLDER" in said
        same = [answer(ops, capsys, f"rules={rules}"), answer(ops, capsys, "stack=torch")]
        for found in same:
            assert found["metrics"] == usual["metrics"]
        ops.write_text("id,silicon_ttft_ms,silicon_tpot_ms\na,1,2\n")
        assert main(["validate", f"truth={ops}"]) == 2
        assert "rules=FOLDER says what the columns of a published table mean" in capsys.readouterr().err
    finally:
        published.publications.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name a table"),
        (["truth=/no/such.csv"], "cannot be read"),
        (["truth={ops}", "limit=0"], "at least 1"),
        (["truth={ops}", "rules=/no/such"], "rules=/no/such: no folder with rules on published tables"),
        (["truth={ops}", "rules=[a]"], "must be a path"),
        (["truth={ops}", "half=unseen", "details=true"], "half=unseen details=True: of these rows nobody sees more"),
        (["truth={ops}", "half=unseen", "limit=1"], "leave limit out"),
        (["truth={ops}", "half=mine"], "half='mine' is not one of looked_at, unseen"),
        (["truth={ops}", "rival=nobody"], "is not known; take table"),
        (["truth={ops}", "device.memory_gb=3"], "no figure 'memory_gb'"),
        (["truth={ops}", "device=h100_sx"], "unknown device 'h100_sx'; did you mean h100_sxm"),
        (["truth={ops}", "format=xml"], "choose text or json"),
    ],
)
def test_bad_input_is_one_line(ops: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", *(text.format(ops=ops) for text in arguments)]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
