"""The Python face: answers are kept from call to call, and what is added since is seen."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import opcast
import pytest
from opcast.datasets.clusters import load_cluster
from opcast.datasets.ops import make_op
from opcast.datasets.schema import Measurement
from opcast.datasets.store import Store
from opcast.simulator.question.plan import Parallel, Plan, load_stack

SHAPE = {"m": 300, "n": 640, "k": 384, "dtype": "bf16"}


def test_a_measurement_that_is_added_answers_the_next_call(tmp_path: Path) -> None:
    before = opcast.predict("gemm", "l4", home=tmp_path, **SHAPE)
    assert before.engine != "measured"
    now = datetime(2026, 1, 1, tzinfo=UTC)
    row = Measurement(op=make_op("gemm", **SHAPE), device_id="l4", run_id="test", measured_at=now, latency_us=123.0)
    Store(tmp_path / "store").write([row], "test")
    after = opcast.predict("gemm", "l4", home=tmp_path, **SHAPE)
    assert (after.engine, after.latency_us) == ("measured", 123.0)


def test_the_same_question_again_takes_well_under_a_millisecond(tmp_path: Path) -> None:
    first = opcast.predict("gemm", "l4", home=tmp_path, **SHAPE)
    times = []
    for _ in range(50):
        began = time.process_time()
        assert opcast.predict("gemm", "l4", home=tmp_path, **SHAPE) == first
        times.append(time.process_time() - began)
    assert np.median(times) < 2e-3


def test_devices_folders_and_options_are_told_apart(tmp_path: Path) -> None:
    device = opcast.load_device("l4")
    base = opcast.predict("gemm", device, home=tmp_path, **SHAPE)
    assert opcast.predict("gemm", "l4", home=tmp_path, **SHAPE) == base
    assert opcast.predict("gemm", "l4", home=tmp_path, cache="cold", **SHAPE).latency_us >= base.latency_us
    assert opcast.predict("gemm", "l4", home=tmp_path, engines=["analytical"], **SHAPE).engine == "analytical"
    assert opcast.predict("gemm", "h100_sxm", home=tmp_path, **SHAPE).latency_us < base.latency_us


TINY = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "vocab_size": 1024,
}


def test_steps_are_asked_about_links_as_on_the_command_line(tmp_path: Path) -> None:
    plan = Plan(Parallel(tp=4), replace(load_cluster("dgx_h100"), nodes=2), load_stack("megatron"))
    settings = {"plan": plan, "home": tmp_path, "seq_len": 256, "global_batch": 8}
    usual = opcast.simulate(TINY, "train", "h100_sxm", **settings)
    assert usual.network == {}
    flow = opcast.simulate(TINY, "train", "h100_sxm", network="flow", faults_study={"samples": 4}, **settings)
    assert flow.network["fidelity"] == "flow"
    assert flow.network["faults_study"]["trials"] == 4
    late = opcast.simulate(TINY, "train", "h100_sxm", stragglers=[{"node": 1, "slowdown": 3.0}], **settings)
    assert late.step_time_s > usual.step_time_s
    broken = opcast.simulate(TINY, "train", "h100_sxm", fault_draw={"count": 2}, **settings)
    assert len(broken.network["faults"]) == 2


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"network": "flow"}, "network=flow needs a cluster"),
        ({"faults": [{"link": "a-b"}]}, "needs a cluster"),
        ({"network": "guess"}, "is not one of auto"),
    ],
)
def test_what_needs_a_cluster_says_so(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        opcast.simulate(TINY, "train", "h100_sxm", seq_len=64, **asked)
    with pytest.raises(ValueError, match=says):
        opcast.predict("all_reduce", "h100_sxm", size_bytes=1, ranks=2, **asked)
