"""A campaign as an Indexed Job of Kubernetes: manifests made and checked here, applied by whoever may.

The plan travels as a ConfigMap (compressed), the store is a volume that all pods share. A pod's index is its part.
"""

from __future__ import annotations

import base64
import gzip
import re
from typing import Any

from ...datasets.installing import install_command
from ...harness.environment import JOB, NODE
from ...harness.plan import CampaignPlan
from ..show import BadInputError
from .places import Kubernetes

MOST_BYTES = 1_000_000  # of a ConfigMap
DISRUPTED = [{"type": "DisruptionTarget", "status": "True"}]


def manifests(target: Kubernetes, plan: CampaignPlan, campaign: str) -> list[dict[str, Any]]:
    """The ConfigMap and the Job, checked against the schema of ``place.version``. BadInputError."""
    packed = gzip.compress(plan.to_json().encode(), mtime=0)
    if len(packed) > MOST_BYTES:
        raise BadInputError(
            f"the plan of {len(plan.cases):,} cases takes {len(packed):,} bytes, a ConfigMap 1 MiB: "
            "split the campaign (campaign.cases), or measure its parts (campaign=compute, memory, …) one by one"
        )
    name = re.sub(r"[^a-z0-9-]", "-", f"opcast-{campaign}".lower())[:52]
    labels = {"app": "opcast", "campaign": name}
    plan_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": target.namespace, "labels": labels},
        "binaryData": {"plan.json.gz": base64.b64encode(packed).decode()},
    }
    documents = [plan_map, _job(target, name, labels)]
    for document in documents:
        check(document, target.version)
    return documents


def check(manifest: dict[str, Any], version: str) -> None:
    """BadInputError when a manifest does not fit Kubernetes' own schema."""
    try:
        from kubernetes_validate import utils as schemas
    except ImportError:
        raise BadInputError(f"where=kubernetes needs kubernetes-validate: {install_command('cluster')}") from None
    try:
        schemas.validate(manifest, version, strict=True)
    except schemas.ValidationError as error:
        path = ".".join(map(str, error.path))
        raise BadInputError(f"the manifest does not fit Kubernetes {version}: {path}: {error.message}") from None
    except (
        schemas.SchemaNotFoundError,
        schemas.InvalidSchemaError,
        schemas.VersionNotSupportedError,
        IndexError,  # older than all its schemas
    ):
        latest = schemas.latest_version()
        raise BadInputError(f"where.version={version}: no schema of that version; the latest is {latest}") from None


def _job(target: Kubernetes, name: str, labels: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": target.namespace, "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": target.parts,
            "parallelism": target.parts,
            "backoffLimitPerIndex": target.restarts,
            "activeDeadlineSeconds": target.time_min * 60,
            "podFailurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": DISRUPTED}]},
            "template": {"metadata": {"labels": labels}, "spec": _pod(target, name, labels)},
        },
    }


def _pod(target: Kubernetes, name: str, labels: dict[str, str]) -> dict[str, Any]:
    resources: dict[str, Any] = {"cpu": str(target.cpus), "memory": f"{target.memory_gib}Gi"}
    if target.gpus:
        resources["nvidia.com/gpu"] = target.gpus
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    part_argument = f"$(PART)/{target.parts}"
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 120,
        "nodeSelector": dict(target.node_selector),
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [_elsewhere(labels)]}},
        "containers": [
            {
                "name": "part",
                "image": target.image,
                "command": ["python", "-m", "opcast.harness", "/plan/plan.json.gz", f"/data/{target.store_path}"],
                "args": ["--part", part_argument],
                "env": [
                    {"name": "PART", "valueFrom": {"fieldRef": {"fieldPath": index}}},
                    {"name": NODE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                    {"name": JOB, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                ],
                "resources": {"requests": resources, "limits": resources},
                "volumeMounts": [
                    {"name": "plan", "mountPath": "/plan", "readOnly": True},
                    {"name": "data", "mountPath": "/data"},
                    {"name": "shm", "mountPath": "/dev/shm"},
                ],
            }
        ],
        "volumes": [
            {"name": "plan", "configMap": {"name": name}},
            {"name": "data", "persistentVolumeClaim": {"claimName": target.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _elsewhere(labels: dict[str, str]) -> dict[str, Any]:
    """One pod of a campaign on a node: parts beside each other would disturb their measurements."""
    return {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
