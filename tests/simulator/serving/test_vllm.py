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

from opcast.simulator.serving.rules import VLLM

from .played import played

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


def ours(case: dict[str, Any]) -> dict[str, Any]:
    """What opcast schedules."""
    names = ("max_tokens", "max_seqs", "max_model_len", "long_prefill", "requests", "caching")
    return played(
        policy=VLLM,
        blocks=case["blocks"] - 1,  # vLLM keeps one for padding
        watermark=int(case["watermark"] * case["blocks"]),
        whole_prompt=int(case["whole_prompt"]),
        **{name: case[name] for name in names},
    )


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
    mine = ours(case)
    assert len(mine["preemptions"]) == len(mine["hits"]) == 20
    assert sum(mine["hits"]) > 0
    tokens = sum(sum(each.values()) for each in mine["schedule"])
    assert tokens >= sum(prompt + output - 1 for _, prompt, output, *_ in case["requests"]) - sum(mine["hits"])


@pytest.mark.slow
@NEEDED
def test_what_is_scheduled_is_what_vllm_schedules(answers: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    preempted = 0
    hit = 0
    for case, theirs in answers:
        mine = ours(case)
        for place, (own, other) in enumerate(zip(mine["schedule"], theirs["schedule"], strict=True)):
            assert list(own.items()) == list(other.items()), (place, case["caching"])
        assert mine["preemptions"] == theirs["preemptions"]
        assert mine["hits"] == theirs["hits"]
        preempted += sum(theirs["preemptions"])
        hit += sum(theirs["hits"])
    assert preempted > 100
    assert hit > 1000
