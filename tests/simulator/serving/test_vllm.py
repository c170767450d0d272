"""vLLM's own scheduler and the policy ``vllm`` side by side: what each schedules in each iteration.

Recorded schedules of small cases are compared everywhere. Random ones skip where vLLM is not installed: ``OPCAST_VLLM``
names a folder with its Python files and the packages that they import (docs/serving-engines.md says how to make
one); no GPU and no compiled part of it is needed.
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

from .played import played
from .recorded import recorded

ORACLE = Path(__file__).with_name("vllm_oracle.py")
FOLDER = os.environ.get("OPCAST_VLLM", "")
NEEDED = pytest.mark.skipif(
    not FOLDER and importlib.util.find_spec("vllm") is None,
    reason="needs vLLM: pip install vllm, or name its checkout in OPCAST_VLLM",
)


def random_case(seed: int, priorities: bool = False) -> dict[str, Any]:
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
    more = {"priorities": random.integers(0, 3, len(requests)).tolist()} if priorities else {}
    return more | {
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
        policy="vllm",
        blocks=case["blocks"] - 1,  # vLLM keeps one for padding
        watermark=int(case["watermark"] * case["blocks"]),
        whole_prompt=int(case["whole_prompt"]),
        priorities=case.get("priorities"),
        **{name: case[name] for name in names},
    )


@pytest.fixture(scope="module")
def answers() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Cases, and what vLLM makes of them; one process for all."""
    cases = [random_case(seed, seed >= 24) for seed in range(36)]
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


def test_nobody_is_admitted_in_the_iteration_that_preempted() -> None:
    """The first grows into blocks of the second, which waits for the next iteration, although a chunk of it fits."""
    mine = played(
        [[0, 16, 40, 0, 0], [0, 30, 10, 0, 0]],
        caching=False,
        policy="vllm",
        blocks=4,
        max_seqs=8,
        max_tokens=32,
        long_prefill=10,
    )
    assert mine["preemptions"][0] == 0
    assert mine["preemptions"][1] > 0
    both = [len(each) == 2 for each in mine["schedule"]]
    stopped = both.index(False)
    assert mine["schedule"][stopped] == {"0": 1}
    assert mine["schedule"][stopped + 1] == {"0": 1, "1": 10}


def test_recorded_schedules_are_ours() -> None:
    kept = recorded("vllm")
    preempted = hit = 0
    for case, theirs in zip(kept["cases"], kept["answers"], strict=True):
        mine = ours(case)
        own, other = ([list(each.items()) for each in made["schedule"]] for made in (mine, theirs))
        assert own == other
        assert (mine["preemptions"], mine["hits"]) == (theirs["preemptions"], theirs["hits"])
        preempted, hit = preempted + sum(theirs["preemptions"]), hit + sum(theirs["hits"])
    assert preempted > 0
    assert hit > 0


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
