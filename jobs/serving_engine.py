"""``engine=vllm args="…" calibrate=LOGFILE`` of ``opcast serving``: an engine as its users start it, as settings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets.own_warnings import OpcastWarning
from .serving_unread import check_arguments
from .settings import read
from .show import CONFIG_DIRECTORY, BadInputError, say

if TYPE_CHECKING:
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
}
LARGEST_BYTES = 1 << 26


def with_engine(config: Mapping[str, Any], tell: Callable[[str], None] = say) -> dict[str, Any]:
    """The configuration with what an engine's own arguments and its start-up log say.

    ``tell`` is told which of them are not simulated. ServingEngineError for an engine or argument that does not exist,
    KvError for a log that says nothing of memory, BadInputError for arguments of no engine and a log that is not there.
    """
    made = dict(config)
    name = (made.get("engine") or {}).get("serving")
    if name:
        made = started(made, str(name), str(config.get("args") or ""), tell)
    elif config.get("args"):
        raise BadInputError(f"args={config['args']!r} needs to know whose they are: engine=vllm, sglang or trtllm")
    if config.get("calibrate"):
        kv = dict(made.get("kv") or {})
        seen = start_up(Path(str(config["calibrate"])).expanduser(), tell)
        made["kv"] = kv | {"seen": dict(kv.get("seen") or {}) | seen}
    return made


def started(config: dict[str, Any], name: str, text: str, tell: Callable[[str], None]) -> dict[str, Any]:
    """The configuration of an engine that is started with these arguments. BadInputError where settings contradict."""
    from ..simulator.serving.connect import usual_engine_stack
    from ..simulator.serving.engine_args import read_arguments
    from ..simulator.serving.engines import load_serving_engine

    engine = load_serving_engine(name)
    given = read_arguments(engine, text)
    if given.not_simulated:
        tell(f"of {engine.id}'s arguments these are not simulated: {', '.join(given.not_simulated)}")
    stack = config.get("stack") or usual_engine_stack(engine.id)
    made = config | {"stack": {**stack, **({"cuda_graph": False} if given.eager else {})}}
    scheduler: dict[str, Any] = {"policy": given.policy or engine.id}
    if (config["scheduler"] or {}).get("prefix_caching") is None:
        scheduler["prefix_caching"] = engine.prefix_caching
    if (config["scheduler"] or {}).get("max_model_len") in (None, "auto"):
        scheduler["max_model_len"] = None
    scheduler |= {SCHEDULER[key]: value for key, value in given.limits.items() if key in SCHEDULER}
    if "overlapped" in given.host:
        scheduler["async_scheduling"] = given.host["overlapped"]
    if given.graphs.get("sizes") and not given.eager:
        scheduler["cuda_graphs"] = given.graphs["sizes"]
    made["scheduler"] = joined("scheduler", config["scheduler"], scheduler)
    parallel = dict(given.parallel)
    ranks, copies = parallel.pop("dp", 1), given.replicas
    if engine.data_parallel == "experts" and not has_experts(config):
        ranks, copies = 1, ranks
        parallel.pop("ep", None)
    check_devices(config, ranks * parallel.get("tp", 1) * parallel.get("pp", 1))
    made["parallel"] = joined("parallel", config["parallel"], parallel)
    made["replicas"] = config["replicas"] * copies
    if ranks > 1:
        if config["attention_dp"] not in (1, ranks):
            raise BadInputError(f"args say {ranks} ranks of attention, but attention_dp={config['attention_dp']}")
        made["attention_dp"] = ranks
    made["kv"] = joined("kv", config["kv"], memory(given))
    formats = {"quantization": given.quantization, "kv_dtype": given.kv.get("dtype", "auto").replace("auto", "")}
    if any(formats.values()):
        said = {name: value for name, value in formats.items() if value}
        made["precision"] = joined("precision", config["precision"], said)
    if given.speculation:
        made["speculation"] = joined("speculation", config["speculation"], {"tokens": given.speculation})
    return made


def keywords(
    model: Any, settings: Mapping[str, Any], given: Mapping[str, Any], engine: str, args: str, calibrate: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """``settings`` of a step and groups of a served request, as Python has them, with what the engine's arguments and
    log say. The errors of :func:`with_engine`; what is not simulated is a warning."""
    from ..datasets.precisions import precision_of
    from ..simulator.question.keywords import OF_CLUSTER, clustered
    from ..simulator.question.plan import Parallel, load_stack, stack_from_dict
    from ..simulator.trace.models import resolve

    own = {name: value for name, value in settings.items() if value is not None}
    cluster = clustered(own.get("cluster"), {name: own[name] for name in OF_CLUSTER if name in own})
    stack = load_stack(own["stack"]) if isinstance(own.get("stack"), str) else own.get("stack")
    quantization = own.get("quantization") or precision_of(own.get("precision") or "auto")[1]
    before: dict[str, Any] = {
        "scheduler": {},
        "kv": {},
        "speculation": {},
        **given,
        "engine": {"serving": engine},
        "args": args,
        "calibrate": calibrate,
        "cluster": None if cluster is None else cluster.to_dict(),
        "model": {"config": {} if model is None else resolve(model).language},
        "stack": None if stack is None else asdict(stack),
        "parallel": {each.name: own[each.name] for each in fields(Parallel) if each.name in own},
        "precision": {"quantization": quantization, "kv_dtype": own.get("kv_dtype")},
    }
    made = with_engine(before, lambda text: warnings.warn(text, OpcastWarning, stacklevel=4))
    if given.get("law") is not None:
        check_arguments(before, made)
        return dict(settings), {name: made[name] for name in (*given, "scheduler", "kv")}
    own |= made["parallel"]
    own |= {name: made["precision"].get(name) or None for name in ("quantization", "kv_dtype")}
    if made.get("stack"):
        own["stack"] = stack_from_dict(made["stack"])
    return own, {name: made[name] for name in (*given, "scheduler", "kv", "speculation")}


def joined(group: str, own: Mapping[str, Any] | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group with those of the arguments. BadInputError where a user set one of them otherwise."""
    files = {"parallel": "parallel/default.yaml", "precision": "precision/auto.yaml"}
    whole = read(CONFIG_DIRECTORY / files.get(group, "serving.yaml"))
    usual, settings = whole if group in files else whole.get(group) or {}, dict(own or {})
    for name, value in given.items():
        set_to = settings.get(name)
        if set_to not in (value, None, "", usual.get(name)) and set_to != []:
            raise BadInputError(f"args say {group}.{name}={value}, but it is set to {set_to}: leave out one of them")
    return settings | dict(given)


def check_devices(config: Mapping[str, Any], needed: int) -> None:
    """BadInputError where a replica needs more devices than the cluster has."""
    cluster = config.get("cluster")
    have = int(cluster["nodes"]) * int(cluster["devices_per_node"]) if cluster else 1
    if needed > have:
        where = f"cluster={cluster['id']} with cluster.nodes={cluster['nodes']}" if cluster else "one device"
        raise BadInputError(f"args need {needed} devices, {where} has {have}: take a cluster of so many, or more nodes")


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether the model has experts, as far as its configuration says."""
    from ..simulator.serving.host import layers_and_experts

    model = config.get("model") or {}
    return layers_and_experts(model.get("config") or {})[1] > 0


def memory(given: EngineArguments) -> dict[str, Any]:
    """What arguments say of KV memory, as settings: blocks, tokens of a block, the fraction, the largest graph."""
    kv = given.kv
    block = kv.get("block_tokens")
    blocks = kv.get("blocks") or (kv["tokens"] // (block or 1) if "tokens" in kv else None)
    found = {"blocks": blocks, "block_tokens": block, "fraction": kv.get("fraction")}
    found["graphs"] = 0 if given.eager else given.graphs.get("most")
    if "bytes" in kv:
        found["seen"] = {"kv_gib": kv["bytes"] / 2**30}
    return {name: value for name, value in found.items() if value is not None}


def start_up(path: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """What an engine's start-up log says of its memory; ``tell`` is told where its lines disagree."""
    from ..simulator.serving.kv_memory import overheads_of

    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise BadInputError(f"calibrate={path}: larger than {LARGEST_BYTES >> 20} MiB; cut it after start-up")
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise BadInputError(f"calibrate={path} cannot be read: {error.strerror}") from None
    said = asdict(overheads_of(lines, f"calibrate={path}", tell))
    return {name: value for name, value in said.items() if value is not None}
