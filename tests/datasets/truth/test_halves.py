"""The frozen split of sources: what was drawn stays drawn, and no table or copy of a source changes sides."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.datasets.truth import read_table
from opcast.datasets.truth.halves import HALVES, LOOKED_AT, UNSEEN, half_of, only_half

STEPS = """source,id,stack,model_canon,gpu_canon,num_gpus,precision,seq_len_tokens,gbs_seqs,mbs_seqs,tp,pp,step_time_s
{first},a,megatron,tiny_llama_100m,h100_sxm,8,bf16,4096,64,1,1,1,0.2
{second},b,megatron,tiny_llama_100m,h100_sxm,8,bf16,4096,64,1,1,1,0.4
{second},c,megatron,tiny_llama_100m,no_such_gpu,8,bf16,4096,64,1,1,1,0.4
"""


@pytest.mark.parametrize(
    ("source", "half"),
    [
        ("FasterTransformer docs/bert_guide", LOOKED_AT),
        ("FasterTransformer docs/gpt_guide", UNSEEN),
        ("NeMo AutoModel docs performance-summary (2026)", UNSEEN),
        ("TensorRT-LLM docs performance.md v0.7.1", LOOKED_AT),
        ("TensorRT-LLM docs performance.md v0.5.0", UNSEEN),
    ],
)
def test_the_draw_of_2026_11_26_stands(source: str, half: str) -> None:
    assert half_of(source) == half


@given(st.text())
def test_every_source_is_in_one_half(source: str) -> None:
    assert half_of(source) in HALVES


@pytest.fixture
def table(tmp_path: Path):
    first = next(f"page {number}" for number in range(99) if half_of(f"page {number}") == LOOKED_AT)
    second = next(f"page {number}" for number in range(99) if half_of(f"page {number}") == UNSEEN)
    (tmp_path / "steps.csv").write_text(STEPS.format(first=first, second=second))
    return read_table(tmp_path / "steps.csv")


def test_rows_and_what_was_refused_are_in_the_half_of_their_source(table) -> None:
    halves = {half: only_half(table, half) for half in HALVES}
    assert [row.id for row in halves[LOOKED_AT].rows] == ["a"]
    assert [row.id for row in halves[UNSEEN].rows] == ["b"]
    assert [row.id for row in halves[UNSEEN].unsupported] == ["c"]
    assert sum(half.count for half in halves.values()) == table.count
