"""Evaluation: whatever is scored was not seen, and what the report says is what the rows say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from opcast.datasets.devices import Device
from opcast.datasets.vocabulary import OpColumns
from opcast.models import analytical
from opcast.models.baselines import BASELINES, calibrated_roofline, log_log, nearest
from opcast.models.candidates import Options
from opcast.models.evaluation import ape, cross_fit, evaluate, summarise
from opcast.models.learning import choose, learn
from opcast.models.predictor import load
from opcast.models.splits import split
from opcast.models.table import MeasurementTable, tables
from opcast.models.training import fit

FIGURES = {"n", "median_ape", "mean_ape", "p90_ape", "max_ape", "bias", "coverage", "interval_width", "split", "chosen"}


@pytest.fixture(scope="module")
def trees(fast: Options) -> Options:
    return dataclasses.replace(fast, candidates=("calibrated", "lightgbm"))


def reduce_rows(device: Device, wave: float = 0.2) -> MeasurementTable:
    """All-reduces of 2, 4 and 8 ranks over twelve octaves, with an efficiency that varies with size and ranks."""
    sizes, ranks = (each.ravel() for each in np.meshgrid(2 ** np.arange(16, 30), [2, 4, 8]))
    columns = {
        "size_bytes": sizes,
        "ranks": ranks,
        "ranks_per_node": np.full(42, 8),
        "link": np.zeros(42, dtype=int),
        "norm": np.zeros(42, dtype=int),
    }
    latency = analytical.latency_us(OpColumns("all_reduce", columns, "bf16", None), device)
    latency = latency * (1.4 + wave * np.sin(np.log2(sizes)) + 0.02 * ranks)
    made = pa.table({**columns, "dtype": ["bf16"] * 42, "latency_us": latency})
    return tables("all_reduce", made, device)[0]


def test_what_is_scored_was_not_used_to_choose_or_calibrate() -> None:
    """A candidate that is perfect in one fold only must not be taken for that fold."""
    columns = {name: np.arange(100) for name in ("batch", "m", "n", "k", "layout")}
    folds = split("gemm", columns, 5, 0)
    lucky = np.where(folds.fold == 3, 0.0, 0.5)
    residuals = {"steady": np.full(100, 0.2), "lucky": lucky}
    made = cross_fit(residuals, np.ones(100), np.zeros(100), np.ones(100), folds, 0.9)
    assert made.chosen == ("steady",) * 5
    assert set(made.residual) == {0.2}


def test_at_a_near_tie_the_simpler_candidate_wins() -> None:
    loss = {"simple": np.full(10, 0.1000), "complex": np.full(10, 0.0995)}
    assert choose(loss, np.ones(10), np.arange(10)) == "simple"
    assert choose(loss | {"complex": np.full(10, 0.05)}, np.ones(10), np.arange(10)) == "complex"


def test_errors_are_what_the_contract_says() -> None:
    measured, predicted = np.array([100.0, 100.0, 50.0]), np.array([110.0, 80.0, 50.0])
    assert ape(np.log(measured / predicted)).tolist() == pytest.approx([10.0, 20.0, 0.0])
    assert summarise(np.log(measured / predicted))["bias"] == pytest.approx(-10 / 3)


def test_every_mode_reports_the_same_figures(measurements: MeasurementTable, trees: Options) -> None:
    result = fit(
        measurements, dataclasses.replace(trees, evaluations=("random", "groups", "extrapolate", "ranks"))
    ).result
    reports = result["evaluations"]
    assert list(reports) == ["random", "groups", "extrapolate m", "ranks"]
    assert reports["ranks"] == {"error": "gemm has no ranks"}
    for name in ("random", "groups", "extrapolate m"):
        assert set(reports[name]) >= FIGURES
        assert set(reports[name]["baselines"]) == set(BASELINES)
        assert reports[name]["by_dtype"]["fp32"]["n"] == reports[name]["n"]
    assert result["split"] == reports["random"]["split"] == "3-fold, random ops"
    assert result["test_median_ape"] == reports["random"]["median_ape"]
    assert reports["groups"]["n"] == 240 > reports["extrapolate m"]["n"] > 20


def test_the_predictor_does_not_depend_on_what_is_reported(measurements: MeasurementTable, trees: Options) -> None:
    plain = fit(measurements, trees).predictor
    asked = fit(measurements, dataclasses.replace(trees, evaluations=("extrapolate", "random"))).predictor
    assert plain.model_bytes() == asked.model_bytes()


def test_where_no_mode_applies_groups_are_reported(measurements: MeasurementTable, trees: Options) -> None:
    result = fit(measurements, dataclasses.replace(trees, evaluations=("ranks",))).result
    assert result["split"] == "3-fold, grouped by (n, k)"
    assert list(result["evaluations"]) == ["ranks", "groups"]


def test_rows_held_out_cannot_change_their_own_answers(measurements: MeasurementTable, trees: Options) -> None:
    """Spoiling the latencies beyond a size leaves the answers to them as they were: nothing was learned from them."""
    ops = measurements.frame()
    far = measurements.columns["m"] > measurements.columns["m"].max() / 10
    spoilt = dataclasses.replace(measurements, latency_us=np.where(far, 50.0, 1.0) * measurements.latency_us)
    answers = []
    for table in (measurements, spoilt):
        crossed = evaluate(table, ops, trees, "extrapolate", learn(table, ops, trees))[1]["extrapolate m"]
        answers.append(table.latency_us[crossed.rows] / np.exp(crossed.residual))
        assert (crossed.rows == np.flatnonzero(far)).all()
    assert answers[0].tolist() == pytest.approx(answers[1].tolist())


def test_each_rank_count_is_answered_by_a_model_of_the_others(gpu: Device, fast: Options) -> None:
    table = reduce_rows(gpu)
    result = fit(table, dataclasses.replace(fast, evaluations=("ranks", "extrapolate"))).result["evaluations"]
    assert result["ranks"]["split"] == "one ranks of 2, 4, 8 left out"
    assert result["ranks"]["n"] == 42
    assert len(result["ranks"]["chosen"]) == 3
    assert result["ranks"]["median_ape"] < result["ranks"]["baselines"]["nearest"]["median_ape"]
    assert result["extrapolate size_bytes"]["n"] == 9


def test_collectives_are_lines_over_size_and_survive_storage(gpu: Device, tmp_path: Path) -> None:
    table = reduce_rows(gpu)
    made = fit(table, Options(evaluations=("extrapolate",)))
    assert made.result["chosen"] == "lines"
    far = made.result["evaluations"]["extrapolate size_bytes"]
    assert far["median_ape"] < 0.5 * far["baselines"]["nearest"]["median_ape"]
    again = load(made.predictor.save(tmp_path / "1"))
    ops = table.frame()
    assert again.predict_frame(ops).latency_us.tolist() == made.predictor.predict_frame(ops).latency_us.tolist()


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_answer_every_op_and_know_nothing_of_its_latency(measurements: MeasurementTable, name: str) -> None:
    known, asked = measurements.take(np.arange(200)), measurements.take(np.arange(200, 240))
    parts = known.frame(), asked.frame()
    answers = BASELINES[name](known, parts[0], asked, parts[1])
    blind = dataclasses.replace(asked, latency_us=np.ones(40))
    assert np.isfinite(answers).all()
    assert (answers > 0).all()
    assert BASELINES[name](known, parts[0], blind, parts[1]).tolist() == answers.tolist()


def test_baselines_are_exact_where_they_should_be(gpu: Device) -> None:
    """A power law is met by log-log interpolation, a line over the roofline by the calibrated one."""
    table = reduce_rows(gpu, wave=0.0)
    ops = table.frame()
    rows = np.arange(42)
    inner = np.isin(rows, [16, 20, 24])
    power = dataclasses.replace(
        table, latency_us=1e-3 * table.columns["size_bytes"] ** 0.7 * table.columns["ranks"] ** 0.5
    )
    assert log_log(power.take(rows[~inner]), ops, power.take(rows[inner]), ops) == pytest.approx(
        power.latency_us[inner], rel=0.05
    )
    line = dataclasses.replace(table, latency_us=3.0 * ops.roofline_us)
    assert calibrated_roofline(line, ops, line, ops) == pytest.approx(line.latency_us, rel=0.05)
    assert nearest(power, ops, power, ops).tolist() == power.latency_us.tolist()


def test_the_nearest_op_has_the_same_codes(gpu: Device) -> None:
    table = reduce_rows(gpu)
    mixed = dataclasses.replace(table, dtype=np.where(np.arange(42) % 2, "bf16", "fp32"))
    found = nearest(mixed, mixed.frame(), mixed.take(np.arange(10)), mixed.frame())
    assert found.tolist() == mixed.latency_us[:10].tolist()
    bf16 = mixed.take(np.flatnonzero(mixed.dtype == "bf16"))
    other = dataclasses.replace(mixed, dtype=np.full(42, "bf16"))
    assert set(nearest(mixed, mixed.frame(), other, mixed.frame())) <= set(bf16.latency_us)
