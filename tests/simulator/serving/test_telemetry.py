"""Logs of engines' steps: what is read of each format, what is learned, and what it makes of other loads."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from opcast.simulator.question.calibration import Calibration, load_calibration
from opcast.simulator.question.canonical import RequestError
from opcast.simulator.question.errors import PlanError
from opcast.simulator.question.learned_steps import FACTORS, HOST, LEARNED, LearnedSteps
from opcast.simulator.question.serving import IterationLaw
from opcast.simulator.serving.iteration import IterationTables
from opcast.simulator.serving.learned import interval_width, step_us, with_learned
from opcast.simulator.serving.replica import ServedReplica, by_hand
from opcast.simulator.serving.step_fit import learn
from opcast.simulator.serving.step_logs import LoggedStep, StepLog, as_log, gather, read_steps
from opcast.simulator.serving.tabulate import Extent
from opcast.simulator.validation.calibration import as_json
from opcast.tests.benchmarks.telemetry import scores, tables_of
from opcast.tests.worlds.chip import make_world

VLLM = """INFO 11-27 [kv_cache_utils.py] GPU KV cache size: 100,000 tokens
(EngineCore_DP0 pid=7) INFO [core.py] Iteration(0): 2 context requests, 512 context tokens, 0 generation requests, \
0 generation tokens, iteration elapsed time: 31.25 ms
(EngineCore_DP0 pid=7) INFO [core.py] Iteration(1): 0 context requests, 0 context tokens, 2 generation requests, \
2 generation tokens, iteration elapsed time: 8.50 ms, GPU KV cache usage: 0.6%
INFO 11-27 [core.py] Iteration(2): 0 context requests, 0 context tokens, 2 generation requests, 6 generation tokens, \
iteration elapsed time: 9.00 ms
"""
SGLANG = """[2025-05-27 20:14:37] Prefill batch, #new-seq: 2, #new-token: 512, #cached-token: 0, token usage: 0.00, \
#running-req: 0, #queue-req: 0, cuda graph: False, input throughput (token/s): 120.00
[2025-05-27 20:14:38] Decode batch, #running-req: 2, #token: 514, token usage: 0.01, cuda graph: True, \
gen throughput (token/s): 80.00, #queue-req: 0
[2025-05-27 20:14:38 TP0] Decode batch. #running-req: 2, #token: 516, token usage: 0.01, cuda graph: True, \
gen throughput (token/s): 250.00, #queue-req: 0
[2025-05-27 20:14:38] Decode batch, #running-req: 1, #full token: 300, full token usage: 0.01, cuda graph: True, \
gen throughput (token/s): 150.00, #queue-req: 0
"""
FPM = {
    "version": 1,
    "wall_time": 0.025,
    "scheduled_requests": {
        "num_prefill_requests": 2,
        "sum_prefill_tokens": 256,
        "sum_prefill_kv_tokens": 64,
        "num_decode_requests": 3,
        "sum_decode_kv_tokens": 1024,
    },
}


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_vllms_lines(tmp_path: Path) -> None:
    steps, left_out = gather(written(tmp_path, "vllm.log", VLLM))
    prompts, decodes = steps
    assert prompts == LoggedStep(0, 0, 512, 0, 2, 31.25)
    assert decodes == LoggedStep(2, pytest.approx(600), 0, 0, 0, 8.5)
    assert list(left_out.values()) == [1], "tokens that are guessed ahead"


def test_sglangs_lines_count_where_nothing_else_ran(tmp_path: Path) -> None:
    steps, left_out = gather(written(tmp_path, "sglang.log", SGLANG))
    assert steps == [LoggedStep(2, 516, 0, 0, 0, 8.0)]
    assert left_out == {"follow a prompt, or another number of sequences": 2}


@pytest.mark.parametrize("envelope", [True, False])
def test_forward_pass_metrics(tmp_path: Path, envelope: bool) -> None:
    record = {"timestamp": 1, "event": {"schema": "dynamo.fpm.trace.v1", "fpm": FPM}} if envelope else FPM
    idle = {"version": 1, "wall_time": 0.0, "scheduled_requests": {}}
    path = tmp_path / "fpm.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, [record, idle])).encode() + b'\n{"cut'))
    steps, left_out = gather(path)
    assert steps == [LoggedStep(3, 1024, 256, 64, 2, 25.0)]
    assert sum(left_out.values()) == 2
    log = as_log(steps, left_out, 0.0)
    # two chunks of 128 tokens behind 32 each
    assert log.prefill_pairs[0] == 2 * 128 * (32 + 129 / 2)
    assert log.samples[0] == 5


def test_tables_of_ones_own(tmp_path: Path) -> None:
    path = written(tmp_path, "steps.csv", "decodes,prefill_tokens,time_ms\n4,0,7.5\n0,100,9\n,,3\n")
    steps, left_out = gather(path)
    assert [step[:1] + step[2:] for step in steps] == [(4, 0, 0, 0, 7.5), (0, 100, 0, 1, 9.0)]
    assert math.isnan(steps[0].decode_context)
    assert sum(left_out.values()) == 1
    assert as_log(steps, {}, 500.0).decode_context.tolist() == [2000.0, 0.0]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.log", "INFO nothing here\n", "--enable-logging-iteration-details"),
        ("a.csv", "decodes,seconds\n1,2\n", "lacks the column time_ms"),
        ("a.csv", "decodes,time_ms\nmany,2\n", "many"),
        ("a.jsonl", '{"decodes": 3}\n', "lacks 'time_ms'"),
        ("a.csv", "decodes,time_ms\n1,2\n", "has 1 steps"),
        ("a.log", "", "is empty"),
    ],
)
def test_a_log_that_says_nothing_is_one_line(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        read_steps(written(tmp_path, name, text), 0.0)


def law(weights: float = 1.0, products: float = 1.0, attention: float = 1.0) -> IterationTables:
    """Tables of a GPU that reads weights for 5 ms and computes 256 tokens in the time."""
    axis = np.array([1.0, 64, 128, 256, 512, 1024, 2048, 4096, 8192])
    token_us = weights * 5000.0 + products * 19.5 * np.maximum(axis - 256, 0.0)
    rows, contexts = np.array([1.0, 512]), np.array([1.0, 32768])
    attend = attention * 2e-3 * rows[:, None] * contexts
    prompt = attention * 1e-4 * np.array([1.0, 16384])[:, None] * contexts
    flat = np.zeros(2)
    token = (axis, token_us)
    attending = (rows, contexts, attend, np.array([1.0, 16384]), contexts, prompt)
    return IterationTables(
        *token, *token, rows, np.array([50.0, 200.0]), rows, flat, *attending, rows, flat, rows, flat
    )


def replica_of(tables: IterationTables) -> ServedReplica:
    return replace(by_hand(IterationLaw(base_us=1.0), 9000, 16, 0.0), tables=tables)


def given(host: dict[str, float]) -> LearnedSteps:
    """Steps as predicted, with a host."""
    return LearnedSteps(
        "m", "d", "e", dict.fromkeys(FACTORS, 1.0), host, ((0.0,) * len(LEARNED),) * len(LEARNED), 0.01, 0.01, 200
    )


def steps_of(tables: IterationTables, random: np.random.Generator, most: int, longest: int, prompt: int) -> StepLog:
    """Steps of a true law with a host of 1.5 ms and 12 us a sequence, noise of 1 %."""
    decodes = random.integers(1, most + 1, 200).astype(float)
    context = decodes * random.integers(longest // 2, longest + 1, 200)
    new = np.where(random.random(200) < 0.3, random.integers(prompt // 2, prompt + 1, 200), 0).astype(float)
    bare = as_log(
        [LoggedStep(*row, 0.0, float(row[2] > 0), 1.0) for row in zip(decodes, context, new, strict=True)], {}, 0.0
    )
    us = step_us(tables, np.zeros(0), given({"step_us": 1500.0, "seq_us": 12.0, "token_us": 0.0}), bare)
    us *= np.exp(0.01 * random.standard_normal(200))
    return replace(bare, time_us=us)


@pytest.mark.parametrize("true", [(0.8, 1.3, 1.2), (1.25, 0.9, 0.8), (1.0, 1.0, 1.0)])
def test_what_one_load_teaches_holds_on_others(true: tuple[float, float, float]) -> None:
    random, none = np.random.default_rng(3), np.zeros(0)
    log = steps_of(law(*true), random, most=24, longest=2000, prompt=600)
    log.time_us[::25] *= 6  # pauses
    learned, usual = learn(log, replica_of(law()), ("m", "d", "e"))
    assert (~usual).sum() == 8
    for limit, load in (
        (0.03, (24, 2000, 600)),
        (0.08, (128, 500, 600)),
        (0.08, (24, 8000, 300)),
        (0.08, (4, 500, 4000)),
    ):
        other = steps_of(law(*true), random, *load)
        off = step_us(law(), none, learned, other) / other.time_us
        assert np.mean(np.abs(off - 1)) < limit
        assert np.mean(np.abs(np.log(off)) <= interval_width(law(), none, learned, other)) > 0.8


def test_what_no_step_depends_on_keeps_its_prediction() -> None:
    random = np.random.default_rng(4)
    only_decodes = steps_of(law(), random, 16, 1000, 1)
    only_decodes = only_decodes.rows(only_decodes.prefill_tokens == 0)
    learned, _ = learn(only_decodes, replica_of(law()), ("m", "d", "e"))
    assert 0.8 < learned.factors["prompts"] < 1.25
    unlike = as_log([LoggedStep(0, 0, 2000, 0, 1, 1.0)], {}, 0.0)
    like = as_log([LoggedStep(8, 8000, 0, 0, 0, 1.0)], {}, 0.0)
    wide, narrow = (interval_width(law(), np.zeros(0), learned, each)[0] for each in (unlike, like))
    assert wide > 2 * narrow


def test_a_replica_takes_the_times_and_the_host_that_were_learned() -> None:
    random, none = np.random.default_rng(5), np.zeros(0)
    log = steps_of(law(0.8, 1.2, 1.1), random, 24, 2000, 600)
    learned, _ = learn(log, replica_of(law()), ("m", "d", "e"))
    served = with_learned(replica_of(law()), learned)
    own = given(dict(zip(HOST, (served.host.step_us, served.host.seq_us, 0.0), strict=True)))
    assert step_us(served.tables, none, own, log) == pytest.approx(step_us(law(), none, learned, log), rel=1e-3)
    assert f"from {learned.rows} steps of e" in served.notes[-1]


def test_what_was_learned_is_a_file_of_a_version(tmp_path: Path) -> None:
    learned, _ = learn(steps_of(law(), np.random.default_rng(6), 24, 2000, 600), replica_of(law()), ("m", "d", "e"))
    path = written(tmp_path, "steps.json", as_json(Calibration(steps=(learned,))))
    assert load_calibration(str(path)).steps == (learned,)
    values = json.loads(path.read_text())
    values["steps"][0]["version"] = 2
    with pytest.raises(PlanError, match="version 2"):
        load_calibration(str(written(tmp_path, "newer.json", json.dumps(values))))
    values["steps"][0] |= {"version": 1, "factors": {"weights": 0.0}}
    with pytest.raises(PlanError, match="weights"):
        load_calibration(str(written(tmp_path, "bad.json", json.dumps(values))))


@pytest.mark.slow
def test_two_hundred_steps_of_a_gpu_with_other_laws(tmp_path: Path) -> None:
    tables = tables_of(make_world("unlike_any", 1), "tiny_llama_100m", str(tmp_path), Extent(128, 4096, 8192))
    found = scores(*tables)
    assert found["same"].mean_ape < 3
    assert found["many more sequences"].mean_ape < 8
    assert found["same"].inside > 0.8
