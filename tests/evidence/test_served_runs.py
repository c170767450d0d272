"""Rows of served runs: layouts, lengths, what is known of their benchmark, and what is left out."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from opcast.datasets.truth import ServingRow, read_table
from opcast.simulator.validation.serving import router_of, seats_of

COLUMNS = (
    *("id", "silicon_data_source", "backend", "backend_version", "model_path", "system", "precision", "mode"),
    *("isl", "osl", "batch_size", "tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size"),
    *(
        f"{pool}_{name}"
        for pool in ("prefill", "decode")
        for name in ("batch_size", "num_workers", "tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    ),
    *("silicon_ttft_ms", "silicon_tpot_ms"),
)
R1 = {"model_path": "deepseek-ai/DeepSeek-R1", "backend": "trtllm", "precision": "fp4", "system": "b200_sxm"}
APART = R1 | {
    "silicon_data_source": "a.csv; config_id=320",
    "mode": "disagg",
    "tp_size": "",
    "batch_size": "",
    "prefill_num_workers": "1",
    "prefill_tp_size": "1",
    "prefill_attention_dp_size": "4",
    "prefill_moe_tp_size": "1",
    "prefill_moe_ep_size": "4",
    "decode_num_workers": "5",
    "decode_batch_size": "20",
    "decode_tp_size": "8",
    "decode_attention_dp_size": "1",
    "decode_moe_tp_size": "1",
    "decode_moe_ep_size": "8",
}
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
    assert row.measured == {"ttft": 100.0, "tpot": 10.25, "throughput": pytest.approx(1546.2844)}


def test_attention_data_ranks_share_requests_and_expert_ranks_count_once(read):
    ranks = {"tp_size": "1.0", "attention_dp_size": "8.0", "moe_tp_size": "1.0", "moe_ep_size": "8.0"}
    twice = {"tp_size": "64.0", "moe_tp_size": "8.0", "moe_ep_size": "8.0"}
    attention, tensor = read(R1 | ranks, R1 | twice).rows
    assert (attention.layout.tp, attention.layout.dp, attention.layout.ep, attention.concurrency) == (1, 8, 8, 16)
    assert (tensor.layout.tp, tensor.layout.ep, tensor.hardware.devices) == (8, 8, 8)
    assert attention.quantization == "nvfp4"
    assert attention.options["kv_dtype"] == "fp8"


def test_ranks_that_share_experts_are_attention_ranks_where_none_are_told(read):
    qwen = {"model_path": "Qwen/Qwen3-235B-A22B-FP8", "attention_dp_size": "", "tp_size": "2", "moe_tp_size": "4"}
    (row,) = read(qwen).rows
    assert (row.layout.tp, row.layout.dp, row.layout.etp, row.hardware.devices) == (2, 2, 4, 4)


@pytest.mark.parametrize(
    ("line", "layout"),
    [
        ({"isl": "8192", "silicon_data_source": "silicon_concurrency=32; measured=2025-11-02"}, (8, 1, 8)),
        ({"isl": "8192", "silicon_data_source": "silicon_concurrency=64; measured=2025-11-02"}, (1, 8, 8)),
        ({"isl": "8192", "silicon_data_source": "silicon_concurrency=64; measured=2026-02-03"}, (8, 1, 1)),
        (
            {"isl": "8192", "silicon_data_source": "silicon_concurrency=64; measured=2025-11-02", "system": "b200_sxm"},
            (8, 1, 8),
        ),
        ({"model_path": "openai/gpt-oss-120b", "precision": "fp4", "backend_version": "gpt-oss-dev"}, (8, 1, 8)),
        ({"model_path": "MiniMaxAI/MiniMax-M2.5", "backend": "vllm", "backend_version": "0.18.0"}, (8, 1, 8)),
    ],
)
def test_ranks_that_the_table_does_not_have_are_those_of_the_recipe(line, layout, read):
    told = {"tp_size": "8", "moe_tp_size": "8", "moe_ep_size": "1", "backend_version": ""}
    (row,) = read(R1 | told | {"precision": "fp8", "system": "h200_sxm"} | line).rows
    assert (row.layout.tp, row.layout.dp, row.layout.ep) == layout


def test_vllm_balances_its_ranks_and_who_runs_it_says_how_many_places_they_have(read):
    qwen = {"model_path": "Qwen/Qwen3-235B-A22B-FP8", "attention_dp_size": "", "tp_size": "2", "moe_tp_size": "4"}
    shared, recipe, other = read(qwen, {}, R1).rows
    assert (shared.concurrency, seats_of(shared), router_of(shared)) == (32, 16, "vllm_dp")
    assert (recipe.concurrency, seats_of(recipe), router_of(recipe)) == (16, 16, "vllm_dp")
    assert (seats_of(other), router_of(other)) == (None, "least_outstanding")


@pytest.mark.parametrize(
    ("isl", "day", "tokens"),
    [("1024", "2025-12-15", 1152), ("1024", "2026-01-28", 8192), ("8192", "2025-12-15", 8448)],
)
def test_the_recipe_of_then_has_one_prompt_in_an_iteration(isl, day, tokens, read):
    source = {"silicon_data_source": f"silicon_concurrency=32; measured={day}", "isl": isl}
    (row,) = read(R1 | source | {"backend_version": "1.1.0rc2.post2"}).rows
    assert row.serving["max_tokens"] == tokens


def test_workers_of_four_gpus_share_their_heads(read):
    four = {f"{pool}_{name}": "4" for pool in ("prefill", "decode") for name in ("attention_dp_size", "moe_tp_size")}
    ones = {f"{pool}_{name}": "1" for pool in ("prefill", "decode") for name in ("tp_size", "moe_ep_size")}
    (row,) = read(APART | {"backend": "sglang", "system": "gb200"} | four | ones).rows
    assert [(each.tp, each.dp, each.ep) for each in (row.layout, row.decoding.layout)] == [(4, 1, 1), (4, 1, 1)]


def test_a_rounded_copy_counts_once(read):
    table = read({"silicon_ttft_ms": "100.1234"}, {"silicon_ttft_ms": "100.12"})
    assert [(row.id, row.why) for row in table.unsupported] == [("run 1", "a copy of run 0")]


@pytest.mark.parametrize(("clients", "looks"), [("8", 10), ("16", 30)])
def test_a_recipe_that_looks_for_requests_now_and_then(clients, looks, read):
    qwen = {"model_path": "Qwen/Qwen3.5-397B-A17B", "backend": "sglang", "system": "b200_sxm", "batch_size": clients}
    (row,) = read(qwen | {"silicon_data_source": "a.csv", "tp_size": "8", "moe_tp_size": "8"}).rows
    assert (row.model, row.quantization, row.serving["wait_iterations"]) == ("qwen3_5_397b_a17b", "fp8_block", looks)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"mode": "disagg"}, "without its number of workers"),
        ({"backend_version": "1.2.0rc6.post3"}, "multi-token prediction"),
        ({"system": "gb200", "tp_size": "16"}, "disaggregated run under the name"),
        ({"model_path": "Qwen/Qwen3.5-397B-A17B", "backend": "sglang", "backend_version": "0.5.9"}, "multi-token"),
        ({"backend": "tgi"}, "engine 'tgi'"),
        ({"silicon_tpot_ms": ""}, "neither TTFT nor TPOT"),
    ],
)
def test_rows_that_say_something_else_are_left_out_with_the_reason(line, why, read):
    table = read(line)
    assert not table.rows
    assert why in table.unsupported[0].why
    assert table.count == 1


def test_workers_that_decode_have_layouts_limits_and_clients_of_their_own(read):
    (row,) = read(APART | {"isl": "8192"}).rows
    assert (row.layout.tp, row.layout.dp, row.layout.ep, row.hardware.devices) == (1, 4, 4, 4)
    decoding = row.decoding
    assert (decoding.prefill, decoding.workers, decoding.hardware.devices) == (1, 5, 8)
    assert (decoding.layout.tp, decoding.layout.dp, decoding.layout.ep) == (8, 1, 8)
    assert row.concurrency == 5 * 20  # where the source does not say how many
    assert "decode_seqs" not in row.serving  # it was read off these runs
    assert row.serving["max_seqs"] == 2
    assert row.tags["pools"] == "apart"


def test_gpus_that_a_table_counts_twice_count_once(read):
    gpt = {"model_path": "openai/gpt-oss-120b", "backend": "trtllm", "precision": "fp4"}
    experts = {"tp_size": "4", "moe_tp_size": "2", "moe_ep_size": "2"}
    minimax = {"model_path": "MiniMaxAI/MiniMax-M2.5", "system": "b300_sxm", "tp_size": "2", "attention_dp_size": "2"}
    minimax |= {"moe_tp_size": "1", "moe_ep_size": "4"}
    one, two = read(gpt | experts, minimax).rows
    assert (one.layout.tp, one.layout.ep, one.hardware.devices) == (2, 2, 2)
    assert (two.layout.tp, two.layout.dp, two.layout.ep, two.concurrency) == (1, 2, 2, 16)


def test_a_run_named_v3_is_one_of_r1_and_its_copy_counts_once(read):
    named = R1 | {"model_path": "deepseek-ai/DeepSeek-V3"}
    table = read(R1, named | {"silicon_ttft_ms": "100"}, named)
    assert {row.tags["model"] for row in table.rows} == {"DeepSeek-R1"}
    assert [(each.id, each.why) for each in table.unsupported] == [("run 1", "a copy of run 0")]


def test_a_copy_counts_once(read):
    table = read({}, {"silicon_ttft_ms": "100"}, {})
    assert [row.id for row in table.rows] == ["run 0", "run 2"]
    assert [(row.id, row.why) for row in table.unsupported] == [("run 1", "a copy of run 0")]
