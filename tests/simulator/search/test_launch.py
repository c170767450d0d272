"""Launch files say what the point says, and the frameworks know what they are told."""

from __future__ import annotations

import json
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from opcast.simulator.question.plan import load_stack
from opcast.simulator.search.architecture import megatron_model
from opcast.simulator.search.launch import (
    MEGATRON_BRIDGE,
    STACKS,
    TITAN_MODELS,
    launch_file,
    other_stack,
    stack_of,
)
from opcast.simulator.search.launch_errors import LaunchError
from opcast.simulator.search.launch_reading import settings_of_launch
from opcast.simulator.search.request import SearchRequest, request_of, set_up
from opcast.simulator.search.served.servers import settings_of_servers
from opcast.simulator.search.space import AXES
from opcast.simulator.trace.models import known_models, resolve


def spelled(text: str) -> list[str]:
    """The lines of a script without what joins them."""
    return [line.removesuffix(" \\") for line in text.splitlines()]


@pytest.fixture(scope="module")
def step(asking: Callable[..., SearchRequest]) -> Callable[..., Any]:
    """A function: axes -> the step of that point."""

    def make(**axes: Any) -> Any:
        made = set_up(asking({}))
        usual = {name: values[0] for name, values in made.axes.items()}
        assert axes.keys() <= set(AXES)
        return request_of(made, {**usual, **axes})

    return make


def test_megatron_is_told_of_every_degree(step: Callable[..., Any]) -> None:
    text = launch_file(step(tp=2, pp=2, vpp=3, cp=2, zero_stage=1, recompute="full", micro_batch=4), "megatron-lm")
    lines = spelled(text)
    for line in (
        *("--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--context-parallel-size 2"),
        *("--num-virtual-stages-per-pipeline-rank 3", "--use-distributed-optimizer", "--sequence-parallel"),
        *(
            "--recompute-granularity full",
            "--recompute-method uniform",
            "--micro-batch-size 4",
            "--global-batch-size 64",
        ),
        *("--num-layers 6", "--hidden-size 1024", "--bf16", "--overlap-grad-reduce", "--tp-comm-overlap"),
    ):
        assert line in lines
    plain = launch_file(step(tp=1, zero_stage=0, overlap="none"), "megatron-lm")
    assert not {"--sequence-parallel", "--use-distributed-optimizer", "--overlap-grad-reduce"} & set(spelled(plain))


def test_megatron_bridge_gets_overrides(step: Callable[..., Any]) -> None:
    lines = launch_file(step(tp=2, precision="fp8"), "megatron-bridge").splitlines()
    assert "model.tensor_model_parallel_size=2" in lines
    assert "mixed_precision=bf16_with_fp8_current_scaling_mixed" in lines
    assert {line.partition("=")[0] for line in lines[1:]} <= set(MEGATRON_BRIDGE)


def test_torchtitan_gets_toml(step: Callable[..., Any]) -> None:
    titan = replace(step(tp=2, pp=2, zero_stage=3, micro_batch=4), stack=load_stack("torchtitan"))
    found = tomllib.loads(launch_file(titan, "torchtitan"))
    assert found["parallelism"]["tensor_parallel_degree"] == 2
    assert found["parallelism"]["data_parallel_shard_degree"] == 2
    assert found["parallelism"]["fsdp_reshard_after_forward"] == "always"
    assert found["parallelism"]["pipeline_parallel_layers_per_stage"] == 3
    assert (found["training"]["local_batch_size"], found["training"]["global_batch_size"]) == (32, 64)


@pytest.mark.parametrize(
    ("axes", "framework", "says"),
    [
        ({"zero_stage": 1}, "torchtitan", r"take space.zero_stage=\[0,2,3\]"),
        ({"pp": 2, "schedule": "zb-h1"}, "torchtitan", "schedule=zb-h1 has no name"),
        ({"pp": 2, "schedule": "zb-h1"}, "megatron-lm", "is none of Megatron's"),
        ({"recompute": "full:3"}, "megatron-lm", "recompute=full:3 has no argument"),
        ({}, "deepspeeed", "framework=deepspeeed is none that trains"),
        ({"zero_stage": 1}, "accelerate", r"take space.zero_stage=\[0,2,3\]"),
        ({"pp": 2}, "deepspeed", "take space.pp=1"),
        ({"tp": 2}, "accelerate", "take space.sequence_parallel=false"),
        ({"recompute": "selective"}, "accelerate", "recompute=selective has no setting"),
    ],
)
def test_what_a_framework_cannot_be_told(
    axes: dict[str, Any], framework: str, says: str, step: Callable[..., Any]
) -> None:
    with pytest.raises(ValueError, match=says):
        launch_file(step(**{"zero_stage": 0, **axes}), framework)


@pytest.mark.parametrize(
    ("trained", "framework", "says"),
    [
        ({"lora_rank": 8}, "torchtitan", "no setting for adapters: take framework=megatron-bridge"),
        ({"lora_rank": 8}, "megatron-lm", "no setting for adapters"),
        ({"lora_rank": 8, "lora_modules": "q_proj"}, "megatron-bridge", "name all of q_proj, k_proj, v_proj"),
        ({"frozen": "embed"}, "accelerate", "workload.frozen='embed' cannot be written"),
    ],
)
def test_weights_that_stay_as_they_are_are_never_left_out_in_silence(
    trained: dict[str, Any], framework: str, says: str, step: Callable[..., Any]
) -> None:
    point = step(zero_stage=0)
    with pytest.raises(LaunchError, match=says):
        launch_file(replace(point, work=replace(point.work, **trained)), framework)


@pytest.mark.parametrize(
    ("model", "says", "never"),
    [
        (
            "llama3_8b",
            {
                "--swiglu": True,
                "--normalization": "RMSNorm",
                "--norm-epsilon": 1e-5,
                "--position-embedding-type": "rope",
                "--rotary-base": 500000,
                "--disable-bias-linear": True,
                "--untie-embeddings-and-output-weights": True,
                "--num-query-groups": 8,
                "--vocab-size": 128256,
            },
            ("--use-rope-scaling", "--num-experts", "--add-qkv-bias"),
        ),
        ("llama3_1_8b", {"--use-rope-scaling": True, "--rope-scaling-factor": 8.0}, ()),
        ("qwen2_5_7b", {"--add-qkv-bias": True, "--disable-bias-linear": True}, ("--qk-layernorm",)),
        ("qwen3_30b_a3b", {"--qk-layernorm": True, "--num-experts": 128, "--moe-ffn-hidden-size": 768}, ()),
        (
            "deepseek_v3",
            {
                "--multi-latent-attention": True,
                "--kv-lora-rank": 512,
                "--moe-layer-freq": "([0]*3+[1]*58)",
                "--moe-shared-expert-intermediate-size": 2048,
                "--moe-router-score-function": "sigmoid",
                "--rope-type": "yarn",
            },
            ("--group-query-attention",),
        ),
        (
            "gpt3_175b",
            {"--normalization": "LayerNorm", "--position-embedding-type": "learned_absolute", "--hidden-size": 12288},
            ("--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"),
        ),
    ],
)
def test_the_model_that_starts_is_the_one_that_was_asked_about(
    model: str, says: dict[str, Any], never: tuple[str, ...]
) -> None:
    told = megatron_model(dict(resolve(model).language))
    assert {name: told.get(name) for name in says} == says
    assert not set(never) & set(told)


@pytest.mark.parametrize("model", ["gemma2_9b", "gpt_oss_20b"])
def test_a_model_that_megatron_cannot_be_told_is_refused(model: str) -> None:
    with pytest.raises(LaunchError, match="take framework=megatron-bridge"):
        megatron_model(dict(resolve(model).language))


def test_accelerate_and_deepspeed_get_files_and_a_script_that_python_reads(step: Callable[..., Any]) -> None:
    for framework, axes in (
        ("accelerate", {"tp": 2, "zero_stage": 3, "sequence_parallel": False}),
        ("deepspeed", {"tp": 1, "zero_stage": 2}),
    ):
        point = step(**axes, micro_batch=2, recompute="full")
        point = replace(point, work=replace(point.work, lora_rank=16))
        text = launch_file(point, framework)
        parts = [part.split(" <<'END'\n") for part in text.split("cat > ")[1:]]
        files = {name: rest.split("\nEND\n")[0] for name, rest in parts}
        compile(files["train.py"], "train.py", "exec")
        assert "MICRO_BATCH, SEQ_LEN" in files["train.py"]
        assert "if True:" in files["train.py"]
        assert "LoraConfig(r=16, lora_dropout=0.0, target_modules=LINEARS)" in files["train.py"]
        told = yaml.safe_load(files["accelerate.yaml"])
        if framework == "accelerate":
            assert told["fsdp_config"]["fsdp_version"] == 2
            assert told["fsdp_config"]["fsdp_reshard_after_forward"] is True
            degrees = told["parallelism_config"]
            assert degrees["parallelism_config_tp_size"] == 2
            assert degrees["parallelism_config_dp_shard_size"] * 2 == told["num_processes"]
        else:
            batch = json.loads(files["deepspeed.json"])
            assert batch["zero_optimization"]["stage"] == 2
            size = batch["train_micro_batch_size_per_gpu"] * batch["gradient_accumulation_steps"]
            assert size * told["num_processes"] == batch["train_batch_size"]


@pytest.mark.parametrize(
    "axes",
    [
        {"tp": 2, "pp": 2, "vpp": 2, "schedule": "interleaved", "zero_stage": 1, "recompute": "full"},
        {"tp": 1, "zero_stage": 0, "overlap": "none", "micro_batch": 4},
        {"tp": 2, "zero_stage": 3, "precision": "fp8"},
    ],
)
def test_a_command_is_read_back_as_the_step_it_starts(
    axes: dict[str, Any], step: Callable[..., Any], tmp_path: Path
) -> None:
    request = replace(step(**axes), model="llama3_8b")
    file = tmp_path / "start.sh"
    file.write_text(launch_file(request, "megatron-lm"))
    read = settings_of_launch(file)
    assert read["model"] == resolve(request.model).name
    work, parallel = request.work, request.parallel
    assert (read["workload.seq_len"], read["workload.micro_batch"]) == (work.seq_len, work.micro_batch)
    assert read["workload.global_batch"] == work.sequences
    for name in ("tp", "pp", "cp"):
        assert read[f"parallel.{name}"] == getattr(parallel, name)
    assert read.get("parallel.vpp", 1) == parallel.vpp
    assert read["parallel.zero_stage"] == parallel.zero_stage
    assert read["parallel.sequence_parallel"] is parallel.sequence_parallel
    assert read["workload.recompute"] == request.recompute
    assert read["precision"] == (request.quantization or "bf16")
    assert ("dp" in read["stack.overlap"]) is ("dp" in request.stack.overlap)


@pytest.mark.parametrize("framework", STACKS)
def test_what_a_framework_runs_is_what_its_file_is_read_back_as(
    framework: str, step: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "launch"
    for stack in ("torch", "torchtitan", "torchtitan_eager", "deepspeed", "megatron", "megatron_core"):
        zero = 1 if "megatron" in framework else 2
        request = replace(step(zero_stage=zero), model="llama3_8b", stack=load_stack(stack))
        file.write_text(launch_file(request, framework))
        read = settings_of_launch(file).get("stack", "megatron")  # Megatron's files say overlap alone
        said = other_stack(request, framework)
        assert bool(said) is (read != stack), (stack, read)
        assert f"files of {framework} as stack={read}:" in said or not said
    assert read in (STACKS[framework], "torchtitan")
    usual = replace(request, stack=None)
    assert other_stack(usual, framework) == ""
    assert launch_file(usual, framework) == launch_file(replace(usual, stack=stack_of(framework)), framework)


@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3_30b_a3b", "gpt3_175b"])
def test_a_script_is_one_that_a_shell_reads_and_comes_back_as_its_model(
    model: str, step: Callable[..., Any], tmp_path: Path
) -> None:
    text = launch_file(replace(step(tp=2), model=model), "megatron-lm")
    assert subprocess.run(["sh", "-n"], input=text, text=True, check=False).returncode == 0
    file = tmp_path / "start.sh"
    file.write_text(text)
    assert settings_of_launch(file)["model"] == model


@pytest.mark.parametrize("model", ["llama3_1_8b", "qwen3_0_6b", "tiny_llama_100m"])
def test_torchtitan_is_told_its_name_of_the_model_or_asks_for_it(
    model: str, step: Callable[..., Any], tmp_path: Path
) -> None:
    text = launch_file(replace(step(zero_stage=3), model=model), "torchtitan")
    names = {"llama3_1_8b": ("llama3", "8B"), "qwen3_0_6b": ("qwen3", "0.6B")}
    said = tomllib.loads(text).get("model", {})
    assert tuple(said.values()) == names.get(model, ())
    assert ("put model.name" in text) is (model not in names)
    file = tmp_path / "titan.toml"
    file.write_text(text)
    assert settings_of_launch(file)["model"] == model
    if said:
        file.write_text("\n".join(line for line in text.splitlines() if not line.startswith("#")))
        assert settings_of_launch(file)["model"] == {"llama3_1_8b": "llama3_8b"}.get(model, model)


def test_models_of_torchtitan_ship_under_their_names() -> None:
    assert set(TITAN_MODELS) <= known_models().keys()


OWN = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=2
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
MODEL_ARGS=(
    --use-mcore-models
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    # the heads of keys and values
    --group-query-attention
    --num-query-groups 8
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 500000
    --normalization RMSNorm
    --swiglu
    --untie-embeddings-and-output-weights
    --disable-bias-linear
    --attention-dropout 0.0
    --hidden-dropout 0.0
)
torchrun ${DISTRIBUTED_ARGS[@]} "pretrain_gpt.py" \\
    ${MODEL_ARGS[@]} --micro-batch-size 1 --global-batch-size 128 --bf16 \\
    --tensor-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce \\
    --overlap-param-gather --tokenizer-type NullTokenizer --vocab-size 128256 --mock-data --train-iters 5
"""


def test_a_script_of_one_s_own_with_arrays_and_variables_is_read(tmp_path: Path) -> None:
    file = tmp_path / "train_llama3_8b.sh"
    file.write_text(OWN)
    assert settings_of_launch(file) == {
        "model": "llama3_8b",
        "workload": "train",
        "workload.seq_len": 8192,
        "workload.micro_batch": 1,
        "workload.global_batch": 128,
        "workload.recompute": "none",
        "parallel.tp": 4,
        "parallel.sequence_parallel": True,
        "parallel.zero_stage": 1,
        "cluster.nodes": 2,
        "cluster.devices_per_node": 8,
        "precision": "bf16",
        "stack.overlap": ["dp", "cp", "pp"],
    }
    file.write_text(OWN.replace("--attention-dropout 0.0", ""))
    with pytest.raises(LaunchError, match=r"llama3_8b comes closest and differs in --attention-dropout"):
        settings_of_launch(file)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("--swiglu", "--squared-relu"), "no model that opcast ships has these arguments; .* differs in --swiglu"),
        (("--bf16", "--bf16 \\\n--moe-extended-tp"), "--moe-extended-tp may change the step and is not read"),
        (("pretrain_gpt.py", "other.py"), "is nothing that opcast reads back: a command of Megatron-LM"),
        (("--bf16", "--bf16 \\\n--transformer-impl local"), "--transformer-impl local runs layers without"),
        (("--seq-length 4096", "--seq-length many"), "--seq-length=many must be a whole number"),
    ],
)
def test_a_command_that_is_not_understood_is_refused(
    change: tuple[str, str], says: str, step: Callable[..., Any], tmp_path: Path
) -> None:
    text = launch_file(replace(step(tp=2), model="llama3_8b"), "megatron-lm")
    if change[0].startswith("--seq"):
        change = (next(line for line in spelled(text) if line.startswith("--seq-length")), change[1])
    file = tmp_path / "start.sh"
    file.write_text(text.replace(*change))
    with pytest.raises(LaunchError, match=says):
        settings_of_launch(file)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers x", "--num-layers=x must be a whole number"),
        (b"torchrun --nnodes $NODES pretrain_gpt.py --num-layers 2 --bf16", r"--nnodes=\$NODES must be a whole number"),
        (b"\x7fELF\x02\x01\x01\x00\xff\xfe", "cannot be read: it is no text"),
    ],
)
def test_what_is_no_number_and_no_text_is_named(content: bytes, says: str, tmp_path: Path) -> None:
    file = tmp_path / "start.sh"
    file.write_bytes(content)
    with pytest.raises(LaunchError, match=rf"^launch={file}:? {says}"):
        settings_of_launch(file, "tiny_llama_100m")
    if says.endswith("text"):
        with pytest.raises(LaunchError, match=says):
            settings_of_servers(file)
