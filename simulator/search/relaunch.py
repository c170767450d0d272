"""A command of Megatron-LM read back: the settings of the step that it starts.

What the command says of the model must be what a model that opcast knows is made of; layout, batch, format and
recomputation become settings of ``opcast simulate``. What the GPUs are no command says.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...datasets.loading import nearest
from ...datasets.reading import named_words
from ..trace.models import known_models, resolve, shipped_source
from .architecture import megatron_model
from .launch import FP8_RECIPES, MADE_UP, MEGATRON_LM, settings_called
from .launch_errors import LaunchError
from .relaunch_values import whole

FUSED_LAYERS = "transformer_engine"  # what Megatron-LM runs unless told otherwise
SCRIPT = re.compile(r"pretrain_\w+\.py$")
OF_MODEL = ("--max-position-embeddings", "--vocab-size")  # which a run may have longer or padded
WITHOUT_TIME = (  # what changes neither time nor memory of a step
    *MADE_UP,
    *("--tokenizer-type", "--tokenizer-model", "--data-path", "--split", "--seed", "--min-lr"),
    *("--lr-warmup-iters", "--lr-decay-iters", "--weight-decay", "--adam-beta1", "--adam-beta2", "--clip-grad"),
    *("--init-method-std", "--save", "--load", "--save-interval", "--eval-interval", "--log-throughput"),
    *("--use-mcore-models", "--tensorboard-dir", "--distributed-backend", "--distributed-timeout-minutes"),
    *("--moe-router-load-balancing-type", "--moe-aux-loss-coeff"),
)
DEFAULTS = {  # of Megatron-LM's own parser, which a command need not say
    "--normalization": "LayerNorm",
    "--norm-epsilon": 1e-5,
    "--position-embedding-type": "learned_absolute",
    "--rotary-base": 10000,
    "--rotary-percent": 1.0,
    "--attention-dropout": 0.1,
    "--hidden-dropout": 0.1,
    "--moe-router-topk": 2,
    "--moe-router-load-balancing-type": "aux_loss",
    "--moe-token-dispatcher-type": "allgather",
}
ARRAY = re.compile(r"^\s*(\w+)=\(((?:[^()]|\([^()]*\))*)\)\s*$", re.M)  # as Megatron-LM's own examples hold arguments
VARIABLE = re.compile(r"^\s*(?:export\s+)?(\w+)=([\w./:-]+)\s*$", re.M)
USED = re.compile(r"\"?\$\{?(\w+)(?:\[@\])?\}?\"?")
COUNTS = settings_called(0)
MODEL_SIZES = (  # of a model, in whole numbers
    *("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--num-query-groups"),
    *("--kv-channels", "--max-position-embeddings", "--num-experts", "--moe-router-topk", "--moe-ffn-hidden-size"),
)


def megatron_settings(path: Path, text: str, model: str = "") -> dict[str, Any] | None:
    """The settings of ``opcast simulate``, by their paths, that a command of Megatron-LM says; None without one.

    Without a ``model`` it is the shipped one that the arguments describe. LaunchError for a model that is none of these
    or not the one that is named, and an argument that may change the step and that opcast does not read.
    """
    command = _command(text)
    if command is None:
        return None
    start, flags = command
    numbers = {name: whole(path, name, flags[name]) for name in (*COUNTS, *MODEL_SIZES) if name in flags}
    places = {f"cluster.{item}": whole(path, name, start[name]) for name, item in PLACES.items() if name in start}
    model = model or _model(flags)
    model_flags = megatron_model(dict(resolve(model).language))
    if differ := _differences(flags, model_flags):
        raise LaunchError(f"launch={path} starts another model than {model}: they differ in {', '.join(differ)}")
    settings: dict[str, Any] = {"model": model}
    settings |= {setting: numbers[name] for name, setting in COUNTS.items() if name in flags}
    settings |= places
    settings["parallel.sequence_parallel"] = "--sequence-parallel" in flags
    settings["parallel.zero_stage"] = _zero_stage(flags)
    settings["precision"] = _precision(flags)
    settings["workload.recompute"] = _recompute(flags)
    if settings.get("parallel.vpp", 1) > 1:
        settings["parallel.schedule"] = "interleaved"
    settings["stack.overlap"] = _overlap(flags)
    _check(flags, model_flags, path)
    return settings


DEEPEST = 4  # variables within variables
PLACES = {"--nnodes": "nodes", "--nproc-per-node": "devices_per_node"}


def _command(text: str) -> tuple[dict[str, str], dict[str, Any]] | None:
    """What torchrun is told, and what the script is: values by name, True for a flag, a list for several."""
    text = text.replace("\\\n", " ")
    text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    values = dict(VARIABLE.findall(text)) | {name: " ".join(words.split()) for name, words in ARRAY.findall(text)}
    for line in text.splitlines():
        if SCRIPT.search(line) or "pretrain_" in line:
            for _ in range(DEEPEST):
                line = USED.sub(lambda match: values.get(match[1], match[0]), line)
        try:
            words = shlex.split(line)
        except ValueError:
            continue
        at = next((at for at, word in enumerate(words) if SCRIPT.search(word)), None)
        if at is not None:
            start = {name.replace("_", "-"): value for name, value in _pairs(words[:at]).items()}
            return {name: str(value) for name, value in start.items()}, _pairs(words[at + 1 :])
    return None


def _pairs(words: Sequence[str]) -> dict[str, Any]:
    pairs = dict(named_words(words))
    return {name: True if not values else values[0] if len(values) == 1 else values for name, values in pairs.items()}


def _same(one: Any, other: Any) -> bool:
    try:
        return float(one) == float(other)
    except (TypeError, ValueError):
        return str(one) == str(other)


def _differences(flags: Mapping[str, Any], model_flags: Mapping[str, Any]) -> list[str]:
    """The arguments in which a command and a model differ."""
    effective = DEFAULTS | dict(flags)
    compared = model_flags.keys() - set(OF_MODEL)
    return sorted(name for name in compared if name not in effective or not _same(effective[name], model_flags[name]))


def _model(flags: Mapping[str, Any]) -> str:
    """The shipped model that the arguments describe; of several alike the one whose tokenizer is named."""
    closest: tuple[int, str, list[str]] = (1 << 30, "", [])
    matches: list[tuple[bool, bool, str]] = []
    for name in known_models():
        try:
            model_flags = megatron_model(dict(resolve(name).language))
        except LaunchError:
            continue
        differ = _differences(flags, model_flags)
        if not differ:
            matches.append(
                (shipped_source(name) != flags.get("--tokenizer-model"), _vocabulary(flags, model_flags), name)
            )
        closest = min(closest, (len(differ), name, differ))
    if matches:
        return min(matches)[2]
    raise LaunchError(
        f"no model that opcast ships has these arguments; {closest[1]} comes closest and differs in "
        f"{', '.join(closest[2][:6])}"
    )


def _vocabulary(flags: Mapping[str, Any], model_flags: Mapping[str, Any]) -> bool:
    return any(name in flags and not _same(flags[name], model_flags.get(name)) for name in OF_MODEL)


def _zero_stage(flags: Mapping[str, Any]) -> int:
    if "--use-megatron-fsdp" in flags:
        return {"optim_grads": 2, "optim_grads_params": 3, "optim": 1}.get(
            str(flags.get("--data-parallel-sharding-strategy", "optim_grads_params")), 0
        )
    return int("--use-distributed-optimizer" in flags)


def _precision(flags: Mapping[str, Any]) -> str:
    if "--fp8-format" in flags:
        recipe = str(flags.get("--fp8-recipe", "delayed"))
        formats = {value: name for name, value in FP8_RECIPES.items()} | {"delayed": "fp8"}
        if recipe not in formats:
            raise LaunchError(f"--fp8-recipe {recipe} is not simulated; {nearest(recipe, formats, 'choose from')}")
        return formats[recipe]
    return "fp16" if "--fp16" in flags else "bf16" if "--bf16" in flags else "fp32"


def _recompute(flags: Mapping[str, Any]) -> str:
    if "--recompute-activations" in flags:
        return "selective"
    return str(flags.get("--recompute-granularity", "none"))


def _overlap(flags: Mapping[str, Any]) -> list[str]:
    """What runs beside compute, of what arguments say; context parallelism and plain pipelines always do."""
    states = {
        "dp": "--overlap-grad-reduce" in flags,
        "tp": "--tp-comm-overlap" in flags or "--sequence-parallel" not in flags,
        "cp": True,
        "pp": "--no-overlap-p2p-communication" not in flags,
    }
    return [name for name, overlaps in states.items() if overlaps]


def _check(flags: Mapping[str, Any], model_flags: Mapping[str, Any], path: Path) -> None:
    """LaunchError for what is neither of the model nor read nor without effect."""
    if (layers := flags.get("--transformer-impl", FUSED_LAYERS)) != FUSED_LAYERS:
        raise LaunchError(
            f"launch={path}: --transformer-impl {layers} runs layers without Transformer Engine's kernels, attention "
            f"in parts, which is not simulated: take it out, or {FUSED_LAYERS}"
        )
    handled = {
        *model_flags,
        *MEGATRON_LM,
        *COUNTS,
        *WITHOUT_TIME,
        "--transformer-impl",
        "--fp16",
        "--recompute-activations",
    }
    if unknown := sorted(name for name in flags if name not in handled):
        raise LaunchError(f"launch={path}: {', '.join(unknown)} may change the step and is not read: take it out")
