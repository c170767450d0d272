"""Rows of served runs: layouts, lengths, what is known of their benchmark, and what is left out."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from opcast.datasets.truth import ServingRow, read_table

COLUMNS = (
    *("id", "silicon_data_source", "backend", "backend_version", "model_path", "system", "precision", "mode"),
    *("isl", "osl", "batch_size", "tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size"),
    *("decode_num_workers", "silicon_ttft_ms", "silicon_tpot_ms"),
)
USUAL = {
    "silicon_data_source": "a.csv; silicon_concurrency=16",
    "backend": "vllm",
    "backend_version": "0.18.0",
    "model_path": "meta-llama/Llama-3.1-70B",
    "system": "h200_sxm",
    "precision": "fp8",
    "mode": "agg",
    "isl": "1024",
    "osl": "1024",
    "batch_size": "16.0",
    "tp_size": "4.0",
    "pp_size": "1.0",
    "attention_dp_size": "1.0",
    "moe_tp_size": "4.0",
    "moe_ep_size": "1.0",
    "silicon_ttft_ms": "100.5",
    "silicon_tpot_ms": "10.25",
}


@pytest.fixture
def read(tmp_path: Path):
    """A function: the table of lines that differ from a usual one so much."""

    def table(*lines: dict[str, str]):
        path = tmp_path / "served.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            for number, line in enumerate(lines):
                measured = {"silicon_ttft_ms": f"{100 + number}"}
                writer.writerow({"id": f"run {number}", **USUAL, **measured, **line})
        return read_table(path)

    return table


def test_a_row_is_a_closed_loop_on_an_engine(read):
    (row,) = read({}).rows
    assert isinstance(row, ServingRow)
    assert (row.model, row.framework, row.version, row.quantization) == ("llama3_1_70b", "vllm", "0.18.0", "fp8")
    assert (row.layout.tp, row.layout.dp, row.hardware.devices) == (4, 1, 4)
    assert (row.concurrency, row.input_len, row.output_len, row.shortest) == (16, 1024, 1024, 0.8)
    assert row.measured == {"ttft": 100.0, "tpot": 10.25}


def test_attention_data_ranks_share_requests_and_expert_ranks_count_once(read):
    r1 = {"model_path": "deepseek-ai/DeepSeek-R1", "backend": "trtllm", "precision": "fp4", "system": "b200_sxm"}
    ranks = {"tp_size": "1.0", "attention_dp_size": "8.0", "moe_tp_size": "1.0", "moe_ep_size": "8.0"}
    twice = {"tp_size": "64.0", "moe_tp_size": "8.0", "moe_ep_size": "8.0"}
    attention, tensor = read(r1 | ranks, r1 | twice).rows
    assert (attention.layout.tp, attention.layout.dp, attention.layout.ep, attention.concurrency) == (1, 8, 8, 128)
    assert (tensor.layout.tp, tensor.layout.ep, tensor.hardware.devices) == (8, 8, 8)
    assert attention.quantization == "nvfp4"
    assert attention.options["kv_dtype"] == "fp8"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"mode": "disagg"}, "without its number of workers"),
        ({"mode": "disagg", "decode_num_workers": "2"}, "two pools"),
        ({"model_path": "deepseek-ai/DeepSeek-V3"}, "copy of a DeepSeek-R1 run"),
        ({"backend_version": "1.2.0rc6.post3"}, "multi-token prediction"),
        ({"system": "gb200", "tp_size": "16"}, "disaggregated run under the name"),
        ({"model_path": "Qwen/Qwen3.5-397B-A17B"}, "linear or sparse attention"),
        ({"backend": "tgi"}, "engine 'tgi'"),
        ({"silicon_tpot_ms": ""}, "neither TTFT nor TPOT"),
    ],
)
def test_rows_that_say_something_else_are_left_out_with_the_reason(line, why, read):
    table = read(line)
    assert not table.rows
    assert why in table.unsupported[0].why
    assert table.count == 1


def test_a_copy_counts_once(read):
    table = read({}, {"silicon_ttft_ms": "100"}, {})
    assert [row.id for row in table.rows] == ["run 0", "run 2"]
    assert [(row.id, row.why) for row in table.unsupported] == [("run 1", "a copy of run 0")]
