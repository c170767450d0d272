"""A point as its framework spells it: Megatron-LM, Megatron-Bridge, torchtitan, DeepSpeed and FSDP2 by accelerate.

One table per framework says what each setting is called; a row gives a value, or None where nothing is to be said. What
a framework cannot be told is a LaunchError that says which axis to change.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ...datasets.loading import nearest
from ..question.canonical import RequestError
from ..question.requests import SimulateRequest
from ..question.stack import Stack, load_stack
from ..trace.models import known_models, resolve, shipped_source
from .accelerate import training_script
from .architecture import megatron_model
from .launch_adapters import bridge_linears, check_trained_weights
from .launch_errors import LaunchError
from .launch_point import Launch
from .request import SearchRequest, request_of, set_up

STACKS = {  # what each runs, as its files are read back
    "megatron-lm": "megatron",
    "megatron-bridge": "megatron",
    "torchtitan": "torchtitan",
    "deepspeed": "deepspeed",
    "accelerate": "torch",
}
TITAN_EAGER = "torchtitan_eager"  # what a file of torchtitan without compile.enable is read back as
TITAN_MODELS = {  # shipped models that torchtitan has (torchtitan/models of 0.2) -> its model.name, model.flavor
    **dict.fromkeys(("llama3_8b", "llama3_1_8b"), ("llama3", "8B")),
    **dict.fromkeys(("llama3_70b", "llama3_1_70b", "llama3_3_70b"), ("llama3", "70B")),
    **dict.fromkeys(("llama3_405b", "llama3_1_405b"), ("llama3", "405B")),
    "llama4_scout": ("llama4", "17bx16e"),
    "llama4_maverick": ("llama4", "17bx128e"),
    **dict.fromkeys(("deepseek_v3", "deepseek_r1"), ("deepseek_v3", "671B")),
    **{
        f"qwen3_{size.lower().replace('-', '_').replace('.', '_')}": ("qwen3", size)
        for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B")
    },
    "gpt_oss_20b": ("gpt_oss", "20b"),
    "gpt_oss_120b": ("gpt_oss", "120b"),
}
FP8 = {"fp8": "hybrid", "mxfp8": "e4m3", "fp8_block": "e4m3"}
FP8_RECIPES = {"fp8": "tensorwise", "mxfp8": "mxfp8", "fp8_block": "blockwise"}

MADE_UP = {  # what a run needs beside model and layout: to be replaced
    "--mock-data": True,
    "--train-iters": 100,
    "--lr": 3e-4,
    "--lr-decay-style": "constant",
    "--eval-iters": 0,
    "--log-interval": 1,
}
RECIPES = {  # of Megatron-Bridge for mixed precision, by the format of linear layers
    "": "bf16_mixed",
    "fp8": "bf16_with_fp8_current_scaling_mixed",
    "fp8_block": "bf16_with_fp8_subchannel_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
}


Rule = Callable[[Launch], Any]


def _when(condition: bool, value: Any = True) -> Any:
    return value if condition else None


SIZES = {  # of a step, and degrees of its layout -> what Megatron-LM and Megatron-Bridge call them
    "seq_len": ("--seq-length", "model.seq_length"),
    "micro_batch": ("--micro-batch-size", "train.micro_batch_size"),
    "global_batch": ("--global-batch-size", "train.global_batch_size"),
}
DEGREES = {
    "tp": ("--tensor-model-parallel-size", "model.tensor_model_parallel_size"),
    "pp": ("--pipeline-model-parallel-size", "model.pipeline_model_parallel_size"),
    "vpp": ("--num-virtual-stages-per-pipeline-rank", "model.virtual_pipeline_model_parallel_size"),
    "cp": ("--context-parallel-size", "model.context_parallel_size"),
    "ep": ("--expert-model-parallel-size", "model.expert_model_parallel_size"),
    "etp": ("--expert-tensor-parallel-size", "model.expert_tensor_parallel_size"),
}


def settings_called(at: int) -> dict[str, str]:
    """The settings of ``opcast simulate`` by what Megatron-LM (0) or Megatron-Bridge (1) calls them."""
    sizes = {names[at]: f"workload.{name}" for name, names in SIZES.items()}
    return sizes | {names[at]: f"parallel.{name}" for name, names in DEGREES.items()}


def _size(name: str, launch: Launch) -> Any:
    work = launch.request.work
    return work.sequences if name == "global_batch" else getattr(work, name)


def _degree(name: str, launch: Launch) -> Any:
    return _when(name != "vpp" or launch.parallel.vpp > 1, getattr(launch.parallel, name))


MEGATRON_LM: dict[str, Rule] = {
    **{names[0]: partial(_size, name) for name, names in SIZES.items()},
    **{names[0]: partial(_degree, name) for name, names in DEGREES.items()},
    "--expert-model-parallel-size": lambda x: _when(x.parallel.ep > 1, x.parallel.ep),
    "--expert-tensor-parallel-size": lambda x: _when(x.parallel.ep > 1, x.parallel.etp),
    "--sequence-parallel": lambda x: _when(x.parallel.sequence_parallel),
    "--use-distributed-optimizer": lambda x: _when(x.parallel.zero_stage > 0),
    "--use-megatron-fsdp": lambda x: _when(x.parallel.zero_stage > 1),
    "--data-parallel-sharding-strategy": lambda x: _sharding(x),
    "--no-gradient-accumulation-fusion": lambda x: _when(x.parallel.zero_stage > 1),
    "--ckpt-format": lambda x: _when(x.parallel.zero_stage > 1, "fsdp_dtensor"),
    "--overlap-grad-reduce": lambda x: _when("dp" in x.stack.overlap),
    "--overlap-param-gather": lambda x: _when("dp" in x.stack.overlap and x.parallel.zero_stage > 0),
    "--tp-comm-overlap": lambda x: _when("tp" in x.stack.overlap and x.parallel.sequence_parallel),
    "--no-overlap-p2p-communication": lambda x: _when(x.parallel.vpp > 1 and "pp" not in x.stack.overlap),
    "--recompute-granularity": lambda x: _when(x.request.recompute != "none", _recompute(x)),
    "--recompute-method": lambda x: _when(_recompute(x) == "full", "uniform"),
    "--recompute-num-layers": lambda x: _when(_recompute(x) == "full", 1),
    "--bf16": lambda x: _when(x.request.precision in ("bf16", "auto")),
    "--fp16": lambda x: _when(x.request.precision == "fp16"),
    "--fp8-format": lambda x: FP8.get(x.request.quantization),
    "--fp8-recipe": lambda x: FP8_RECIPES.get(x.request.quantization),
}
MEGATRON_BRIDGE: dict[str, Rule] = {
    **{names[1]: partial(_degree, name) for name, names in DEGREES.items()},
    "model.sequence_parallel": lambda x: x.parallel.sequence_parallel,
    **{names[1]: partial(_size, name) for name, names in SIZES.items()},
    "model.recompute_granularity": lambda x: _when(x.request.recompute != "none", _recompute(x)),
    "model.recompute_method": lambda x: _when(_recompute(x) == "full", "uniform"),
    "model.recompute_num_layers": lambda x: _when(_recompute(x) == "full", 1),
    "ddp.use_distributed_optimizer": lambda x: x.parallel.zero_stage > 0,
    "ddp.use_megatron_fsdp": lambda x: _when(x.parallel.zero_stage > 1),
    "checkpoint.ckpt_format": lambda x: _when(x.parallel.zero_stage > 1, "fsdp_dtensor"),
    "model.gradient_accumulation_fusion": lambda x: _when(x.parallel.zero_stage > 1, False),
    "ddp.data_parallel_sharding_strategy": lambda x: _sharding(x),
    "ddp.overlap_grad_reduce": lambda x: "dp" in x.stack.overlap,
    "ddp.overlap_param_gather": lambda x: "dp" in x.stack.overlap and x.parallel.zero_stage > 0,
    "comm_overlap.tp_comm_overlap": lambda x: "tp" in x.stack.overlap and x.parallel.sequence_parallel,
    "comm_overlap.overlap_p2p_comm": lambda x: _when(x.parallel.vpp > 1, "pp" in x.stack.overlap),
    "mixed_precision": lambda x: _mixed(x),
    "peft.dim": lambda x: x.request.work.lora_rank or None,
    "peft.dropout": lambda x: _when(x.request.work.lora_rank > 0, x.request.work.lora_dropout),
    "peft.target_modules": lambda x: bridge_linears(x),
}
TORCHTITAN: dict[str, Rule] = {
    "training.seq_len": lambda x: x.request.work.seq_len,
    "training.local_batch_size": lambda x: _local_batch(x),
    "training.global_batch_size": lambda x: x.request.work.sequences,
    "training.mixed_precision_param": lambda x: "bfloat16",
    "parallelism.data_parallel_replicate_degree": lambda x: _replicas(x),
    "parallelism.data_parallel_shard_degree": lambda x: x.dp // _replicas(x),
    "parallelism.fsdp_reshard_after_forward": lambda x: "always" if x.parallel.zero_stage == 3 else "never",
    "parallelism.tensor_parallel_degree": lambda x: x.parallel.tp,
    "parallelism.pipeline_parallel_degree": lambda x: x.parallel.pp,
    "parallelism.pipeline_parallel_schedule": lambda x: _when(x.parallel.pp > 1, _schedule(x)),
    "parallelism.pipeline_parallel_microbatch_size": lambda x: _when(x.parallel.pp > 1, x.request.work.micro_batch),
    "parallelism.pipeline_parallel_layers_per_stage": lambda x: _when(x.parallel.pp > 1, _layers_a_stage(x)),
    "parallelism.pipeline_parallel_first_stage_less_layers": lambda x: _when(x.parallel.pp > 1, 0),
    "parallelism.pipeline_parallel_last_stage_less_layers": lambda x: _when(x.parallel.pp > 1, 0),
    "parallelism.context_parallel_degree": lambda x: x.parallel.cp,
    "parallelism.expert_parallel_degree": lambda x: x.parallel.ep,
    "activation_checkpoint.mode": lambda x: _recompute(x),
    "compile.enable": lambda x: _compiles(x.stack),
}


def _compiles(stack: Stack) -> bool:
    return "pointwise" in stack.fusion


def _sharding(launch: Launch) -> str | None:
    return {2: "optim_grads", 3: "optim_grads_params"}.get(launch.parallel.zero_stage)


def _recompute(launch: Launch) -> str:
    if launch.request.recompute not in ("none", "full", "selective"):
        raise LaunchError(
            f"recompute={launch.request.recompute} has no argument: take space.recompute=[none,selective,full]"
        )
    return launch.request.recompute


def _mixed(launch: Launch) -> str:
    if launch.request.precision == "fp16" and not launch.request.quantization:
        return "fp16_mixed"
    if launch.request.quantization not in RECIPES:
        raise LaunchError(
            f"precision={launch.request.quantization} has no recipe of Megatron-Bridge: "
            "take bf16, fp8, fp8_block or mxfp8"
        )
    return RECIPES[launch.request.quantization]


def _replicas(launch: Launch) -> int:
    shard = launch.parallel.shard or launch.dp
    return launch.dp if launch.parallel.zero_stage == 0 else max(launch.dp // shard, 1)


def _local_batch(launch: Launch) -> int:
    """Sequences of one call: a pipeline takes all of its micro-batches, without one gradients are accumulated."""
    work = launch.request.work
    return work.sequences // launch.dp if launch.parallel.pp > 1 else work.micro_batch


def _layers_a_stage(launch: Launch) -> int:
    layers = int(launch.model("num_hidden_layers", "n_layer") or 0)
    return -(-layers // (launch.parallel.pp * launch.parallel.vpp))


def _schedule(launch: Launch) -> str:
    names = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "gpipe": "GPipe"}
    if launch.parallel.schedule not in names:
        raise LaunchError(
            f"schedule={launch.parallel.schedule} has no name in torchtitan: take 1f1b, interleaved or gpipe"
        )
    return names[launch.parallel.schedule]


def _torchtitan_can(launch: Launch) -> None:
    if launch.parallel.zero_stage == 1:
        raise LaunchError("torchtitan shards gradients and weights together: take space.zero_stage=[0,2,3]")
    if launch.request.quantization:
        raise LaunchError(
            f"precision={launch.request.quantization} is a converter in torchtitan's own code: take precision=bf16"
        )
    if launch.parallel.tp > 1 and not launch.parallel.sequence_parallel:
        raise LaunchError("torchtitan's tensor parallelism is sequence parallel: take space.sequence_parallel=true")


def stack_of(framework: str) -> Stack:
    """What a framework that is told of a step runs. RequestError for one that is none of :data:`STACKS`."""
    if framework not in STACKS:
        raise RequestError(f"framework={framework} is none that trains; {nearest(framework, STACKS, 'choose from')}")
    return load_stack(STACKS[framework])


def usual_framework(stack: Stack | None) -> str:
    """Whom a launch file is for where nobody says: torchtitan's stacks have their own, all others Megatron-LM's."""
    return "torchtitan" if stack is not None and stack.id.startswith("torchtitan") else "megatron-lm"


def other_stack(request: SimulateRequest, framework: str) -> str:
    """What to say of a step that was simulated with another stack than its framework's; empty for none."""
    stack = request.stack
    if stack is None:
        return ""
    eager = framework == "torchtitan" and not _compiles(stack)
    runs = TITAN_EAGER if eager else stack_of(framework).id
    if stack.id == runs:
        return ""
    return (
        f"stack={stack.id} was searched, and `opcast simulate launch=` takes files of {framework} as stack={runs}: "
        f"leave stack= out to search that, or say stack={stack.id} there, too"
    )


def launch_point(request: SearchRequest, point: Mapping[str, Any], framework: str | None) -> tuple[str, str]:
    """The launch file of a point, and what to say where it runs something else than was searched; without a ``stack``
    Megatron-LM's was."""
    framework = framework or usual_framework(request.base.stack)
    base = replace(request.base, stack=request.base.stack or stack_of(framework))
    text = launch_file(request_of(set_up(replace(request, base=base)), point), framework)
    return text, other_stack(request.base, framework)


def launch_file(request: SimulateRequest, framework: str) -> str:
    """The text that tells a framework to run the step of a request: arguments of a command line, or TOML.

    Without a stack it is what the framework runs. LaunchError for what it cannot be told; RequestError for a framework
    that is none of :data:`STACKS`.
    """
    usual = stack_of(framework)
    request = replace(request, stack=request.stack or usual)
    launch = Launch(request, dict(resolve(request.model).language))
    check_trained_weights(launch, framework)
    if launch.parallel.schedule in ("zb-h1", "dualpipe", "gpipe") and framework != "torchtitan":
        raise LaunchError(f"schedule={launch.parallel.schedule} is none of Megatron's: take space.schedule=1f1b")
    if framework == "torchtitan":
        _torchtitan_can(launch)
        return _titan_file(launch)
    if framework in ("deepspeed", "accelerate"):
        return training_script(launch, framework, header(launch), hub_id(launch))
    if framework == "megatron-lm":
        return megatron_script(launch)
    lines = [f"{name}={word(value)}" for name, value in filled(MEGATRON_BRIDGE, launch).items()]
    recipe = (
        ["# Beside the model's recipe for adapters, whose peft is a LoRA."] if launch.request.work.lora_rank else []
    )
    return "\n".join([*header(launch), *recipe, *lines, ""])


def _titan_file(launch: Launch) -> str:
    """TOML with torchtitan's name of the model, or a line that asks for one: else torchtitan starts a tiny model."""
    name = resolve(launch.request.model).name
    spelled = TITAN_MODELS.get(name) if _ships(launch) else None
    if spelled is None:
        ask = "# torchtitan has no such model by name: put model.name and model.flavor of one of yours here."
        return toml(filled(TORCHTITAN, launch), [*header(launch), ask])
    model = dict(zip(("model.name", "model.flavor"), spelled, strict=True))
    return toml(model | filled(TORCHTITAN, launch), header(launch))


def megatron_script(launch: Launch) -> str:
    """A shell script for a checkout of Megatron-LM, the same on every node: the model, the layout, made-up data."""
    assert launch.request.cluster is not None
    cluster = launch.request.cluster
    flags = megatron_model(launch.config) | filled(MEGATRON_LM, launch)
    flags["--max-position-embeddings"] = max(
        launch.request.work.seq_len or 0, flags.get("--max-position-embeddings") or 0
    )
    tokenizer = hub_id(launch)
    tokens = {"--tokenizer-type": "HuggingFaceTokenizer", "--tokenizer-model": tokenizer}
    flags |= {name: value for name, value in MADE_UP.items() if name not in flags}
    flags |= tokens if tokenizer else {"--tokenizer-type": "NullTokenizer"}
    start = (
        f"exec torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.devices_per_node} "
        '--node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}" '
        "pretrain_gpt.py"
    )
    return "\n".join(
        [
            "#!/bin/sh",
            *header(launch),
            "# Run it in a checkout of Megatron-LM, on each node with its NODE_RANK and with MASTER_ADDR.",
            "# Data are made up: put --data-path, and your own --train-iters and --lr, in the place of the last lines.",
            " \\\n".join([start, *arguments(flags)]),
            "",
        ]
    )


def hub_id(launch: Launch) -> str:
    """The hub id of a shipped model that was not changed; empty for any other."""
    name = resolve(launch.request.model).name
    source = shipped_source(name)
    return source if source and dict(resolve(name).language) == dict(launch.config) else ""


def filled(table: Mapping[str, Callable[[Any], Any]], launch: Any) -> dict[str, Any]:
    """The settings of a table that have something to say."""
    values = {name: rule(launch) for name, rule in table.items()}
    return {name: value for name, value in values.items() if value is not None}


def header(launch: Launch) -> list[str]:
    """What the file is for."""
    assert launch.request.cluster is not None
    cluster = launch.request.cluster
    name = resolve(launch.request.model).name
    name = name if _ships(launch) else f"a model like {name}"
    return [f"# {name} on {cluster.nodes} x {cluster.devices_per_node} GPUs ({cluster.id}), dp={launch.dp}"]


def _ships(launch: Launch) -> bool:
    """Whether the model is the one that comes along under its name, and not one with settings of its own."""
    name = resolve(launch.request.model).name
    return dict(resolve(name).language if name in known_models() else {}) == dict(launch.config)


def arguments(values: Mapping[str, Any]) -> list[str]:
    """Arguments of a command line, flags by their names alone."""
    return [name if value is True else f"{name} {shlex.quote(str(value))}" for name, value in values.items()]


def word(value: Any) -> str:
    """A value as Hydra and TOML spell it."""
    if isinstance(value, list):
        return f"[{','.join(map(word, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def toml(values: Mapping[str, Any], comments: Sequence[str]) -> str:
    """Settings with dots in their names as tables of TOML."""
    tables: dict[str, list[str]] = {}
    for name, value in values.items():
        head, _, key = name.partition(".")
        tables.setdefault(head, []).append(f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {word(value)}")
    return "\n".join([*comments, *(line for head, lines in tables.items() for line in ("", f"[{head}]", *lines)), ""])
