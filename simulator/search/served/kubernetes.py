"""A way to serve as a Kubernetes manifest: servers of an engine, and what stands before pools apart.

SGLang's servers are Deployments that its router finds by their labels. TensorRT-LLM's front takes a list of addresses,
so that its pools are StatefulSets, whose pods have names. vLLM comes without a router for pools apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....datasets.counts import counted
from ..launch import LaunchError
from .roles import BOOTSTRAP_PORT, BOTH, PREFILL, ServedRole

IMAGES = {
    "sglang": "lmsysorg/sglang:latest",
    "vllm": "vllm/vllm-openai:latest",
    "trtllm": "nvcr.io/nvidia/tensorrt-llm/release:latest",
}
FILES = "/etc/opcast"  # where a pod finds files of settings
PORT = 8000  # of all pods: the router looks for servers at one
APP = "opcast-serving"


def manifest(
    engine: str,
    title: str,
    servers: list[ServedRole],
    words: list[list[str]],
    per_node: int,
    files: Mapping[str, str] | None = None,
) -> str:
    """YAML of all resources, one document after the other, for servers of an engine started by these ``words``.

    ``files`` are what servers read, by name. LaunchError for a server of more than a node, and for vLLM's pools apart.
    """
    for server in servers:
        if server.devices > per_node:
            raise LaunchError(
                f"a server of {server.devices} GPUs is more than a node of {per_node}, which a Deployment cannot be: "
                f"take space.rules=['replica_devices <= {per_node}'], or framework={engine}"
            )
    apart = servers[0].role != BOTH
    if apart and engine == "vllm":
        raise LaunchError(
            "vLLM comes without a router for pools apart: take framework=llm-d or framework=dynamo-kubernetes"
        )
    parts: list[dict[str, Any]] = []
    if files:
        parts.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": APP}, "data": dict(files)})
    for server, own_words in zip(servers, words, strict=True):
        name = pool(server)
        parts.append(_servers(engine, name, server, own_words, bool(files)))
        if apart and engine == "trtllm":
            parts.append(_service(name, _labels(server.role), PORT, headless=True))
    if not apart:
        parts.append(_service(APP, _labels("server"), PORT))
    else:
        account = engine == "sglang"
        start = router_words() if account else ["trtllm-serve", "disaggregated", "-c", f"{FILES}/servers.yaml"]
        parts += [*(_account() if account else []), _router(engine, start), _service(APP, _labels("router"), PORT)]
    return yaml_of(f"# {title}: {pools(servers)}\n", parts)


def pools(servers: Sequence[ServedRole]) -> str:
    """How many servers each pool has, and their GPUs."""
    return ", ".join(f"{one.replicas} x {counted(one.devices, 'GPU')} {one.role}".strip() for one in servers)


def pool(role: ServedRole) -> str:
    """The name of a role's servers."""
    return f"{APP}-{role.role or 'server'}"


def addresses(role: ServedRole) -> list[str]:
    """Where the servers of a StatefulSet are reached."""
    return [f"{pool(role)}-{copy}.{pool(role)}:{PORT}" for copy in range(role.replicas)]


def yaml_of(head: str, parts: list[dict[str, Any]]) -> str:
    """Resources as YAML, one document after the other, below a comment."""
    import yaml

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            """Labels that are used twice are written twice."""
            return True

    return head + yaml.dump_all(parts, Dumper=Plain, sort_keys=False)


def _labels(role: str) -> dict[str, str]:
    return {"app": APP, "role": role}


def _servers(engine: str, name: str, role: ServedRole, words: list[str], files: bool) -> dict[str, Any]:
    """A Deployment of a role's servers, each with its GPUs; a StatefulSet where they need names."""
    labels = _labels(role.role or "server")
    container = {
        "name": engine,
        "image": IMAGES[engine],
        "command": words,
        "ports": [{"containerPort": PORT}],
        "resources": {"limits": {"nvidia.com/gpu": role.devices}},
        "readinessProbe": {
            "httpGet": {"path": "/health", "port": PORT},
            "initialDelaySeconds": 60,
            "periodSeconds": 10,
            "failureThreshold": 120,
        },
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    metadata: dict[str, Any] = {"labels": labels}
    if role.role == PREFILL and engine == "sglang":
        container["ports"] = [{"containerPort": PORT}, {"containerPort": BOOTSTRAP_PORT}]
        metadata["annotations"] = {"sglang.ai/bootstrap-port": str(BOOTSTRAP_PORT)}
    pod = {
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "32Gi"}}],
    }
    if files:
        _with_files(pod)
    named = bool(role.role) and engine == "trtllm"
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet" if named else "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            **({"serviceName": name, "podManagementPolicy": "Parallel"} if named else {}),
            "replicas": role.replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": metadata, "spec": pod},
        },
    }


def _with_files(pod: dict[str, Any]) -> None:
    """The files of settings, as the pod's first container finds them."""
    pod.setdefault("volumes", []).append({"name": "files", "configMap": {"name": APP}})
    pod["containers"][0].setdefault("volumeMounts", []).append({"name": "files", "mountPath": FILES})


def _service(name: str, selector: dict[str, str], port: int, headless: bool = False) -> dict[str, Any]:
    ports = [{"port": port if headless else 80, "targetPort": port}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {**({"clusterIP": "None"} if headless else {}), "selector": selector, "ports": ports},
    }


def _account() -> list[dict[str, Any]]:
    """Who the router is: it finds servers by their labels, and so must be allowed to see pods."""
    name = f"{APP}-router"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": {"name": name},
            "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name}],
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        },
    ]


def router_words() -> list[str]:
    """The router's command: it sends each prompt to a server that prefills and one that decodes."""
    words = ["python", "-m", "sglang_router.launch_router", "--pd-disaggregation", "--service-discovery"]
    for role in ("prefill", "decode"):
        words += [f"--{role}-selector", *(f"{key}={value}" for key, value in _labels(role).items())]
    words += ["--service-discovery-port", str(PORT), "--service-discovery-namespace", "$(POD_NAMESPACE)"]
    return [*words, "--host", "0.0.0.0", "--port", str(PORT)]


def _router(engine: str, words: list[str]) -> dict[str, Any]:
    labels = _labels("router")
    container: dict[str, Any] = {
        "name": "router",
        "image": IMAGES[engine],
        "command": words,
        "ports": [{"containerPort": PORT}],
    }
    pod: dict[str, Any] = {"containers": [container]}
    if engine == "sglang":
        container["env"] = [{"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}]
        pod["serviceAccountName"] = f"{APP}-router"
    else:
        _with_files(pod)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": f"{APP}-router", "labels": labels},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
