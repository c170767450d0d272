"""Promotion: a predictor becomes current only where it is no worse, and says why."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from opcast.datasets.devices import Device
from opcast.models.candidates import Options
from opcast.models.promotion import judge
from opcast.models.registry import Registry
from opcast.models.training import train_and_register

CARD = {"test_mean_ape": 5.0, "n": 100, "split": "5-fold", "seed": 0, "stated_coverage": 0.9, "fingerprint": "a"}
CARD["version"] = "3"


@pytest.mark.parametrize(
    ("change", "answered", "promoted", "why"),
    [
        ({}, 4.9, True, "5.00 % against 5.00 % of the current version 3 on the same rows"),
        ({"test_mean_ape": 4.0}, 3.0, True, "4.00 % against 5.00 %"),
        ({"test_mean_ape": 5.04}, 5.0, True, "same rows"),
        ({"test_mean_ape": 5.5}, 9.0, False, "5.50 % against 5.00 % of the current version 3 on the same rows"),
        ({"test_mean_ape": 5.5, "fingerprint": "b", "n": 120}, 6.0, True, "120 rows against 100"),
        ({"test_mean_ape": 5.5, "fingerprint": "b", "n": 120}, 5.2, False, "the current one errs by 5.20 %"),
        ({"test_mean_ape": 5.5, "fingerprint": "b", "n": 120}, None, False, "other rows"),
        ({"test_mean_ape": 4.0, "fingerprint": "b", "n": 80}, 3.0, True, "other rows"),
        ({"test_mean_ape": 5.5, "seed": 1}, 6.0, True, "another evaluation"),
    ],
)
def test_it_is_no_worse_on_record_or_on_its_own_rows(
    change: dict[str, Any], answered: float | None, promoted: bool, why: str
) -> None:
    verdict = judge(CARD | change, CARD, answered=answered)
    assert verdict.promoted is promoted
    assert why in verdict.why


def test_the_first_and_the_forced_are_promoted() -> None:
    assert judge(CARD, None).promoted
    assert judge(CARD | {"test_mean_ape": 50.0}, CARD, force=True).promoted
    assert judge(CARD, {"n": 5}).promoted


class OneTable:
    """A store of one table."""

    def __init__(self, device: Device, rows: pa.Table, fingerprint: str) -> None:
        self._device, self._rows, self._fingerprint = device, rows, fingerprint

    def kinds(self) -> list[str]:
        return ["gemm"]

    def read(self, kind: str, device: str | None = None) -> pa.Table:
        return self._rows

    def device(self, device_id: str) -> Device | None:
        return self._device

    def fingerprint(self, kind: str, device: str) -> str:
        return self._fingerprint


def test_a_worse_predictor_is_kept_but_not_used(cpu: Device, rows: pa.Table, fast: Options, tmp_path: Path) -> None:
    registry, store = Registry(tmp_path), OneTable(cpu, rows, "a")
    good = dataclasses.replace(fast, candidates=("lightgbm",))
    poor = dataclasses.replace(fast, candidates=("calibrated",))
    said: list[str] = []
    assert train_and_register(store, cpu, registry, options=good)[0]["gemm"]["promoted"]
    results, trained = train_and_register(store, cpu, registry, options=poor, progress=said.append)
    assert results["gemm"]["promoted"] is False
    assert results["gemm"]["predictor"].endswith("@2")
    assert "same rows" in results["gemm"]["why"]
    assert "promote=true forces" in said[-1]
    assert not trained[0].promoted
    found = registry.find("gemm", cpu.id)
    assert found is not None
    assert found.version == "1"
    forced = dataclasses.replace(poor, promote=True)
    assert train_and_register(store, cpu, registry, options=forced)[0]["gemm"]["promoted"]
    found = Registry(tmp_path).find("gemm", cpu.id)
    assert found is not None
    assert found.card["chosen"] == "calibrated"


def test_on_other_rows_the_current_one_is_asked_too(cpu: Device, rows: pa.Table, fast: Options, tmp_path: Path) -> None:
    """Of noisy rows that have moved any figure is worse, and a new predictor promoted; a poorer one is not, whatever it
    has seen."""
    plain = dataclasses.replace(fast, candidates=("calibrated",))
    registry = Registry(tmp_path)
    train_and_register(OneTable(cpu, rows.slice(0, 60), "a"), cpu, registry, options=plain)
    noisy = pa.array(rows["latency_us"].to_numpy() * np.random.default_rng(0).uniform(1.2, 2.0, rows.num_rows))
    other = rows.set_column(rows.column_names.index("latency_us"), "latency_us", noisy)
    more, _ = train_and_register(OneTable(cpu, other, "b"), cpu, registry, options=plain)
    assert more["gemm"]["promoted"]
    assert "240 rows against 60" in more["gemm"]["why"]
    good = dataclasses.replace(fast, candidates=("lightgbm",))
    assert train_and_register(OneTable(cpu, rows.slice(0, 200), "c"), cpu, registry, options=good)[0]["gemm"][
        "promoted"
    ]
    poor, _ = train_and_register(OneTable(cpu, rows, "d"), cpu, registry, options=plain)
    assert not poor["gemm"]["promoted"]
    assert "240 rows against 200" in poor["gemm"]["why"]
