"""Cold products of which only warm rows are known: by the row, or by what weights take from memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.devices import load_device
from opcast.datasets.ops import KINDS, Op, make_op
from opcast.datasets.vocabulary import OpColumns
from opcast.simulator.engines import Answers, build_engine
from opcast.simulator.predict.columns import predict_columns
from opcast.simulator.predict.ops import predict_ops
from opcast.simulator.timing.cold_products import bound_cold_products, weight_bytes

L40S = load_device("l40s")


class Streaming:
    """Products take their weights over a rate."""

    name = "streaming"

    def answer(self, kind, columns, dtype, out_dtype, cache):
        answers = Answers.declined(len(columns["m"]))
        answers.latency_us[:] = columns["n"] * columns["k"] * 2.0 / (0.8 * L40S.memory_gbps * 1e3)
        return answers


def answers(latency_us: float, inside: bool) -> Answers:
    one = Answers.declined(1)
    made = replace(one, low_us=np.array([0.5 * latency_us]), high_us=np.array([2.0 * latency_us]))
    return replace(made, latency_us=np.array([latency_us]), in_envelope=np.array([inside]))


def bounded(op: Op, warm_us: float, cold_us: float, inside: bool = False, device=L40S) -> Answers:
    return bound_cold_products(Streaming(), [op], answers(warm_us, True), answers(cold_us, inside), device)[1]


OP = make_op("gemm", m=1, n=4096, k=4096)  # 34 MB: the cache of an L40S has room for them
STREAM_US = weight_bytes(OP) / (0.8 * L40S.memory_gbps * 1e3)


def test_row_that_was_already_cold_stays_as_it_was_timed() -> None:
    found = bounded(OP, 55.0, 118.0)
    assert found.latency_us[0] == pytest.approx(55.0)
    assert found.high_us[0] == pytest.approx(110.0)  # bounds go along


def test_warm_row_takes_what_its_weights_take_from_memory() -> None:
    assert bounded(OP, 8.0, 118.0).latency_us[0] == pytest.approx(STREAM_US + L40S.launch_us, rel=0.01)


def test_kin_take_at_most_a_narrow_product_and_a_share_of_a_wide_one() -> None:
    told = answers(118.0, False)
    told.engine[:] = "transfer"
    warm, cold = bound_cold_products(Streaming(), [OP], told, told, L40S)
    narrow_us = STREAM_US * 128 / 4096
    assert warm.latency_us[0] == pytest.approx(STREAM_US + narrow_us, rel=0.01)
    assert cold.latency_us[0] == warm.latency_us[0]
    many = OP.replace(m=1024)
    assert bound_cold_products(Streaming(), [many], told, told, L40S)[0].latency_us[0] == 118.0


@pytest.mark.parametrize("change", ["inside", "shorter", "other kind", "host"])
def test_what_was_measured_or_is_no_product_of_a_gpu_stays(change: str) -> None:
    cold_us = 20.0 if change == "shorter" else 118.0
    op = make_op("elementwise", numel=2**24) if change == "other kind" else OP
    device = replace(L40S, vendor="cpu") if change == "host" else L40S
    assert bounded(op, 8.0, cold_us, change == "inside", device).latency_us[0] == cold_us


@pytest.mark.parametrize("device", ["rtx_4090", "l40s"])
def test_a_product_that_is_asked_alone_is_bound_as_in_a_step(device: str) -> None:
    """Only warm rows of it are known: a weight of 34 MB is not read three times as slowly as memory gives it."""
    card = load_device(device)
    engine = build_engine(card, [], [Path(__file__).parents[3] / "models" / "shipped"])
    ops = [make_op("gemm", m=m, n=4096, k=4096) for m in (1, 16)]
    cold = np.array([answer.latency_us for answer in predict_ops(ops, card, engine, "cold")])
    warm = np.array([answer.latency_us for answer in predict_ops(ops, card, engine)])
    assert (cold >= 1e-3 * weight_bytes(OP) / card.memory_gbps).all()
    assert (cold <= 1.2 * warm).all()
    columns = dict(zip(KINDS["gemm"].names, np.array([op.dims for op in ops]).T, strict=True))
    asked = OpColumns("gemm", columns, "bf16", "bf16", "cold")
    assert predict_columns(asked, card, engine).latency_us.tolist() == cold.tolist()


@pytest.mark.parametrize("device", ["gb10", "rtx_5060_ti", "l4"])
def test_a_cache_that_only_kin_have_slows_no_product_of_a_chip_without_it(device: str) -> None:
    """RTX PRO 6000 and L40S keep 50 MB in their caches: what else their rows wait for is no share of memory's time."""
    card = load_device(device)
    engine = build_engine(card, [], [Path(__file__).parents[3] / "models" / "shipped"])
    in_cache, beyond = (make_op("gemm", m=1, n=n, k=4096) for n in (6144, 128256))
    answers = predict_ops([in_cache, beyond], card, engine, "cold")
    rates = [weight_bytes(op) / answer.latency_us for op, answer in zip((in_cache, beyond), answers, strict=True)]
    assert "/rtx_pro_6000_server@" in str(answers[0].predictor) or "/l40s@" in str(answers[0].predictor)
    assert rates[0] > 0.7 * rates[1]
