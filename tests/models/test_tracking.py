"""MLflow on SQLite for real: runs, pictures, registered models without pickle; and servers that do not answer."""

from __future__ import annotations

import dataclasses
import importlib.util
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opcast.models import tracking
from opcast.models.candidates import Options
from opcast.models.features import feature_names
from opcast.models.following import AliasFollower
from opcast.models.importance import permutation_importance
from opcast.models.registry import Registry
from opcast.models.tracking import Tracked, TrackingError, check, log
from opcast.models.training import Trained, TrainingOutcome

if importlib.util.find_spec("mlflow") is None:
    pytest.skip("needs MLflow's registry: pip install 'opcast[mlflow]'", allow_module_level=True)


@pytest.fixture(scope="module")
def trained(outcome: TrainingOutcome, fast: Options, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    registry = Registry(tmp_path_factory.mktemp("registry"))
    predictor = registry.register(outcome.predictor)
    corrected = {**outcome.result["candidates"], "gemm@lib-1:kernel/h100_sxm@1": 3.0}  # as of a new device
    outcome = dataclasses.replace(outcome, result={**outcome.result, "candidates": corrected})
    return Trained("gemm", outcome, predictor, registry.path(predictor), fast)


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture(scope="module")
def tracked(trained: Trained, uri: str) -> Tracked:
    (made,) = log([trained], uri)
    return made


@pytest.fixture(scope="module")
def client(tracked: Tracked, uri: str) -> Any:
    import mlflow

    return mlflow.MlflowClient(uri, uri)


def test_a_run_holds_figures_options_and_the_data_behind_it(
    client: Any, tracked: Tracked, outcome: TrainingOutcome
) -> None:
    run = client.get_run(tracked.run_id)
    assert client.get_experiment(run.info.experiment_id).name == "opcast/cpu_two_threads"
    assert run.info.status == "FINISHED"
    assert run.data.metrics["test_median_ape"] == pytest.approx(outcome.result["test_median_ape"])
    assert run.data.metrics["candidate_gemm_lib-1:kernel/h100_sxm_1_median_ape"] == 3.0
    assert run.data.params["chosen"] == outcome.result["chosen"]
    assert run.data.params["option.lightgbm.trees"] == "40"
    assert [each.dataset.digest for each in run.inputs.dataset_inputs] == ["fingerprint-1"]
    assert {each.path for each in client.list_artifacts(tracked.run_id, "plots")} == {
        "plots/predicted-vs-measured.png",
        "plots/error-vs-size.png",
        "plots/importance.png",
    }
    groups = outcome.result["evaluations"]["groups"]
    logged = run.data.metrics["groups/baselines/log_log/median_ape"]
    assert logged == pytest.approx(groups["baselines"]["log_log"]["median_ape"])


def test_the_registered_model_answers_by_its_device_alias_without_pickle(
    client: Any, tracked: Tracked, outcome: TrainingOutcome, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow
    import pandas

    assert str(client.get_model_version_by_alias("opcast-gemm", "cpu_two_threads").version) == tracked.version
    folder = Path(client.download_artifacts(tracked.run_id, "model"))
    assert not [path for path in folder.rglob("*") if path.suffix in (".pkl", ".pickle", ".joblib")]
    mlflow.set_tracking_uri(uri)
    model = mlflow.pyfunc.load_model("models:/opcast-gemm@cpu_two_threads")
    ops = pandas.DataFrame({"m": [1, 64], "n": [1024, 2048], "k": [1024, 1024], "dtype": ["fp32", "fp32"]})
    columns = {name: ops[name].to_numpy() for name in ("m", "n", "k")} | {"batch": np.ones(2), "layout": np.ones(2)}
    expected = outcome.predictor.predict(columns, "fp32")
    assert model.predict(ops)["latency_us"].tolist() == expected.latency_us.tolist()


def test_the_registered_model_says_what_it_takes(tracked: Tracked, uri: str) -> None:
    import mlflow
    import pandas

    mlflow.set_tracking_uri(uri)
    found = mlflow.models.get_model_info("models:/opcast-gemm@cpu_two_threads")
    assert found.signature is not None
    assert found.signature.inputs.required_input_names() == ["m", "n", "k"]
    assert found.signature.outputs.input_names() == ["latency_us", "low_us", "high_us", "in_envelope"]
    model = mlflow.pyfunc.load_model("models:/opcast-gemm@cpu_two_threads")
    answers = model.predict(model.input_example)
    assert (answers["latency_us"] > 0).all()
    ops = pandas.DataFrame({"m": [64], "n": [2048], "k": [1024], "dtype": ["fp32"]})
    named, numbered = (model.predict(ops.assign(layout=[layout])) for layout in ("nt", 1))
    assert named["latency_us"].tolist() == numbered["latency_us"].tolist()


def test_training_again_moves_the_alias(trained: Trained, client: Any, uri: str) -> None:
    (again,) = log([trained], uri)
    assert str(client.get_model_version_by_alias("opcast-gemm", "cpu_two_threads").version) == again.version
    assert len(client.search_model_versions("name='opcast-gemm'")) >= 2


def test_what_was_not_promoted_is_logged_without_the_alias(trained: Trained, client: Any, uri: str) -> None:
    (first,) = log([trained], uri)
    worse = dataclasses.replace(trained, promoted=False, why="mean error 9.00 % against 5.00 %")
    (kept,) = log([worse], uri)
    assert kept.alias is None
    assert str(client.get_model_version_by_alias("opcast-gemm", "cpu_two_threads").version) == first.version
    tags = client.get_model_version("opcast-gemm", kept.version).tags
    assert tags["why"] == worse.why


def test_importance_finds_the_features_that_matter(outcome: TrainingOutcome) -> None:
    """The rows' law bends with n, and nothing bends with a column of noise that no tree has seen."""
    ops = outcome.table.frame()
    target = np.log(outcome.table.latency_us / ops.analytical_us)
    found = permutation_importance(outcome.predictor.correction, ops.matrix, target)
    names = feature_names("gemm")
    assert found[names.index("size_n")] > 0
    assert found[names.index("device_units")] == 0.0
    assert (found == permutation_importance(outcome.predictor.correction, ops.matrix, target)).all()


def test_artifacts_lie_beside_the_database(tracked: Tracked, uri: str) -> None:
    folder = Path(uri.removeprefix("sqlite:///")).parent
    assert sorted(path.name for path in folder.iterdir()) == ["mlartifacts", "mlflow.db"]


def test_a_server_that_is_not_there_fails_at_once_and_harms_nothing(trained: Trained) -> None:
    with pytest.raises(
        TrackingError, match=r"http://127.0.0.1:9 does not answer .*refused.* Nothing is lost"
    ) as caught:
        log([trained], "http://127.0.0.1:9")
    assert "\n" not in str(caught.value)
    assert (trained.path / "model.npz").is_file()


def test_a_server_that_never_speaks_fails_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracking.TIMEOUT_S <= 5.0
    monkeypatch.setattr(tracking, "TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        held: list[object] = []  # a connection that nobody keeps would be closed
        taker = threading.Thread(target=lambda: held.append(server.accept()), daemon=True)
        taker.start()
        with pytest.raises(TrackingError, match=r"does not answer \(timed out\)"):
            check(f"http://127.0.0.1:{port}")
        taker.join(5.0)


def test_a_database_that_cannot_be_written_is_named(trained: Trained) -> None:
    with pytest.raises(TrackingError, match=r"cannot write /proc/nowhere/mlflow\.db"):
        log([trained], "sqlite:////proc/nowhere/mlflow.db")


def test_a_database_that_is_none_is_one_line(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"this is no database" * 100)
    with pytest.raises(TrackingError, match="predictors are on disk, nothing is lost") as caught:
        log([trained], f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert "\n" not in str(caught.value)


def test_an_alias_that_moves_is_followed(
    trained: Trained, client: Any, uri: str, outcome: TrainingOutcome, tmp_path: Path
) -> None:
    """Another registry fetches what it has not, and needs MLflow's files no more for what it has."""
    correction = dataclasses.replace(outcome.predictor.correction, offset=outcome.predictor.correction.offset + 0.1)
    made = Registry(tmp_path / "there").register(dataclasses.replace(outcome.predictor, correction=correction))
    later = dataclasses.replace(trained, predictor=made, path=Registry(tmp_path / "there").path(made))
    first, second = log([trained, later], uri)
    own = Registry(tmp_path / "here")
    follower = AliasFollower(uri, own)
    known = (("gemm", "cpu_two_threads"), {"backend": made.backend})

    def current() -> float:
        found = own.find(*known[0], **known[1])
        assert found is not None
        return found.correction.offset

    assert [name.rpartition("/")[2] for name in follower.look()] == ["cpu_two_threads@1"]
    assert current() == correction.offset
    assert follower.look() == []
    for version, offset, number in (
        (first.version, outcome.predictor.correction.offset, "2"),
        (second.version, correction.offset, "1"),
    ):
        client.set_registered_model_alias("opcast-gemm", "cpu_two_threads", version)
        assert [name.rpartition("@")[2] for name in follower.look()] == [number]
        assert current() == offset
    assert len(own.list()) == 2
