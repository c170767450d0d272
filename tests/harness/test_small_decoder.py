"""The small decoder: how many operators it runs, and how near their host's time is to that of a real model's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opcast.datasets.ops import make_op
from opcast.harness.cases import prepare
from opcast.harness.cases.base import Unsupported
from opcast.harness.launch import LAYER_OPERATORS, host_calls

Call = Callable[[], object]


class Counted(TorchDispatchMode):
    """Counts operators that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += not (func.is_view or func.overloadpacket is torch.ops.aten._unsafe_view)
        return func(*args, **(kwargs or {}))


def operators(run: Call) -> int:
    with torch.no_grad(), Counted() as counted:
        run()
    return counted.operators


@pytest.mark.parametrize("layers", [1, 4])
def test_as_many_operators_run_as_are_counted(layers: int) -> None:
    run = host_calls("operator", layers * LAYER_OPERATORS, "cpu")
    assert [operators(run), operators(run)] == [layers * LAYER_OPERATORS] * 2


def test_only_whole_layers_are_run() -> None:
    with pytest.raises(Unsupported, match="multiple of 40"):
        prepare(make_op("host_overhead", what="operator", calls=41), "torch", "cpu")
    with pytest.raises(ValueError, match="whole layers"):
        host_calls("operator", 41, "cpu")


def each_us(runs: dict[str, Call], rounds: int = 60) -> dict[str, float]:
    """Microseconds of this thread's processor time for an operator of each run, in turn."""
    counts = {name: operators(run) for name, run in runs.items()}
    spent: dict[str, list[float]] = {name: [] for name in runs}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.thread_time_ns()
            run()
            spent[name].append((time.thread_time_ns() - start) / 1e3 / counts[name])
    torch.set_num_threads(threads)
    return {name: float(np.quantile(each, 0.1)) for name, each in spent.items()}


def test_an_operator_inside_a_model_takes_longer_than_one_in_a_loop_and_about_as_long_as_a_real_model_s() -> None:
    """A decoder of transformers of twelve layers as small: its operators are within a third of the small decoder's."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.Qwen3Config(**sizes, head_dim=32, num_hidden_layers=12, vocab_size=64)
    model = transformers.Qwen3ForCausalLM(config).eval().to(torch.bfloat16)
    cache = transformers.DynamicCache(config=model.config)
    token = torch.ones(1, 1, dtype=torch.int64)

    def decode() -> None:
        model(token, None, None, cache, use_cache=True)
        cache.crop(-1)

    with torch.no_grad():
        model(torch.arange(8).view(1, 8), None, None, cache)
        us = each_us({"small": host_calls("operator", 160, "cpu"), "real": decode})
    loop = host_calls("launch", 1000, "cpu")
    start = time.thread_time_ns()
    loop()
    in_a_loop_us = (time.thread_time_ns() - start) / 1e6
    assert us["small"] > 2.0 * in_a_loop_us
    assert 0.67 < us["small"] / us["real"] < 1.5, us
