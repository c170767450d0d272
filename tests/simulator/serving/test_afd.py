"""Attention and feed-forward layers apart: the formula beside a pipeline played event by event; laws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.simulator.question.canonical import RequestError
from opcast.simulator.question.ffn_apart import FfnApart
from opcast.simulator.question.serving import DecodePool, IterationLaw, KvMemory, ServingRequest
from opcast.simulator.question.traffic import Lengths, RequestTraffic
from opcast.simulator.serving import serve as serving
from opcast.simulator.serving.afd import apart_tables, by_hand, iteration_us, ping_pong_us, transfer_us
from opcast.simulator.serving.iteration import at_points, linear_tables
from opcast.simulator.serving.replica import by_hand as replica_by_hand

TABLES = linear_tables(base_us=1000.0, decode_us=20.0, decode_context_us=0.01)
APART = FfnApart(4, micro_batches=3, gbps=10.0, us=5.0, token_bytes=1e4, layers=10, ffn_us=500.0, ffn_token_us=40.0)


def played_us(attention_us: float, ffn_us: float, way_us: float, layers: int, batches: int) -> float:
    """When the last micro-batch is back from the last layer: stages take one at a time, first come first served."""
    ready, attention_free, ffn_free = [0.0] * batches, 0.0, 0.0
    for _ in range(layers):
        for batch in range(batches):
            attention_free = max(attention_free, ready[batch]) + attention_us
            ready[batch] = attention_free + way_us
        for batch in range(batches):
            ffn_free = max(ffn_free, ready[batch]) + ffn_us
            ready[batch] = ffn_free + way_us
    return max(ready)


@given(
    st.floats(0.1, 100),
    st.floats(0.1, 100),
    st.floats(0, 100),
    st.integers(1, 12),
    st.integers(1, 5),
)
def test_the_formula_is_what_the_pipeline_takes(
    attention_us: float, ffn_us: float, way_us: float, layers: int, batches: int
) -> None:
    total = ping_pong_us(layers * attention_us, layers * ffn_us, layers * way_us, layers, batches)
    assert total == pytest.approx(played_us(attention_us, ffn_us, way_us, layers, batches))


def test_hidden_transfers_are_the_papers_formula() -> None:
    assert ping_pong_us(300.0, 200.0, 50.0, 10, 3) == pytest.approx((30 + 20 + 2 * 5) + 30 * (3 * 10 - 1))


@given(st.integers(1, 64), st.floats(1, 8000), st.sampled_from([1.0, 5.0, 50.0]))
def test_more_bandwidth_and_more_gpus_are_never_slower(decodes: int, context: float, gbps: float) -> None:
    slow = replace(APART, gbps=gbps)
    base_us = iteration_us(TABLES, slow, by_hand(slow), 8, decodes, context)
    for faster in (replace(slow, gbps=2 * gbps), replace(slow, us=0.0), replace(slow, ffn_gpus=8)):
        assert iteration_us(TABLES, faster, by_hand(faster), 8, decodes, context) <= base_us + 1e-6


def test_feed_forward_layers_that_take_nothing_leave_attention() -> None:
    free = replace(APART, micro_batches=1, us=0.0, token_bytes=0.0, ffn_us=0.0, ffn_token_us=0.0)
    tables = apart_tables(TABLES, free, by_hand(free), 1, 64, 4096)
    for decodes, context in ((1.0, 1.0), (8.0, 512.0), (64.0, 4096.0)):
        us = at_points(tables.attend_rows, tables.attend_context, tables.attend_us, decodes, context)
        assert us == pytest.approx(1000 + 20 * decodes + 0.01 * decodes * context)


def test_the_more_loaded_end_decides_a_transfer() -> None:
    costs = by_hand(APART)
    assert transfer_us(APART, costs, 10.0, 1) == pytest.approx(10 * (5 + 10 * 1e4 / 1e4))
    assert transfer_us(APART, costs, 10.0, 6) == pytest.approx(10 * (5 + 60 * 1e4 / 1e4))
    experts = replace(costs, copies=8)  # shared out over four GPUs
    assert transfer_us(APART, experts, 10.0, 6) == pytest.approx(10 * (5 + 120 * 1e4 / 1e4))


def test_a_pool_that_decodes_with_experts_apart_serves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "worth_compiling", lambda outputs: False)
    law, kv = IterationLaw(base_us=1000.0, decode_us=20.0, prefill_token_us=10.0), KvMemory(500, 16)
    traffic = RequestTraffic(rate=20.0, requests=20, input=Lengths(mean=50), output=Lengths(mean=10))
    pool = DecodePool(2, kv=kv, link_gbps=100.0)
    request = ServingRequest(law=law, kv=kv, traffic=traffic, decode_pool=pool, afd=APART)
    replica = replica_by_hand(law, 500, 16, 0.0)
    decoder = replace(replica, tables=apart_tables(replica.tables, APART, by_hand(APART), 2, 64, 128))
    report = serving.serve(request, replica, decoder).report
    assert report.completed == 20
    assert report.devices == 1 + 2 + 4
    one_us = iteration_us(replica.tables, APART, by_hand(APART), 2, 1, 55)
    assert report.tpot_ms.p50 >= 0.9 * one_us / 1e3


def test_it_is_of_a_pool_that_decodes() -> None:
    with pytest.raises(RequestError, match=r"afd\.ffn_gpus=4 is of replicas that only decode"):
        ServingRequest(law=IterationLaw(base_us=1.0), kv=KvMemory(9), afd=APART)
    with pytest.raises(RequestError, match="give both"):
        FfnApart(4, ffn_us=1.0)


def test_tables_grow_with_sequences_and_context() -> None:
    tables: Any = apart_tables(TABLES, APART, by_hand(APART), 4, 64, 4096)
    assert (np.diff(tables.attend_us, axis=0) >= 0).all()
    assert (np.diff(tables.attend_us, axis=1) >= 0).all()
