"""A way to serve under NVIDIA Dynamo: commands of its workers, and the graph that its Kubernetes operator deploys.

Arguments and fields are those of ai-dynamo 1.6.1: ``backend_args.py`` of each engine and the graphs beside them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from ..launch import LaunchError, filled
from .kubernetes import APP, pools, yaml_of
from .roles import ServedRole

VERSION = "1.6.1"
REGISTRY = "nvcr.io/nvidia/ai-dynamo"
IMAGES = {"vllm": "vllm-runtime", "sglang": "sglang-runtime", "trtllm": "tensorrtllm-runtime"}
WORKERS = {
    "vllm": "python -m dynamo.vllm --model {model}",
    "sglang": "python -m dynamo.sglang --model-path {model}",
    "trtllm": "python -m dynamo.trtllm --model {model}",
}
FRONTEND = "python -m dynamo.frontend --router-mode kv --http-port 8000"
OF_A_SERVER = ("--port", "--host")  # which a worker has not: the frontend listens

TRTLLM: dict[str, Callable[[ServedRole], Any]] = {
    "--tensor-parallel-size": lambda x: x.ranks,
    "--pipeline-parallel-size": lambda x: x.pp if x.pp > 1 else None,
    "--expert-parallel-size": lambda x: x.ep if x.ep > 1 else None,
    "--enable-attention-dp": lambda x: True if x.dp > 1 else None,
    "--max-batch-size": lambda x: x.batch,
    "--max-num-tokens": lambda x: x.max_tokens,
    "--max-seq-len": lambda x: x.max_len,
    "--override-engine-args": lambda x: _overrides(x),
}


def _overrides(role: ServedRole) -> str | None:
    overrides: dict[str, Any] = {"kv_cache_config": {"dtype": role.kv_dtype}} if role.kv_dtype else {}
    overrides |= {"cache_transceiver_config": {"backend": "DEFAULT"}} if role.role else {}
    return json.dumps(overrides) if overrides else None


def worker(engine: str, table: Mapping[str, Any], model: str, role: ServedRole) -> list[str]:
    """The words of a worker: the engine's own arguments without its port, and the role."""
    arguments = {name: value for name, value in filled(table, role).items() if name not in OF_A_SERVER}
    if role.role:
        arguments["--disaggregation-mode"] = role.role
    words = shlex.split(WORKERS[engine].format(model=shlex.quote(model)))
    return [*words, *spelled(arguments)]


def spelled(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments as words of a command, flags by their names alone."""
    return [word for name, value in arguments.items() for word in ([name] if value is True else [name, str(value)])]


def graph(engine: str, title: str, servers: list[ServedRole], words: list[list[str]], per_node: int) -> str:
    """YAML of a DynamoGraphDeployment: the frontend and a worker of each role, started by these ``words``.

    LaunchError for a worker of more than a node.
    """
    if large := [server.devices for server in servers if server.devices > per_node]:
        raise LaunchError(
            f"a worker of {large[0]} GPUs is more than a node of {per_node}: "
            f"take space.rules=['replica_devices <= {per_node}'], or framework=dynamo"
        )
    services: dict[str, Any] = {
        "Frontend": {
            "componentType": "frontend",
            "replicas": 1,
            "extraPodSpec": {"mainContainer": _container("dynamo-frontend", shlex.split(FRONTEND))},
        }
    }
    for server, own_words in zip(servers, words, strict=True):
        name = server.role or "worker"
        services[name] = {
            "componentType": "worker",
            **({"subComponentType": server.role} if server.role else {}),
            "envFromSecret": "hf-token-secret",
            "replicas": server.replicas,
            "resources": {"limits": {"gpu": str(server.devices)}},
            "sharedMemory": {"size": "32Gi"},
            "extraPodSpec": {"mainContainer": _container(IMAGES[engine], own_words)},
        }
    use = "# kubectl apply -f THIS_FILE, where Dynamo's operator runs; the secret holds HF_TOKEN"
    return yaml_of(
        f"# {title}: {pools(servers)}\n{use}\n",
        [
            {
                "apiVersion": "nvidia.com/v1alpha1",
                "kind": "DynamoGraphDeployment",
                "metadata": {"name": APP},
                "spec": {"backendFramework": engine, "services": services},
            }
        ],
    )


def _container(image: str, words: list[str]) -> dict[str, Any]:
    return {"image": f"{REGISTRY}/{image}:{VERSION}", "command": words[:1], "args": words[1:]}
