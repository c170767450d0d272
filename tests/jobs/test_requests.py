"""Requests of the verbs that do not simulate: from a configuration, through JSON and back."""

from __future__ import annotations

import pytest

from opcast.datasets.sources.options import ImportOptions
from opcast.jobs.cli import main
from opcast.jobs.composing import compose
from opcast.jobs.requests import DataRequest, ImportRequest, TrainRequest, train_request
from opcast.models.candidates import Options


def test_training_is_asked_by_a_request() -> None:
    config = compose(
        "train", ["device=l4", "op=[gemm,copy]", "predictor.lightgbm.trees=7", "eval=random", "power=true"]
    )
    made = train_request(config, "l4")
    assert made.kinds == ("gemm", "copy")
    assert (made.options.lightgbm.trees, made.options.evaluations, made.power) == (7, ("random",), True)
    assert TrainRequest.from_json(made.to_json()) == made
    assert made.key() != train_request({**config, "power": False}, "l4").key()
    assert TrainRequest.from_dict({"options": {"folds": 3}}).options == Options(folds=3)


def test_imports_and_stores_go_through_json() -> None:
    for made in (
        ImportRequest("csv", "a.csv", options=ImportOptions(systems=("h100_sxm",))),
        DataRequest("check", "/s"),
    ):
        assert type(made).from_json(made.to_json()) == made


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["data", "chek"], "takes nothing, `check`, `repeat`, `drift`, `gain`, `nodes` or `bundle`, not 'chek'"),
        (["import", "source=csv", "link=3"], "link=3 is not one of nvlink"),
    ],
)
def test_what_they_cannot_be_is_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert says in capsys.readouterr().err
