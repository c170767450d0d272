"""The accuracy benchmark on a store of its own: it scores what targets ask, and says whether they are reached."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from opcast.datasets.devices import load_device
from opcast.datasets.store import Store
from opcast.datasets.vocabulary import OpColumns
from opcast.models import analytical


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GEMMs of an L40S up to n = 16384 whose efficiency depends on n alone."""
    path = tmp_path_factory.mktemp("accuracy") / "store"
    rng = np.random.default_rng(0)
    count = 400
    columns = {"batch": np.ones(count, dtype=int), "layout": np.ones(count, dtype=int)}
    columns |= {"m": 2 ** rng.integers(0, 12, count), "n": rng.choice([1024, 2048, 4096, 8192, 16384], count)}
    columns["k"] = rng.choice([1024, 2048, 4096], count)
    latency = analytical.latency_us(OpColumns("gemm", columns, "bf16", None), load_device("l40s"))
    text = {"dtype": "bf16", "out_dtype": "bf16", "device_id": "l40s", "backend": "lib-1:gemm", "status": "ok"}
    text |= {"cache": "warm", "source": "csv", "timer": "imported"}
    rows = pa.table({**columns, **{name: [value] * count for name, value in text.items()}})
    rows = rows.append_column("latency_us", pa.array(latency * (1.2 + 0.02 * np.log2(columns["n"]))))
    moment = pa.array([datetime(2026, 1, 1, tzinfo=UTC)] * count, pa.timestamp("us", tz="UTC"))
    Store(path).write(("gemm", rows.append_column("measured_at", moment)), "made")
    return path


def test_targets_are_scored_beside_simpler_answers(root: Path, store: Path, tmp_path: Path) -> None:
    script = [sys.executable, "-P", str(root / "tests" / "benchmarks" / "accuracy_ops.py"), "--store", str(store)]
    chosen = ["--device", "l40s", "--quick", "--kind", "gemm", "--json", str(tmp_path / "out.json")]
    done = subprocess.run([*script, *chosen], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [each["target"] for each in results] == ["GEMM, unseen (n, k)", "GEMM, n > 8192 unseen"]
    sites, large = results
    assert 100 < sites["rows"] <= 180  # repeats are merged
    assert sites["reached"] is (sites["median_ape"] <= 2.0 and sites["mean_ape"] <= 3.0 and sites["p90_ape"] <= 7.0)
    assert large["split"] == "n > 8192 never seen"
    assert set(large["baselines"]) == {"roofline", "calibrated_roofline", "log_log", "nearest"}
    assert "GEMM, unseen (n, k)" in done.stdout


def test_a_store_without_what_targets_ask_is_a_failure(root: Path, tmp_path: Path) -> None:
    script = [sys.executable, "-P", str(root / "tests" / "benchmarks" / "accuracy_ops.py")]
    done = subprocess.run([*script, "--store", str(tmp_path / "none"), "--quick"], capture_output=True, text=True)
    assert done.returncode == 1
