"""Calibrations: a known slowness is found again, what nobody ran has physics and a wide interval, groups stay whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.datasets.devices import load_device
from opcast.datasets.ops import make_op
from opcast.datasets.truth import TrainingRow, read_table
from opcast.datasets.truth.published import CHECKOUT
from opcast.simulator.question.calibration import (
    ACROSS,
    FAMILIES,
    NONE,
    USUAL,
    Calibration,
    Effect,
    RunKind,
    StepCalibration,
    calibrated,
    cell_of,
    factors,
    family_of,
    load_calibration,
    regime_of,
    relative_spread,
    run_kind,
    unknown_of,
)
from opcast.simulator.question.plan import PlanError
from opcast.simulator.question.sources import Sources
from opcast.simulator.question.stack import EVERY_TABLE
from opcast.simulator.validation import ValidationSettings
from opcast.simulator.validation.answers import Engines
from opcast.simulator.validation.calibrate import chosen_hosts, sampled
from opcast.simulator.validation.calibration import (
    as_json,
    corrected,
    fit,
    halves,
    known_of,
    left_out,
    score,
)
from opcast.simulator.validation.holdout import WAYS, holdouts
from opcast.simulator.validation.intervals import (
    family_shares,
    fit_spread,
    fit_widths,
    interval_score,
    stated,
    without_source,
)
from opcast.simulator.validation.observed import ObservedStep, group_of, observe
from opcast.simulator.workbench import workbench

SLOW = {"megatron": 1.3, "fsdp": 0.9}
CHIPS = ("hopper-132", "ampere-108")


def run(place: int, framework: str, chip: str, random: np.random.Generator, noise: float) -> ObservedStep:
    """A run whose products take SLOW times longer, and whose attention twice as long on Ampere."""
    gemm, attention = random.uniform(0.4, 0.7), random.uniform(0.1, 0.3)
    rest = 1.0 - gemm - attention
    parts = {("gemm 16bit", "train"): gemm, ("attention 16bit", "train"): attention, ("rest", "train"): rest}
    took = gemm * SLOW[framework] + attention * (2.0 if chip == CHIPS[1] else 1.0) + rest
    setting = RunKind(framework, chip, "train")
    measured = took * np.exp(noise * random.standard_normal())
    return ObservedStep(str(place), f"{framework} {chip}", f"g{place % 7}", {"train": setting}, 1.0, measured, parts)


def runs(noise: float, skip: tuple[str, str] | None = None, sources: int = 0) -> list[ObservedStep]:
    """Ten runs of each pair: each pair in a table of its own, or all in so many ``sources``."""
    random = np.random.default_rng(1)
    pairs = [(framework, chip) for framework in SLOW for chip in CHIPS if (framework, chip) != skip]
    found = [run(10 * place + at, *pair, random, noise) for place, pair in enumerate(pairs) for at in range(10)]
    return [replace(each, table=f"source {int(each.id) % sources}") for each in found] if sources else found


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_known_slowness_is_found_again(noise: float) -> None:
    known = Calibration(fit(runs(noise, sources=5)).effects())
    for framework, slow in SLOW.items():
        made = factors(known, RunKind(framework, "hopper-132", "train"))
        assert made["gemm 16bit"] == pytest.approx(slow, abs=0.1)
    assert score(corrected(each, known) for each in runs(noise))["median"] < 2.0


def test_what_one_source_is_off_by_counts_less_than_what_several_agree_on() -> None:
    """Nobody can tell the framework of a single source from its machines; five sources have it in common."""
    setting = RunKind("megatron", "hopper-132", "train")
    spread = [each for each in runs(0.01, sources=5) if each.chip == "hopper-132"]
    alone = [replace(each, table="alone") if each.framework == "megatron" else each for each in spread]
    slower = [factors(Calibration(fit(of).effects()), setting)["gemm 16bit"] for of in (alone, spread)]
    assert 1.0 < slower[0] < slower[1] - 0.05


def test_a_pair_that_nobody_ran_has_the_sum_of_what_is_known() -> None:
    unseen = RunKind("fsdp", "ampere-108", "train")
    known = Calibration(fit(runs(0.01, skip=("fsdp", "ampere-108"), sources=5)).effects())
    own = [each for each in runs(0.01) if each.settings["train"] == unseen]
    before = np.median([abs(np.log(each.measured)) for each in own])
    assert np.median([abs(corrected(each, known)) for each in own]) < 0.95 * before
    effects = {(each.of, each.family): each.value for each in known.effects}
    levels = ("all", "framework=fsdp", "chip=ampere-108", "regime=train")
    sums = {family: np.exp(sum(effects[of, family] for of in levels)) for family in ("rest", "gemm")}
    found = factors(known, unseen)
    assert found["rest"] == pytest.approx(sums["rest"])
    assert found["gemm 16bit"] == pytest.approx(sums["gemm"] * np.exp(effects["format=16bit", "gemm"]))


def test_what_nothing_is_known_of_is_physics() -> None:
    known = Calibration(fit(runs(0.01)).effects())
    made = factors(known, RunKind("another", "blackwell-148", "decode"))
    usual = {effect.family: np.exp(effect.value) for effect in known.effects if effect.of == "all"}
    assert {name: value for name, value in made.items() if " " not in name and name != "host"} == pytest.approx(usual)
    assert StepCalibration(made).factor("gemm fp8") == pytest.approx(usual["gemm"])  # a format that no run had
    assert all(0.8 < value < 1.25 for value in usual.values())


def test_runs_join_what_was_known() -> None:
    """A few runs of a new chip move what they are of, as far as it was not sure; without runs nothing moves."""
    start = known_of(runs(0.01))
    assert known_of([], start) == start
    random = np.random.default_rng(2)
    new = [replace(run(at, "megatron", "volta-80", random, 0.01), table="new") for at in range(8)]
    new = [replace(each, measured=1.25 * each.measured) for each in new]
    joined = known_of(new, start)
    before, after = (np.median([abs(corrected(each, known)) for each in new]) for known in (start, joined))
    assert after < 0.7 * before
    old = [each for each in runs(0.01) if each.framework == "fsdp"]
    kept, moved, alone = (
        np.median([abs(corrected(each, known)) for each in old]) for known in (start, joined, known_of(new))
    )
    assert moved < kept + 0.03 < alone
    at = {(each.of, each.family): each for each in start.effects}
    for each in joined.effects:
        earlier = at.get((each.of, each.family))
        assert earlier is None or (each.error <= earlier.error + 1e-3 and each.rows >= earlier.rows)


def test_what_was_applied_already_is_not_applied_twice() -> None:
    plain = runs(0.0)
    known = Calibration(fit(plain).effects())

    def again(each: ObservedStep) -> ObservedStep:
        made = factors(known, each.settings["train"])
        times = {part: share * made[part[0]] for part, share in each.parts.items()}
        total = sum(times.values())
        applied = {part: float(np.log(made[part[0]])) for part in times}
        return replace(each, predicted=total, parts={part: us / total for part, us in times.items()}, applied=applied)

    second = Calibration(fit([again(each) for each in plain]).effects())
    for framework in SLOW:
        setting = RunKind(framework, "hopper-132", "train")
        assert factors(second, setting)["gemm 16bit"] == pytest.approx(factors(known, setting)["gemm 16bit"], rel=1e-3)


def test_errors_of_what_was_left_out_come_from_the_others() -> None:
    found = runs(0.02)
    out = left_out(found, lambda each: each.framework)
    others = Calibration(fit([each for each in found if each.framework != "fsdp"]).effects())
    first = next(each for each in found if each.framework == "fsdp")
    assert out[first.id] == pytest.approx(corrected(first, others))
    assert set(halves(found)) == set(out)


def all_errors(observed: list[ObservedStep]) -> dict[str, dict[str, float]]:
    """Errors by what was left out, to first order."""
    ways = ("table", "framework", "chip")
    return {"halves": halves(observed)} | {
        way: left_out(observed, lambda step, way=way: getattr(step, way)) for way in ways
    }


def test_steps_of_what_errs_more_have_a_wider_spread() -> None:
    random = np.random.default_rng(5)
    wild = []
    for step in runs(0.02):
        share = random.uniform(0.0, 0.6)
        parts = {cell: value * (1.0 - share) for cell, value in step.parts.items()}
        wild.append(replace(step, parts=parts | {("host", "train"): share}))
    errors = {step.id: float(random.standard_normal()) * (0.02 + 0.8 * step.parts["host", "train"]) for step in wild}
    spread = fit_spread(wild, errors)
    assert spread["host"] > 5 * spread["gemm"]
    assert relative_spread(spread, {"host": 0.5, "gemm": 0.5}) > 2 * relative_spread(spread, {"gemm": 1.0})
    assert relative_spread({}, {"host": 0.5}) == 1.0
    assert np.median([relative_spread(spread, family_shares(step)) for step in wild]) == pytest.approx(1.0, rel=0.1)


def test_nothing_that_is_said_of_a_source_rests_on_its_own_errors() -> None:
    observed = runs(0.02)
    errors = all_errors(observed)
    source = observed[0].table
    ids = {step.id for step in observed if step.table == source}
    worse = {way: {key: 9.0 * off if key in ids else off for key, off in of.items()} for way, of in errors.items()}
    before, after = (without_source(observed, of) for of in (errors, worse))
    assert after[source] == before[source]
    assert any(after[name] != before[name] for name in before if name != source)


def test_widths_grow_with_what_is_not_known() -> None:
    found = runs(0.02)
    made = fit_widths(found, all_errors(found), {})
    assert made[""] <= made["kind"] <= made["pair"] <= max(made["chip"], made["framework"]) <= made["both"]
    known = Calibration((Effect("gemm", "all", 0.1, 0.01, 9),), widths=made)
    found_of = calibrated(known, RunKind("fsdp", CHIPS[0], "train"))
    assert found_of.width == made[f"fsdp {CHIPS[0]} train"]
    assert found_of.width_experts == max(found_of.width, made[""])  # no run of theirs has any
    wide = replace(known, widths=made | {f"fsdp {CHIPS[0]} train": 2.0})
    assert calibrated(wide, RunKind("fsdp", CHIPS[0], "train")).width_experts == 2.0
    for chip in ("new", *CHIPS):  # what is wide where runs are known is no narrower where none is
        wide = replace(known, widths=made | {f"other {CHIPS[1]} train": 2.0})
        assert calibrated(wide, RunKind("other", chip, "train")).width == 2.0
    assert unknown_of(RunKind("fsdp", CHIPS[0], "decode"), made) == "kind"
    assert unknown_of(RunKind("fsdp", CHIPS[0], "decode"), {f"fsdp {CHIPS[0]}": 0.1}) == ""  # of an older file
    assert unknown_of(RunKind("fsdp", "new", "train"), made) == "chip"
    assert unknown_of(RunKind("new", CHIPS[0], "train"), made) == "framework"
    assert unknown_of(RunKind("new", "new", "train"), made) == "both"


@given(st.lists(st.floats(-0.3, 0.3), min_size=2, max_size=6))
def test_effects_of_a_question_multiply(values: list[float]) -> None:
    levels = RunKind("a", "b", "train").levels("d")[: len(values)]
    effects = tuple(Effect("gemm", of, value, 0.0, 1) for of, value in zip(levels, values, strict=True))
    made = factors(Calibration(effects), RunKind("a", "b", "train"))
    with_format = made.get("gemm d", made["gemm"])  # no level of so few has the format
    assert with_format == pytest.approx(float(np.exp(sum(values))))


def test_the_slowest_host_that_explains_no_more_is_not_taken() -> None:
    found = runs(0.01)
    slower = [replace(each, predicted=each.predicted * 1.5) for each in found]
    assert chosen_hosts({1.0: found, 3.0: found, 5.0: slower}) == {"megatron": 1.0, "fsdp": 1.0}


def test_families_of_ops() -> None:
    group: Mapping[str, int] = {"size_bytes": 1024, "ranks": 8}
    assert family_of(make_op("gemm", m=1, n=1, k=1, dtype="bf16")) == "gemm"
    assert family_of(make_op("all_reduce", **group, ranks_per_node=8)) == "collective_inside"
    assert family_of(make_op("all_reduce", **group, ranks_per_node=4)) == "collective_between"
    assert family_of(make_op("rms_norm", rows=1, cols=8, dtype="bf16")) == family_of(None) == "rest"


def test_formats_of_16_bits_are_one_and_chips_are_told_by_their_units() -> None:
    a100, h100 = load_device("a100_sxm_80gb"), load_device("h100_sxm")
    cells = {cell_of(make_op("gemm", m=1, n=1, k=1, dtype=dtype)) for dtype in ("fp16", "bf16")}
    assert cells == {"gemm 16bit"}
    assert run_kind("x", a100, "train").chip == run_kind("x", load_device("a100_sxm_40gb"), "train").chip
    assert run_kind("x", a100, "train").chip != run_kind("x", h100, "train").chip


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    found = runs(0.01)
    errors = all_errors(found)
    spread = fit_spread(found, errors["table"])
    made = Calibration(
        fit(found).effects(), {"megatron": 3.0}, fit_widths(found, errors, spread), spread, rows={"t": 3}
    )
    path = tmp_path / "steps.json"
    path.write_text(as_json(made))
    assert load_calibration(str(path)) == made


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("[]", "must be a mapping"),
        ('{"effects": [{"family": "gemm"}]}', "lacks"),
        ('{"effects": [{"family": "gemms", "of": "all", "value": 1, "error": 0, "rows": 1}]}', "is not one of gemm"),
        ('{"effects": [{"family": "gemm", "of": "all", "value": 800, "error": 0, "rows": 1}]}', "from -10 to 10"),
        ('{"host": {"torch": -5.0}}', "host.torch=-5.0 must be"),
        ('{"widths": {"both": 900.0}}', "widths.both=900.0 must be"),
        ('{"spread": {"base": 1.0, "gemm": -1.0}}', "spread.gemm=-1.0 must be"),
        ('{"spread": {"gemm": 1.0}}', "spread.base=None must be"),
        ('{"effects": [{"family": "gemm", "of": "all", "value": 1, "error": 0, "rows": 1}]}', "has no width"),
    ],
)
def test_what_is_no_calibration_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=said):
        load_calibration(str(path))


def test_a_name_that_is_no_calibration_says_what_may_stand_there() -> None:
    with pytest.raises(PlanError, match=f"calibration=nonsense .* take {USUAL}, {NONE} or a file"):
        load_calibration("nonsense")


def test_the_shipped_calibration_holds_together() -> None:
    shipped = load_calibration(USUAL)
    assert shipped.effects
    assert {effect.family for effect in shipped.effects} <= set(FAMILIES)
    assert all(abs(effect.value) < 1.5 and effect.error > 0 for effect in shipped.effects)
    assert len({(effect.of, effect.family) for effect in shipped.effects}) == len(shipped.effects)
    assert json.loads(as_json(shipped))["widths"] == dict(shipped.widths)
    assert load_calibration(NONE) == Calibration()


@pytest.mark.reference
def test_a_sample_of_a_table_holds_whole_groups(reference_data: Path) -> None:
    rows = read_table(reference_data / "truth" / "train_llm_foundry_mpt.csv").rows
    found = sampled(rows, 60)
    assert 40 < len(found) <= 60
    inside = {group_of(row) for row in found}
    assert inside.isdisjoint({group_of(row) for row in sampled(rows, 2000) if row not in found})


@pytest.mark.reference
def test_nothing_is_fitted_to_times_that_another_tool_put_together(reference_data: Path) -> None:
    rows = [
        row
        for row in read_table(reference_data / "truth" / "train_vtrain_a100.csv").rows
        if isinstance(row, TrainingRow)
    ]
    assert {row.tags["times"] for row in rows if row.hardware.devices <= 8} == {"composed"}
    found = sampled(rows, 2000)
    assert {row.id for row in found} == {row.id for row in rows if row.hardware.devices > 8}
    assert {row.tags["times"] for row in found} == {"measured"}
    composed = {
        (row.model, str(row.layout), row.micro_batch, row.global_batch // row.layout.dp // row.micro_batch): row
        for row in rows
        if row.tags["times"] == "composed"
    }
    series = [
        [composed[(*alike, count)].measured["step_time"] for count in (2, 4, 8)]
        for *alike, count in composed
        if count == 8 and {(*alike, 2), (*alike, 4)} <= composed.keys()
    ]
    assert len(series) > 150
    assert max(abs(2 * two + eight - 3 * four) for two, four, eight in series) < 1e-12  # seconds: a straight line


@pytest.mark.reference
@pytest.mark.parametrize("table", ["train_korthikanti22", "train_llama3_paper"])
def test_small_tables_are_answered_as_well_as_the_frozen_scores_say(
    table: str, reference_data: Path, tmp_path: Path
) -> None:
    frozen = json.loads((CHECKOUT.parent / "calibration_scores.json").read_text())[table]
    bench = workbench(Sources(store=str(tmp_path / "store"), predictors=str(tmp_path / "predictors")))
    setting = ValidationSettings(bench.engine, tmp_path)
    rows = read_table(reference_data / "truth" / f"{table}.csv").rows
    found = observe(table, rows, setting, Engines(setting))
    errors = [float(np.log(each.measured / each.predicted)) for each in found]
    assert len(errors) == frozen["fitted"]["rows"]
    assert score(errors)["median"] == pytest.approx(frozen["fitted"]["median"], abs=1.5)
    if table == "train_llama3_paper":  # four runs of MLSys'23 are as near by physics (docs/results.md)
        assert score(errors)["median"] < frozen["physics"]["median"]


def test_a_slower_host_is_found_in_the_runs_that_it_holds_up() -> None:
    """Most runs of a framework wait for no host: they say nothing, and hide nothing."""
    found = runs(0.01)
    waiting = {each.id for each in found if each.framework == "fsdp" and int(each.id) % 10 < 2}
    took = [replace(each, measured=each.measured * 2.0) if each.id in waiting else each for each in found]
    slower = [replace(each, predicted=each.predicted * 2.0) if each.id in waiting else each for each in took]
    assert chosen_hosts({1.0: took, 3.0: took, 5.0: slower}) == {"megatron": 1.0, "fsdp": 5.0}
    few = {each.id for each in took if each.framework != "fsdp"} | set(sorted(waiting)[1:])  # one run says too little
    alone = {host: [each for each in of if each.id not in few] for host, of in ((1.0, took), (5.0, slower))}
    assert chosen_hosts(alone) == {"fsdp": 1.0}


def test_tensor_groups_across_nodes_have_effects_and_widths_of_their_own() -> None:
    assert regime_of("train", 8, 8) == "train"
    assert regime_of("train", 16, 8) == f"train{ACROSS}"
    found = runs(0.01)
    setting = RunKind("fsdp", CHIPS[0], f"train{ACROSS}")
    bad = [
        replace(
            each,
            id=f"bad {each.id}",
            measured=each.measured * (2.0 + 0.1 * int(each.id)),
            parts={(cell, "train"): share for (cell, _), share in each.parts.items()},
            settings={"train": setting},
        )
        for each in found[:6]
    ]
    alone, beside = (Calibration(fit(own).effects()) for own in (found, found + bad))
    sane = RunKind("fsdp", CHIPS[0], "train")
    assert factors(beside, sane)["gemm 16bit"] == pytest.approx(factors(alone, sane)["gemm 16bit"], rel=0.15)
    made = fit_widths(found + bad, all_errors(found + bad), {})
    known = replace(beside, widths=made)
    assert calibrated(known, setting).width > 3 * calibrated(known, sane).width
    assert calibrated(known, RunKind("megatron", CHIPS[0], setting.regime)).width == made[ACROSS]


def test_intervals_are_scored_by_what_they_miss_and_how_wide_they_are() -> None:
    assert interval_score([0.0, 0.1], [0.1, 0.1]) == {"coverage": 1.0, "width": 0.2, "interval_score": 0.2}
    missed = interval_score([0.0, 0.3], [0.1, 0.1])
    assert missed["coverage"] == 0.5
    assert missed["interval_score"] == pytest.approx(0.2 + 20 * 0.2 / 2)


def test_intervals_of_what_was_left_out_hold_most_of_it() -> None:
    found = runs(0.05)
    errors = all_errors(found)
    known = without_source(found, errors)
    for how, missed in errors.items():
        half = stated(found, known, how)
        assert set(half) == set(missed)
        assert interval_score([missed[key] for key in half], list(half.values()))["coverage"] >= 0.75


def test_each_way_of_leaving_out_covers_every_run_once_and_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    found = runs(0.02)
    cases = list(holdouts(found, lambda others: {each.framework: 2.0 for each in others}))
    for way, by in WAYS.items():
        of_way = [case for case in cases if case.way == way]
        assert sorted(key for case in of_way for key in case.ids) == sorted(each.id for each in found)
        for case in of_way:
            path.write_text(as_json(case.calibration))
            assert load_calibration(str(path)) == case.calibration
            load_calibration.cache_clear()
            members = [each for each in found if each.id in case.ids]
            assert len({by(each) for each in members}) == 1
            assert set(case.tables) == (set() if way == "halves" else {each.table for each in members})
            if way == "framework":
                (name,) = {each.framework for each in members}
                assert name not in case.calibration.host
                assert not [effect for effect in case.calibration.effects if f"framework={name}" in effect.of]
    (alone,) = [case for case in cases if case.way == "physics"]
    assert (alone.calibration, alone.tables) == (Calibration(), EVERY_TABLE)
