"""Steps asked one by one: the times of the event loop, in microseconds of Python."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import opcast
from opcast.simulator.question.serving import Scheduler, Speculation
from opcast.simulator.serving.batch_time import batch_us
from opcast.simulator.serving.host import HostTime
from opcast.simulator.serving.replica import ServedReplica
from opcast.simulator.serving.setup import timing
from opcast.simulator.serving.step_latency import StepLatency
from opcast.tests.simulator.serving.test_telemetry import law, replica_of

MOST_US = 50.0


@dataclass
class Request:
    """As the SGLang Simulator has it."""

    extend_length: int
    past_kv_length: int


def replica() -> ServedReplica:
    return replace(replica_of(law()), host=HostTime(step_us=300.0, seq_us=7.0), graphs=(1, 2, 4, 8, 16, 64))


@given(
    decodes=st.lists(st.integers(1, 30_000), max_size=80),
    prompts=st.lists(st.tuples(st.integers(2, 4000), st.integers(0, 9000)), max_size=4),
    issue_us=st.sampled_from([0.0, 80.0]),
)
def test_a_step_takes_as_long_as_in_the_event_loop(
    decodes: list[int], prompts: list[tuple[int, int]], issue_us: float
) -> None:
    own = replica()
    own = replace(own, tables=own.tables._replace(kernels=np.array([200.0, 300.0]), issue_us=issue_us))
    batch = SimpleNamespace(reqs=[Request(1, past) for past in decodes] + [Request(*prompt) for prompt in prompts])
    said = StepLatency(own).predict_infer_time(batch)
    if not decodes and not prompts:
        assert said == 0
        return
    sums = SimpleNamespace(
        size=len(batch.reqs),
        decodes=float(len(decodes)),
        decode_context=float(sum(decodes)),
        prefill_tokens=float(sum(new for new, _ in prompts)),
        prefill_pairs=float(sum(new * (past + (new + 1) / 2) for new, past in prompts)),
        prefill_context=float(sum(past for _, past in prompts)),
        samples=float(len(batch.reqs)),
    )
    assert said * 1e6 == pytest.approx(batch_us(timing(own, Scheduler(), Speculation()), sums))


def test_an_answer_takes_less_than_fifty_microseconds() -> None:
    latency, steps = StepLatency(replica()), np.random.default_rng(0).integers(1, 64, 500).tolist()
    began = time.process_time()
    for decodes in steps:
        latency.step(decodes, decodes * 900.0, 0.0, 0.0, 0.0, decodes)
    for new in steps:
        latency.step(8.0, 7000.0, new * 20.0, new * new * 200.0, 0.0, 9.0)
    assert (time.process_time() - began) / (2 * len(steps)) * 1e6 < MOST_US


def test_python_has_it_by_the_settings_of_serving() -> None:
    latency = opcast.step_latency(law={"base_us": 1000, "decode_us": 10}, kv={"blocks": 100})
    assert latency.seconds([(1, 100), (1, 200)]) == pytest.approx(1020e-6)
