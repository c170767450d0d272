"""Log-probs by operators that go over all logits one after the other: what they move, and for how many sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from opcast.datasets.clusters import Cluster
from opcast.simulator.graph import Graph
from opcast.simulator.passes.fuse import fuse
from opcast.simulator.question.plan import Parallel, Plan, Stack
from opcast.simulator.trace import Workload, trace

CLUSTER = Cluster("c", "c", "h100_sxm")
TOKENS = 32


def bytes_by_phase(graph: Graph) -> dict[str, int]:
    phases = ("forward", "backward")
    return {phase: sum(k * n.bytes_moved for n, k in graph.weighted() if n.phase == phase) for phase in phases}


@pytest.mark.parametrize("sequences", [1, 2, 4])
def test_logits_go_through_memory_once_for_each_operator(
    sequences: int, small_model: Callable[..., dict[str, Any]], assert_sound: Callable[..., None]
) -> None:
    """Forward ten tensors of fp32 logits more, backward eleven, and for each of several sequences zeros and a sum."""
    workload = Workload("train", batch=sequences, seq_len=TOKENS // sequences, attention="fused")
    graph = trace(small_model("llama"), workload, "bf16")
    apart = fuse(graph, Plan(Parallel(), CLUSTER, Stack(fusion=("log_probs_apart",))))
    assert_sound(apart)
    softmax = next(n.op for n in graph.nodes() if n.source == "aten._log_softmax")
    assert softmax is not None
    logits = 4 * softmax.rows * softmax.cols
    before, after = bytes_by_phase(graph), bytes_by_phase(apart)
    slices = 0 if sequences == 1 else sequences + 2 + 3 * (sequences - 1)
    assert after["forward"] - before["forward"] == 10 * logits
    assert after["backward"] - before["backward"] == (11 + slices) * logits
