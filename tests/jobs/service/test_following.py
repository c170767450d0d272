"""A service that follows MLflow: another predictor answers as soon as an alias of the registry moves."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from opcast.datasets.ops import make_op
from opcast.models.predictor import Predictor
from opcast.models.registry import Registry
from opcast.simulator.question.sources import Sources
from opcast.simulator.workbench import SHIPPED_PREDICTORS

OP: dict[str, Any] = {"op": {"kind": "gemm", "m": 512, "n": 1024, "k": 2048, "dtype": "fp8"}, "device": "h100_sxm"}
DEVICE, MODEL = "h100_sxm", "opcast-gemm"


def version_of(client: Any, predictor: Predictor, folder: Path) -> str:
    """The number of a version of the registered model that holds a predictor."""
    predictor.save(folder / "model")
    run = client.create_run("0", tags={"opcast.kind": "gemm"})
    client.log_artifacts(run.info.run_id, str(folder), "model")
    digest = Registry(folder / "other").register(predictor).card["sha256"]
    tags = {"device": DEVICE, "sha256": digest}
    return str(client.create_model_version(MODEL, f"{run.info.artifact_uri}/model", run.info.run_id, tags=tags).version)


@pytest.mark.slow
def test_the_predictor_that_an_alias_names_answers(serve: Any, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs MLflow's registry: pip install 'opcast[mlflow]'")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    client = mlflow.MlflowClient(uri, uri)
    client.create_registered_model(MODEL)
    usual = Registry(SHIPPED_PREDICTORS).find("gemm", DEVICE)
    assert usual is not None
    longer = replace(usual, correction=replace(usual.correction, offset=usual.correction.offset + 0.5))
    versions = [version_of(client, each, tmp_path / name) for each, name in ((usual, "a"), (longer, "b"))]
    client.set_registered_model_alias(MODEL, DEVICE, versions[0])
    with serve(follow=uri, follow_s=1, sources=Sources.at(str(tmp_path / "home")), workers=1) as address:
        for at in (0, 1, 0):
            client.set_registered_model_alias(MODEL, DEVICE, versions[at])
            expected = float(
                (usual, longer)[at].predict_ops([make_op("gemm", m=512, n=1024, k=2048, dtype="fp8")]).latency_us[0]
            )
            for _ in range(300):
                found = httpx.post(f"{address}/v1/predict", json=OP, timeout=120).json()
                if math.isclose(found["latency_us"], expected, rel_tol=1e-6):
                    break
                time.sleep(0.1)
            else:
                pytest.fail(f"version {versions[at]} does not answer: {found['latency_us']}, not {expected}")
        client.set_registered_model_alias(MODEL, "champion", versions[1])  # of no device
        time.sleep(1.5)
        assert httpx.post(f"{address}/v1/predict", json=OP).json()["latency_us"] == found["latency_us"]
