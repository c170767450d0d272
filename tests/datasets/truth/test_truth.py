"""Tables of published results: told by their columns, every line a row or a reason, units as opcast has them."""

from __future__ import annotations

import csv
import re
import shutil
from pathlib import Path
from typing import TypeVar

import pytest

from opcast.datasets.truth import InferenceRow, OperatorRow, ServingRow, TrainingRow, TruthError, read_table
from opcast.datasets.truth.cells import FILL, REFUSE, Cells, precision_of
from opcast.datasets.truth.dimensions import dimensions_of
from opcast.datasets.truth.hardware import hardware_of
from opcast.datasets.truth.shapes import configuration, shipped

Row = TypeVar("Row")
STEP = {
    "row_id": "a",
    "kind": "train_dense_pretrain",
    "model_canon": "llama3-8b",
    "gpu_canon": "H100",
    "num_gpus": "16",
    "precision": "BF16",
    "gbs_seqs": "64",
    "mbs_seqs": "1",
    "seq_len_tokens": "4096",
    "tp": "2",
    "pp": "1",
    "step_time_s": "2.0",
}


def written(folder: Path, *rows: dict[str, str], name: str = "anything.csv") -> Path:
    path = folder / name
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return path


def only(folder: Path, cells: dict[str, str], kind: type[Row]) -> Row:
    """The one row of a table, which can be simulated."""
    table = read_table(written(folder, cells))
    assert not table.unsupported, table.unsupported
    (row,) = table.rows
    assert isinstance(row, kind)
    return row


def refused(folder: Path, cells: dict[str, str]) -> str:
    """Why the one row of a table cannot be simulated."""
    table = read_table(written(folder, cells))
    assert not table.rows
    (row,) = table.unsupported
    return row.why


def one(folder: Path, **changes: str) -> TrainingRow:
    return only(folder, STEP | changes, TrainingRow)


def test_a_step_is_read_with_its_layout_and_machine(tmp_path: Path) -> None:
    row = one(tmp_path, source="Megatron-Bridge docs")
    assert row.layout.dp == 8
    assert row.layout.tp == 2
    assert row.layout.zero_stage == 1
    assert row.layout.sequence_parallel
    assert row.hardware.device == "h100_sxm"
    assert row.hardware.cluster_figures["nodes"] == 2
    assert row.framework == "megatron"
    assert row.measured == {"step_time": 2.0}


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({"tokens_per_s_per_gpu": "1000"}, 64 * 4096 / 1000 / 16),
        ({"seqs_per_s": "16"}, 4.0),
        ({"tokens_per_s_per_gpu": "1000", "seqs_per_s": "16"}, 64 * 4096 / 1000 / 16),
        ({"step_time_s": "3", "tokens_per_s_per_gpu": "1000"}, 3.0),
    ],
)
def test_rates_become_step_times(tmp_path: Path, changes: dict[str, str], seconds: float) -> None:
    assert one(tmp_path, **{"step_time_s": "", **changes}).measured["step_time"] == pytest.approx(seconds)


def test_flops_become_step_times(tmp_path: Path) -> None:
    row = one(tmp_path, step_time_s="", model_tflops_per_s_per_gpu="400")
    sizes = dimensions_of(row.config)
    assert sizes is not None
    flops = 6 * 8.03e9 - 6 * 0.525e9 + 12 * 32 * 4096 * 4096  # all weights but the embedding's, and attention
    assert sizes.flops_per_token(4096) == pytest.approx(flops, rel=0.01)
    assert row.measured["step_time"] == pytest.approx(64 * 4096 * sizes.flops_per_token(4096) / 400e12 / 16)


def test_memory_in_gb_and_gib(tmp_path: Path) -> None:
    assert one(tmp_path, peak_mem_gib="40").measured["peak_memory"] == 40
    assert one(tmp_path, peak_mem_alloc_gb="40").measured["peak_memory"] == pytest.approx(37.25, abs=0.01)


def test_a_run_out_of_memory_is_a_verdict(tmp_path: Path) -> None:
    assert one(tmp_path, status="OOM", step_time_s="").measured == {"fits": 0.0}
    assert one(tmp_path, status="Success").measured == {"fits": 1.0, "step_time": 2.0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpu_canon": "TPU-V5P"}, "no figures of the GPU 'TPU-V5P'"),
        ({"model_canon": "llama9-1b"}, "neither in conf/model"),
        ({"model_canon": "switch4"}, "no file of its dimensions"),
        ({"tp": "3"}, "does not divide 16 devices"),
        ({"gbs_seqs": "63"}, "no multiple of 1 x 8 data ranks"),
        ({"gbs_seqs": ""}, "global batch is not published"),
        ({"tp": "", "pp": ""}, "not published"),
        ({"step_time_s": ""}, "neither time nor memory"),
        ({"step_time_s": "-1"}, "must be positive"),
        ({"step_time_s": "inf"}, "not a number"),
        ({"step_time_s": "fast"}, "step_time_s='fast' is not a number"),
        ({"num_gpus": "2.5"}, "not a whole number"),
        ({"tp": "0"}, "tp=0 must be at least 1"),
        ({"precision": "FP7"}, "precision 'FP7' is not known"),
        ({"kind": "train_dense_lora", "source": "a blog"}, "the rank of the run's adapters"),
        ({"pp": "2", "after_pp_fix": "False", "source": "nanotron"}, "after_pp_fix"),
    ],
)
def test_what_cannot_be_simulated_is_said(tmp_path: Path, changes: dict[str, str], said: str) -> None:
    assert said in refused(tmp_path, STEP | changes)


@pytest.mark.parametrize(
    ("source", "rank", "modules", "dropout"),
    [
        ("MLPerf Training v5.1", 16, "", 0.1),
        ("Megatron-Bridge docs", 16, "[qkv]_proj$", 0.0),
        ("NeMo AutoModel docs", 16, "proj$", 0.0),
    ],
)
def test_adapters_are_those_of_the_publication(
    tmp_path: Path, source: str, rank: int, modules: str, dropout: float
) -> None:
    row = one(tmp_path, kind="train_dense_lora", source=source)
    assert (row.lora_rank, row.lora_modules, row.lora_dropout) == (rank, modules, dropout)
    assert one(tmp_path, source=source).lora_rank == 0


LOGGED = {
    "source": "MLPerf Training v5.1, closed/open logs of AMD",
    "kind": "train_lora",
    "model": "llama2-70b (LoRA r16, attention)",
    "chip": "mi300x",
    "num_gpus": "8",
    "gpus_per_node": "8.0",
    "precision": "fp8",
    "gbs_seqs": "8.0",
    "mbs_seqs": "1.0",
    "seq_len_tokens": "8192.0",
    "tp": "1",
    "pp": "1",
    "sp": "false",
    "recompute": "full:block:21",
    "step_time_s": "4",
    "system": "a server",
    "config": "AMD/benchmarks/llama2_70b_lora/config_MI300X_1x8x1.sh",
    "framework": "PyTorch 2.8, ROCm 7.0.0",
}


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ({"chip": "mi300x"}, {"fp8_params": True}),
        ({"chip": "mi355x"}, {"fp8_params": True}),
        ({"chip": "h200_sxm"}, {"attention_dtype": "fp8", "fp8_params": True}),
        ({"chip": "h200_sxm", "source": "MLPerf Training v5.1, logs of Cisco"}, {"fp8_params": True}),
    ],
)
def test_a_table_of_logs_is_read_by_its_chips_and_the_first_layers_that_run_again(
    tmp_path: Path, cells: dict[str, str], told: dict[str, object]
) -> None:
    (row,) = read_table(written(tmp_path, LOGGED | cells)).rows
    assert isinstance(row, TrainingRow)
    assert (row.hardware.device, row.model, row.framework) == (cells["chip"], "llama2-70b", "nemo")
    assert (row.recompute, row.lora_rank, row.options) == ("full:21", 16, told)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kind": "relative_pipeline", "gbs_seqs": "", "seq_len_tokens": ""}, "only how schedules compare"),
        ({"source": "AMD-AGI/Primus documents", "model": "gdn-300m (12 blocks)"}, "gdn-300m: the table does not tell"),
    ],
)
def test_logged_rows_that_say_too_little_are_refused(tmp_path: Path, changes: dict[str, str], why: str) -> None:
    assert why in refused(tmp_path, LOGGED | changes)


@pytest.mark.parametrize(
    ("nodes", "gathers", "scatters", "framework"),
    [
        ("2", "224", "223", "nanotron"),
        ("2", "164", "160", "nanotron_checked"),
        ("2", "129", "224", "nanotron"),  # one slow measurement
        ("1", "164", "160", "nanotron"),
        ("64", "44", "45", "nanotron"),
        ("64", "6.5", "6.5", "nanotron_checked"),
        ("2", "", "", "nanotron"),
    ],
)
def test_hosts_that_wait_are_told_by_what_their_network_measured(
    tmp_path: Path, nodes: str, gathers: str, scatters: str, framework: str
) -> None:
    said = {"nodes": nodes, "nccl_allgather_GBps": gathers, "nccl_reducescatter_GBps": scatters}
    path = written(tmp_path, STEP | said | {"source": "nanotron"})
    (row,) = read_table(path, outcomes=(FILL, REFUSE)).rows
    assert isinstance(row, TrainingRow)
    assert row.framework == framework
    assert one(tmp_path, source="nanotron", **said).framework == "nanotron"  # where it is scored nobody knows


def test_shares_of_activations_are_read(tmp_path: Path) -> None:
    row = one(tmp_path, step_time_s="", activation_pct_of_tp_baseline="16.18", recompute="selective+SP")
    assert row.measured == {"activation_share": 16.18}


def test_composers_fp8_is_transformer_engines(tmp_path: Path) -> None:
    row = one(tmp_path, precision="amp_fp8")
    assert (row.precision, row.quantization) == ("bf16", "fp8")


@pytest.mark.parametrize(
    ("said", "zero"),
    [("", 0), ("1", 1), ("3.0", 3), ("2-like (params kept)", 2)],
)
def test_zero_stages_in_words(tmp_path: Path, said: str, zero: int) -> None:
    assert one(tmp_path, zero_stage=said, source="nanotron").layout.zero_stage == zero


@pytest.mark.parametrize(
    ("text", "formats"),
    [("FP8-MX", ("bf16", "mxfp8")), ("NVFP4(bf16 tail)", ("bf16", "nvfp4")), ("BF16?", ("bf16", ""))],
)
def test_precisions(text: str, formats: tuple[str, str]) -> None:
    assert precision_of(text) == formats


@pytest.mark.parametrize(
    ("container", "precision", "graphed"),
    [("26.06", "MXFP8", True), ("26.08", "NVFP4", True), ("26.04.01", "MXFP8", False), ("26.06", "FP8", False)],
)
def test_recent_recipes_in_block_formats_are_graphs(
    tmp_path: Path, container: str, precision: str, graphed: bool
) -> None:
    source = f"Megatron-Bridge docs performance-summary container {container}"
    row = one(tmp_path, source=source, precision=precision, gpu_canon="GB200", num_gpus="8")
    assert row.options.get("cuda_graph", False) is graphed


def test_the_network_that_a_row_publishes() -> None:
    def nic(gpus: int, **cells: str) -> float:
        return hardware_of(Cells({"gpu_canon": "A100-80", **cells}, 1), gpus).cluster_figures["nic_gbps"]

    assert nic(16, gpu="A100 (8 per node, NVLink; multi-node 800 Gb/s per node)") == 12.5
    assert nic(16, source="A100 80GB with 1600 Gbps node-node interconnect") == 25
    assert nic(16, gpu_detail="8/node NVLink, 400Gb/s RoCE per GPU") == 50


def test_a_part_of_a_rack_is_one_domain() -> None:
    figures = hardware_of(Cells({"gpu_canon": "GB200"}, 1), 256).cluster_figures
    assert (figures["nodes"], figures["devices_per_node"]) == (4, 64)


def test_a_table_beside_gives_dimensions_and_the_row_overrides_them(tmp_path: Path) -> None:
    shape = {"model_canon": "mine", "layers": "4", "hidden": "256", "heads": "8", "kv_heads": "2", "ffn_hidden": "512"}
    written(tmp_path, shape | {"vocab": "1000", "act": "swiglu", "tied": "False"}, name="model_dims.csv")
    row = one(tmp_path, model_canon="mine", layers="6")
    assert row.config["model_type"] == "llama"
    assert (row.config["num_hidden_layers"], row.config["num_key_value_heads"]) == (6, 2)


def test_no_table_is_told_from_one(tmp_path: Path) -> None:
    for path, said in (
        (written(tmp_path, {"a": "1", "b": "2"}), "training by num_gpus, seq_len_tokens"),
        (tmp_path / "missing.csv", "cannot be read"),
        (tmp_path, "a table of results is a .csv file"),
    ):
        with pytest.raises(TruthError, match=said):
            read_table(path)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(TruthError, match="cannot be read"):
        read_table(tmp_path / "binary.csv")


def test_a_collective_on_no_node_is_refused(tmp_path: Path) -> None:
    row = {
        "collective": "all_reduce",
        "busbw_GBps": "100",
        "payload_bytes": "1e6",
        "num_gpus": "8",
        "gpu_canon": "H100",
    }
    table = read_table(written(tmp_path, row | {"nodes": "0"}, row | {"nodes": "1"}))
    assert [left.why for left in table.unsupported] == ["nodes=0 must be at least 1"]
    assert len(table.rows) == 1
    assert not table.failed


# --- the public tables ---------------------------------------------------------------------------------

KINDS = {
    "train_nanotron_h100": ("training", TrainingRow, 900),
    "train_llm_foundry_mpt": ("training", TrainingRow, 120),
    "train_vtrain_a100": ("training", TrainingRow, 962),
    "train_simumax_b200": ("training", TrainingRow, 22),
    "train_torchtitan": ("training", TrainingRow, 16),
    "memory_korthikanti22": ("memory", TrainingRow, 4),
    "infer_fastertransformer_gpt": ("inference", InferenceRow, 200),
    "infer_fastertransformer_bert": ("inference", InferenceRow, 447),
    "infer_trtllm_static_v05_v071": ("inference", InferenceRow, 56),
    "ops_llmcompass": ("operator", OperatorRow, 140),
    "ncu_gemm_a100": ("operator", OperatorRow, 48),
    "collectives": ("collective", OperatorRow, 50),
    "serving_silicon": ("serving", ServingRow, 900),
}


ENCODER = {
    "source": "FasterTransformer docs/bert_guide.md",
    "row_id": "a",
    "model_canon": "ft-bert-base",
    "gpu_canon": "A10",
    "num_gpus": "1",
    "tp": "1",
    "pp": "1",
    "precision": "",
    "batch_size": "8",
    "input_len_tokens": "128",
    "output_len_tokens": "0",
    "layers": "12",
    "heads": "12",
    "head_dim": "64",
    "engine": "PyTorch:EFF-FT-INT8-v2",
    "latency_ms": "2.5",
}


def encoder(folder: Path, **changes: str) -> InferenceRow:
    return only(folder, ENCODER | changes, InferenceRow)


def test_an_encoder_is_read_with_its_engine(tmp_path: Path) -> None:
    row = encoder(tmp_path)
    assert (row.framework, row.precision, row.quantization) == ("fastertransformer_int8_v2", "fp16", "int8")
    first = encoder(tmp_path, engine="PyTorch:FT-INT8-v1")
    assert (first.framework, first.quantization) == ("fastertransformer_int8_v1", "int8")
    assert row.options == {"real_tokens": 0.5}
    assert row.config["model_type"] == "bert"
    assert (row.config["hidden_size"], row.config["intermediate_size"]) == (768, 3072)
    assert (row.measured, row.output_len) == ({"ttft": 2.5}, 1)


@pytest.mark.parametrize(
    ("changes", "framework", "formats"),
    [
        ({"engine": "PyTorch:FT", "precision": "TF32"}, "fastertransformer", ("fp32", "tf32")),
        ({"engine": "PyTorch:FT", "precision": "FP16", "input_len_tokens": "512"}, "fastertransformer", ("fp16", "")),
        ({"engine": "triton:FT", "precision": "FP16", "head_dim": "128"}, "fastertransformer", ("fp16", "")),
        ({"engine": "PyTorch:TorchScript-FP16"}, "torchscript", ("fp16", "")),
        ({"engine": "TensorFlow:TF", "precision": "FP32"}, "tensorflow", ("fp32", "")),
    ],
)
def test_engines_of_encoders(tmp_path: Path, changes: dict[str, str], framework: str, formats: tuple[str, str]) -> None:
    row = encoder(tmp_path, **changes)
    assert (row.framework, (row.precision, row.quantization)) == (framework, formats)


WHOLE = {
    "row_id": "a",
    "model_canon": "gpt2_large",
    "gpu_canon": "NVIDIA_A100-SXM4-40GB",
    "num_gpus": "1",
    "precision": "FP32",
    "mode": "train",
    "seq_len_tokens": "1024",
    "batch_size": "4",
    "option": "",
    "dp": "1",
    "tp": "1",
    "pp": "1",
    "e2e_latency_ms": "500",
}


@pytest.mark.parametrize(
    ("changes", "kind", "framework", "options"),
    [
        ({}, TrainingRow, "torch_2023", {"optimizer": "none"}),
        ({"mode": "inf"}, InferenceRow, "torch_2023", {}),
        ({"mode": "inf", "option": "fusion"}, InferenceRow, "torch_compile_2023", {}),
        ({"num_gpus": "4", "option": "dp4", "dp": "4", "precision": "see cfg"}, TrainingRow, "megatron_fp32", {}),
    ],
)
def test_steps_of_whole_models(
    tmp_path: Path, changes: dict[str, str], kind: type, framework: str, options: dict[str, str]
) -> None:
    row = only(tmp_path, WHOLE | changes, kind)
    assert isinstance(row, TrainingRow | InferenceRow)
    assert (row.framework, row.precision, row.options) == (framework, "fp32", options)
    if isinstance(row, TrainingRow):
        assert row.measured == {"step_time": 0.5}
        assert row.micro_batch == 4 // row.layout.dp


@pytest.mark.parametrize(("engine", "said"), [("onnx:x", "neither FasterTransformer"), ("FT-sparse", "sparse weights")])
def test_engines_that_nothing_is_known_of(tmp_path: Path, engine: str, said: str) -> None:
    assert said in refused(tmp_path, ENCODER | {"engine": engine})


def test_a_batch_without_a_time_hears_which_columns_have_one(tmp_path: Path) -> None:
    static = {name: WHOLE[name] for name in ("row_id", "model_canon", "num_gpus", "precision", "batch_size")}
    static |= {"stack": "vllm", "gpu_canon": "h100_sxm", "input_len_tokens": "1000", "output_len_tokens": "100"}
    said = refused(tmp_path, static | {"e2e_latency_ms": "500"})
    columns = {"latency_ms": "e2e", "ttft_ms": "ttft", "itl_ms": "tpot", "out_tokens_per_s_total": "throughput"}
    for column, quantity in columns.items():
        assert column in said
        assert only(tmp_path, static | {column: "500"}, InferenceRow).measured == {quantity: 500}


def test_a_pipeline_of_fastertransformer_takes_a_batch_in_parts(tmp_path: Path) -> None:
    changes = {"engine": "triton:FT", "precision": "FP16", "head_dim": "128", "num_gpus": "2", "pp": "2"}
    assert encoder(tmp_path, **changes, gpu_canon="A100-80").micro_batches == 2
    assert encoder(tmp_path, **changes | {"batch_size": "1"}, gpu_canon="A100-80").micro_batches == 1
    many = {"batch_size": "32", "input_len_tokens": "1024"}
    assert encoder(tmp_path, **changes | many, gpu_canon="A100-80").micro_batches == 8


@pytest.mark.reference
@pytest.mark.parametrize("name", KINDS)
def test_public_tables_are_read_wherever_they_lie(name: str, reference_data: Path, tmp_path: Path) -> None:
    truth = reference_data / "truth"
    copy = Path(shutil.copy(truth / f"{name}.csv", tmp_path / "renamed.csv"))
    shutil.copy(truth / "model_dims.csv", tmp_path)
    table = read_table(copy)
    kind, made, least = KINDS[name]
    assert table.kind == kind
    assert len(table.rows) >= least
    assert all(isinstance(row, made) for row in table.rows)
    with copy.open(newline="") as file:
        assert table.count == sum(1 for _ in csv.DictReader(file))
    assert all(row.why for row in table.unsupported)


@pytest.mark.reference
def test_published_parameter_counts_agree(reference_data: Path) -> None:
    path = reference_data / "truth" / "train_llm_foundry_mpt.csv"
    with path.open(newline="") as file:
        counts = {line["row_id"]: int(line["num_params"]) for line in csv.DictReader(file)}
    for row in read_table(path).rows:
        assert isinstance(row, TrainingRow)
        assert row.config["model_type"] == "gpt2"
        sizes = dimensions_of(row.config)
        assert sizes is not None
        learned = row.seq_len * sizes.hidden
        assert sizes.parameters + learned == pytest.approx(counts[row.id], rel=2e-3)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("llama3_405b", 405.9, 405.9),
        ("gpt3_175b", 174.6, 174.6),
        ("mixtral_8x7b", 46.7, 12.9),
        ("qwen3_30b_a3b", 30.5, 3.3),
        ("deepseek_v3", 671.0, 37.6),
        ("gpt_oss_120b", 116.8, 5.7),
    ],
)
def test_dimensions_count_what_models_publish(name: str, billions: float, active: float) -> None:
    sizes = dimensions_of(shipped(name) or {})
    assert sizes is not None
    assert sizes.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    embeddings = sizes.vocab * sizes.hidden * (1 if sizes.tied else 2)
    assert (sizes.layer_weights(True) + embeddings) / 1e9 == pytest.approx(active, rel=0.03)


def test_families_of_dimension_rows() -> None:
    common = {"layers": "4", "hidden": "512", "heads": "8", "vocab": "1000", "ffn_hidden": "1024", "tied": "False"}
    experts = {"experts": "16", "topk": "2", "moe_ffn": "256"}
    made = {
        "gpt2": {"act": "gelu (ungated)"},
        "llama": {"act": "swiglu"},
        "mixtral": experts,
        "qwen3_moe": {"model_canon": "qwen3-x", **experts},
        "gpt_oss": {"attn": "alternating sliding window 128", **experts},
        "deepseek_v3": {"attn": "MLA q_lora1536 kv_lora512 nope128 rope64 v128", "first_dense": "1", **experts},
    }
    for kind, cells in made.items():
        config = configuration(Cells({**common, **cells}, 1))
        assert config["model_type"] == kind
        assert dimensions_of(config) is not None
    assert config["q_lora_rank"] == 1536
    assert config["v_head_dim"] == 128
    assert config["first_k_dense_replace"] == 1


def test_stages_by_cost_count_the_logits() -> None:
    from opcast.datasets.truth.training import stages_by_cost

    config = shipped("nanotron_1_34b") or {}
    assert stages_by_cost(config, 2) == (11, 5)  # the logits weigh four of its sixteen layers
    for stages in (2, 3, 4, 8, 16):
        made = stages_by_cost(config, stages)
        assert len(made) == stages
        assert sum(made) == 16
        assert made[-1] <= made[0]


def test_recipes_of_latent_attention_make_wide_projections_again(tmp_path: Path) -> None:
    bridge, automodel = {"source": "Megatron-Bridge docs"}, {"source": "NeMo AutoModel docs"}
    assert one(tmp_path, model_canon="deepseek-v3", **bridge).recompute == "selective:mla_up_proj,mlp"
    assert one(tmp_path, model_canon="deepseek-v3", gpu_canon="GB200", **bridge).recompute == "selective:mla_up_proj"
    assert one(tmp_path, model_canon="deepseek-v3", recompute="full", **bridge).recompute == "full"
    assert one(tmp_path, model_canon="qwen3-30b-a3b", **bridge).recompute == "none"
    assert one(tmp_path, model_canon="gpt-oss-20b", **automodel).recompute == "none"


def test_recipes_place_layers_and_tokens_further_on(tmp_path: Path) -> None:
    """61 layers in chunks of four leave the last one to the loss and the layer of multi-token prediction."""
    deepseek = {"model_canon": "deepseek-v3", "num_gpus": "64", "tp": "1"}
    bridge = {"source": "Megatron-Bridge docs container 26.08", **deepseek}
    row = one(tmp_path, **bridge, pp="4", vp="4")
    assert row.layout.stages == (4,) * 15 + (1,)
    assert (row.mtp_layers, one(tmp_path, **{**bridge, "source": "Megatron-Bridge container 25.11"}).mtp_layers) == (
        1,
        0,
    )
    assert one(tmp_path, **bridge, pp="8", vp="4").layout.stages == (1, *(2,) * 30, 0)
    assert one(tmp_path, **bridge, pp="2").layout.stages == ()  # even: no recipe has two chunks
    other = one(tmp_path, **{**bridge, "source": "a blog"}, pp="4", vp="4", zero_stage="1", stack="megatron")
    assert (other.layout.stages, other.mtp_layers) == ((), 0)


@pytest.mark.parametrize(
    ("model", "precision", "path", "rounded"),
    [
        ("nemotron3-super-120b", "NVFP4", "model.layers.2.mixer.in_proj", True),
        ("nemotron3-super-120b", "NVFP4", "model.layers.74.mixer.in_proj", False),
        ("nemotron3-super-120b", "NVFP4", "model.layers.7.mixer.q_proj", False),
        ("nemotron3-super-120b", "NVFP4", "model.layers.3.mixer.fc1_latent_proj", False),
        ("nemotron3-super-120b", "MXFP8", "model.layers.74.mixer.in_proj", True),
        ("nemotron3-super-120b", "MXFP8", "mtp1.second.mixer.experts", False),
        ("nemotron3-nano-30b", "MXFP8", "model.layers.51.mixer.experts", True),
    ],
)
def test_recipes_of_hybrids_keep_layers_in_more_bits(
    tmp_path: Path, model: str, precision: str, path: str, rounded: bool
) -> None:
    row = one(tmp_path, source="Megatron-Bridge docs", model_canon=model, precision=precision, tp="1")
    skip = row.options.get("quantize_skip") or "(?!)"
    assert (re.search(str(skip), path) is None) == rounded


@pytest.mark.parametrize(
    ("said", "source", "policy"),
    [
        ("full", "Megatron-Bridge", "full"),
        ("none/unknown", "nanotron", "none"),
        ("selective+SP", "Korthikanti", "selective"),
        ("selective:mlp+core_attn", "Megatron-Bridge", "selective:mlp,core_attn"),
        ("selective:none", "Megatron-Bridge", "none"),
        ("selective", "torchtitan benchmarks/llama3_h100_202412", "ops"),
        ("selective(default)", "torchtitan", "ops"),
        ("", "torchtitan", "ops"),
        ("", "Megatron-Bridge", "none"),
        ("", "NeMo AutoModel", "full"),
    ],
)
def test_recomputation_in_words(tmp_path: Path, said: str, source: str, policy: str) -> None:
    assert one(tmp_path, recompute=said, source=source).recompute == policy
