"""A way to serve as it is started: commands of vLLM, SGLang, TensorRT-LLM and Dynamo, llm-d's values, Kubernetes.

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
from .dynamo import FRONTEND, graph, spelled, worker
from .dynamo import TRTLLM as DYNAMO_TRTLLM
from .kubernetes import FILES, addresses, manifest
from .kubernetes import PORT as KUBERNETES_PORT
from .llm_d import helm_values, llm_d_port
from .request import ServedSearchRequest
from .roles import BOOTSTRAP_PORT, BOTH, DECODE, PORTS, PREFILL, PlacedServer, ServedRole, counts, placed, roles

FRAMEWORKS = ("vllm", "sglang", "trtllm", "dynamo", "llm-d", "kubernetes", "dynamo-kubernetes")
OF_KUBERNETES = ("llm-d", "kubernetes", "dynamo-kubernetes")
OF_AN_ENGINE = ("dynamo", "kubernetes", "dynamo-kubernetes")  # which run the engine of the point's policy
Rule = Callable[[ServedRole], Any]


def engine_started(framework: str, policy: str = "") -> str:
    """The engine that a framework starts: its own, vLLM by llm-d, else that of a policy; empty without one.

    RequestError for a framework that is none of :data:`FRAMEWORKS`.
    """
    if framework not in FRAMEWORKS:
        raise RequestError(
            f"framework={framework} is none that serves; {nearest(framework, FRAMEWORKS, 'choose from')}"
        )
    if framework in OF_AN_ENGINE:
        return policy_of(policy).framework if policy else ""
    return "vllm" if framework == "llm-d" else framework


def other_engine(framework: str | None, policy: str) -> str:
    """What to say of a way that was searched with another engine's policy than its framework starts; empty for none."""
    runs, searched = engine_started(framework, policy) if framework else "", policy_of(policy).framework
    if runs in ("", searched):
        return ""
    return (
        f"policy={policy} was searched, and framework={framework} starts {runs}: leave space.policy out to search that"
    )


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


DYNAMO_TABLES = {"vllm": VLLM, "sglang": SGLANG, "trtllm": DYNAMO_TRTLLM}
ROUTER_PORT = 7000  # beside servers of one pool at 8000 and on
NIXL_PORT, NIXL_PORTS = 20100, 16  # of vLLM's side channel: one for each of a server's ranks
DYNAMO_PORT = 9100


def _connector(role: ServedRole) -> str:
    kv_role = {PREFILL: "kv_producer", DECODE: "kv_consumer"}[role.role]
    return json.dumps({"kv_connector": "NixlConnector", "kv_role": kv_role})


def launch_serving(request: ServedSearchRequest, row: Mapping[str, Any], framework: str | None) -> str:
    """The text that starts a point: a shell script of commands, or YAML for Kubernetes.

    Without a ``framework`` the engine of the point's policy. LaunchError for what it cannot be told; RequestError for
    one that is none of :data:`FRAMEWORKS`.
    """
    chosen = framework or policy_of(row["policy"]).framework
    engine = engine_started(chosen, row["policy"])
    model, servers = served_name(request.step.model), roles(request, row)
    if engine == "vllm" and any(server.ep not in (1, server.ranks) for server in servers):
        raise LaunchError("vLLM shares experts out over all tensor and data ranks: take space.ep=[] or 1")
    clusters, unlike = request.clusters(), len({server.cluster for server in servers}) > 1
    if unlike and chosen in OF_KUBERNETES:
        raise LaunchError(
            f"framework={chosen} has no name of yours for nodes with these GPUs or those: take framework=dynamo"
        )
    per_node = clusters[row["cluster"]].devices_per_node
    title = f"{model} on {row['cluster']}"
    if chosen == "kubernetes":
        files = _files(engine, servers, {server.role: addresses(server) for server in servers}, KUBERNETES_PORT)
        words = [_in_a_pod(command(engine, model, server, KUBERNETES_PORT)) for server in servers]
        return manifest(engine, title, servers, words, per_node, files)
    if chosen == "llm-d":
        return helm_values(model, servers, [command("vllm", model, server, llm_d_port(server)) for server in servers])
    if chosen == "dynamo-kubernetes":
        words = [worker(engine, DYNAMO_TABLES[engine], model, server) for server in servers]
        return graph(engine, title, servers, words, per_node)
    copies = placed(servers, clusters)
    lines = [
        *_header(servers),
        *(_written(engine, servers, copies) if chosen != "dynamo" else []),
        *_commands(chosen, engine, model, copies),
    ]
    return "\n".join([*lines, *_front(chosen, model, servers, copies), ""])


def launch_way(request: ServedSearchRequest, row: Mapping[str, Any], framework: str | None) -> tuple[str, str]:
    """The text that starts a point, and what to say where it runs something else than was searched."""
    return launch_serving(request, row, framework), other_engine(framework, row["policy"])


def served_name(model: Any) -> str:
    """What an engine is told to load: the hub id that a shipped model is of, or the model as it was given."""
    name = (
        str(model.get("name", "MODEL")) if isinstance(model, Mapping) else model if isinstance(model, str) else "MODEL"
    )
    return shipped_source(name) or name


def command(
    framework: str, model: str, role: ServedRole, port: int | None = None, copy: int | None = None
) -> list[str]:
    """The words of a server's command; at a ``port`` of its own that others reach, or as the ``copy`` of several."""
    start, table = COMMANDS[framework]
    words = shlex.split(start.format(model=shlex.quote(model)))
    arguments = filled(table, role) | ({} if port is None else {"--port": port, "--host": "0.0.0.0"})
    if copy is not None:
        arguments["--port"] = PORTS[role.role] + copy
        if "--disaggregation-bootstrap-port" in arguments:
            arguments["--disaggregation-bootstrap-port"] = BOOTSTRAP_PORT + copy
    return [*words, *spelled(arguments)]


def _header(servers: list[ServedRole]) -> list[str]:
    places = " and ".join(dict.fromkeys(role.cluster for role in servers))
    lengths = servers[0].max_len, servers[0].max_len - servers[0].room, servers[0].room
    return [
        "#!/bin/sh",
        f"# {counts(servers)} ({places})",
        f"# Each takes {lengths[0]:,} tokens a request: {lengths[1]:,} of prompt and answer, {lengths[2]:,} of room.",
    ]


def _files(engine: str, servers: list[ServedRole], urls: Mapping[str, list[str]], port: int) -> dict[str, str]:
    """What TensorRT-LLM is told in files: attention data ranks, how caches move, and servers by their ``urls``."""
    if engine != "trtllm":
        return {}
    files = {}
    for server in servers:
        options = [f"enable_attention_dp: {str(server.dp > 1).lower()}"]
        options += ["kv_cache_config:", f"  dtype: {server.kv_dtype}"] if server.kv_dtype else []
        options += ["cache_transceiver_config:", "  backend: DEFAULT"] if server.role else []
        files[f"{server.role or 'both'}.yaml"] = "\n".join([*options, ""])
    if len(servers) > 1:
        lines = ["hostname: 0.0.0.0", f"port: {port}", "backend: pytorch"]
        for name, server in zip(("context_servers", "generation_servers"), servers, strict=True):
            lines += [f"{name}:", f"  num_instances: {server.replicas}", "  urls:"]
            lines += [f"    - {url}" for url in urls[server.role]]
        files["servers.yaml"] = "\n".join([*lines, ""])
    return files


def _written(engine: str, servers: list[ServedRole], copies: list[PlacedServer]) -> list[str]:
    """The same as lines of a script that writes them."""
    nodes = _nodes(copies)
    urls = {server.role: [copy.address(nodes) for copy in copies if copy.role is server] for server in servers}
    written = _files(engine, servers, urls, 8000)
    return [line for name, text in written.items() for line in (f"cat > {name} <<'END'", *text.splitlines(), "END")]


def _in_a_pod(words: list[str]) -> list[str]:
    """A server's command with its file where a pod finds it."""
    at = words.index("--extra_llm_api_options") + 1 if "--extra_llm_api_options" in words else 0
    return [f"{FILES}/{word}" if at and i == at else word for i, word in enumerate(words)]


def _nodes(copies: list[PlacedServer]) -> int:
    return 1 + max(server.node for server in copies)


def _commands(chosen: str, engine: str, model: str, copies: list[PlacedServer]) -> list[str]:
    """The command of every copy, with GPUs and ports of its own; by node where there are several."""
    nodes, unlike = _nodes(copies), len({server.role.cluster for server in copies}) > 1
    lines = []
    if nodes > 1:
        lines += ["# Run it on every node, with NODE_RANK=0, 1, … set.", 'case "${NODE_RANK:-0}" in']
    for node in range(nodes):
        of_node = [server for server in copies if server.node == node]
        if nodes > 1 and of_node:
            lines += [f"{node})", *([f"# {of_node[0].role.cluster}"] if unlike else [])]
        lines += [_started(chosen, engine, model, server, at) for at, server in enumerate(of_node)]
        lines += [";;"] if nodes > 1 and of_node else []
    return [*lines, "esac"] if nodes > 1 else lines


def _started(chosen: str, engine: str, model: str, server: PlacedServer, at: int) -> str:
    words = (
        worker(engine, DYNAMO_TABLES[engine], model, server.role)
        if chosen == "dynamo"
        else command(engine, model, server.role, copy=server.copy)
    )
    settings = [f"CUDA_VISIBLE_DEVICES={','.join(map(str, server.gpus))}"] if server.gpus else []
    if engine == "vllm" and server.role.role:
        settings += [f"VLLM_NIXL_SIDE_CHANNEL_PORT={NIXL_PORT + NIXL_PORTS * at}"]
    if chosen == "dynamo":
        settings += [f"DYN_SYSTEM_PORT={DYNAMO_PORT + at}"]
    return " ".join([*settings, shlex.join(words), "&"])


def _front(chosen: str, model: str, servers: list[ServedRole], copies: list[PlacedServer]) -> list[str]:
    """What users call, on the first node, and the wait for all."""
    first, nodes = [], _nodes(copies)
    if chosen == "dynamo":
        first = [f"{FRONTEND} &"]
    elif len(servers) > 1 or (chosen == "sglang" and len(copies) > 1):
        first = [router(chosen, copies, nodes)]
    elif len(copies) > 1:
        addresses = ", ".join(server.address(nodes) for server in copies)
        first = [f"# Users are shared out over {addresses} by a balancer of yours."]
    if first and nodes > 1 and not first[0].startswith("#"):
        first = ["# NODE_0 and so on stand for the hosts of your nodes.", f'[ "${{NODE_RANK:-0}}" = 0 ] && {first[0]}']
    return [*first, "wait"]


def router(framework: str, copies: list[PlacedServer], nodes: int) -> str:
    """The command of what stands before servers: before pools apart, and before SGLang's copies."""
    if framework == "trtllm":
        return "trtllm-serve disaggregated -c servers.yaml &"
    if framework == "vllm":
        return (
            "# vLLM comes without a router for pools apart: take framework=dynamo or framework=llm-d, which bring one"
        )
    words = ["python", "-m", "sglang_router.launch_router"]
    if copies[0].role.role:
        words += ["--pd-disaggregation"]
        for server in copies:
            words += [f"--{server.role.role}", f"http://{server.address(nodes)}"]
            words += [str(BOOTSTRAP_PORT + server.copy)] if server.role.role == PREFILL else []
    else:
        words += ["--worker-urls", *(f"http://{server.address(nodes)}" for server in copies)]
    return shlex.join([*words, "--port", str(ROUTER_PORT)]) + " &"
