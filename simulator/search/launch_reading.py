"""A launch file read back: the settings of the step that it starts, by their paths in ``opcast simulate``.

Commands of Megatron-LM (:mod:`.relaunch`), torchtitan's TOML, overrides of Megatron-Bridge and YAML of NeMo,
accelerate's YAML and DeepSpeed's JSON (:mod:`.relaunch_accelerate`). A file that opcast wrote also says model and
cluster, in its first comment; of any other the model is named beside it where the file does not say it. What the GPUs
are no file says.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...datasets.clusters import ClusterError, load_cluster
from ...datasets.reading import UNREADABLE, flat, problem, read_text, read_yaml
from ..trace.models import known_models, resolve
from .launch import RECIPES, TITAN_EAGER, TITAN_MODELS, TORCHTITAN, settings_called
from .launch_adapters import BRIDGE_LINEARS, linears_pattern
from .launch_errors import LaunchError
from .relaunch import megatron_settings
from .relaunch_accelerate import accelerate_settings
from .relaunch_values import flag, whole

HEADER = re.compile(r"^# (\S+) on (\d+) x (\d+) GPUs \(([\w.-]+)\), dp=\d+$", re.M)
OVERRIDE = re.compile(r"(?:^|\s)((?:model|train|ddp|comm_overlap|trainer|mixed_precision|peft)(?:\.\w+)*)=(\S+)", re.M)
READ = (
    "a command of Megatron-LM (torchrun … pretrain_gpt.py --num-layers …), torchtitan's TOML, overrides of "
    "Megatron-Bridge or YAML of NeMo, accelerate's YAML or DeepSpeed's JSON"
)
BRIDGE_COUNTS = {  # as Megatron-Bridge and NeMo call them
    **settings_called(1),
    "model.encoder_seq_length": "workload.seq_len",
    "model.micro_batch_size": "workload.micro_batch",
    "model.global_batch_size": "workload.global_batch",
    "trainer.num_nodes": "cluster.nodes",
    "trainer.devices": "cluster.devices_per_node",
    "peft.dim": "workload.lora_rank",
}
TITAN_COUNTS = {
    "training.seq_len": "workload.seq_len",
    "training.global_batch_size": "workload.global_batch",
    "parallelism.tensor_parallel_degree": "parallel.tp",
    "parallelism.pipeline_parallel_degree": "parallel.pp",
    "parallelism.context_parallel_degree": "parallel.cp",
    "parallelism.expert_parallel_degree": "parallel.ep",
}
TITAN_READ = (*TORCHTITAN, "model.name", "model.flavor", "compile.components")
TITAN_WITHOUT_TIME = re.compile(
    r"(job|profiling|metrics|optimizer|lr_scheduler|checkpoint|comm|validation|experimental|debug)\.|"
    r"training\.(dataset|dataset_path|steps|max_norm|seed|deterministic|gc_freq|mixed_precision_reduce)$|"
    r"model\.(tokenizer_path|hf_assets_path|print_after_conversion)$|"
    r"activation_checkpoint\.(selective_ac_option|early_stop|preserve_rng_state|determinism_check)$"
)
TITAN_SCHEDULES = {"1F1B": ("1f1b", 1), "Interleaved1F1B": ("interleaved", 2), "GPipe": ("gpipe", 1)}


def settings_of_launch(path: Path, model: str = "") -> dict[str, Any]:
    """The settings of ``opcast simulate``, by their paths, that a launch file says; ``model`` goes before its own.

    LaunchError for a file of no such kind, a model that it does not say, or is not the one that is named, and what may
    change the step and opcast does not read.
    """
    text = read_text(path.expanduser(), LaunchError, f"launch={path}")
    head = own_header(text)
    settings = megatron_settings(path, text, model)
    if settings is None:
        named = model or str(head.get("model", ""))
        readers = (accelerate_settings, titan_settings, bridge_settings)
        settings = next((answer for reader in readers if (answer := reader(path, text, named)) is not None), None)
    if settings is None:
        raise LaunchError(f"launch={path} is nothing that opcast reads back: {READ}")
    if not settings.get("model"):
        raise LaunchError(f"launch={path} does not say which model it trains: add model=llama3_8b, or another")
    return {name: value for name, value in head.items() if name != "model"} | {"workload": "train"} | settings


def own_header(text: str) -> dict[str, Any]:
    """Model and cluster as opcast's own files say them, where they are names that opcast knows."""
    match = HEADER.search(text)
    if match is None:
        return {}
    settings: dict[str, Any] = {"model": match[1]} if match[1] in known_models() else {}
    try:
        load_cluster(match[4])
    except ClusterError:
        return settings
    return settings | {"cluster": match[4], "cluster.nodes": int(match[2]), "cluster.devices_per_node": int(match[3])}


def titan_settings(path: Path, text: str, model: str) -> dict[str, Any] | None:
    """What torchtitan's TOML says; None for what is none."""
    try:
        values = tomllib.loads(text)
    except UNREADABLE:  # TOMLDecodeError is a ValueError
        return None
    if why := problem(values):
        raise LaunchError(f"launch={path} cannot be read: {why}")
    keys = dict(flat(values))
    if not any(name.startswith(("parallelism.", "training.")) for name in keys):
        return None
    if unknown := sorted(name for name in keys if name not in TITAN_READ and not TITAN_WITHOUT_TIME.match(name)):
        raise LaunchError(f"launch={path}: {', '.join(unknown)} may change the step and is not read: take it out")
    counts = {name: whole(path, name, keys[name]) for name in TITAN_COUNTS if name in keys}
    settings: dict[str, Any] = {TITAN_COUNTS[name]: count for name, count in counts.items() if count > 0}
    settings["model"] = model or _titan_model(keys)
    settings["stack"] = "torchtitan" if flag(path, "compile.enable", keys.get("compile.enable", False)) else TITAN_EAGER
    settings["precision"] = {"bfloat16": "bf16", "float32": "fp32"}.get(
        str(keys.get("training.mixed_precision_param", "bfloat16")), "bf16"
    )
    settings["parallel.sequence_parallel"] = settings.get("parallel.tp", 1) > 1
    pp = settings.get("parallel.pp", 1)
    settings |= _titan_sharding(path, keys, pp)
    if pp > 1:
        settings |= _titan_pipeline(path, keys, settings["model"], pp)
    else:
        settings["workload.micro_batch"] = whole(path, *_or(keys, "training.local_batch_size", 8))
    settings["workload.recompute"] = str(keys.get("activation_checkpoint.mode", "selective"))
    return settings


def _or(keys: Mapping[str, Any], name: str, default: Any) -> tuple[str, Any]:
    return name, keys.get(name, default)


def _titan_model(keys: Mapping[str, Any]) -> str:
    """The shipped model of torchtitan's name and flavour, where they spell one."""
    spelled = keys.get("model.name"), keys.get("model.flavor")
    return next((model for model, name in TITAN_MODELS.items() if name == spelled), "")


def _titan_sharding(path: Path, keys: Mapping[str, Any], pp: int) -> dict[str, Any]:
    copies = whole(path, *_or(keys, "parallelism.data_parallel_replicate_degree", 1))
    shard = whole(path, *_or(keys, "parallelism.data_parallel_shard_degree", -1))
    if shard == 1:
        return {"parallel.zero_stage": 0}
    gathered = {"always": False, "never": True, "default": pp > 1}
    policy = str(keys.get("parallelism.fsdp_reshard_after_forward", "default"))
    if policy not in gathered:
        raise LaunchError(f"launch={path}: fsdp_reshard_after_forward={policy} is none of {', '.join(gathered)}")
    return {
        "parallel.zero_stage": 2 if gathered[policy] else 3,
        **({"parallel.shard": shard} if copies > 1 and shard > 1 else {}),
    }


def _titan_pipeline(path: Path, keys: Mapping[str, Any], model: str, pp: int) -> dict[str, Any]:
    schedule_name = str(keys.get("parallelism.pipeline_parallel_schedule", "1F1B"))
    if schedule_name not in TITAN_SCHEDULES:
        raise LaunchError(
            f"launch={path}: the schedule {schedule_name} is not simulated; choose from {', '.join(TITAN_SCHEDULES)}"
        )
    schedule, chunks = TITAN_SCHEDULES[schedule_name]
    layers_per_stage = whole(path, *_or(keys, "parallelism.pipeline_parallel_layers_per_stage", 0))
    if layers_per_stage and model:
        config = resolve(model).language
        layers = int(config.get("num_hidden_layers") or config.get("n_layer") or 0)
        chunks = max(-(-layers // (layers_per_stage * pp)), 1)
    return {
        "parallel.schedule": schedule,
        "parallel.vpp": chunks,
        "workload.micro_batch": whole(path, *_or(keys, "parallelism.pipeline_parallel_microbatch_size", 1)),
    }


def bridge_settings(path: Path, text: str, model: str) -> dict[str, Any] | None:
    """What overrides of Megatron-Bridge, or YAML of NeMo, say; None for what is neither."""
    overrides: dict[str, Any] = dict(OVERRIDE.findall("\n".join(x for x in text.splitlines() if not x.startswith("#"))))
    if not overrides:
        try:
            values = read_yaml(text, LaunchError)
        except LaunchError:
            return None
        overrides = dict(flat(values)) if isinstance(values, Mapping) else {}
    counts = {
        BRIDGE_COUNTS[name]: whole(path, name, value)
        for name, value in overrides.items()
        if name in BRIDGE_COUNTS and value not in ("null", None)
    }
    if not any(name.startswith("parallel.") for name in counts):
        return None
    settings: dict[str, Any] = {"model": model, **counts}
    short = {name.partition(".")[2]: value for name, value in overrides.items()}
    sequence_parallel = flag(path, "sequence_parallel", short.get("sequence_parallel", False))
    settings["parallel.sequence_parallel"] = sequence_parallel
    settings["parallel.zero_stage"] = _bridge_zero(path, overrides)
    if counts.get("parallel.vpp", 1) > 1:
        settings["parallel.schedule"] = "interleaved"
    recompute = short.get("recompute_granularity")
    settings["workload.recompute"] = "none" if recompute in (None, "null") else str(recompute)
    settings["precision"] = _bridge_precision(path, overrides)
    if "workload.lora_rank" in settings:
        settings |= _bridge_adapters(path, overrides)
    overlaps = {
        "dp": flag(path, "overlap_grad_reduce", short.get("overlap_grad_reduce", False)),
        "tp": flag(path, "tp_comm_overlap", short.get("tp_comm_overlap", False)) or not sequence_parallel,
        "cp": True,
        "pp": flag(path, "overlap_p2p_comm", short.get("overlap_p2p_comm", True)),
    }
    settings["stack.overlap"] = [name for name, overlapped in overlaps.items() if overlapped]
    return settings


def _bridge_zero(path: Path, overrides: Mapping[str, Any]) -> int:
    if flag(path, "ddp.use_megatron_fsdp", overrides.get("ddp.use_megatron_fsdp", False)):
        return {"optim_grads": 2, "optim_grads_params": 3, "optim": 1}.get(
            str(overrides.get("ddp.data_parallel_sharding_strategy", "optim_grads_params")), 0
        )
    names = ("ddp.use_distributed_optimizer", "model.use_distributed_optimizer")
    return int(any(flag(path, name, overrides.get(name, False)) for name in names))


def _bridge_adapters(path: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Which products have adapters (megatron/bridge/peft/lora.py: all four where nothing is said), their dropout."""
    targets = overrides.get("peft.target_modules", list(BRIDGE_LINEARS))
    products = [str(target) for target in targets] if isinstance(targets, list) else re.findall(r"\w+", str(targets))
    if unknown := [product for product in products if product not in BRIDGE_LINEARS]:
        raise LaunchError(
            f"launch={path}: peft.target_modules={unknown[0]} is not simulated: {', '.join(BRIDGE_LINEARS)}"
        )
    try:
        dropout = float(overrides.get("peft.dropout", 0))
    except (TypeError, ValueError):
        raise LaunchError(f"launch={path}: peft.dropout={overrides['peft.dropout']} must be a number") from None
    return {"workload.lora_modules": linears_pattern(products), "workload.lora_dropout": dropout}


def _bridge_precision(path: Path, overrides: Mapping[str, Any]) -> str:
    """The format by the recipe's name; NeMo's trainer says bits."""
    recipe = str(overrides.get("mixed_precision", ""))
    precisions = {name: quantization or "bf16" for quantization, name in RECIPES.items()} | {"fp16_mixed": "fp16"}
    if recipe and recipe not in precisions:
        raise LaunchError(
            f"launch={path}: mixed_precision={recipe} is not simulated; choose from {', '.join(precisions)}"
        )
    bits = {"16": "fp16", "16-mixed": "fp16", "32": "fp32"}.get(str(overrides.get("trainer.precision", "")), "bf16")
    return precisions.get(recipe, bits)
