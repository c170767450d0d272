"""The draw of the next token: a sort of the vocabulary a sequence, after the product that makes logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from opcast.datasets.devices import load_device
from opcast.simulator.engines.analytical import AnalyticalEngine
from opcast.simulator.timing.costs import cost_graphs
from opcast.simulator.timing.sampling import SORT_CLOCKS, add_top_p_sort
from opcast.simulator.trace import Workload, trace

A100 = load_device("a100_sxm_80gb")


@pytest.mark.parametrize(("batch", "rounds"), [(2, 1), (2 * A100.compute_units, 2)])
def test_each_sequence_is_sorted_on_one_unit(
    small_model: Callable[..., dict[str, Any]], batch: int, rounds: int
) -> None:
    graph = trace(small_model("gpt2", layers=2), Workload("decode", batch=batch, seq_len=8), "fp16")
    (costs,) = cost_graphs([graph], A100, AnalyticalEngine(A100), {})
    assert add_top_p_sort(costs, "", 1, A100) is costs
    logits = [node.op for node in costs.nodes if node.op and node.path == "lm_head"]
    assert len(logits) == 1
    longer = add_top_p_sort(costs, "top_p", 1, A100).kernel_us - costs.kernel_us
    assert longer.sum() == pytest.approx(rounds * logits[0].n * SORT_CLOCKS / A100.clock_mhz)
    assert (add_top_p_sort(costs, "top_p", 4, A100).kernel_us - costs.kernel_us).sum() == pytest.approx(
        4 * longer.sum()
    )
