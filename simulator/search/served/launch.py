"""A way to serve as its engine spells it: commands of vLLM, SGLang and TensorRT-LLM, or a Kubernetes manifest.

One table per engine says what each setting is called; a row gives a value, True for a flag, or None where nothing is to
be said. What an engine cannot be told is a LaunchError that says which axis to change.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from ....datasets.loading import nearest
from ...question.canonical import RequestError
from ...serving.policies import policy_of
from ...trace.models import shipped_source
from ..launch import LaunchError, filled
from .kubernetes import PORT as KUBERNETES_PORT
from .kubernetes import manifest
from .request import ServedSearchRequest
from .roles import BOOTSTRAP_PORT, BOTH, DECODE, PORTS, PREFILL, ServedRole, roles

FRAMEWORKS = ("vllm", "sglang", "trtllm", "kubernetes")
Rule = Callable[[ServedRole], Any]


def _above(value: int, least: int = 1) -> int | None:
    return value if value > least else None


VLLM: dict[str, Rule] = {
    "--tensor-parallel-size": lambda x: x.tp,
    "--pipeline-parallel-size": lambda x: _above(x.pp),
    "--data-parallel-size": lambda x: _above(x.dp),
    "--enable-expert-parallel": lambda x: True if x.ep > 1 else None,
    "--max-num-seqs": lambda x: x.batch,
    "--max-num-batched-tokens": lambda x: x.max_tokens,
    "--max-model-len": lambda x: x.max_len,
    "--quantization": lambda x: {"fp8": "fp8"}.get(x.quantization),
    "--kv-cache-dtype": lambda x: {"fp8": "fp8"}.get(x.kv_dtype),
    "--kv-transfer-config": lambda x: None if x.role == BOTH else _connector(x),
    "--port": lambda x: PORTS[x.role],
}
SGLANG: dict[str, Rule] = {
    "--tp-size": lambda x: x.ranks,
    "--pp-size": lambda x: _above(x.pp),
    "--attn-dp-size": lambda x: _above(x.dp),
    "--ep-size": lambda x: _above(x.ep),
    "--max-running-requests": lambda x: x.batch * x.dp,
    "--chunked-prefill-size": lambda x: x.max_tokens * x.dp,
    "--context-length": lambda x: x.max_len,
    "--quantization": lambda x: {"fp8": "fp8"}.get(x.quantization),
    "--kv-cache-dtype": lambda x: {"fp8": "fp8_e4m3"}.get(x.kv_dtype),
    "--disaggregation-mode": lambda x: x.role or None,
    "--disaggregation-transfer-backend": lambda x: "nixl" if x.role else None,
    "--disaggregation-bootstrap-port": lambda x: BOOTSTRAP_PORT if x.role == PREFILL else None,
    "--host": lambda x: "0.0.0.0" if x.role else None,
    "--port": lambda x: PORTS[x.role],
}
TRTLLM: dict[str, Rule] = {
    "--tp_size": lambda x: x.ranks,
    "--pp_size": lambda x: _above(x.pp),
    "--ep_size": lambda x: _above(x.ep),
    "--max_batch_size": lambda x: x.batch,
    "--max_num_tokens": lambda x: x.max_tokens,
    "--max_seq_len": lambda x: x.max_len,
    "--extra_llm_api_options": lambda x: f"{x.role or 'both'}.yaml",
    "--port": lambda x: PORTS[x.role],
}
COMMANDS = {
    "vllm": ("vllm serve {model}", VLLM),
    "sglang": ("python -m sglang.launch_server --model-path {model}", SGLANG),
    "trtllm": ("trtllm-serve {model}", TRTLLM),
}


def _connector(role: ServedRole) -> str:
    kv_role = {PREFILL: "kv_producer", DECODE: "kv_consumer"}[role.role]
    return json.dumps({"kv_connector": "NixlConnector", "kv_role": kv_role})


def launch_serving(request: ServedSearchRequest, row: Mapping[str, Any], framework: str | None) -> str:
    """The text that starts a point: a shell script of commands, or a Kubernetes manifest (``kubernetes``).

    Without a ``framework`` the engine of the point's policy. LaunchError for what it cannot be told; RequestError for
    one that is none of :data:`FRAMEWORKS`.
    """
    chosen = framework or policy_of(row["policy"]).framework
    if chosen not in FRAMEWORKS:
        raise RequestError(f"framework={chosen} is none that serves; {nearest(chosen, FRAMEWORKS, 'choose from')}")
    model, servers = served_name(request.step.model), roles(request, row)
    if chosen == "kubernetes":
        words = [command("sglang", model, each, KUBERNETES_PORT) for each in servers]
        per_node = request.clusters()[row["cluster"]].devices_per_node
        return manifest(f"{model} on {row['cluster']}", servers, words, per_node)
    if chosen == "vllm" and any(each.ep not in (1, each.ranks) for each in servers):
        raise LaunchError("vLLM shares experts out over all tensor and data ranks: take space.ep=[] or 1")
    return "\n".join([*_header(row, servers), *_files(chosen, servers), *_commands(chosen, model, servers), ""])


def served_name(model: Any) -> str:
    """What an engine is told to load: the hub id that a shipped model is of, or the model as it was given."""
    name = (
        str(model.get("name", "MODEL")) if isinstance(model, Mapping) else model if isinstance(model, str) else "MODEL"
    )
    return shipped_source(name) or name


def command(framework: str, model: str, role: ServedRole, port: int | None = None) -> list[str]:
    """The words of a server's command; at a ``port`` of its own that others reach."""
    start, table = COMMANDS[framework]
    words = shlex.split(start.format(model=shlex.quote(model)))
    found = filled(table, role) | ({} if port is None else {"--port": port, "--host": "0.0.0.0"})
    for name, value in found.items():
        words += [name] if value is True else [name, str(value)]
    return words


def _header(row: Mapping[str, Any], servers: list[ServedRole]) -> list[str]:
    said = [f"{each.replicas} x {each.role or 'server'} of {each.devices} GPUs" for each in servers]
    return ["#!/bin/sh", f"# {', '.join(said)} ({row['cluster']}); each server is started on GPUs of its own"]


def _files(framework: str, servers: list[ServedRole]) -> list[str]:
    """What TensorRT-LLM is told in files: attention data ranks, how caches move, and its servers."""
    if framework != "trtllm":
        return []
    lines: list[str] = []
    for each in servers:
        said = [f"enable_attention_dp: {str(each.dp > 1).lower()}"]
        said += ["kv_cache_config:", f"  dtype: {each.kv_dtype}"] if each.kv_dtype else []
        said += ["cache_transceiver_config:", "  backend: DEFAULT"] if each.role else []
        lines += [f"cat > {each.role or 'both'}.yaml <<'END'", *said, "END"]
    if len(servers) > 1:
        lines += ["cat > servers.yaml <<'END'", "hostname: 0.0.0.0", "port: 8000", "backend: pytorch"]
        for name, each in zip(("context_servers", "generation_servers"), servers, strict=True):
            lines += [f"{name}:", f"  num_instances: {each.replicas}", "  urls:"]
            lines += [f"    - {each.role.upper()}_{at}:{PORTS[each.role]}" for at in range(each.replicas)]
        lines += ["END"]
    return lines


def _commands(framework: str, model: str, servers: list[ServedRole]) -> list[str]:
    lines = []
    for each in servers:
        lines += [f"# {each.replicas} times" + (f", {each.role}" if each.role else "")]
        lines += [shlex.join(command(framework, model, each)) + (" &" if each.role else "")]
    if len(servers) > 1:
        lines += ["# what users call: put the hosts of your servers in the place of names such as PREFILL_0"]
        lines += [router(framework, servers)]
    return lines


def router(framework: str, servers: list[ServedRole]) -> str:
    """The command of what stands before pools apart."""
    if framework == "trtllm":
        return "trtllm-serve disaggregated -c servers.yaml"
    if framework == "vllm":
        return (
            "# vLLM comes without one: its production-stack's or llm-d's router, or another that speaks Nixl's protocol"
        )
    urls: list[str] = []
    for each in servers:
        for at in range(each.replicas):
            urls += [f"--{each.role}", f"http://{each.role.upper()}_{at}:{PORTS[each.role]}"]
            urls += [str(BOOTSTRAP_PORT)] if each.role == PREFILL else []
    return shlex.join(["python", "-m", "sglang_router.launch_router", "--pd-disaggregation", *urls, "--port", "8000"])
