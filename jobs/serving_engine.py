"""``engine=vllm args="…" calibrate=LOGFILE`` of ``opcast serving``: an engine as its users start it, as settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .show import BadInputError

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
}
LARGEST_BYTES = 1 << 26


def with_engine(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with what an engine's own arguments and its start-up log say.

    ServingEngineError for an engine or argument that does not exist, KvError for a log that says nothing of memory,
    BadInputError for arguments of no engine and a log that cannot be read.
    """
    made = dict(config)
    name = (made.get("engine") or {}).get("serving")
    if name:
        made = started(made, str(name), str(config.get("args") or ""))
    elif config.get("args"):
        raise BadInputError(f"args={config['args']!r} needs to know whose they are: engine=vllm, sglang or trtllm")
    if config.get("calibrate"):
        kv = dict(made.get("kv") or {})
        made["kv"] = kv | {"seen": start_up(Path(str(config["calibrate"])).expanduser())}
    return made


def started(config: dict[str, Any], name: str, text: str) -> dict[str, Any]:
    """The configuration of an engine that is started with these arguments."""
    from ..simulator.serving.connect import usual_engine_stack
    from ..simulator.serving.engine_args import read_arguments
    from ..simulator.serving.engines import load_serving_engine

    engine = load_serving_engine(name)
    given = read_arguments(engine, text)
    stack = config.get("stack") or usual_engine_stack(engine.id)
    scheduler = dict(config["scheduler"]) | {"policy": engine.id}
    scheduler |= {SCHEDULER[key]: value for key, value in given.limits.items() if key in SCHEDULER}
    if "overlapped" in given.host:
        scheduler["async_scheduling"] = given.host["overlapped"]
    made = config | {"scheduler": scheduler, "stack": {**stack, **({"cuda_graph": False} if given.eager else {})}}
    made["parallel"] = dict(config["parallel"]) | dict(given.parallel)
    if given.parallel.get("dp", 1) > 1:
        made["attention_dp"] = given.parallel["dp"]
    made["kv"] = dict(config["kv"]) | memory(given)
    if given.kv.get("dtype") not in (None, "same"):
        made["options"] = {"kv_dtype": given.kv["dtype"]}
    if given.quantization:
        made["precision"] = dict(config["precision"]) | {"quantization": given.quantization}
    return made


def memory(given: EngineArguments) -> dict[str, Any]:
    """What arguments say of KV memory, as settings: blocks, tokens of a block, the fraction, the largest graph."""
    kv = given.kv
    block = kv.get("block_tokens")
    blocks = kv.get("blocks") or (kv["tokens"] // (block or 1) if "tokens" in kv else None)
    found = {"blocks": blocks, "block_tokens": block, "fraction": kv.get("fraction")}
    found["graphs"] = 0 if given.eager else given.graphs.get("most")
    return {name: value for name, value in found.items() if value is not None}


def start_up(path: Path) -> dict[str, Any]:
    """What an engine's start-up log says of its memory."""
    from ..simulator.serving.kv_memory import overheads_of

    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise BadInputError(f"calibrate={path}: larger than {LARGEST_BYTES >> 20} MiB; cut it after start-up")
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise BadInputError(f"calibrate={path} cannot be read: {error.strerror}") from None
    return {name: value for name, value in asdict(overheads_of(lines, str(path))).items() if value is not None}
