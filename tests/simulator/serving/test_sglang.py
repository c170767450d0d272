"""SGLang's own scheduler and the policy ``sglang`` side by side: what each schedules in each iteration.

Recorded schedules of small cases are compared everywhere. Random ones skip where SGLang's wheel is not there.
``OPCAST_SGLANG`` names a folder that it was unpacked into
(docs/serving-engines.md); nothing of it needs to be compiled or installed, and no GPU.
"""

from __future__ import annotations

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

ORACLE = Path(__file__).with_name("sglang_oracle.py")
FOLDER = os.environ.get("OPCAST_SGLANG", "")
NEEDED = pytest.mark.skipif(not FOLDER, reason="SGLang's wheel is not there (OPCAST_SGLANG)")


def random_case(seed: int) -> dict[str, Any]:
    """Requests that crowd a small KV memory; each fits alone."""
    random = np.random.default_rng(seed)
    tokens = int(random.integers(600, 2400))
    requests, iteration = [], 0
    for _ in range(80):
        iteration += int(random.integers(0, 8 if seed % 3 else 80))  # now and then nobody is there
        prompt, output = int(random.integers(1, tokens // 6)), int(random.integers(1, 240))
        requests.append([iteration, prompt, output, 0, 0])
    chunk = int(random.integers(64, 700))
    return {
        "max_seqs": int(random.integers(2, 40)),
        "chunk": chunk,
        "max_tokens": int(random.choice([chunk // 2, 2 * chunk])),
        "tokens": tokens,
        "conservativeness": float(random.choice([0.1, 0.3, 1.0])),
        "mixed": seed % 4 == 3,
        "caching": False,
        "ignore_eos": False,
        "requests": requests,
    }


def with_prefixes(seed: int) -> dict[str, Any]:
    """The same, where most requests begin like others."""
    case, random = random_case(seed), np.random.default_rng(seed)
    shared = {prefix: int(random.integers(16, 300)) for prefix in (1, 2, 3)}
    for request in case["requests"]:
        if random.random() < 0.7:
            request[3] = int(random.integers(1, 4))
            request[4] = min(shared[request[3]], request[1])
    return {**case, "caching": True}


def ours(case: dict[str, Any]) -> dict[str, Any]:
    names = ("max_tokens", "max_seqs", "chunk", "conservativeness", "requests", "caching")
    given = {name: case[name] for name in names}
    flags = {name: int(case[name]) for name in ("mixed", "ignore_eos")}
    return played(policy="sglang", blocks=case["tokens"], block_tokens=1, **flags, **given)


def answered(cases: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What opcast and SGLang make of cases; one process for all."""
    command = [sys.executable, str(ORACLE), FOLDER]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [(ours(case), theirs) for case, theirs in zip(cases, json.loads(done.stdout), strict=True)]


def test_our_side_of_the_comparison_runs_without_sglang() -> None:
    case = random_case(1)
    case["requests"] = case["requests"][:20]
    mine = ours(case)
    tokens = sum(sum(each.values()) for each in mine["schedule"])
    assert tokens >= sum(prompt + output - 1 for _, prompt, output, *_ in case["requests"])


def test_recorded_schedules_are_ours() -> None:
    kept = recorded("sglang")
    retracted = 0
    for case, theirs in zip(kept["cases"], kept["answers"], strict=True):
        mine = ours(case)
        assert mine["schedule"] == theirs["schedule"]
        assert mine["preemptions"] == theirs["preemptions"]
        retracted += sum(theirs["preemptions"])
    assert retracted > 0


@pytest.mark.slow
@NEEDED
def test_what_is_scheduled_is_what_sglang_schedules() -> None:
    retracted = 0
    for number, (mine, theirs) in enumerate(answered([random_case(seed) for seed in range(16)])):
        for place, (own, other) in enumerate(zip(mine["schedule"], theirs["schedule"], strict=True)):
            assert own == other, (number, place)
        assert mine["preemptions"] == theirs["preemptions"]
        retracted += sum(theirs["preemptions"])
    assert retracted > 15


@pytest.mark.slow
@NEEDED
@pytest.mark.parametrize("caching", [False, True])
def test_answers_as_long_as_asked_are_admitted_by_their_ends_as_sglang_does(caching: bool) -> None:
    """Without its radix cache SGLang plays through when they end; with it, it counts all that they still make."""
    made = with_prefixes if caching else random_case
    cases = [{**made(seed), "ignore_eos": True} for seed in range(4 if caching else 16)]
    if caching:  # nobody shares anything, so that hits are alike
        cases = [{**case, "requests": [[*each[:3], 0, 0] for each in case["requests"]]} for case in cases]
    for number, (mine, theirs) in enumerate(answered(cases)):
        for place, (own, other) in enumerate(zip(mine["schedule"], theirs["schedule"], strict=True)):
            assert own == other, (number, place)
        assert mine["preemptions"] == theirs["preemptions"]


@pytest.mark.slow
@NEEDED
def test_prefix_hits_are_nearly_those_of_the_radix_cache() -> None:
    for mine, theirs in answered([with_prefixes(seed) for seed in range(6)]):
        same = [own == other for own, other in zip(mine["hits"], theirs["hits"], strict=True)]
        assert np.mean(same) >= 0.9
        assert sum(mine["hits"]) == pytest.approx(sum(theirs["hits"]), rel=0.05)
