"""Training: learns what is there to learn, reports honest figures, is deterministic, and refuses bad tables."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import yaml

from opcast.datasets.devices import Device
from opcast.models.candidates import CANDIDATES, Calibrated, OptionError, Options
from opcast.models.learning import OF_MODELS, weigh, weights_of
from opcast.models.registry import Registry
from opcast.models.training import (
    MeasurementTable,
    TrainingError,
    TrainingOutcome,
    fit,
    tables,
    train,
    train_and_register,
)

FIELDS = ("n", "test_median_ape", "test_mean_ape", "test_p90_ape", "coverage", "roofline_median_ape", "split")


class MemoryStore:
    """What training asks of a store, over Arrow tables by kind."""

    def __init__(self, device: Device, by_kind: dict[str, pa.Table]) -> None:
        self._device, self._tables = device, by_kind

    def kinds(self) -> list[str]:
        return list(self._tables)

    def read(self, kind: str, device: str | None = None) -> pa.Table:
        rows = self._tables[kind]
        return rows if device in (None, self._device.id) else rows.slice(0, 0)

    def device(self, device_id: str) -> Device | None:
        return self._device if device_id == self._device.id else None

    def fingerprint(self, kind: str, device: str) -> str:
        return f"{kind}-{device}"


@pytest.fixture
def store(cpu: Device, rows: pa.Table) -> MemoryStore:
    host = pa.table({"what": [0, 1], "calls": [1, 1], "dtype": ["fp32"] * 2, "latency_us": [1.0, 2.0]})
    return MemoryStore(cpu, {"gemm": rows, "host_overhead": host})


def test_it_learns_the_law_behind_the_rows(outcome: TrainingOutcome) -> None:
    result = outcome.result
    assert result["n"] == 240
    assert result["test_median_ape"] < 6.0
    assert result["test_median_ape"] < 0.4 * result["candidates"]["calibrated"]
    assert result["test_median_ape"] <= result["test_mean_ape"] <= result["test_max_ape"]
    assert result["roofline_median_ape"] > result["test_median_ape"]
    assert result["split"] == "3-fold, grouped by (n, k)"
    assert 0.82 <= result["coverage"] <= 0.97


@pytest.mark.parametrize("name", CANDIDATES)
def test_every_candidate_serves_alone(measurements: MeasurementTable, fast: Options, name: str) -> None:
    made = fit(measurements, dataclasses.replace(fast, candidates=(name,)))
    assert made.result["chosen"] == name
    baseline = made.result["analytical_median_ape"]
    assert made.result["test_median_ape"] < (baseline if name == "calibrated" else 0.6 * baseline)


def test_training_is_deterministic(measurements: MeasurementTable, fast: Options, outcome: TrainingOutcome) -> None:
    again = fit(measurements, fast)
    assert again.predictor.model_bytes() == outcome.predictor.model_bytes()
    assert again.result == outcome.result


def test_results_carry_the_contracts_fields(store: MemoryStore, fast: Options, tmp_path: Path) -> None:
    results = train(store, "cpu_two_threads", options=fast, registry=Registry(tmp_path))
    assert set(FIELDS) <= set(results["gemm"])
    assert results["gemm"]["predictor"] == "gemm@torch/cpu_two_threads@1"
    assert "5 are needed" in results["host_overhead"]["error"]
    assert [entry.kind for entry in Registry(tmp_path).list()] == ["gemm"]


def test_backends_are_trained_apart(cpu: Device, rows: pa.Table, fast: Options, tmp_path: Path) -> None:
    half = rows.num_rows // 3
    names = ["torch"] * half + ["onednn"] * (rows.num_rows - half)
    store = MemoryStore(cpu, {"gemm": rows.append_column("backend", pa.array(names))})
    results, trained = train_and_register(store, cpu, Registry(tmp_path), options=fast)
    assert {label: result["n"] for label, result in results.items()} == {"gemm": 80, "gemm@onednn": 160}
    assert [each.label for each in trained] == ["gemm@onednn", "gemm"]
    assert Registry(tmp_path).find("gemm", cpu.id).backend == "torch"


def test_the_card_says_where_a_predictor_comes_from(outcome: TrainingOutcome) -> None:
    card = outcome.predictor.card
    assert card["fingerprint"] == "fingerprint-1"
    assert card["dtypes"] == ["fp32"]
    assert card["stated_coverage"] == 0.9
    assert card["range"]["n"][0] >= 128


def test_rows_that_cannot_be_learned_are_left_out(gpu: Device) -> None:
    columns = {"batch": [1] * 4, "m": [8] * 4, "n": [8] * 4, "k": [8] * 4, "layout": [1] * 4}
    latency, dtype = [1.0, float("nan"), -1.0, 2.0], ["bf16", "bf16", "bf16", "int64"]
    (made,) = tables("gemm", pa.table({**columns, "dtype": dtype, "latency_us": latency}), gpu)
    assert len(made) == 1
    with pytest.raises(TrainingError, match="has 1 usable rows; 5 are needed"):
        fit(made)


def test_on_a_cpu_the_mean_of_calls_is_learned_as_far_as_most_calls_go(cpu: Device, gpu: Device) -> None:
    columns = {name: [1, 1, 1] for name in ("batch", "layout")} | {name: [8, 16, 32] for name in ("m", "n", "k")}
    told = {
        "latency_us": [10.0, 10.0, 10.0],
        "latency_mean_us": [11.0, 90.0, 9.0],  # beside other work, after one long stop, below the median
        "latency_p90_us": [14.0, 12.0, 11.0],
    }
    rows = pa.table({**columns, "dtype": ["fp32"] * 3, **told})
    (learned,) = tables("gemm", rows, cpu)
    assert learned.latency_us.tolist() == [11.0, 12.0, 10.0]
    assert tables("gemm", rows, gpu)[0].latency_us.tolist() == [10.0, 10.0, 10.0]
    (plain,) = tables("gemm", rows.drop_columns(["latency_mean_us"]), cpu)
    assert plain.latency_us.tolist() == [10.0, 10.0, 10.0]


def test_a_table_without_a_dimension_is_named(gpu: Device) -> None:
    with pytest.raises(TrainingError, match="lacks column 'm'"):
        tables("gemm", pa.table({"batch": [1], "latency_us": [1.0]}), gpu)


def test_unknown_kinds_and_devices_are_named(store: MemoryStore) -> None:
    with pytest.raises(TrainingError, match="no softmax measurements; it has gemm"):
        train(store, "cpu_two_threads", ["softmax"])
    with pytest.raises(TrainingError, match="unknown device 'h1000'"):
        train(store, "h1000")


def test_seven_rows_are_enough_for_a_calibration(cpu: Device, rows: pa.Table) -> None:
    (made,) = tables("gemm", rows.slice(0, 7), cpu)
    result = fit(made).result
    assert result["chosen"] == "calibrated"
    assert result["split"] == "5-fold, grouped by (n, k)"


def test_conf_mirrors_the_options(root: Path) -> None:
    """A new option is a decision: it stands in the configuration with the code's default, or this fails."""
    auto = yaml.safe_load((root / "conf" / "predictor" / "auto.yaml").read_text())
    code = dataclasses.asdict(Options(workers=auto["workers"]))
    code["candidates"] = list(code["candidates"])
    del code["calibrated"]  # it has no options
    del code["evaluations"], code["promote"]  # not how it is learned: `eval` and `promote` of conf/train.yaml
    assert dataclasses.fields(Calibrated) == ()
    assert auto == code
    assert Options.from_dict(auto) == Options(workers=auto["workers"])


def test_a_kind_gets_its_familys_options_unless_they_were_set() -> None:
    families = {"gemm": {"folds": 4, "lightgbm": {"leaves": 63, "l2": 2.0}}, "grouped_gemm": {"lightgbm": {"l2": 3.0}}}
    options = Options.from_dict({"families": families, "lightgbm": {"leaves": 7}})
    assert options.for_kind("gemm").lightgbm == dataclasses.replace(options.lightgbm, l2=2.0)
    assert options.for_kind("grouped_gemm").lightgbm.l2 == 3.0
    assert options.for_kind("gemm").folds == 4
    assert options.for_kind("rms_norm") == dataclasses.replace(options, families={})
    assert Options.from_dict({"families": families}).for_kind("gemm").lightgbm.leaves == 63


@pytest.mark.parametrize("name", ["lightgbm", "random_forest"])
def test_the_other_configurations_hold_valid_options(root: Path, name: str) -> None:
    values = yaml.safe_load((root / "conf" / "predictor" / f"{name}.yaml").read_text())
    values.pop("defaults")
    assert Options.from_dict(values).named == name


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fold": 3}, "did you mean folds"),
        ({"lightgbm": {"tree": 3}}, r"predictor.lightgbm has no option 'tree'; did you mean trees"),
        ({"lightgbm": {"trees": "many"}}, "^predictor.lightgbm.trees='many' must be a whole number"),
        ({"candidates": ["forest"]}, "did you mean random_forest"),
        ({"candidates": []}, "is empty"),
        ({"coverage": 90}, "between 0 and 1"),
        ({"folds": 1}, "at least 2"),
    ],
)
def test_bad_options_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Options.from_dict(values)


def test_nothing_is_learned_of_a_throttled_device_and_it_is_said(cpu: Device, rows: pa.Table) -> None:
    slow = rows.slice(0, 40).to_pydict()
    slow["latency_us"] = [3 * us for us in slow["latency_us"]]
    hot = [True] * 40
    mixed = pa.concat_tables([rows.append_column("throttled", pa.array([None] * len(rows), pa.bool_())),
                              pa.table(slow, rows.schema).append_column("throttled", pa.array(hot))])  # fmt: skip
    (table,) = tables("gemm", mixed, cpu)
    (clean,) = tables("gemm", rows, cpu)
    assert sorted(table.latency_us) == sorted(clean.latency_us)
    said: list[str] = []
    store = MemoryStore(cpu, {"gemm": pa.table(slow, rows.schema).append_column("throttled", pa.array(hot))})
    why = (
        "none of 40 rows is usable (40 were taken on a throttled device; predictor.eager=true takes eagerly timed ones)"
    )
    assert train(store, cpu.id, ["gemm"]) == {"gemm": {"error": why}}
    few = pa.concat_tables([mixed.slice(0, 12), mixed.slice(len(rows), 3)])
    next(iter(train(MemoryStore(cpu, {"gemm": few}), cpu.id, ["gemm"], progress=said.append)))
    assert said[0] == "gemm: 3 of 15 rows were taken on a throttled device and are left out"


def test_products_timed_under_the_power_limit_are_learned_at_boost_clocks() -> None:
    """A step slows them down again by what the limit leaves: once, whatever clocks they were timed at."""
    from opcast.datasets.devices import load_device
    from opcast.datasets.ops import KINDS

    h100 = load_device("h100_sxm")
    count, dims = 4, {"m": 8192, "n": 8192, "k": 8192, "batch": 1, "layout": 1}
    columns = {dim.name: [dims.get(dim.name, dim.default or 0)] * count for dim in KINDS["gemm"].dims}
    table = pa.table(
        {
            **columns,
            "dtype": ["bf16"] * count,
            "latency_us": [1500.0] * count,
            "clocks": ["steady", "burst", None, "steady"],
            "sm_clock_mhz": [0.8 * h100.clock_mhz, h100.clock_mhz, None, None],
        }
    )
    (found,) = tables("gemm", table, h100)
    assert list(found.latency_us) == [pytest.approx(1200.0, rel=0.01), 1500.0, 1500.0, 1500.0]
    unknown = load_device("t4")  # no steady rate is known of its kind: nobody slows its rows
    (same,) = tables(
        "gemm", table.set_column(table.column_names.index("dtype"), "dtype", pa.array(["fp16"] * count)), unknown
    )
    assert list(same.latency_us) == [1500.0] * count


def test_products_as_models_have_them_count_more(cpu: Device, rows: pa.Table) -> None:
    table = tables("gemm", rows, cpu)[0].take(np.arange(40))
    ops, options = table.frame(), Options().for_kind("gemm")
    ragged = {**table.columns, "n": table.columns["n"] + np.arange(40) % 2}
    weights = weights_of(dataclasses.replace(table, columns=ragged), ops, options)
    plain = weigh(ops.analytical_us, options.weight_power)
    whole = (ragged["n"] % 64 == 0) & (ragged["k"] % 64 == 0)
    assert 0 < whole.sum() < 40
    ratio = weights / plain
    assert ratio[whole] == pytest.approx(OF_MODELS * ratio[~whole][0])
    assert weights.mean() == pytest.approx(1.0)


def test_other_kinds_have_no_widths_of_models(cpu: Device) -> None:
    rows = pa.table(
        {
            "numel": [1024, 4096, 65536],
            "inputs": [1, 1, 1],
            "fn": [0, 0, 0],
            "run": [0, 0, 0],
            "dtype": ["fp32"] * 3,
            "latency_us": [2.0, 2.1, 3.0],
        }
    )
    table = tables("elementwise", rows, cpu)[0]
    ops, options = table.frame(), Options().for_kind("elementwise")
    assert weights_of(table, ops, options) == pytest.approx(weigh(ops.analytical_us, options.weight_power))
