"""``opcast train``: the contract's answer, evaluations as asked, what is current, and one line for bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from opcast.datasets.devices import load_device
from opcast.datasets.store import Store
from opcast.datasets.vocabulary import OpColumns
from opcast.jobs.cli import main
from opcast.jobs.train import show
from opcast.models import analytical
from opcast.models.registry import Registry

CONTRACT = {
    *("n", "test_median_ape", "test_mean_ape", "test_p90_ape", "coverage", "roofline_median_ape", "split", "predictor"),
    *("evaluations", "promoted", "why"),
}
QUICK = ["device=l40s", "tracking=null", "predictor.folds=3", "predictor.workers=1"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All-reduces and norms of an L40S with a known efficiency, one backend timed on the host."""
    path = tmp_path_factory.mktemp("train") / "store"
    sizes, ranks = (each.ravel() for each in np.meshgrid(2 ** np.arange(12, 30), [2, 4, 8]))
    reduce = {
        "size_bytes": sizes,
        "ranks": ranks,
        "ranks_per_node": np.full(54, 8),
        "link": np.zeros(54, dtype=int),
        "norm": np.zeros(54, dtype=int),
    }
    rows, cols = (each.ravel() for each in np.meshgrid(2 ** np.arange(0, 14), 512 * np.arange(1, 9)))
    for kind, columns, timer in (
        ("all_reduce", reduce, "imported"),
        ("rms_norm", {"rows": rows, "cols": cols}, "eager"),
    ):
        count = len(next(iter(columns.values())))
        latency = analytical.latency_us(OpColumns(kind, columns, "bf16", None), load_device("l40s"))
        text = {"dtype": "bf16", "out_dtype": "bf16", "device_id": "l40s", "backend": "lib-1:kernel", "status": "ok"}
        text |= {"cache": "warm", "source": "csv", "timer": timer}
        table = pa.table({**columns, **{name: [value] * count for name, value in text.items()}})
        table = table.append_column(
            "latency_us", pa.array(latency * (1.5 + 0.2 * np.sin(np.log2(next(iter(columns.values()))))))
        )
        moment = pa.array([datetime(2026, 1, 1, tzinfo=UTC)] * count, pa.timestamp("us", tz="UTC"))
        Store(path).write((kind, table.append_column("measured_at", moment)), "made")
    return path


@pytest.fixture
def train(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs the verb into a registry of this test and returns its JSON."""

    def run(*arguments: str) -> dict[str, Any]:
        places = [f"store={store}", f"predictors={tmp_path}/predictors", "format=json"]
        assert main(["train", *QUICK, *places, *arguments]) == 0
        return json.loads(capsys.readouterr().out)["kinds"]

    return run


def test_the_answer_holds_the_contract_and_every_evaluation_asked_for(train: Callable[..., dict[str, Any]]) -> None:
    kinds = train("eval=[ranks,extrapolate,head_dim]")
    result = kinds["all_reduce"]
    assert set(result) >= CONTRACT
    assert result["split"] == "one ranks of 2, 4, 8 left out"
    assert list(result["evaluations"]) == ["ranks", "extrapolate size_bytes", "head_dim"]
    assert result["evaluations"]["head_dim"]["error"] == "all_reduce has no head_dim"
    assert result["promoted"]
    assert "predictor.eager=true" in kinds["rms_norm"]["error"]


def test_rows_timed_on_the_host_are_learned_when_asked(train: Callable[..., dict[str, Any]]) -> None:
    assert train("op=rms_norm", "predictor.eager=true")["rms_norm"]["n"] == 112


def test_a_worse_predictor_does_not_become_current_unless_forced(
    train: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    train("op=all_reduce")
    worse = train("op=all_reduce", "predictor.candidates=[calibrated]")["all_reduce"]
    assert (worse["promoted"], worse["predictor"][-2:]) == (False, "@2")
    assert "same rows" in worse["why"]
    assert train("op=all_reduce", "predictor.candidates=[calibrated]", "promote=true")["all_reduce"]["promoted"]
    found = Registry(tmp_path / "predictors").find("all_reduce", "l40s")
    assert found is not None
    assert found.card["chosen"] == "calibrated"


def test_a_person_sees_a_row_for_each_evaluation(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [f"store={store}", f"predictors={tmp_path}/predictors"]
    assert main(["train", *QUICK, *places, "op=all_reduce", "eval=[groups,ranks]"]) == 0
    shown = capsys.readouterr()
    assert "nearest" in shown.out
    assert [line.split()[1] for line in shown.out.splitlines() if "all_reduce " in line] == ["groups", "ranks"]
    assert "1 of 1: all_reduce, 54 rows" in shown.err


def test_a_person_is_told_of_what_has_too_few_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of the table had a cell too few: a short campaign ended in an IndexError behind its training."""
    few = {"rope": {"error": "rope on cpu has 3 usable rows; 5 are needed"}}
    spoilt = {"predictor": "gemm@torch/cpu@1", "evaluations": {"devices": {"error": "one device alone"}}}
    show({**few, "gemm": spoilt}, load_device("h100_sxm"))
    said = " ".join(capsys.readouterr().out.split())
    assert "3 usable rows" in said
    assert "one device alone" in said


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("eval=grups", "eval has 'grups'; did you mean groups?"),
        ("eval=[groups,nothing]", "eval has 'nothing'; choose from groups, random"),
        ("predictor.trials=-2", "predictor.trials=-2 must be 0"),
        ("+predictor.families.gem={folds:3}", "predictor.families has 'gem'; did you mean gemm?"),
        ("+predictor.families.rope={lightgbm:{tree:3}}", "predictor.families.rope.lightgbm has no option 'tree'"),
    ],
)
def test_bad_input_is_one_line(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], argument: str, message: str
) -> None:
    assert main(["train", *QUICK, f"store={store}", f"predictors={tmp_path}/p", argument]) == 2
    told = capsys.readouterr().err.strip()
    assert message in told
    assert "\n" not in told


def test_the_version_before_answers_again_when_asked(
    train: Callable[..., dict[str, Any]], store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("op=all_reduce")
    train("op=all_reduce", "predictor.candidates=calibrated", "promote=true")
    registry = Registry(tmp_path / "predictors")
    places = [f"store={store}", f"predictors={tmp_path}/predictors", "op=all_reduce", "rollback=true"]
    assert [each.version for each in registry.list() if each.current] == ["2"]
    assert main(["train", *QUICK, *places, "format=json"]) == 0
    (done,) = json.loads(capsys.readouterr().out)["rolled_back"]
    assert (done["from"], done["to"], done["mlflow_version"]) == ("2", "1", None)
    assert [each.version for each in registry.list() if each.current] == ["1"]
    assert main(["train", *QUICK, *places]) == 2
    assert "no version before 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_rollback_moves_the_alias_of_mlflow_too(
    train: Callable[..., dict[str, Any]], store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"tracking=sqlite:///{tmp_path}/mlflow.db"
    train("op=all_reduce", uri)
    train("op=all_reduce", uri, "predictor.candidates=calibrated", "promote=true")
    client = mlflow.MlflowClient(uri.removeprefix("tracking="), uri.removeprefix("tracking="))
    (model,) = client.search_registered_models()
    assert {name: str(value) for name, value in model.aliases.items()} == {"l40s": "2"}
    places = [f"store={store}", f"predictors={tmp_path}/predictors", "op=all_reduce", "rollback=true"]
    assert main(["train", *QUICK, *places, uri]) == 0
    (model,) = client.search_registered_models()
    assert {name: str(value) for name, value in model.aliases.items()} == {"l40s": "1"}
