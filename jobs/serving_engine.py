"""``engine=vllm args="…" calibrate=LOGFILE`` of ``opcast serving``: an engine as its users start it, as settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..simulator.question.declaration import plain_default
from .show import BadInputError

if TYPE_CHECKING:
    from ..datasets.clusters import Cluster
    from ..simulator.question.declaration import RequestSetting
    from ..simulator.serving.engine_args import EngineArguments

SCHEDULER = {  # limits of an engine's arguments -> settings of the scheduler
    "max_tokens": "max_tokens",
    "max_seqs": "max_seqs",
    "chunk": "chunk",
    "max_model_len": "max_model_len",
    "chunked": "chunked_prefill",
    "prefix_caching": "prefix_caching",
    "long_prefill": "long_prefill_tokens",
    "mixed": "mixed_chunk",
    "conservativeness": "conservativeness",
    "wait_iterations": "wait_iterations",
    "wait_share": "wait_share",
    "watermark": "watermark",
    "whole_prompt": "whole_prompt",
    "balance_iterations": "balance_iterations",
    "gather_iterations": "gather_iterations",
    "queue": "queue",
}
LARGEST_BYTES = 1 << 26
OF_ARGUMENTS = ("parallel.", "precision.")  # groups in which arguments of an engine say the same


def apply_engine(
    values: Mapping[str, Any], settings: Sequence[RequestSetting], tell: Callable[[str], None]
) -> dict[str, Any]:
    """What was given of a served model with what its engine's own arguments and start-up log say.

    ``settings`` are those of the verb. ``tell`` is told which arguments are not simulated. ServingEngineError for an
    engine or argument that does not exist, KvError for a log that says nothing of memory, BadInputError for arguments
    of no engine, a log that is not there, and where what was given contradicts them.
    """
    settings_ = dict(values)
    name, text, log = (settings_.pop(name_, None) for name_ in ("engine", "args", "calibrate"))
    if name:
        settings_ = with_arguments(settings_, str(name), str(text or ""), settings, tell)
        if settings_.get("law") is not None:
            check_arguments(values, settings_, settings)
    elif text:
        raise BadInputError(f"args={text!r} needs to know whose they are: engine=vllm, sglang or trtllm")
    if log:
        kv = dict(settings_.get("kv") or {})
        settings_["kv"] = kv | {"seen": dict(kv.get("seen") or {}) | start_up(Path(str(log)).expanduser(), tell)}
    return settings_


def with_arguments(
    values: dict[str, Any], name: str, text: str, settings: Sequence[RequestSetting], tell: Callable[[str], None]
) -> dict[str, Any]:
    """What was given with the arguments that an engine is started with. BadInputError where they contradict."""
    from ..datasets.precisions import precision_of
    from ..simulator.question.keywords import OF_CLUSTER, clustered, framework
    from ..simulator.serving.connect import usual_serving_stack
    from ..simulator.serving.engine_args import read_arguments
    from ..simulator.serving.engines import load_serving_engine

    engine = load_serving_engine(name)
    read = read_arguments(engine, text)
    if read.not_simulated:
        tell(f"of {engine.id}'s arguments these are not simulated: {', '.join(read.not_simulated)}")
    stack = framework(values.get("stack")) or usual_serving_stack(engine.id)
    settings_ = values | {"stack": replace(stack, cuda_graph=False, eager=True) if read.eager else stack}
    own_scheduler = dict(values.get("scheduler") or {})
    scheduler: dict[str, Any] = {"policy": read.policy or engine.id}
    if own_scheduler.get("prefix_caching") is None:
        scheduler["prefix_caching"] = engine.prefix_caching
    if own_scheduler.get("max_model_len") in (None, "auto"):
        scheduler["max_model_len"] = None
    limits = dict(read.limits)
    if limits.get("queue") == "priority" and not has_classes(values.get("traffic")):
        tell(f"of {engine.id}'s arguments priority changes nothing: no request is of a class (traffic.classes)")
        del limits["queue"]
    scheduler |= {SCHEDULER[key]: value for key, value in limits.items() if key in SCHEDULER}
    if "overlapped" in read.host:
        scheduler["async_scheduling"] = read.host["overlapped"]
    if read.graphs.get("sizes") and not read.eager:
        scheduler["cuda_graphs"] = read.graphs["sizes"]
    settings_["scheduler"] = merge_group(settings, "scheduler", own_scheduler, scheduler)
    settings_["kv"] = merge_group(settings, "kv", values.get("kv"), memory(read))
    for group in ("admission", "tiers", "lora", "eplb"):
        said = getattr(read, group)
        if said:
            settings_[group] = merge_group(settings, group, values.get(group), said)
    if read.speculation:
        settings_["speculation"] = merge_group(
            settings, "speculation", values.get("speculation"), {"tokens": read.speculation}
        )
    parallel = dict(read.parallel)
    ranks, copies = parallel.pop("dp", 1), read.replicas
    if engine.data_parallel == "experts" and not has_experts(values.get("model")):
        ranks, copies = 1, ranks
        parallel.pop("ep", None)
    cluster = clustered(values.get("cluster"), {name_: values[name_] for name_ in OF_CLUSTER if name_ in values})
    check_devices(cluster, ranks * parallel.get("tp", 1) * parallel.get("pp", 1))
    settings_["replicas"] = values.get("replicas", 1) * copies
    if ranks > 1:
        if values.get("attention_dp", 1) not in (1, ranks):
            raise BadInputError(f"args say {ranks} ranks of attention, but attention_dp={values['attention_dp']}")
        settings_["attention_dp"] = ranks
    formats = {"quantization": read.quantization, "kv_dtype": read.kv.get("dtype", "auto").replace("auto", "")}
    chosen = precision_of(str(values["precision"]))[1] if "precision" in values else ""
    of_arguments = parallel | {name_: value for name_, value in formats.items() if value}
    settings_ = merge_group(settings, "", ({"quantization": chosen} if chosen else {}) | settings_, of_arguments)
    return settings_ | {"unpacked_by": engine.id if read.quantization in engine.unpacks else ""}


def has_classes(traffic: Any) -> bool:
    """Whether requests are of classes, or may be: a trace has its own."""
    values = traffic if isinstance(traffic, Mapping) else vars(traffic) if traffic is not None else {}
    return bool(values.get("classes") or values.get("trace"))


def check_arguments(
    values: Mapping[str, Any], argument_values: Mapping[str, Any], settings: Sequence[RequestSetting]
) -> None:
    """BadInputError where an engine's arguments set (``argument_values``) what a law leaves no room for."""
    for setting in settings:
        if setting.name == "kv":
            before = plain_default(setting.default) | dict(values.get("kv") or {})
            for name, value in (argument_values.get("kv") or {}).items():
                if value != before.get(name) and name not in ("blocks", "block_tokens"):
                    raise BadInputError(f"args say kv.{name}={value}, which needs a model: with law there is none")
        elif setting.path.startswith(OF_ARGUMENTS) and argument_values.get(setting.name) != values.get(setting.name):
            statement = f"args say {setting.path}={argument_values[setting.name]}"
            raise BadInputError(f"{statement}, which needs a model: with law there is none")


def merge_group(
    settings: Sequence[RequestSetting],
    group: str,
    user_values: Mapping[str, Any] | None,
    argument_values: Mapping[str, Any],
) -> dict[str, Any]:
    """The settings of a group (empty: of the replica itself) with those of the arguments.

    BadInputError where a user set one of them otherwise.
    """
    declared = {setting.name: setting for setting in settings}
    within = declared if not group else {setting.name: setting for setting in declared[group].inside}
    set_by_user = dict(user_values or {})
    for name, value in argument_values.items():
        set_to, usual = set_by_user.get(name), plain_default(within[name].default)
        if set_to not in (value, None, "", usual) and set_to != []:
            path = f"{group}.{name}" if group else within[name].path
            raise BadInputError(f"args say {path}={value}, but it is set to {set_to}: leave out one of them")
    return set_by_user | dict(argument_values)


def check_devices(cluster: Cluster | None, needed: int) -> None:
    """BadInputError where a replica needs more devices than the cluster has."""
    have = 1 if cluster is None else cluster.devices
    if needed > have:
        where = f"cluster={cluster.id} with cluster.nodes={cluster.nodes}" if cluster else "one device"
        raise BadInputError(f"args need {needed} devices, {where} has {have}: take a cluster of so many, or more nodes")


def has_experts(model: Any) -> bool:
    """Whether the model has experts, as far as its configuration says."""
    from ..simulator.serving.host import layers_and_experts
    from ..simulator.trace.models import resolve

    return model is not None and layers_and_experts(resolve(model).language)[1] > 0


def memory(arguments: EngineArguments) -> dict[str, Any]:
    """What arguments say of KV memory, as settings: blocks, tokens of a block, the fraction, the largest graph."""
    kv = arguments.kv
    block = kv.get("block_tokens")
    blocks = kv.get("blocks") or (kv["tokens"] // (block or 1) if "tokens" in kv else None)
    memory_settings = {"blocks": blocks, "block_tokens": block, "fraction": kv.get("fraction")}
    memory_settings["graphs"] = 0 if arguments.eager else arguments.graphs.get("most")
    if "bytes" in kv:
        memory_settings["seen"] = {"kv_gib": kv["bytes"] / 2**30}
    return {name: value for name, value in memory_settings.items() if value is not None}


def start_up(path: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """What an engine's start-up log says of its memory; ``tell`` is told where its lines disagree."""
    from ..simulator.serving.kv_memory import overheads_of

    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise BadInputError(f"calibrate={path}: larger than {LARGEST_BYTES >> 20} MiB; cut it after start-up")
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise BadInputError(f"calibrate={path} cannot be read: {error.strerror}") from None
    overheads = asdict(overheads_of(lines, f"calibrate={path}", tell))
    return {name: value for name, value in overheads.items() if value is not None}
