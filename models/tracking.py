"""MLflow: one run per kind with parameters, metrics, pictures and data fingerprint; the model registered by alias.

Tracking comes last: predictors are on disk and in the registry before a server is touched, so that one which does
not answer costs a message and nothing else. The model is MLflow's pyfunc flavour with a loader module, not a pickle.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from ..datasets.devices import Device
from ..datasets.installing import install_command
from .candidates import Options
from .features import feature_names
from .importance import ROWS, permutation_importance
from .plots import save as save_plots
from .predictor import Predictor, read_card
from .registry import Registry
from .table import MeasurementStore
from .training import Trained, train_and_register

if TYPE_CHECKING:
    from mlflow import MlflowClient

TIMEOUT_S = 5.0  # of a question to a tracking server
LOADER = "opcast.models.mlflow_model"
PREFIX = "opcast-"  # of registered models
DIGEST = "sha256"  # the tag with the hash of a predictor's arrays


class TrackingError(ValueError):
    """MLflow cannot be reached or refuses; the message names the server. Trained predictors are unharmed."""


@dataclass(frozen=True)
class Tracked:
    """Where MLflow keeps a predictor: the run, the registered model's name and version, and its alias if promoted."""

    run_id: str
    model: str
    version: str
    alias: str | None


def train_tracked(
    store: MeasurementStore,
    device: Device | str,
    kinds: Iterable[str] | None,
    options: Options | None,
    registry: Registry,
    uri: str | None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """:func:`.training.train` into a registry, then log to MLflow at ``uri`` unless it is None or MLflow is missing.

    TrackingError when MLflow fails: by then every predictor is registered.
    """
    results, trained = train_and_register(store, device, registry, kinds, options, progress)
    if uri and importlib.util.find_spec("mlflow") is None:
        if progress:
            progress(f"mlflow is not installed: trained and registered, not tracked ({install_command('mlflow')})")
    elif uri:
        log(trained, uri)
    return results


def log(trained: Iterable[Trained], uri: str) -> list[Tracked]:
    """Log and register predictors that are on disk already. TrackingError when MLflow is missing or does not answer."""
    check(uri)
    with in_one_line(uri):
        client = client_of(uri)
        experiments: dict[str, str] = {}
        done = []
        for result in trained:
            device_id = result.predictor.device_id
            if device_id not in experiments:
                experiments[device_id] = _experiment(client, f"opcast/{device_id}", uri)
            done.append(_log_one(client, experiments[device_id], result))
    return done


def check(uri: str) -> None:
    """TrackingError, within seconds, when MLflow is not installed or a server does not answer at all."""
    if importlib.util.find_spec("mlflow") is None:
        raise TrackingError(f"tracking needs mlflow: {install_command('mlflow')}, or switch tracking off")
    parts = urlsplit(uri)
    if parts.scheme == "sqlite":
        _writable(Path(uri.removeprefix("sqlite:///")))
    if parts.scheme not in ("http", "https"):
        return
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=TIMEOUT_S):
            return
    except (OSError, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError) and error.code < 500:
            return  # it answers; what it has to say comes with the first call
        reason = getattr(error, "reason", error)
        raise TrackingError(
            f"MLflow at {uri} does not answer ({reason}); start it, or use sqlite:///FILE. Nothing is lost"
        ) from None


def _writable(database: Path) -> None:
    try:
        database.parent.mkdir(parents=True, exist_ok=True)
        existed = database.exists()
        with database.open("ab"):
            pass
        if not existed:
            database.unlink()
    except OSError as error:
        raise TrackingError(f"MLflow cannot write {database}: {error.strerror}; give another sqlite:///FILE") from None


@contextmanager
def in_one_line(uri: str) -> Iterator[None]:
    """What MLflow and its database raise, as one line; a failure inside must not hide behind a page of traceback.

    What it prints (a run's address on a server) goes to stderr: stdout is the verb's answer.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except TrackingError:
        raise
    except Exception as error:  # MLflow raises its own, requests', sqlalchemy's and alembic's
        first = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {first[0] if first else ''}"
        raise TrackingError(
            f"MLflow at {uri} failed ({reason[:200]}); predictors are on disk, nothing is lost"
        ) from error


def client_of(uri: str) -> MlflowClient:
    """MLflow at a tracking URI."""
    import logging

    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):  # their progress notes are not ours to print
        logging.getLogger(name).setLevel(logging.ERROR)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _experiment(client: MlflowClient, name: str, uri: str) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return str(experiment.experiment_id)
    location = None
    if uri.startswith("sqlite:///"):  # by default MLflow would put artifacts wherever the process happens to run
        location = (Path(uri.removeprefix("sqlite:///")).absolute().parent / "mlartifacts").as_uri()
    return str(client.create_experiment(name, artifact_location=location))


def _log_one(client: MlflowClient, experiment_id: str, trained: Trained) -> Tracked:
    predictor = trained.predictor
    run = client.create_run(experiment_id, run_name=trained.label, tags={"opcast.kind": predictor.kind})
    run_id = run.info.run_id
    _log_numbers(client, run_id, trained)
    with tempfile.TemporaryDirectory() as scratch:
        pictures = Path(scratch, "plots")
        pictures.mkdir()
        outcome = trained.outcome
        measured_us = outcome.table.latency_us[outcome.held_out]
        save_plots(measured_us, outcome.held_out_us, _importance(trained), trained.label, pictures)
        client.log_artifacts(run_id, str(pictures), "plots")
        client.log_dict(run_id, dict(outcome.result["evaluations"]), "evaluations.json")
        _save_model(Path(scratch, "model"), trained)
        client.log_artifacts(run_id, str(Path(scratch, "model")), "model")
    client.set_terminated(run_id)
    return _register(client, f"{run.info.artifact_uri}/model", run_id, trained)


def _importance(trained: Trained) -> dict[str, float]:
    """Importance of each feature, read from a sample of the rows."""
    table, seed = trained.outcome.table, trained.outcome.options.seed
    if len(table) > ROWS:
        table = table.take(np.sort(np.random.default_rng(seed).choice(len(table), ROWS, replace=False)))
    ops = table.frame()
    target = np.log(table.latency_us / ops.analytical_us)
    importance = permutation_importance(trained.predictor.correction, ops.matrix, target, seed)
    return dict(zip(feature_names(table.kind), importance.tolist(), strict=True))


def _log_numbers(client: MlflowClient, run_id: str, trained: Trained) -> None:
    import time

    from mlflow.entities import Dataset, DatasetInput, Metric, Param

    result, now = trained.outcome.result, int(time.time() * 1000)
    numbers = {name: value for name, value in result.items() if isinstance(value, (int, float))}
    numbers |= {f"candidate_{name}_median_ape": value for name, value in result["candidates"].items()}
    numbers |= dict(_figures(result["evaluations"]))
    texts = {
        **_parameters(trained.predictor),
        **{f"option.{name}": value for name, value in _flat(trained.outcome.options)},
    }
    client.log_batch(
        run_id,
        metrics=[Metric(_allowed(name), float(value), now, 0) for name, value in numbers.items()],
        params=[Param(name, str(value)[:500]) for name, value in texts.items()],
    )
    table = trained.outcome.table
    dataset = Dataset(trained.label, (table.fingerprint or "unknown")[:36], "opcast-store", "{}")
    client.log_inputs(run_id, [DatasetInput(dataset, [])])


def _allowed(name: str) -> str:
    """A name as MLflow takes it: a predictor that was corrected is named with @."""
    return re.sub(r"[^\w./ :-]", "_", name)


def _figures(evaluations: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number of the evaluations by its path: ``groups/baselines/roofline/median_ape``."""
    for name, value in evaluations.items():
        if isinstance(value, Mapping):
            yield from _figures(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{name}", value


def _parameters(predictor: Predictor) -> dict[str, Any]:
    card = predictor.card
    names = ("chosen", "split", "stated_coverage", "seed", "opcast_version", "fingerprint", "dtypes")
    return {
        "kind": predictor.kind,
        "device": predictor.device_id,
        "backend": predictor.backend,
        "predictor": f"{predictor.name}@{predictor.version}",
        **{name: card[name] for name in names if name in card},
    }


def _flat(options: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            yield from _flat(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def _save_model(path: Path, trained: Trained) -> None:
    """The folder MLflow wants: the predictor's own files, and which module loads them."""
    import mlflow.pyfunc

    from .mlflow_model import example_of, signature_of

    metadata: Mapping[str, Any] = {"predictor": trained.predictor.name, "version": trained.predictor.version}
    mlflow.pyfunc.save_model(
        str(path),
        loader_module=LOADER,
        data_path=str(trained.path),
        pip_requirements=["opcast"],
        signature=signature_of(trained.predictor.kind),
        input_example=example_of(trained.outcome.table),
        metadata=dict(metadata),
    )


def _register(client: MlflowClient, source: str, run_id: str, trained: Trained) -> Tracked:
    """A version of the registered model; the device's alias moves to it only where the predictor was promoted."""
    from mlflow.exceptions import MlflowException

    predictor, name = trained.predictor, f"opcast-{alias_of(trained.label)}"
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    tags = {"device": predictor.device_id, "promoted": str(trained.promoted), "why": trained.why}
    tags[DIGEST] = str(read_card(trained.path).get("sha256", ""))
    model_version = client.create_model_version(name, source, run_id, tags=tags)
    alias = alias_of(predictor.device_id) if trained.promoted else None
    if alias:
        client.set_registered_model_alias(name, alias, model_version.version)
    return Tracked(run_id, name, str(model_version.version), alias)


def roll_back(uri: str, device_id: str, label: str, predictor: str) -> str | None:
    """Move the device's alias of a registered model to a predictor's version (``gemm@torch/h100_sxm@3``); its number.

    None where MLflow knows no such version. TrackingError when MLflow is missing or does not answer.
    """
    check(uri)
    with in_one_line(uri):
        client, name = client_of(uri), f"{PREFIX}{alias_of(label)}"
        for model_version in client.search_model_versions(f"name = '{name}'"):
            if model_version.run_id and client.get_run(model_version.run_id).data.params.get("predictor") == predictor:
                client.set_registered_model_alias(name, alias_of(device_id), model_version.version)
                return str(model_version.version)
    return None


def alias_of(text: str) -> str:
    """A text as MLflow takes names and aliases."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text)
