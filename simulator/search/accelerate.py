"""A point as accelerate starts it: FSDP2 or DeepSpeed under Transformers, with a training script of made-up data.

Names are those of accelerate 1.15 and DeepSpeed 0.19. What the two cannot be told is a LaunchError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .launch_adapters import peft_lines
from .launch_errors import LaunchError
from .launch_point import Launch

TRAIN = """{imports}import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM
MICRO_BATCH, SEQ_LEN, ACCUMULATE, STEPS = {micro_batch}, {seq_len}, {accumulate}, 20
accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE)
model = AutoModelForCausalLM.from_config({config})
{adapters}if {checkpointing}:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={{"use_reentrant": False}})
tokens = torch.randint(0, model.config.vocab_size, (MICRO_BATCH * 64, SEQ_LEN))  # made up: put your own in their place
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=MICRO_BATCH)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
done = 0
while done < STEPS * ACCUMULATE:
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        done += 1
"""


def training_script(launch: Launch, framework: str, head: list[str], source: str) -> str:
    """A shell script that writes configuration and training script, and starts them. ``source``: the model's hub id.

    LaunchError for a layout that the framework has not.
    """
    _check(launch, framework)
    cluster = launch.request.cluster
    assert cluster is not None
    files = {"accelerate.yaml": _yaml(_accelerate(launch, framework)), "train.py": _train(launch, source)}
    if framework == "deepspeed":
        files["deepspeed.json"] = json.dumps(_deepspeed(launch), indent=1) + "\n"
    lines = ["#!/bin/sh", *head, "# Run it on each node, with NODE_RANK and MASTER_ADDR set where there are several."]
    for name, text in files.items():
        lines += [f"cat > {name} <<'END'", text.rstrip("\n"), "END"]
    start = (
        'exec accelerate launch --config_file accelerate.yaml --machine_rank "${NODE_RANK:-0}" '
        '--main_process_ip "${MASTER_ADDR:-localhost}" --main_process_port "${MASTER_PORT:-29500}" train.py'
    )
    return "\n".join([*lines, start, ""])


def _check(launch: Launch, framework: str) -> None:
    parallel = launch.parallel
    for name in ("pp", "cp", "ep"):
        if getattr(parallel, name) > 1:
            raise LaunchError(f"{framework} under Transformers has no {name}: take space.{name}=1")
    if parallel.tp > 1 and framework == "deepspeed":
        raise LaunchError(
            "tensor parallelism of DeepSpeed is not spelled here: take space.tp=1, or framework=accelerate"
        )
    if parallel.tp > 1 and parallel.sequence_parallel:
        raise LaunchError("tensor ranks of Transformers share no tokens: take space.sequence_parallel=false")
    if framework == "accelerate" and parallel.zero_stage not in (0, 2, 3):
        raise LaunchError("FSDP2 shards gradients and weights together: take space.zero_stage=[0,2,3]")
    if launch.request.quantization:
        raise LaunchError(f"precision={launch.request.quantization} is not spelled here: take precision=bf16")
    if launch.request.recompute not in ("none", "full"):
        raise LaunchError(f"recompute={launch.request.recompute} has no setting: take space.recompute=[none,full]")


def _accelerate(launch: Launch, framework: str) -> dict[str, Any]:
    cluster, parallel = launch.request.cluster, launch.parallel
    assert cluster is not None
    base: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "mixed_precision": "fp16" if launch.request.precision == "fp16" else "bf16",
        "num_machines": cluster.nodes,
        "num_processes": cluster.devices,
        "main_training_function": "main",
    }
    if framework == "deepspeed":
        return base | {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "deepspeed.json"}}
    if parallel.zero_stage == 0 and parallel.tp == 1:
        return base | {"distributed_type": "MULTI_GPU"}
    shard = (parallel.shard or launch.dp) if parallel.zero_stage else 1
    degrees = {
        "parallelism_config_dp_replicate_size": launch.dp // shard,
        "parallelism_config_dp_shard_size": shard,
        "parallelism_config_tp_size": parallel.tp,
    }
    fsdp = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": parallel.zero_stage == 3,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_activation_checkpointing": False,
    }
    config = {"distributed_type": "FSDP", "fsdp_config": fsdp}
    if launch.dp // shard > 1 or parallel.tp > 1:
        config["parallelism_config"] = degrees
    return base | config


def _deepspeed(launch: Launch) -> dict[str, Any]:
    stage, overlapped = launch.parallel.zero_stage, "dp" in launch.stack.overlap
    half = launch.request.precision == "fp16"
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": overlapped, "contiguous_gradients": True}
    return {
        "train_batch_size": launch.request.work.sequences,
        "train_micro_batch_size_per_gpu": launch.request.work.micro_batch,
        "gradient_accumulation_steps": accumulated(launch),
        "bf16": {"enabled": not half},
        "fp16": {"enabled": half},
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
    }


def accumulated(launch: Launch) -> int:
    """Micro-batches of a step on each data rank."""
    return max(int(launch.request.work.sequences // (launch.dp * launch.request.work.micro_batch)), 1)


def _train(launch: Launch, source: str) -> str:
    config = f"AutoConfig.from_pretrained({source!r})" if source else f"AutoConfig.for_model(**{dict(launch.config)!r})"
    work = launch.request.work
    adapters = peft_lines(launch)
    return TRAIN.format(
        imports="import re\n" if adapters else "",
        adapters=adapters,
        micro_batch=work.micro_batch,
        seq_len=work.seq_len,
        accumulate=accumulated(launch),
        config=config,
        checkpointing=launch.request.recompute == "full",
    )


def _yaml(values: Mapping[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(dict(values), sort_keys=False))
