"""A way to serve as a Kubernetes manifest: SGLang's servers as Deployments, its router before them."""

from __future__ import annotations

from typing import Any

from ..launch import LaunchError
from .roles import BOOTSTRAP_PORT, BOTH, PREFILL, ServedRole

IMAGE = "lmsysorg/sglang:latest"
PORT = 8000  # of all pods: the router looks for servers at one
APP = "opcast-serving"


def manifest(title: str, servers: list[ServedRole], words: list[list[str]], per_node: int) -> str:
    """YAML of all resources, one document after the other, for servers started by these ``words``.

    LaunchError for a server of more than a node.
    """
    import yaml

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            """Labels that are used twice are written twice."""
            return True

    for each in servers:
        if each.devices > per_node:
            raise LaunchError(
                f"a server of {each.devices} GPUs is more than a node of {per_node}, which a Deployment cannot be: "
                f"take space.rules=['replica_devices <= {per_node}'], or framework=sglang"
            )
    parts: list[dict[str, Any]] = [
        _deployment(f"{APP}-{each.role or 'server'}", each, own) for each, own in zip(servers, words, strict=True)
    ]
    if servers[0].role == BOTH:
        parts.append(_service(APP, {"app": APP, "role": "server"}, PORT))
    else:
        parts += [*_account(), _router(), _service(APP, {"app": APP, "role": "router"}, PORT)]
    said = ", ".join(f"{each.replicas} x {each.devices} GPUs {each.role}".strip() for each in servers)
    head = f"# {title}: {said}\n"
    return head + yaml.dump_all(parts, Dumper=Plain, sort_keys=False)


def _labels(role: str) -> dict[str, str]:
    return {"app": APP, "role": role}


def _deployment(name: str, role: ServedRole, words: list[str]) -> dict[str, Any]:
    """A Deployment of a role's servers, each with its GPUs."""
    labels = _labels(role.role or "server")
    container = {
        "name": "sglang",
        "image": IMAGE,
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
    if role.role == PREFILL:
        container["ports"] = [{"containerPort": PORT}, {"containerPort": BOOTSTRAP_PORT}]
        metadata["annotations"] = {"sglang.ai/bootstrap-port": str(BOOTSTRAP_PORT)}
    pod = {
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "32Gi"}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": role.replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": metadata, "spec": pod},
        },
    }


def _service(name: str, selector: dict[str, str], port: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": selector, "ports": [{"port": 80, "targetPort": port}]},
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


def _router() -> dict[str, Any]:
    labels = _labels("router")
    container = {
        "name": "router",
        "image": IMAGE,
        "command": router_words(),
        "ports": [{"containerPort": PORT}],
        "env": [{"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": f"{APP}-router", "labels": labels},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"serviceAccountName": f"{APP}-router", "containers": [container]},
            },
        },
    }
