"""What a campaign measures for a step: the kernels that the step's stack launches."""

from __future__ import annotations

import pytest

from opcast.datasets.devices import load_device
from opcast.datasets.ops import make_op
from opcast.harness.coverage import to_measure, ways

ATTENTION = make_op("attention_backward", heads_q=32, heads_kv=8, head_dim=128, v_head_dim=128, seq_q=4096, seq_kv=4096)


@pytest.mark.parametrize(("stack", "wanted"), [("torchtitan", {"cudnn", "sdpa"}), ("torch", {"sdpa"})])
def test_attention_is_measured_as_the_stack_runs_it(stack: str, wanted: set[str]) -> None:
    assert {way.backend for way in to_measure(ways(ATTENTION, load_device("h100_sxm"), stack))} == wanted


@pytest.mark.parametrize(
    ("mib", "stack", "wanted"),
    [
        (1, "vllm", {"vllm:custom_all_reduce", "nccl:graph"}),
        (512, "vllm", {"nccl"}),
        (1, "torchtitan", {"nccl"}),
        (1, "megatron_core", {"nccl"}),
    ],
)
def test_sums_are_measured_as_the_stack_issues_them(mib: int, stack: str, wanted: set[str]) -> None:
    op = make_op("all_reduce", size_bytes=mib << 20, ranks=8)
    assert {way.backend for way in to_measure(ways(op, load_device("h100_sxm"), stack))} == wanted
