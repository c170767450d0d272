"""The predictors in the repository: whole, small enough, with their cards, and of use to a clone without data."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.devices import load_device
from opcast.datasets.vocabulary import KINDS
from opcast.models.predictor import load
from opcast.models.registry import Entry, Registry
from opcast.tests.evidence.cards import PAGE, page

SHIPPED = Path(__file__).resolve().parents[2] / "models" / "shipped"
ENTRIES = [entry for entry in Registry(SHIPPED).list() if entry.current]
DEVICES = (
    *("h100_sxm", "h200_sxm", "a100_sxm_80gb", "b200_sxm", "l40s"),
    *("gb200", "gb300", "b300_sxm", "rtx_pro_6000_server"),
)


def test_all_together_stay_below_64_mb() -> None:
    assert 0 < sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) < 64e6


@pytest.mark.parametrize("device", DEVICES)
def test_products_attention_and_collectives_of_each_device_are_there(device: str) -> None:
    kinds = {entry.kind for entry in ENTRIES if entry.device_id == device}
    assert {"gemm", "attention_prefill", "attention_decode", "mla_decode", "fused_moe", "all_reduce"} <= kinds


def test_the_page_is_that_of_the_cards() -> None:
    """``python tests/evidence/cards.py models/shipped`` writes it."""
    assert (SHIPPED / PAGE).read_text("utf-8") == page(Registry(SHIPPED).list())


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8", "fp8_block"])
@pytest.mark.parametrize("device", ["h100_sxm", "h200_sxm", "b200_sxm"])
def test_who_names_no_backend_gets_one_that_knows_the_format(device: str, dtype: str) -> None:
    registry = Registry(SHIPPED)
    predictor = registry.find("gemm", device, registry.default_backend("gemm", device, dtype))
    assert predictor is not None
    ops = {name: np.array([size]) for name, size in {"batch": 1, "m": 4096, "n": 4096, "k": 4096, "layout": 1}.items()}
    assert predictor.predict(ops, dtype, "bf16").in_envelope.all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_shipped_device_is_the_one_that_was_learned_from(device: str) -> None:
    """Not a what-if: what is written down of a device later is no figure that latencies were learned on."""
    registry = Registry(SHIPPED)
    predictor = registry.find("gemm", device, registry.default_backend("gemm", device, "bf16"))
    assert predictor is not None
    ops = {name: np.array([size]) for name, size in {"batch": 1, "m": 4096, "n": 4096, "k": 4096, "layout": 1}.items()}
    assert predictor.predict(ops, "bf16", device=load_device(device)).in_envelope.all()


def test_a_what_if_changes_each_op_as_physics_says() -> None:
    device, registry = load_device("h100_sxm"), Registry(SHIPPED)
    predictor = registry.find("gemm", device.id, registry.default_backend("gemm", device.id, "bf16"))
    assert predictor is not None
    ops = {"batch": [1, 1], "m": [1, 8192], "n": [8192, 8192], "k": [8192, 8192], "layout": [1, 1]}
    columns = {name: np.array(sizes) for name, sizes in ops.items()}
    usual = predictor.predict(columns, "bf16", device=device)
    slow = predictor.predict(columns, "bf16", device=dataclasses.replace(device, memory_gbps=device.memory_gbps / 3))
    change = slow.latency_us / usual.latency_us
    assert change[0] > 2.0  # a matrix-vector product waits for memory
    assert change[1] < 1.1  # a square one does not
    assert usual.in_envelope.all()
    assert not slow.in_envelope.any()


def test_messages_of_either_16_bit_format_are_alike() -> None:
    predictor = Registry(SHIPPED).find("all_reduce", "h100_sxm")
    assert predictor is not None
    ops = {
        "size_bytes": np.array([2**26]),
        "ranks": np.array([8]),
        "ranks_per_node": np.array([8]),
        "link": np.array([0]),
        "norm": np.array([0]),
    }
    left, right = predictor.predict(ops, "bf16"), predictor.predict(ops, "fp16")
    assert left.in_envelope.all()
    assert left.latency_us == right.latency_us


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.device_id}-{entry.kind}-{entry.backend}")
def test_each_loads_answers_and_says_where_it_is_from(entry: Entry) -> None:
    predictor = load(entry.path)
    card = predictor.card
    assert card["sources"]["source"]
    assert card["sources"]["license"]
    assert card["trained_at"]
    assert 0 < card["test_median_ape"] < 100
    assert card["n"] >= 5
    ends = {dim.name: (dim.default, dim.default) for dim in KINDS[entry.kind].dims if dim.of_backend} | card["range"]
    middle = {dim.name: np.array([_between(*ends[dim.name], bool(dim.choices))]) for dim in KINDS[entry.kind].dims}
    device = None if entry.device_id != "any" else load_device("h100_sxm")
    answer = predictor.predict(middle, card["dtypes"][0], device=device)
    assert 0 < answer.low_us[0] < answer.latency_us[0] < answer.high_us[0] < 1e9


def _between(low: int, high: int, choice: bool) -> int:
    """A size in the middle of a range by logarithm; a choice as its low end."""
    return low if choice else round((max(low, 1) * max(high, 1)) ** 0.5) if high else 0
