"""Clusters on this machine: a Slurm and a Ray of several nodes, or a skip that says what is missing."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opcast.simulator.search.ray_connection import connected


def _beside(name: str) -> Any:
    """A module of this folder, whatever Python's path is."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")  # "package" would be the whole session: this folder is none, and tests go on elsewhere
def slurm() -> Iterator[Any]:
    """A Slurm of four nodes (:class:`local_slurm.LocalSlurm`), for all tests of a file."""
    module = _beside("local_slurm")
    if reason := module.missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, module.local_slurm(Path(folder)) as started:
        yield started


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """A ``ray.cluster_utils.Cluster`` of a head without processors and two nodes of one each, which ``auto`` finds.

    Connected to, so that tests share its workers; each would start with Python and opcast anew.
    """
    pytest.importorskip("ray", reason="no Ray: pip install 'opcast[cluster]'")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80 * 2**20})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
        with pytest.MonkeyPatch.context() as patch, connected(RuntimeError, "a test", {"address": cluster.address}):
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield cluster
    finally:
        cluster.shutdown()
