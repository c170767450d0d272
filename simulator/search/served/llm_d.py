"""A way to serve as values of llm-d's Helm chart ``llm-d-modelservice``: vLLM's servers, in one pool or two.

Fields are those of the chart's own ``values.yaml`` and examples (read on 2026-11-26). Each container starts vLLM by a
command of its own, so that all arguments stand in one place.
"""

from __future__ import annotations

from typing import Any

from .kubernetes import IMAGES
from .roles import PREFILL, ServedRole, counts

SIDE_CHANNEL = 5600


def llm_d_port(role: ServedRole) -> int:
    """Where the chart reaches a server: decodes lie behind its sidecar, which has the service's own port."""
    return 8000 if role.role == PREFILL else 8200


def helm_values(model: str, servers: list[ServedRole], words: list[list[str]]) -> str:
    """YAML for ``helm install NAME llm-d-modelservice/llm-d-modelservice -f FILE``.

    ``words`` are the command of each role's servers. A pool that does both is the chart's ``decode``.
    """
    import yaml

    pools = {role.role or "decode": _pool(role, command) for role, command in zip(servers, words, strict=True)}
    values: dict[str, Any] = {
        "multinode": any(role.devices > MOST_OF_A_POD for role in servers),
        "modelArtifacts": {"name": model, "uri": f"hf://{model}", "size": "500Gi"},
        "routing": {"servicePort": 8000, "proxy": {"secure": False}},
        "decode": pools["decode"],
        "prefill": pools.get(PREFILL, {"create": False}),
    }
    head = [
        f"# {model}: {counts(servers)}",
        f"# Each takes {servers[0].max_len:,} tokens a request, {servers[0].room:,} more than asked for.",
        "# helm install NAME llm-d-modelservice/llm-d-modelservice -f THIS_FILE, beside a gateway",
    ]
    return "\n".join([*head, yaml.safe_dump(values, sort_keys=False)])


MOST_OF_A_POD = 8  # GPUs: what nodes have


def _pool(role: ServedRole, words: list[str]) -> dict[str, Any]:
    pod_address = {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    port = {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": str(SIDE_CHANNEL)}
    container: dict[str, Any] = {
        "name": "vllm",
        "image": IMAGES["vllm"],
        "modelCommand": "custom",
        "command": words[:2],
        "args": words[2:],
        "env": [pod_address, port] if role.role else [],
        "ports": [{"containerPort": int(words[words.index("--port") + 1]), "protocol": "TCP"}],
        "resources": {
            "limits": {"nvidia.com/gpu": str(role.devices)},
            "requests": {"nvidia.com/gpu": str(role.devices)},
        },
        "mountModelVolume": True,
    }
    return {
        "create": True,
        "replicas": role.replicas,
        "parallelism": {"tensor": role.tp, "data": role.dp},
        "containers": [container],
    }
