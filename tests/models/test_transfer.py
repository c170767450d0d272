"""One model over devices: answers a device it never saw, is corrected by a few of its rows, and says how sure."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from opcast.datasets.devices import Device
from opcast.datasets.vocabulary import OpColumns
from opcast.models import analytical, training, transfer
from opcast.models.candidates import Options
from opcast.models.correction import Correction
from opcast.models.evaluation import summarise
from opcast.models.features import Frame
from opcast.models.forest import Forest
from opcast.models.learning import Learned, learn
from opcast.models.predictor import ANY, Predictor, load
from opcast.models.registry import Registry
from opcast.models.table import MeasurementTable, TrainingError, tables
from opcast.models.training import train
from opcast.models.transfer import (
    adapt,
    donors_of,
    draw,
    evaluate_device,
    framework,
    joined,
    pool,
    train_pooled,
)

from .conftest import GPU


def relative(name: str, architecture: str, scale: float, units: int) -> Device:
    """A GPU like the first one, ``scale`` times as fast with other compute units."""
    rates = {dtype: rate * scale for dtype, rate in GPU.tensor_tflops.items()}
    return dataclasses.replace(
        GPU,
        id=name,
        architecture=architecture,
        compute_units=units,
        tensor_tflops=rates,
        memory_gbps=GPU.memory_gbps * scale**0.5,
    )


DEVICES = {
    each.id: each
    for each in (
        GPU,
        relative("older", "ampere", 0.4, 108),
        relative("sibling", "hopper", 1.2, 132),
        relative("newest", "blackwell", 2.0, 148),
    )
}


def measured(
    device: Device, count: int = 260, seed: int = 0, level: float = 1.0, backend: str = "lib-1:gemm"
) -> pa.Table:
    """Products whose time is the analytical one times a law of waves that all devices share, and a level of its own."""
    rng = np.random.default_rng([seed, device.compute_units])
    columns = {
        "batch": np.ones(count, dtype=np.int64),
        "m": 2 ** rng.integers(0, 13, count),
        "n": rng.choice(np.arange(256, 8193, 256), count),
        "k": rng.choice(np.arange(256, 8193, 256), count),
        "layout": np.ones(count, dtype=np.int64),
    }
    latency = analytical.latency_us(OpColumns("gemm", columns, "bf16", None), device)
    factor = 1.2 + 0.6 / (1.0 + np.exp(-np.log2(columns["m"] / 64)))
    latency = level * latency * factor * np.exp(0.01 * rng.standard_normal(count))
    return pa.table({**columns, "dtype": ["bf16"] * count, "backend": [backend] * count, "latency_us": latency})


class Memory:
    """A store that lies in memory."""

    def __init__(self, rows: dict[str, pa.Table]) -> None:
        self.rows = rows

    def kinds(self) -> list[str]:
        return ["gemm"]

    def devices(self, kind_name: str | None = None) -> list[str]:
        return list(self.rows)

    def read(self, kind: str, device: str | None = None) -> pa.Table:
        return self.rows[device or ""]

    def device(self, device_id: str) -> Device | None:
        return DEVICES.get(device_id)

    def fingerprint(self, kind: str, device: str) -> str:
        return f"rows of {device}"


@pytest.fixture(scope="module")
def store() -> Memory:
    return Memory({name: measured(device) for name, device in DEVICES.items()})


@pytest.fixture(scope="module")
def donors() -> list[MeasurementTable]:
    return [tables("gemm", measured(DEVICES[name]), DEVICES[name])[0] for name in (GPU.id, "older", "sibling")]


@pytest.fixture(scope="module")
def base(donors: list[MeasurementTable], fast: Options) -> Predictor:
    return pool(donors, fast)


@pytest.fixture(scope="module")
def unseen() -> MeasurementTable:
    return tables("gemm", measured(DEVICES["newest"], 300, seed=5, level=1.3), DEVICES["newest"])[0]


def errors(predictor: Predictor, table: MeasurementTable) -> dict[str, float]:
    return summarise(np.log(table.latency_us / predictor.predict_frame(table.frame()).latency_us))


def test_the_pool_answers_for_a_device_it_never_saw(base: Predictor, unseen: MeasurementTable) -> None:
    ops = unseen.frame()
    plain = summarise(np.log(unseen.latency_us / 1.3 / ops.analytical_us))["median_ape"]
    level = dataclasses.replace(unseen, latency_us=unseen.latency_us / 1.3)
    assert errors(base, level)["median_ape"] < 6.0 < plain


def test_a_device_is_taken_as_asked_and_outside_when_it_is_like_no_donor(
    base: Predictor, unseen: MeasurementTable
) -> None:
    some = unseen.take(np.arange(20))
    columns = {name: values.astype(np.float64) for name, values in some.columns.items()}
    found = base.predict(columns, "bf16", None, unseen.device)
    assert base.device_id == ANY
    np.testing.assert_array_equal(found.latency_us, base.predict_frame(some.frame()).latency_us)
    assert found.in_envelope.any()
    far = relative("far", "blackwell", 4.0, 148)
    assert not base.predict(columns, "bf16", None, far).in_envelope.any()


def test_a_few_rows_mend_the_level_of_a_device(base: Predictor, unseen: MeasurementTable, fast: Options) -> None:
    seen, rest = unseen.take(np.arange(40)), unseen.take(np.arange(40, 300))
    made = adapt([base], seen, fast)
    assert errors(made, rest)["median_ape"] < 0.4 * errors(base, rest)["median_ape"]
    assert made.device_id == "newest"
    assert made.card["adapted_from"].startswith("gemm@lib/any")


def test_rows_that_contradict_the_pool_are_learned_alone(
    base: Predictor, unseen: MeasurementTable, fast: Options
) -> None:
    ops = unseen.frame()
    other = dataclasses.replace(unseen, latency_us=1.7 * ops.analytical_us)
    shuffled = dataclasses.replace(base, correction=Correction(base.correction.features, 0.0, noisy(base, ops.matrix)))
    assert adapt([shuffled], other.take(np.arange(120)), fast).card["chosen"].startswith("alone")


def noisy(base: Predictor, matrix: np.ndarray) -> Forest:
    """A forest fitted on noise."""
    from opcast.models.candidates import LightGBM, Task
    from opcast.models.features import feature_names

    noise = np.random.default_rng(0).standard_normal(len(matrix))
    task = Task(feature_names(base.kind), matrix, noise, np.ones(len(matrix)))
    made = LightGBM(trees=60, min_leaf=1, leaves=64, learning_rate=0.3).fit(task, None).forest
    assert made is not None
    return made


def test_an_adapted_predictor_survives_the_disk(
    base: Predictor, unseen: MeasurementTable, fast: Options, tmp_path: Path
) -> None:
    made = adapt([base], unseen.take(np.arange(60)), fast)
    again = load(made.save(tmp_path / "1"))
    ops = unseen.frame()
    np.testing.assert_array_equal(again.predict_frame(ops).latency_us, made.predict_frame(ops).latency_us)


def test_pooling_and_adapting_repeat_to_the_byte(
    donors: list[MeasurementTable], base: Predictor, unseen: MeasurementTable, fast: Options
) -> None:
    again = pool(donors, fast)
    assert again.model_bytes() == base.model_bytes()
    seen = unseen.take(np.arange(60))
    assert adapt([again], seen, fast).model_bytes() == adapt([base], seen, fast).model_bytes()


def test_a_joined_correction_is_the_sum_of_both(base: Predictor, unseen: MeasurementTable) -> None:
    matrix = unseen.frame().matrix
    first, second = base.correction, Correction(base.correction.features, 0.25, noisy(base, matrix))
    whole = joined(first, second).predict(matrix)
    np.testing.assert_allclose(whole, first.predict(matrix) + second.predict(matrix), atol=1e-9)


def test_intervals_of_the_pool_hold_where_an_architecture_is_left_out(
    base: Predictor, donors: list[MeasurementTable]
) -> None:
    assert set(base.card["evaluations"]) == {"without ampere", "without hopper"}
    assert 0.5 < base.coverage < 1.0


def test_points_are_drawn_without_repeats_and_spread_reaches_the_corners(unseen: MeasurementTable) -> None:
    for rule in ("random", "spread"):
        picked = draw(unseen, 50, rule, seed=3)
        assert len(np.unique(picked)) == 50
        np.testing.assert_array_equal(picked, draw(unseen, 50, rule, seed=3))
    sizes = unseen.columns["m"][draw(unseen, 12, "spread")]
    assert {sizes.min(), sizes.max()} == {1, 4096}


def test_a_device_left_out_is_scored_by_points(store: Memory, fast: Options) -> None:
    found = evaluate_device(store, "gemm", DEVICES["newest"], fast, points=(0, 50, 500))
    assert list(found) == ["device+0", "device+50", "device+50 spread", "device+500"]
    assert found["device+0"]["donors"] == sorted(set(DEVICES) - {"newest"})
    assert found["device+50"]["median_ape"] < 6.0
    assert "too few" in found["device+500"]["error"]


def test_tables_correspond_by_framework_and_prefer_the_same_kernel() -> None:
    assert framework("trtllm-1.3.0rc20:torch_flow") == "trtllm"
    assert framework("torch") == "torch"
    both = pa.concat_tables([measured(GPU, 30, backend="lib-2:gemm"), measured(GPU, 30, seed=1, backend="lib-2:other")])
    store = Memory({GPU.id: both, "older": measured(DEVICES["older"], 30, backend="rival-1:gemm")})
    assert [each.backend for each in donors_of(store, "gemm", "lib-1:gemm", ["bf16"])] == ["lib-2:gemm"]
    assert [each.backend for each in donors_of(store, "gemm", "lib-1:new", ["bf16"])] == ["lib-2:gemm", "lib-2:other"]
    assert donors_of(store, "gemm", "lib-1:gemm", ["fp8"]) == []


def test_pools_are_registered_for_any_device_by_framework(store: Memory, fast: Options, tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    results = train_pooled(store, registry, options=fast)
    assert results["gemm@lib"]["predictor"] == "gemm@lib/any@1"
    assert registry.find("gemm", ANY, "lib") is not None
    with pytest.raises(TrainingError, match="no copy measurements"):
        train_pooled(store, registry, ["copy"], fast)


@pytest.fixture(scope="module")
def pooled(fast: Options, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry with the pool of all devices but the newest."""
    others = Memory({name: measured(device) for name, device in DEVICES.items() if name != "newest"})
    folder = tmp_path_factory.mktemp("pooled")
    train_pooled(others, Registry(folder), options=fast)
    return folder


@pytest.fixture
def registry(pooled: Path, tmp_path: Path) -> Registry:
    """A copy of that registry."""
    return Registry(shutil.copytree(pooled, tmp_path / "registry"))


def test_training_on_few_rows_starts_from_a_pool_that_never_saw_the_device(fast: Options, registry: Registry) -> None:
    few = Memory({"newest": measured(DEVICES["newest"], 40, level=1.3)})
    found = train(few, "newest", options=fast, registry=registry)["gemm"]
    assert found["adapted_from"].startswith("gemm@lib/any")
    alone = train(few, "newest", options=fast)["gemm"]
    assert found["test_mean_ape"] < alone["test_mean_ape"]
    made = registry.find("gemm", "newest")
    assert made is not None
    asked = tables("gemm", measured(DEVICES["newest"], 200, seed=5, level=1.3), DEVICES["newest"])[0]
    answer = made.predict_frame(asked.frame())
    assert summarise(np.log(asked.latency_us / answer.latency_us))["median_ape"] < 8.0


@pytest.mark.parametrize("evaluations", [("groups",), ("random", "extrapolate")])
def test_scores_are_those_of_what_is_registered(
    fast: Options, registry: Registry, evaluations: tuple[str, ...]
) -> None:
    """Another device corrected by few rows is told and scored as that, in the table, the progress and the card."""
    few = Memory({"newest": measured(DEVICES["newest"], 60, level=1.3)})
    said: list[str] = []
    chosen = dataclasses.replace(fast, evaluations=evaluations)
    alone = train(few, "newest", options=chosen)["gemm"]
    found = train(few, "newest", options=chosen, registry=registry, progress=said.append)["gemm"]
    made = registry.find("gemm", "newest")
    assert made is not None
    main = found["evaluations"][evaluations[0]]
    for name in ("median_ape", "mean_ape", "p90_ape"):
        assert found[f"test_{name}"] == main[name] == made.card[f"test_{name}"] != alone[f"test_{name}"]
    assert (found["coverage"], found["split"]) == (main["coverage"], main["split"])
    assert f"{found['chosen']}: median error {found['test_median_ape']:.1f} % held out" in said[-1]
    asked = tables("gemm", measured(DEVICES["newest"], 300, seed=5, level=1.3), DEVICES["newest"])[0]
    if evaluations == ("groups",):
        assert errors(made, asked)["median_ape"] == pytest.approx(found["test_median_ape"], rel=0.5)


def test_rows_are_learned_by_themselves_once(
    fast: Options, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the rows taught is kept for the comparison with other devices' answers that they correct."""
    targets: list[bytes] = []

    def watched(table: MeasurementTable, ops: Frame, *rest: Any) -> Learned:
        targets.append((table.latency_us / ops.analytical_us).tobytes())
        return learn(table, ops, *rest)

    for module in (training, transfer):
        monkeypatch.setattr(module, "learn", watched)
    train(Memory({"newest": measured(DEVICES["newest"], 40, level=1.3)}), "newest", options=fast, registry=registry)
    assert len(targets) > 1
    assert len(set(targets)) == len(targets)


def test_a_named_algorithm_is_the_one_that_learns(fast: Options, registry: Registry) -> None:
    few = Memory({"newest": measured(DEVICES["newest"], 90, level=1.3)})
    files = set()
    for name in ("random_forest", "lightgbm"):
        found = train(few, "newest", options=dataclasses.replace(fast, candidates=(name,)), registry=registry)["gemm"]
        assert found["chosen"].endswith(name)
        assert "why_not" not in found
        files |= {load(each.path).model_bytes() for each in registry.list() if each.device_id == "newest"}
    assert len(files) == 2


def test_a_named_algorithm_that_cannot_learn_a_table_says_why(fast: Options, tmp_path: Path) -> None:
    few = Memory({"newest": measured(DEVICES["newest"], 12, level=1.3)})
    options, said = dataclasses.replace(fast, candidates=("random_forest",)), list[str]()
    found = train(few, "newest", options=options, registry=Registry(tmp_path), progress=said.append)["gemm"]
    assert found["chosen"].endswith("calibrated")
    why = "random_forest takes 30 to 5,000 rows, not 12 (predictor.random_forest.min_rows, max_rows)"
    assert found["why_not"] == why
    assert said[-1].endswith(why)


def test_a_pool_that_saw_the_device_is_not_compared_on_its_rows(store: Memory, fast: Options, tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    train_pooled(store, registry, options=fast)
    assert "adapted_from" not in train(store, "newest", options=fast, registry=registry)["gemm"]


@pytest.fixture
def two_kernels() -> Memory:
    """A device with 260 rows of one kernel and 12 of another, half as fast again."""
    device, few = DEVICES["newest"], 12
    rows = pa.concat_tables(
        [measured(device), measured(device, few, seed=9, level=1.5, backend="another-1:gemm")],
        promote_options="default",
    )
    return Memory({device.id: rows})


def test_few_rows_of_a_kernel_are_learned_with_another_of_the_same_device(
    two_kernels: Memory, fast: Options, tmp_path: Path
) -> None:
    device, registry = DEVICES["newest"], Registry(tmp_path)
    found = train(two_kernels, device, options=fast, registry=registry)
    few = next(each for name, each in found.items() if each["n"] == 12)
    assert few["learned_with"] == ["lib-1:gemm"]
    made = registry.find("gemm", device.id, "another-1:gemm")
    asked = tables("gemm", measured(device, 200, seed=31, level=1.5, backend="another-1:gemm"), device)[0]
    assert errors(made, asked)["median_ape"] < 5.0
    alone = train(two_kernels, device, options=fast)
    assert few["test_median_ape"] < next(each for each in alone.values() if each["n"] == 12)["test_median_ape"]


def test_a_second_training_of_the_same_rows_says_the_same(two_kernels: Memory, fast: Options, tmp_path: Path) -> None:
    """Rows of the store teach each other, so that it does not matter who was registered before."""
    first, second = (train(two_kernels, DEVICES["newest"], options=fast, registry=Registry(tmp_path)) for _ in range(2))
    for label, found in first.items():
        assert {**second[label], "promoted": True, "why": ""} == {**found, "promoted": True, "why": ""}


def test_one_device_is_no_pool(donors: list[MeasurementTable], fast: Options) -> None:
    with pytest.raises(TrainingError, match="two devices"):
        pool(donors[:1], fast)


def test_what_has_no_rows_to_learn_from_is_refused(base: Predictor, unseen: MeasurementTable, fast: Options) -> None:
    with pytest.raises(TrainingError, match="5 are needed"):
        adapt([base], unseen.take(np.arange(3)), fast)
    alone = Memory({"newest": measured(DEVICES["newest"])})
    with pytest.raises(TrainingError, match="no other device"):
        evaluate_device(alone, "gemm", DEVICES["newest"], fast)
