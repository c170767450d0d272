"""vLLM's own scheduler and the policy ``vllm`` side by side: what each schedules in each iteration.

Skips where vLLM is not installed. ``OPCAST_VLLM`` names a folder with its Python files and the packages that they
import (docs/serving.md says how to make one); no GPU and no compiled part of it is needed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opcast.simulator.serving import policies
from opcast.simulator.serving.histogram import BINS
from opcast.simulator.serving.iteration import linear_tables
from opcast.simulator.serving.loop import run
from opcast.simulator.serving.rules import VLLM, IterationTiming, SchedulerRules, ServingSetup
from opcast.simulator.serving.state import StateSizes, as_objects, empty_state
from opcast.simulator.serving.streams import chunk

ORACLE = Path(__file__).with_name("vllm_oracle.py")
FOLDER = os.environ.get("OPCAST_VLLM", "")
NEEDED = pytest.mark.skipif(
    not FOLDER and importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (OPCAST_VLLM)"
)


def random_case(seed: int) -> dict[str, Any]:
    """Requests that crowd a small KV memory; shared prefixes where blocks are cached."""
    random = np.random.default_rng(seed)
    caching = seed % 2 == 1
    blocks = int(random.integers(60, 260))
    longest = (blocks - 1) * 16 // 2
    requests, iteration = [], 0
    for _ in range(120):
        iteration += int(random.integers(0, 6))
        prompt, output = int(random.integers(1, longest)), int(random.integers(1, 60))
        prefix = int(random.integers(1, 4)) if caching and random.random() < 0.7 else 0
        requests.append([iteration, prompt, output, prefix, int(random.integers(16, 300)) if prefix else 0])
    if caching:  # a prefix has one length in opcast
        shared = {prefix: int(random.integers(16, 300)) for prefix in (1, 2, 3)}
        requests = [[*each[:4], min(shared.get(each[3], 0), each[1])] for each in requests]
    return {
        "max_seqs": int(random.integers(2, 40)),
        "max_tokens": int(random.integers(64, 700)),
        "max_model_len": 4096,
        "long_prefill": int(random.choice([0, 0, 100])),
        "whole_prompt": bool(seed % 3),
        "watermark": float(random.choice([0.0, 0.05])),
        "caching": caching,
        "blocks": blocks,
        "requests": requests,
    }


def played(case: dict[str, Any]) -> dict[str, Any]:
    """What opcast schedules: each iteration takes a microsecond, so that its number is its time."""
    law = linear_tables(1.0)
    blocks = case["blocks"] - 1  # vLLM keeps one for padding
    rules = SchedulerRules(
        policy=VLLM,
        max_tokens=case["max_tokens"],
        max_seqs=case["max_seqs"],
        chunk=512,
        max_model_len=case["max_model_len"],
        blocks=blocks,
        block_tokens=16,
        watermark=int(case["watermark"] * case["blocks"]),
        long_prefill=case["long_prefill"],
        whole_prompt=int(case["whole_prompt"]),
        chunked=1,
        padded=0,
        mixed=0,
        lag=0,
        swap_us_per_token=-1.0,
        conservativeness=1.0,
        prefill_every=10,
        drafts=0,
        wait_iterations=0,
        balance_iterations=0,
        gather_iterations=0,
        wait_tokens=0.0,
        answers=0,
    )
    timing = IterationTiming(law, np.zeros(0, np.int64), 0.0, 0.0, 0, 0, 0.0)
    made = ServingSetup(rules, timing, rules, timing, 0, 1, 1, 1, 1, 1, 1, 0, np.zeros(0), 0.0, 0.0, 1.0)
    shape = StateSizes(1, 1, 1, case["max_seqs"], blocks, case["caching"], blocks + 1, bins=BINS)
    state = as_objects(empty_state(shape, len(case["requests"])))
    columns = np.array(case["requests"])
    requests = chunk(columns[:, 0].astype(float), columns[:, 1], columns[:, 2], columns[:, 3], columns[:, 4])
    schedule = watch(state, made, requests)
    left = sorted(state.left[: state.totals[0].left], key=lambda row: row.request)
    return {
        "schedule": schedule,
        "preemptions": [row.preemptions for row in left],
        "hits": [row.hit_tokens for row in left],
    }


def watch(state: Any, made: ServingSetup, requests: Any) -> list[dict[str, int]]:
    """Run, and write down how many tokens of each request are scheduled in each iteration."""
    schedule: dict[float, dict[str, int]] = {}
    real = policies.put

    def put(state: Any, rules: Any, rank: int, batch: int, slot: int, tokens: int) -> None:
        scheduled = schedule.setdefault(state.totals[0].now_us, {})
        scheduled[str(state.slots[slot].request)] = int(tokens)
        real(state, rules, rank, batch, slot, tokens)

    policies.put = put
    try:
        run(state, made, requests, False)
    finally:
        policies.put = real
    return list(schedule.values())


@pytest.fixture(scope="module")
def answers() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Cases, and what vLLM makes of them; one process for all."""
    cases = [random_case(seed) for seed in range(24)]
    environment = {**os.environ, "PYTHONPATH": FOLDER, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, str(ORACLE)], input=json.dumps(cases), env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return list(zip(cases, json.loads(done.stdout), strict=True))


def test_our_side_of_the_comparison_runs_without_vllm() -> None:
    case = random_case(1)
    case["requests"] = case["requests"][:20]
    ours = played(case)
    assert len(ours["preemptions"]) == len(ours["hits"]) == 20
    assert sum(ours["hits"]) > 0
    tokens = sum(sum(each.values()) for each in ours["schedule"])
    assert tokens >= sum(prompt + output - 1 for _, prompt, output, *_ in case["requests"]) - sum(ours["hits"])


@pytest.mark.slow
@NEEDED
def test_what_is_scheduled_is_what_vllm_schedules(answers: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    preempted = 0
    hit = 0
    for case, theirs in answers:
        ours = played(case)
        for place, (own, other) in enumerate(zip(ours["schedule"], theirs["schedule"], strict=True)):
            assert list(own.items()) == list(other.items()), (place, case["caching"])
        assert ours["preemptions"] == theirs["preemptions"]
        assert ours["hits"] == theirs["hits"]
        preempted += sum(theirs["preemptions"])
        hit += sum(theirs["hits"])
    assert preempted > 100
    assert hit > 1000
