"""Features: documented, finite, independent of company, and free of the values they must not see."""

from __future__ import annotations

import time

import numpy as np
import pytest

from opcast.datasets.devices import Device
from opcast.datasets.ops import KINDS
from opcast.datasets.vocabulary import OpColumns
from opcast.models import analytical
from opcast.models.features import REASONS, feature_names, features, frame, reason


def some_columns(kind: str, count: int = 50, seed: int = 0) -> dict[str, np.ndarray]:
    """Random ops of a kind."""
    rng = np.random.default_rng(seed)
    columns = {}
    for dim in KINDS[kind].dims:
        high = len(dim.choices) if dim.choices else 300
        columns[dim.name] = rng.integers(dim.low, dim.low + high, count)
    return columns


@pytest.mark.parametrize("kind", KINDS)
def test_every_feature_is_finite_named_once_and_has_a_reason(kind: str, device: Device) -> None:
    names = feature_names(kind)
    matrix = features(OpColumns(kind, some_columns(kind), "bf16", None, "cold"), device)
    assert matrix.shape == (50, len(names))
    assert matrix.dtype == np.float32
    assert np.isfinite(matrix).all()
    assert len(set(names)) == len(names)
    assert all(reason(name) for name in names)


def test_no_reason_is_left_without_a_feature() -> None:
    used = {name for kind in KINDS for name in feature_names(kind)}
    assert not [start for start in REASONS if not any(name.startswith(start) for name in used)]


@pytest.mark.parametrize("kind", ["gemm", "attention_decode", "elementwise", "all_reduce"])
def test_a_row_does_not_depend_on_its_company(kind: str, gpu: Device) -> None:
    columns = some_columns(kind)
    whole = features(OpColumns(kind, columns, "bf16", None), gpu)
    alone = features(OpColumns(kind, {name: values[7:8] for name, values in columns.items()}, "bf16", None), gpu)
    assert whole[7].tolist() == alone[0].tolist()


def test_frame_carries_the_times_that_features_came_from(cpu: Device) -> None:
    columns = some_columns("gemm")
    made = frame(OpColumns("gemm", columns, "fp32", None, "cold"), cpu)
    assert (
        made.analytical_us.tolist()
        == analytical.latency_us(OpColumns("gemm", columns, "fp32", None, "cold"), cpu).tolist()
    )
    assert (
        made.roofline_us.tolist()
        == analytical.roofline_us(OpColumns("gemm", columns, "fp32", None, "cold"), cpu).tolist()
    )
    column = feature_names("gemm").index("analytical")
    assert made.matrix[:, column] == pytest.approx(np.log2(made.analytical_us), rel=1e-6)


def test_alignment_and_tails_say_what_they_claim(gpu: Device) -> None:
    columns = {"batch": [1, 1], "m": [4096, 4097], "n": [96, 128 * 132], "k": [7, 8192], "layout": [1, 1]}
    matrix = features(
        OpColumns("gemm", {name: np.array(values) for name, values in columns.items()}, "bf16", None), gpu
    )
    rows = [dict(zip(feature_names("gemm"), row, strict=True)) for row in matrix.tolist()]
    assert [row["align_m"] for row in rows] == [12.0, 0.0]
    assert [row["align_n"] for row in rows] == [5.0, 9.0]
    assert [row["align_k"] for row in rows] == [0.0, 12.0]
    assert rows[0]["pad_n128"] == pytest.approx(0.75)
    assert rows[1]["pad_m128"] == pytest.approx(4097 / 4224)
    assert rows[1]["tail_128x128"] == pytest.approx(1.0)


def test_weight_only_products_read_lighter_weights(gpu: Device) -> None:
    columns = {"batch": [1], "m": [4], "n": [8192], "k": [8192], "layout": [1]}
    arrays = {name: np.array(values) for name, values in columns.items()}
    place = feature_names("gemm").index("reach_b")
    reach = {
        name: features(OpColumns("gemm", arrays, name, "bf16"), gpu)[0, place] for name in ("bf16", "w8a16", "w4a16")
    }
    assert reach["bf16"] - reach["w8a16"] == pytest.approx(1.0)
    assert reach["bf16"] - reach["w4a16"] == pytest.approx(2.0)
    latency = {name: analytical.latency_us(OpColumns("gemm", arrays, name, "bf16", "cold"), gpu)[0] for name in reach}
    assert latency["w4a16"] < 0.5 * latency["bf16"] < latency["w8a16"] < latency["bf16"]


def test_each_candidate_tile_has_its_own_last_wave(gpu: Device) -> None:
    columns = {"batch": [1], "m": [192 * 12], "n": [128 * 11], "k": [4096], "layout": [1]}
    row = features(OpColumns("gemm", {name: np.array(values) for name, values in columns.items()}, "bf16", None), gpu)[
        0
    ]
    tails = {name: value for name, value in zip(feature_names("gemm"), row, strict=True) if name.startswith("tail_")}
    assert tails["tail_192x128"] == pytest.approx(1.0)  # 12 x 11 tiles on 132 units
    assert tails["tail_128x128"] == pytest.approx(18 * 11 / 264)
    assert tails["tail_256x128"] == pytest.approx(9 * 11 / 132)


def test_device_and_cache_are_seen(gpu: Device, cpu: Device) -> None:
    columns = some_columns("rms_norm") | {"rows": np.geomspace(1, 1e6, 64).astype(np.int64), "cols": np.full(64, 1024)}
    warm, cold = (features(OpColumns("rms_norm", columns, "bf16", None, cache), gpu) for cache in ("warm", "cold"))
    names = feature_names("rms_norm")
    held, fill = warm[:, names.index("cache_warm")], warm[:, names.index("cache_fill")]
    np.testing.assert_allclose(held, np.minimum(2.0**-fill, 1.0), rtol=1e-5)
    assert 1.0 in held
    assert held.min() < 0.5, "of an op larger than the cache a warm one holds a part"
    assert set(cold[:, names.index("cache_warm")]) == {0.0}
    other = features(OpColumns("rms_norm", columns, "bf16", None), cpu)
    assert (other[:, names.index("device_memory")] != warm[:, names.index("device_memory")]).all()


def test_features_of_many_gemms_are_quick(gpu: Device) -> None:
    columns = some_columns("gemm", 200_000)
    features(OpColumns("gemm", {name: values[:10] for name, values in columns.items()}, "bf16", None), gpu)
    began = time.process_time()
    features(OpColumns("gemm", columns, "bf16", None), gpu)
    assert time.process_time() - began < 1.0
