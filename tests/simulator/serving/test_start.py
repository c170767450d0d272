"""What would not start is not served: the longest sequence against the KV memory, and against an iteration."""

from __future__ import annotations

import pytest

from opcast.simulator.question.canonical import RequestError
from opcast.simulator.question.serving import Scheduler
from opcast.simulator.serving.engines import load_serving_engine
from opcast.simulator.serving.kv import KvBudget, KvError
from opcast.simulator.serving.start import longest_served
from opcast.simulator.trace.context import NO_LIMIT

KV = KvBudget(2575, 16)  # 41,200 tokens: Llama 3.1 8B on an RTX 3090
OWN = 131_072


def started(name: str, own: int = OWN, **scheduler: object) -> tuple[int, str]:
    return longest_served(load_serving_engine(name), Scheduler(policy=name, **scheduler), KV, own)


@pytest.mark.parametrize("stated", [None, 131_072, 41_201])
def test_vllm_stops_where_one_sequence_does_not_fit(stated):
    with pytest.raises(KvError, match=r"would not start.*41,200 tokens.*--max-model-len 41200,"):
        started("vllm", max_model_len=stated)


def test_what_fits_starts():
    assert started("vllm", max_model_len=41_200) == (41_200, "")
    assert started("vllm", own=8192, max_model_len=None) == (8192, "")
    assert started("vllm", own=NO_LIMIT) == (NO_LIMIT, "")


def test_a_length_that_nobody_stated_is_what_fits_and_says_so():
    longest, note = started("vllm")
    assert longest == 41_200
    assert "the model's 131,072 tokens" in note
    assert "--max-model-len 41200" in note


@pytest.mark.parametrize("name", ["sglang", "trtllm"])
def test_other_engines_start_and_serve_shorter_ones(name):
    longest, note = started(name, max_model_len=100_000)
    assert longest == 41_200
    assert "max_model_len=100,000" in note
    assert f"{name} serves none that is longer" in note


def test_an_iteration_holds_a_whole_prompt_where_none_is_cut():
    with pytest.raises(KvError, match=r"max_tokens=2,048.*--max-model-len 2048,"):
        started("vllm", own=8192, max_model_len=None, chunked_prefill=False, max_tokens=2048)
    assert started("vllm", own=8192, max_model_len=None, chunked_prefill=False)[0] == 8192  # the engine takes as many
    with pytest.raises(KvError, match="max_seqs=128 at most"):
        started("vllm", own=8192, max_tokens=128, max_seqs=256)


def test_a_sequence_longer_than_the_models_own_is_said():
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1" in started("vllm", own=4096, max_model_len=8192)[1]
    assert "SGLANG_ALLOW_OVERWRITE" in started("sglang", own=4096, max_model_len=8192)[1]


def test_a_length_is_a_number_or_auto():
    with pytest.raises(RequestError, match=r"scheduler\.max_model_len"):
        Scheduler(max_model_len="long")
