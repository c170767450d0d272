"""Accelerate's YAML and DeepSpeed's JSON read back, in files of their own or in a script that writes them.

``train.py`` in such a script is read where opcast wrote it; of any other the model, lengths and batch are named beside.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...datasets.reading import read_json, read_yaml
from ..trace.models import known_models, shipped_source
from .launch_errors import LaunchError
from .relaunch_values import flag, mapping, whole

WRITTEN = re.compile(r"^cat > (\S+) <<'?END'?\n(.*?)^END$", re.M | re.S)
TRAINED = re.compile(r"^MICRO_BATCH, SEQ_LEN, ACCUMULATE, STEPS = (\d+), (\d+), (\d+),", re.M)
PRETRAINED = re.compile(r"from_pretrained\('([^']+)'\)")
ADAPTED = re.compile(
    r"re\.search\((?P<modules>'[^'\n]*'|\"[^\"\n]*\"), n\).*\n"
    r".*LoraConfig\(r=(?P<rank>\d+), lora_dropout=(?P<dropout>[\d.]+)"
)
FSDP1 = {  # strategies of FSDP1, also by their numbers
    **dict.fromkeys(("FULL_SHARD", "1"), 3),
    **dict.fromkeys(("SHARD_GRAD_OP", "2"), 2),
    **dict.fromkeys(("NO_SHARD", "3"), 0),
}
PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "no": "fp32"}


def accelerate_settings(path: Path, text: str, model: str) -> dict[str, Any] | None:
    """What accelerate's configuration, or DeepSpeed's alone, says; None for what is neither."""
    files = dict(WRITTEN.findall(text))
    config = _mapping(files.get("accelerate.yaml", "" if files else text))
    if "zero_optimization" in config:
        return {"model": model, "stack": "deepspeed", **_deepspeed(path, config)}
    if "distributed_type" not in config:
        return None
    settings: dict[str, Any] = {"model": model} | _places(path, config) | _trained(files.get("train.py", ""), model)
    precision = str(config.get("mixed_precision", "no"))
    if precision not in PRECISIONS:
        raise LaunchError(
            f"launch={path}: mixed_precision={precision} is not read; choose from {', '.join(PRECISIONS)}"
        )
    settings["precision"] = PRECISIONS[precision]
    kind = str(config["distributed_type"])
    if kind == "DEEPSPEED":
        settings |= {"stack": "deepspeed", **_deepspeed(path, _deepspeed_config(path, config, files))}
    elif kind == "FSDP":
        settings |= {"stack": "torch", **_fsdp(path, config)}
    elif kind in ("MULTI_GPU", "NO"):
        settings |= {"stack": "torch", "parallel.zero_stage": 0}
    else:
        raise LaunchError(f"launch={path}: distributed_type={kind} is not simulated: FSDP, DEEPSPEED and MULTI_GPU are")
    accumulate = settings.pop("accumulate", 0)
    ranks = whole(path, "num_processes", config.get("num_processes", 0)) // (
        settings.get("parallel.tp", 1) * settings.get("parallel.cp", 1)
    )
    if accumulate and ranks and "workload.global_batch" not in settings:
        settings["workload.global_batch"] = settings["workload.micro_batch"] * accumulate * ranks
    return settings


def _mapping(text: str) -> dict[str, Any]:
    try:
        values = read_yaml(text, LaunchError)  # which reads JSON, too
    except LaunchError:
        return {}
    return {str(name): value for name, value in values.items()} if isinstance(values, Mapping) else {}


def _places(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    if "num_processes" not in config:
        return {}
    nodes = whole(path, "num_machines", config.get("num_machines", 1))
    return {
        "cluster.nodes": nodes,
        "cluster.devices_per_node": whole(path, "num_processes", config["num_processes"]) // max(nodes, 1),
    }


def _trained(script: str, model: str) -> dict[str, Any]:
    """What opcast's own training script says of lengths, batch and model."""
    match = TRAINED.search(script)
    if match is None:
        return {}
    settings: dict[str, Any] = {"workload.micro_batch": int(match[1]), "workload.seq_len": int(match[2])}
    settings["accumulate"] = int(match[3])
    settings["workload.recompute"] = "full" if "if True:" in script else "none"
    if adapted := ADAPTED.search(script):
        settings["workload.lora_rank"] = int(adapted["rank"])
        settings["workload.lora_dropout"] = float(adapted["dropout"])
        settings["workload.lora_modules"] = ast.literal_eval(adapted["modules"])
    source = PRETRAINED.search(script)
    if source and not model:
        settings["model"] = next((name for name in known_models() if shipped_source(name) == source[1]), "")
    return settings


def _fsdp(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    fsdp, degrees = (mapping(path, name, config.get(name)) for name in ("fsdp_config", "parallelism_config"))
    settings: dict[str, Any] = {}
    if str(fsdp.get("fsdp_version", 1)) == "2":
        keep_gathered = not flag(path, "fsdp_reshard_after_forward", fsdp.get("fsdp_reshard_after_forward", True))
        settings["parallel.zero_stage"] = 2 if keep_gathered else 3
    else:
        strategy = str(fsdp.get("fsdp_sharding_strategy", "FULL_SHARD")).upper()
        if strategy not in FSDP1:
            raise LaunchError(f"launch={path}: fsdp_sharding_strategy={strategy} is not read: take parallelism_config")
        settings["parallel.zero_stage"] = FSDP1[strategy]
    size = {name: whole(path, name, value) for name, value in degrees.items() if name.endswith("_size")}
    copies, shard = (size.get(f"parallelism_config_dp_{name}_size", 1) for name in ("replicate", "shard"))
    if degrees and shard == 1:
        settings["parallel.zero_stage"] = 0
    elif copies > 1:
        settings["parallel.shard"] = shard
    for name in ("tp", "cp"):
        if size.get(f"parallelism_config_{name}_size", 1) > 1:
            settings[f"parallel.{name}"] = size[f"parallelism_config_{name}_size"]
    if flag(path, "fsdp_activation_checkpointing", fsdp.get("fsdp_activation_checkpointing", False)):
        settings["workload.recompute"] = "full"
    if flag(path, "fsdp_offload_params", fsdp.get("fsdp_offload_params", False)):
        raise LaunchError(f"launch={path}: fsdp_offload_params is not simulated: take it out")
    return settings


def _deepspeed_config(path: Path, config: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    """DeepSpeed's own JSON, from the script, from beside the YAML, or what the YAML says in its place."""
    inline = mapping(path, "deepspeed_config", config.get("deepspeed_config"))
    name = inline.get("deepspeed_config_file")
    if not name:
        places = {tensor: inline.get(f"offload_{tensor}_device", "none") for tensor in ("optimizer", "param")}
        zero = {"stage": inline.get("zero_stage", 2)} | {
            f"offload_{tensor}": {"device": device} for tensor, device in places.items()
        }
        return {"zero_optimization": zero}
    source = files[name] if name in files else path.expanduser().parent / str(name)
    return mapping(path, str(name), read_json(source, LaunchError, f"launch={path}: {name}"))


def _deepspeed(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    zero = mapping(path, "zero_optimization", config.get("zero_optimization"))
    stage = whole(path, "zero_optimization.stage", zero.get("stage", 0))
    settings: dict[str, Any] = {"parallel.zero_stage": stage}
    overlapped = flag(path, "overlap_comm", zero.get("overlap_comm", stage == 3))
    settings["stack.overlap"] = ["dp"] if overlapped else []
    for name, setting in (
        ("train_batch_size", "workload.global_batch"),
        ("train_micro_batch_size_per_gpu", "workload.micro_batch"),
    ):
        if config.get(name, "auto") != "auto":
            settings[setting] = whole(path, name, config[name])
    for tensor in ("optimizer", "param"):
        device = str(mapping(path, f"offload_{tensor}", zero.get(f"offload_{tensor}")).get("device", "none"))
        if device != "none" and (tensor == "param" or device != "cpu"):
            raise LaunchError(f"launch={path}: offload_{tensor} to {device} is not simulated: take it out")
        if device == "cpu":
            settings["offload"] = ["optimizer"]
    for name in ("bf16", "fp16"):
        if str(mapping(path, name, config.get(name)).get("enabled", "")).lower() == "true":
            settings["precision"] = name
    return settings
