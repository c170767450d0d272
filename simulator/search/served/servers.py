"""Servers read back from what starts them: commands in a script, or YAML for Kubernetes.

Commands are those of vLLM, SGLang, TensorRT-LLM and Dynamo's workers of the three. Files that a script writes, or a
ConfigMap holds, are read with them. Prefill and decode are told apart as the engines are told.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....datasets.reading import flat, named_words, read_json, read_text, read_yaml
from ...serving.engine_args import read_arguments
from ...serving.engines import load_serving_engine
from ...trace.models import known_models, shipped_source
from ..launch_errors import LaunchError
from .roles import BOTH, DECODE, PREFILL

STARTS = (  # what a command begins with, whose it is, and whether it is Dynamo's
    (("vllm", "serve"), "vllm", False),
    (("-m", "vllm.entrypoints.openai.api_server"), "vllm", False),
    (("-m", "sglang.launch_server"), "sglang", False),
    (("trtllm-serve",), "trtllm", False),
    (("-m", "dynamo.vllm"), "vllm", True),
    (("-m", "dynamo.sglang"), "sglang", True),
    (("-m", "dynamo.trtllm"), "trtllm", True),
)
# what an image starts where a container has arguments alone: ENTRYPOINT of vLLM's docker/Dockerfile, vllm-openai
IMAGES = {"vllm/vllm-openai": ("vllm", "serve")}
MODELS = ("--model", "--model-path", "--model_path")
FILES = ("--extra_llm_api_options", "--extra-engine-args", "--config")
DYNAMO_TRTLLM = {
    "--tensor-parallel-size": "--tp_size",
    "--pipeline-parallel-size": "--pp_size",
    "--expert-parallel-size": "--ep_size",
}
OF_A_ROLE = (
    *("--disaggregation-transfer-backend", "--disaggregation-bootstrap-port", "--host", "--port"),
    "--cache_transceiver_config.backend",
)
WRITTEN = re.compile(r"^cat > (\S+) <<'?(\w+)'?\n(.*?)^\2$", re.M | re.S)


@dataclass(frozen=True)
class Server:
    """A command without its port: whose engine, which model, what it is told, and which role it has."""

    engine: str
    model: str
    words: tuple[str, ...]
    role: str = BOTH


def settings_of_servers(path: Path) -> dict[str, Any]:
    """The settings of ``opcast serving``, by their paths, that a file with servers says.

    LaunchError for a file without any, and for servers that differ within a role.
    """
    text = read_text(path.expanduser(), LaunchError, f"launch={path}")
    counts: dict[Server, int] = {}
    for server, copies in servers_of(path, text):
        counts[server] = counts.get(server, 0) + copies
    if not counts:
        raise LaunchError(
            f"launch={path} starts no server that opcast knows: vllm serve …, python -m sglang.launch_server …, "
            "trtllm-serve …, or YAML for Kubernetes with such commands"
        )
    by_role = {role: [server for server in counts if server.role == role] for role in (BOTH, PREFILL, DECODE)}
    both, prefill, decode = by_role.values()
    if (
        any(len(alike) > 1 for alike in by_role.values())
        or bool(both) == bool(prefill)
        or bool(prefill) != bool(decode)
    ):
        raise LaunchError(f"launch={path} starts servers that differ: opcast takes one kind, or one of each role")
    first = (both or prefill)[0]
    settings: dict[str, Any] = {"engine": first.engine, "args": shlex.join(first.words), "replicas": counts[first]}
    if name := known_name(first.model):
        settings["model"] = name
    if decode:
        settings["decode_pool.replicas"] = counts[decode[0]]
        settings |= _decode_pool(decode[0], first)
    return settings


def known_name(model: str) -> str:
    """The shipped model of a hub id, or a folder or name that opcast takes; empty for any other hub id."""
    shipped = next((name for name in known_models() if model and shipped_source(name) == model), "")
    return shipped or (model if model in known_models() or os.path.isdir(os.path.expanduser(model)) else "")


def _decode_pool(decode: Server, prefill: Server) -> dict[str, Any]:
    """What the pool that decodes has of its own."""
    read_settings, other = (
        read_arguments(load_serving_engine(server.engine), shlex.join(server.words)) for server in (decode, prefill)
    )
    settings: dict[str, Any] = {}
    parallel = {name: read_settings.parallel.get(name, 1) for name in ("tp", "pp", "ep")}
    if parallel != {name: other.parallel.get(name, 1) for name in parallel}:
        settings["decode_pool.parallel"] = parallel
    if (ranks := read_settings.parallel.get("dp", 1)) != other.parallel.get("dp", 1):
        settings["decode_pool.attention_dp"] = ranks
    if "max_seqs" in read_settings.limits:
        settings["decode_pool.max_seqs"] = read_settings.limits["max_seqs"]
    return settings


def servers_of(path: Path, text: str) -> Iterator[tuple[Server, int]]:
    """Every server of a script or of YAML, with how many there are."""
    if not text.startswith("#!"):
        servers = list(_of_yaml(path, text))
        if servers:
            yield from servers
            return
    files = {name: content for name, _, content in WRITTEN.findall(text)}
    for line in WRITTEN.sub("", text).replace("\\\n", " ").splitlines():
        try:
            words = [] if line.lstrip().startswith("#") else shlex.split(line.strip().removesuffix("&"))
        except ValueError:
            continue
        if server := _server(path, words, files):
            yield server, 1


def _of_yaml(path: Path, text: str) -> Iterator[tuple[Server, int]]:
    try:
        documents = [read_yaml(document, LaunchError) for document in re.split(r"^---\s*$", text, flags=re.M)]
    except LaunchError:
        return
    parts = [entry for entry in documents if isinstance(entry, Mapping)]
    maps = [part["data"] for part in parts if part.get("kind") == "ConfigMap" and isinstance(part.get("data"), Mapping)]
    files = {str(name): str(content) for config_map in maps for name, content in config_map.items()}
    for entry in parts:
        for words, copies in _containers(entry, 1):
            if server := _server(path, words, files):
                yield server, copies


def _containers(node: Any, replicas: int) -> Iterator[tuple[list[str], int]]:
    """Commands of containers, with the replicas of what they stand in."""
    if isinstance(node, Mapping):
        copies = node.get("replicas")
        replicas = copies if isinstance(copies, int) and not isinstance(copies, bool) else replicas
        if "command" in node or "args" in node:
            words = [*(_listed(node.get("command")) or _entrypoint(node)), *_listed(node.get("args"))]
            if words[:2] in (["/bin/sh", "-c"], ["sh", "-c"], ["bash", "-c"], ["/bin/bash", "-c"]):
                words = shlex.split(" ".join(words[2:]).replace("\\\n", " "))
            yield words, replicas
        for value in node.values():
            yield from _containers(value, replicas)
    elif isinstance(node, list):
        for value in node:
            yield from _containers(value, replicas)


def _entrypoint(container: Mapping[str, Any]) -> list[str]:
    """What the image of a container starts by itself."""
    image = str(container.get("image", ""))
    return next((list(start) for name, start in IMAGES.items() if name in image), [])


def _listed(words: Any) -> list[str]:
    return [str(word) for word in words] if isinstance(words, list) else []


def _server(path: Path, words: Sequence[str], files: Mapping[str, str]) -> Server | None:
    """The server that a command starts; None for any other command."""
    for start, engine, dynamo in STARTS:
        at = next((i for i in range(len(words)) if tuple(words[i : i + len(start)]) == start), None)
        if at is None or "disaggregated" in words:
            continue
        arguments = [word for word in words[at + len(start) :] if (start, word) != (("trtllm-serve",), "serve")]
        model = arguments.pop(0) if arguments and not arguments[0].startswith("-") else ""
        return _told(path, engine, model, arguments, files, dynamo)
    return None


def _told(path: Path, engine: str, model: str, words: list[str], files: Mapping[str, str], dynamo: bool) -> Server:
    role, settings = BOTH, []
    for name, values in named_words(words):
        if name in MODELS:
            model = values[0] if values else model
        elif name == "--disaggregation-mode":
            role = {"prefill": PREFILL, "decode": DECODE}.get(values[0] if values else "", role)
        elif name == "--kv-transfer-config":
            kinds = {"kv_producer": PREFILL, "kv_consumer": DECODE}
            role = next((name_of_role for kind, name_of_role in kinds.items() if values and kind in values[0]), role)
        elif name in FILES and values:
            role = {"prefill": PREFILL, "decode": DECODE}.get(Path(values[0]).stem, role)
            settings += _arguments(_file(path, values[0], files))
        elif name == "--override-engine-args" and values:
            settings += _arguments(read_json(values[0], LaunchError, f"launch={path}: {name}"))
        elif name not in OF_A_ROLE:
            settings += [DYNAMO_TRTLLM.get(name, name) if dynamo and engine == "trtllm" else name, *values]
    return Server(engine, model, tuple(settings), role)


def _file(path: Path, name: str, files: Mapping[str, str]) -> Any:
    """A file of arguments: written by the same script, or beside it."""
    text = files.get(Path(name).name)
    return read_yaml(path.expanduser().parent / name if text is None else text, LaunchError, f"launch={path}: {name}")


def _arguments(values: Any) -> list[str]:
    """Names with dots and their values, as words of a command."""
    words: list[str] = []
    for name, value in flat(values, "--") if isinstance(values, Mapping) else ():
        if name not in OF_A_ROLE:
            words += [name, *([] if value is True else [str(value).lower() if value is False else str(value)])]
    return words
