"""Two devices, tables of synthetic measurements with a known law behind them, and one trained predictor."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from opcast.datasets.devices import Device
from opcast.datasets.vocabulary import OpColumns
from opcast.models import analytical
from opcast.models.candidates import Interpolation, LightGBM, Options, RandomForest
from opcast.models.training import MeasurementTable, TrainingOutcome, fit, tables

GPU = Device(
    id="h100_like",
    name="a GPU like an H100",
    vendor="nvidia",
    architecture="hopper",
    compute_units=132,
    clock_mhz=1830.0,
    tensor_tflops={"bf16": 989.4, "fp16": 989.4, "fp8": 1978.9, "fp32": 66.9},
    vector_tflops=66.9,
    memory_gib=80.0,
    memory_gbps=3350.0,
    l2_mib=50.0,
    l2_gbps=5500.0,
    link_gbps=450.0,
    pcie_gbps=64.0,
)
CPU = Device(
    id="cpu_two_threads",
    name="a small CPU",
    vendor="cpu",
    architecture="x86_64",
    compute_units=2,
    clock_mhz=2800.0,
    tensor_tflops={"fp32": 0.19, "bf16": 0.05},
    vector_tflops=0.1,
    memory_gib=24.0,
    memory_gbps=30.0,
    l2_mib=32.0,
    l2_gbps=90.0,
    launch_us=1.5,
)
FAST = Options(
    folds=3,
    interpolation=Interpolation(search_rows=80),
    random_forest=RandomForest(trees=10),
    lightgbm=LightGBM(trees=40),
)


@pytest.fixture(scope="session")
def gpu() -> Device:
    return GPU


@pytest.fixture(scope="session")
def cpu() -> Device:
    return CPU


@pytest.fixture(scope="session", params=[GPU, CPU], ids=["gpu", "cpu"])
def device(request: pytest.FixtureRequest) -> Device:
    """Each of the two in turn."""
    return request.param


@pytest.fixture(scope="session")
def fast() -> Options:
    return FAST


def gemm_rows(count: int, device: Device, seed: int = 0, noise: float = 0.02) -> pa.Table:
    """GEMMs whose time is the analytical one times a smooth and a stepwise factor, and noise."""
    rng = np.random.default_rng(seed)
    columns = {
        "batch": np.ones(count, dtype=np.int64),
        "m": 2 ** rng.integers(0, 11, count) + rng.integers(0, 3, count),
        "n": rng.choice(np.arange(128, 4097, 128), count),
        "k": rng.choice(np.arange(128, 4097, 128), count),
        "layout": np.ones(count, dtype=np.int64),
    }
    cache = rng.choice(["cold", "warm"], count)
    latency = np.empty(count)
    for state in ("cold", "warm"):
        rows = cache == state
        part = {name: values[rows] for name, values in columns.items()}
        latency[rows] = analytical.latency_us(OpColumns("gemm", part, "fp32", None, state), device)
    factor = 1.3 + 0.2 * np.sin(np.log2(columns["n"])) + 0.3 * (columns["m"] > 100)
    latency = latency * factor * np.exp(noise * rng.standard_normal(count))
    return pa.table({**columns, "dtype": ["fp32"] * count, "cache": cache, "latency_us": latency})


@pytest.fixture(scope="session")
def rows() -> pa.Table:
    return gemm_rows(240, CPU)


@pytest.fixture(scope="session")
def measurements(rows: pa.Table) -> MeasurementTable:
    (made,) = tables("gemm", rows, CPU, "fingerprint-1")
    return made


@pytest.fixture(scope="session")
def outcome(measurements: MeasurementTable) -> TrainingOutcome:
    return fit(measurements, FAST)
