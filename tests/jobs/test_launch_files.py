"""Launch files are read back as the step that they start: what a search wrote, and what people have of their own."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opcast.jobs.cli import main
from opcast.simulator.search.launch_errors import LaunchError
from opcast.simulator.search.launch_reading import settings_of_launch

STEP = "model=tiny_llama_100m cluster=dgx_h100 workload.seq_len=1024 workload.global_batch=32"
ONE = "space.cp=1 space.micro_batch=2 workers=1 format=json"


@pytest.mark.parametrize(
    ("framework", "point"),
    [
        ("megatron-lm", "space.tp=2 space.pp=2 space.vpp=1 space.recompute=full space.zero_stage=1"),
        ("megatron-bridge", "space.tp=2 space.pp=2 space.vpp=5 space.recompute=none space.zero_stage=1"),
        ("megatron-bridge", "space.tp=2 space.pp=1 space.vpp=1 space.recompute=none space.zero_stage=3"),
        ("torchtitan", "space.tp=2 space.pp=2 space.vpp=5 space.recompute=full space.zero_stage=3"),
        ("torchtitan", "space.tp=1 space.pp=1 space.vpp=1 space.recompute=none space.zero_stage=2"),
        ("deepspeed", "space.tp=1 space.pp=1 space.recompute=none space.zero_stage=3"),
        (
            "megatron-bridge",
            "workload.lora_rank=16 workload.lora_dropout=0.1 'workload.lora_modules=attn|down_proj' space.tp=2 "
            "space.pp=1 space.vpp=1 space.recompute=none space.zero_stage=1",
        ),
        (
            "accelerate",
            "workload.lora_rank=8 'workload.lora_modules=q_proj|v_proj' space.tp=1 space.pp=1 "
            "space.recompute=none space.zero_stage=3",
        ),
        (
            "accelerate",
            "space.tp=2 space.pp=1 space.recompute=full space.zero_stage=3 space.sequence_parallel=false",
        ),
    ],
)
def test_a_file_that_a_search_wrote_starts_the_step_that_it_found(
    framework: str, point: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = f"launch={tmp_path}/start"
    assert main(["search", *STEP.split(), *ONE.split(), *shlex.split(point), f"framework={framework}", file]) == 0
    best = json.loads(capsys.readouterr().out)["best"][0]
    assert main(["simulate", file, "format=json"]) == 0
    back = json.loads(capsys.readouterr().out)
    assert back["step_time_s"] == pytest.approx(best["step_time_s"], rel=1e-9)
    assert back["memory"]["peak_gib"] == pytest.approx(best["peak_gib"], rel=1e-9)


def test_a_stack_of_one_s_own_that_the_framework_does_not_run_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    point = "stack=megatron space.tp=1 space.pp=1 space.recompute=none space.zero_stage=3 framework=accelerate"
    assert main(["search", *STEP.split(), *ONE.split(), *point.split(), f"launch={tmp_path}/start"]) == 0
    said = capsys.readouterr().err
    assert "stack=megatron was searched, and `opcast simulate launch=` takes files of accelerate as stack=torch" in said


TITAN = """
[model]
name = "llama3"
flavor = "8B"
[optimizer]
lr = 3e-4
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
[activation_checkpoint]
mode = "full"
[compile]
enable = true
"""
NEMO = """
trainer: {num_nodes: 4, devices: 8, precision: bf16}
model:
  micro_batch_size: 1
  global_batch_size: 128
  encoder_seq_length: 4096
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: null
  sequence_parallel: true
"""
ACCELERATE = """
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 16
fsdp_config: {fsdp_version: 1, fsdp_sharding_strategy: SHARD_GRAD_OP, fsdp_activation_checkpointing: true}
"""
ZERO = json.dumps(
    {
        "train_micro_batch_size_per_gpu": 4,
        "train_batch_size": "auto",
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
)


@pytest.mark.parametrize(
    ("text", "model", "says"),
    [
        (
            TITAN,
            "",
            {
                "model": "llama3_8b",
                "stack": "torchtitan",
                "parallel.tp": 8,
                "parallel.zero_stage": 3,
                "parallel.sequence_parallel": True,
                "workload.micro_batch": 2,
                "workload.recompute": "full",
            },
        ),
        (
            NEMO,
            "llama3_70b",
            {
                "model": "llama3_70b",
                "parallel.tp": 4,
                "parallel.pp": 2,
                "cluster.nodes": 4,
                "workload.seq_len": 4096,
                "precision": "bf16",
            },
        ),
        (
            ACCELERATE,
            "llama3_8b",
            {
                "stack": "torch",
                "parallel.zero_stage": 2,
                "cluster.nodes": 2,
                "cluster.devices_per_node": 8,
                "workload.recompute": "full",
            },
        ),
        (
            ZERO,
            "llama3_8b",
            {
                "stack": "deepspeed",
                "parallel.zero_stage": 2,
                "workload.micro_batch": 4,
                "offload": ["optimizer"],
                "stack.overlap": [],
                "precision": "bf16",
            },
        ),
    ],
    ids=["torchtitan", "nemo", "accelerate", "deepspeed"],
)
def test_files_of_one_s_own_are_read(text: str, model: str, says: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "launch"
    file.write_text(text)
    read = settings_of_launch(file, model)
    assert {name: read.get(name) for name in says} == says
    assert "cluster" not in read
    if model:
        with pytest.raises(LaunchError, match="does not say which model it trains: add model="):
            settings_of_launch(file)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text + "[experimental_new]\nfast = true\n", "experimental_new.fast may change the step"),
        (lambda text: text.replace("seq_len = 8192", 'seq_len = "many"'), "training.seq_len=many must be a whole"),
        (lambda text: text.replace("[compile]\nenable = true", "[compile]\nenable = 3"), "must be true or false"),
        (lambda text: text.replace("[", "("), "is nothing that opcast reads back"),
        (lambda _: "", "is nothing that opcast reads back"),
        (lambda _: "distributed_type: TPU\n", "distributed_type=TPU is not simulated"),
    ],
)
def test_what_is_not_understood_is_refused(change: Callable[[str], str], says: str, tmp_path: Path) -> None:
    file = tmp_path / "launch"
    file.write_text(change(TITAN))
    with pytest.raises(LaunchError, match=says):
        settings_of_launch(file, "llama3_8b")


SERVERS = """#!/bin/bash
for at in 0; do :; done
vllm serve tiny_llama_100m --max-num-seqs 8 --speculative-config '{"method": "ngram", "num_speculative_tokens": 2}' &
vllm serve tiny_llama_100m --max-num-seqs 8 --speculative-config '{"method": "ngram", "num_speculative_tokens": 2}'
"""
TRAFFIC = (
    "device=h100_sxm traffic.rate=20 traffic.requests=40 traffic.input.mean=200 traffic.output.mean=20 format=json"
)


def test_servers_of_a_script_answer_as_those_of_the_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "start.sh"
    file.write_text(SERVERS)
    assert main(["serving", f"launch={file}", *TRAFFIC.split()]) == 0
    read = json.loads(capsys.readouterr().out)
    words = """--max-num-seqs 8 --speculative-config '{"method": "ngram", "num_speculative_tokens": 2}'"""
    own = ["engine=vllm", f"args={words}", "model=tiny_llama_100m", "replicas=2"]
    assert main(["serving", *own, *TRAFFIC.split()]) == 0
    assert read["ttft_ms"] == json.loads(capsys.readouterr().out)["ttft_ms"]
    assert main(["serving", f"launch={file}"]) == 2
    assert "does not say what its GPUs are: add cluster=dgx_h100" in capsys.readouterr().err
    file.write_text(SERVERS.replace("tiny_llama_100m", "someone/else"))
    assert main(["serving", f"launch={file}", "device=h100_sxm"]) == 2
    assert "does not say a model that opcast knows: add model=" in capsys.readouterr().err
