"""A real MLflow server, reached as users set it up, and what a team sees of opcast's training in its pages."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opcast.jobs.cli import main

from .test_train import store  # noqa: F401, the table that is trained on

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
START_S = 120.0


@pytest.fixture(scope="module")
def mlflow() -> Any:
    """The package, loaded when a test wants it."""
    return pytest.importorskip("mlflow", reason="needs a server of MLflow: pip install 'opcast[mlflow]'")


@pytest.fixture(scope="module")
def server(mlflow: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of ``mlflow server`` on SQLite, in a process and a folder of its own."""
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    places = [f"--backend-store-uri=sqlite:///{folder}/mlflow.db", f"--artifacts-destination={folder}/artifacts"]
    command = [sys.executable, "-m", "mlflow", "server", *places, "--host=127.0.0.1", f"--port={port}", "--workers=1"]
    quick = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (
        open(folder / "log", "wb") as log,
        subprocess.Popen(command, cwd=folder, env=quick, stdout=log, stderr=log, start_new_session=True) as started,
    ):
        deadline = time.monotonic() + START_S
        while not answers(address):
            assert started.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.2)
        yield address
        os.killpg(started.pid, 9)  # asked kindly, it waits for connections of the pages


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=1):
            return True
    except OSError:
        return False


@pytest.fixture(scope="module")
def trained(
    server: str,
    store: Path,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """``opcast train`` twice, the second time worse, with the server in the usual variable; the first one's figures."""
    folder = tmp_path_factory.mktemp("trained")
    words = [f"store={store}", f"predictors={folder}/predictors", "device=l40s", "op=all_reduce", "format=json"]
    words += ["predictor.folds=3", "predictor.workers=1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", server)
        with open(folder / "out.json", "w") as out, pytest.MonkeyPatch.context() as printed:
            printed.setattr(sys, "stdout", out)
            assert main(["train", *words]) == 0
            assert main(["train", *words, "predictor.candidates=[calibrated]"]) == 0
    first, _ = json.JSONDecoder().raw_decode((folder / "out.json").read_text())  # what MLflow says is on stderr
    return first["kinds"]["all_reduce"]


def test_a_server_of_the_usual_variable_has_runs_artifacts_models_and_aliases(
    mlflow: Any, server: str, trained: dict[str, Any], tmp_path: Path
) -> None:
    client = mlflow.MlflowClient(server, server)
    (experiment,) = client.search_experiments(filter_string="name = 'opcast/l40s'")
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
    assert [run.info.status for run in runs] == ["FINISHED", "FINISHED"]
    assert runs[0].data.metrics["test_median_ape"] == pytest.approx(trained["test_median_ape"])
    assert runs[0].info.artifact_uri.startswith("mlflow-artifacts:"), "through the server, on its disk"
    (model,) = client.search_registered_models()
    assert (model.name, {name: str(value) for name, value in model.aliases.items()}) == (
        "opcast-all_reduce",
        {"l40s": "1"},
    )
    folder = Path(client.download_artifacts(runs[0].info.run_id, "model", str(tmp_path)))
    assert {"MLmodel", "card.json", "model.npz"} <= {path.name for path in folder.rglob("*")}
    mlflow.set_tracking_uri(server)
    loaded = mlflow.pyfunc.load_model("models:/opcast-all_reduce@l40s")
    import pandas

    row = {"size_bytes": [2**20], "ranks": [4], "ranks_per_node": [8], "link": ["nvlink"], "dtype": ["bf16"]}
    assert loaded.predict(pandas.DataFrame(row))["latency_us"][0] > 0


@pytest.mark.skipif(CHROMIUM is None, reason="pages need Chromium: apt-get install chromium")
def test_a_team_finds_runs_metrics_pictures_models_and_aliases_in_the_pages(
    mlflow: Any, server: str, trained: dict[str, Any], tmp_path: Path
) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="pages are tested with playwright (the extra dev)")
    client = mlflow.MlflowClient(server, server)
    (experiment,) = client.search_experiments(filter_string="name = 'opcast/l40s'")
    first = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])[0].info.run_id
    pages = f"{server}/#/experiments/{experiment.experiment_id}"
    pictures = Path(os.environ.get("OPCAST_SCREENSHOTS") or tmp_path)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(60_000)

        def shows(address: str, name: str, *texts: str, search: str = "") -> None:
            page.goto(address)
            try:
                if search:
                    page.get_by_placeholder(search).fill(texts[0])
                for text in texts:
                    page.get_by_text(text).locator("visible=true").first.wait_for()
            finally:
                page.screenshot(path=str(pictures / f"{name}.png"))

        error = trained["test_median_ape"]
        shows(f"{pages}/runs", "runs", "opcast/l40s", "all_reduce")
        shows(f"{pages}/runs/{first}", "run", "test_median_ape", f"{error:.4f}", "option.folds", "Finished")
        shows(
            f"{pages}/runs/{first}/model-metrics", "metrics", "test_median_ape", f"{error:.3g}", search="Search metric"
        )
        shows(f"{pages}/runs/{first}/artifacts/plots/predicted-vs-measured.png", "artifacts", "predicted-vs-measured")
        page.locator("img[src*='predicted-vs-measured'], img[src^='blob:']").first.wait_for(state="visible")
        page.screenshot(path=str(pictures / "artifacts.png"))
        shows(f"{server}/#/models/opcast-all_reduce", "model", "opcast-all_reduce", "Version 2", "l40s")
        shows(f"{server}/#/models/opcast-all_reduce/versions/1", "version", "promoted", "device", "l40s")
        browser.close()
