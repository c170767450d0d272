"""The draw of the next token after the product that makes logits: a sort a sequence, or passes over all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from opcast.datasets.devices import load_device
from opcast.simulator.engines.analytical import AnalyticalEngine
from opcast.simulator.timing.costs import cost_graphs
from opcast.simulator.timing.sampling import DRAW_BYTES, SORT_CLOCKS, add_draw
from opcast.simulator.trace import Workload, trace

A100 = load_device("a100_sxm_80gb")


@pytest.mark.parametrize(("batch", "rounds"), [(2, 1), (2 * A100.compute_units, 2)])
def test_each_sequence_is_sorted_on_one_unit(
    small_model: Callable[..., dict[str, Any]], batch: int, rounds: int
) -> None:
    graph = trace(small_model("gpt2", layers=2), Workload("decode", batch=batch, seq_len=8), "fp16")
    (costs,) = cost_graphs([graph], A100, AnalyticalEngine(A100), {})
    assert add_draw(costs, "", 1, A100) is costs
    logits = [node.op for node in costs.nodes if node.op and node.path == "lm_head"]
    assert len(logits) == 1
    longer = add_draw(costs, "top_p", 1, A100).kernel_us - costs.kernel_us
    assert longer.sum() == pytest.approx(rounds * logits[0].n * SORT_CLOCKS / A100.clock_mhz)
    assert (add_draw(costs, "top_p", 4, A100).kernel_us - costs.kernel_us).sum() == pytest.approx(4 * longer.sum())


def test_passes_over_the_whole_vocabulary_grow_with_sequences_and_no_tensor_rank_saves_any(
    small_model: Callable[..., dict[str, Any]],
) -> None:
    added_us = {}
    for batch in (2, 4):
        graph = trace(small_model("gpt2", layers=2), Workload("decode", batch=batch, seq_len=8), "fp16")
        (costs,) = cost_graphs([graph], A100, AnalyticalEngine(A100), {})
        (logits,) = [node.op for node in costs.nodes if node.op and node.path == "lm_head"]
        added_us[batch] = float((add_draw(costs, "log_probs", 1, A100).kernel_us - costs.kernel_us).sum())
    launches_us = len(DRAW_BYTES) * A100.launch_us
    assert added_us[4] - launches_us == pytest.approx(2 * (added_us[2] - launches_us))
    assert added_us[4] - launches_us == pytest.approx(4 * logits.n * 52 / A100.memory_gbps / 1e3)
