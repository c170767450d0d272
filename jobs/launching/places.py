"""The settings of ``where=…`` as frozen data, one class for each choice of ``conf/where``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...datasets.loading import choice, load
from ..show import BadInputError


@dataclass(frozen=True)
class Here:
    """In this process."""

    name: str = "here"
    parts: int = 1


@dataclass(frozen=True)
class Slurm:
    """As an array of jobs of a node each; see ``conf/where/slurm.yaml``."""

    name: str = "slurm"
    parts: int = 8
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gpus: int | None = None
    cpus: int | None = 4
    memory_gib: float | None = 32
    exclusive: bool = False
    time_min: int = 240
    restarts: int = 20
    at_once: int | None = None
    container: str | None = None
    runtime: str = "pyxis"
    mounts: str | None = None
    python: str | None = None
    setup: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    logs: str | None = None
    wait: bool = False


@dataclass(frozen=True)
class Ray:
    """As tasks of a Ray cluster; see ``conf/where/ray.yaml``."""

    name: str = "ray"
    parts: int = 8
    address: str = "auto"
    cpus: float = 1
    gpus: float | None = None
    restarts: int = 20


@dataclass(frozen=True)
class Kubernetes:
    """As an Indexed Job; see ``conf/where/kubernetes.yaml``."""

    image: str
    claim: str
    name: str = "kubernetes"
    parts: int = 8
    manifest: str = "campaign.yaml"
    store_path: str = "store"
    namespace: str = "default"
    gpus: int = 1
    cpus: int = 4
    memory_gib: int = 32
    node_selector: Mapping[str, str] = field(default_factory=dict)
    time_min: int = 240
    restarts: int = 20
    version: str = "1.31"


RUNTIMES = ("pyxis", "apptainer", "singularity")  # of containers, under Slurm
Place = Here | Slurm | Ray | Kubernetes
PLACES: Mapping[str, type[Any]] = {"here": Here, "slurm": Slurm, "ray": Ray, "kubernetes": Kubernetes}


def place_of(values: Mapping[str, Any]) -> Place:
    """The checked settings of a ``where``. BadInputError names a wrong one."""
    name = str(values.get("name", "here"))
    choice(BadInputError, "where", name, list(PLACES))
    missing = [key for key, value in values.items() if value == "???"]
    if missing:
        raise BadInputError(f"where={name} needs where.{missing[0]}=…")
    target: Place = load(PLACES[name], dict(values), BadInputError, f"where={name}", "setting")
    if isinstance(target, Slurm):
        choice(BadInputError, "where.runtime", target.runtime, RUNTIMES)
        if target.mounts and not target.container:
            raise BadInputError(f"where.mounts={target.mounts} is of a container, and where.container names none")
    for key in ("parts", "time_min"):
        if getattr(target, key, 1) < 1:
            raise BadInputError(f"where.{key}={getattr(target, key)} must be at least 1")
    return target
