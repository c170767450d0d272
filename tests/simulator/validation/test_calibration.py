"""Constants of frameworks: whole groups on one side, a known slowness found again, the other half untouched."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opcast.datasets.truth import TrainingRow, read_table
from opcast.simulator.report.answer import Breakdown, OpShare

SPEC = importlib.util.spec_from_file_location(
    "calibrate_stacks", Path(__file__).parents[2] / "benchmarks" / "calibrate_stacks.py"
)
assert SPEC is not None
assert SPEC.loader is not None
SCRIPT: Any = importlib.util.module_from_spec(SPEC)
sys.modules["calibrate_stacks"] = SCRIPT
SPEC.loader.exec_module(SCRIPT)
FAMILIES, Observed = SCRIPT.FAMILIES, SCRIPT.Observed
family_of, half, parts, stepped = SCRIPT.family_of, SCRIPT.half, SCRIPT.parts, SCRIPT.stepped


@pytest.mark.reference
def test_halves_are_whole_groups_of_about_equal_size(reference_data: Path) -> None:
    rows = [
        r for r in read_table(reference_data / "truth" / "train_vtrain_a100.csv").rows if isinstance(r, TrainingRow)
    ]
    groups: dict[Any, set[int]] = {}
    for row in rows:
        groups.setdefault((row.model, row.layout, row.hardware.devices), set()).add(half(row))
    assert all(len(sides) == 1 for sides in groups.values())
    share = np.mean([side for sides in groups.values() for side in sides])
    assert 0.3 < share < 0.7


def test_families() -> None:
    assert family_of("gemm", FAMILIES) == "gemm"
    assert family_of("attention_backward", FAMILIES) == "attention"
    assert family_of("ep_dispatch", FAMILIES) == family_of("all_reduce", FAMILIES) == "collective"
    assert family_of("rms_norm", FAMILIES) == family_of("custom.thing", FAMILIES) == "*"


class _Report:
    breakdown = Breakdown(
        compute_s=8.0,
        exposed_comm_s=1.0,
        bubble_s=4.5,
        optimizer_s=0.0,
        host_s=0.0,
        by_op=(
            OpShare("gemm", 1, 6.0, 0.6, ()),
            OpShare("rms_norm", 1, 2.0, 0.2, ()),
            OpShare("all_reduce", 1, 3.0, 0.3, ()),
        ),
        by_phase={},
    )


def test_bubbles_follow_what_fills_the_pipeline() -> None:
    found = parts(_Report(), FAMILIES)  # type: ignore[arg-type]  # of a report it reads the breakdown
    assert found == pytest.approx({"gemm": 6.0 * 1.5, "*": 2.0 * 1.5, "collective": 1.5})


def observed(scales: Sequence[float], noise: float, row: TrainingRow) -> list[Any]:
    random = np.random.default_rng(0)
    made = []
    for gemm, attention in random.uniform(0.1, 1.0, (60, 2)):
        measured = (scales[0] * gemm + scales[1] * attention + 0.1) * np.exp(noise * random.standard_normal())
        made.append(
            Observed(
                replace(row, measured={"step_time": measured}),
                gemm + attention + 0.1,
                {"gemm": gemm, "attention": attention},
            )
        )
    return made


@pytest.mark.reference
def test_known_constants_are_found_again(reference_data: Path) -> None:
    table = read_table(reference_data / "truth" / "train_simumax_b200.csv")
    row = next(row for row in table.rows if isinstance(row, TrainingRow))
    found = stepped(observed((1.4, 2.0), 0.01, row), {"gemm": 1.0, "attention": 1.0, "host": 3.0})
    assert found["gemm"] == pytest.approx(1.4, rel=0.05)
    assert found["attention"] == pytest.approx(2.0, rel=0.05)
    assert found["host"] == 3.0
