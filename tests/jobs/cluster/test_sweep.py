"""A sweep on a Ray of two nodes and on a Slurm: the table of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opcast.jobs.cli import main

pytestmark = pytest.mark.slow
WORDS = (
    "sweep plan model=llama3_8b cluster=dgx_h100 workload.global_batch=64 steps=2000 step_time_s=2 "
    "checkpoint.size_gb=100 lives=20 cluster.nodes=1,2 failures.fleet=llama3,rsc1"
)


def table(folder: Path, name: str, *settings: str) -> bytes:
    """The file that a sweep writes."""
    path = folder / f"{name}.parquet"
    assert main([*WORDS.split(), f"table={path}", f"home={folder}", "workers=2", *settings]) == 0
    return path.read_bytes()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The table of processes of this machine."""
    return table(tmp_path_factory.mktemp("alone"), "alone")


def test_ray_fills_the_same_table(ray_cluster: Any, alone: bytes, tmp_path: Path) -> None:
    assert table(tmp_path, "ray", "crew.engine=ray") == alone


def test_slurm_fills_the_same_table(slurm: Any, alone: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit", reason="no submitit: pip install 'opcast[cluster]'")
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    crew = ("crew.engine=slurm", f"crew.folder={tmp_path}/jobs", "crew.options.mem=400M")
    assert table(tmp_path, "slurm", *crew) == alone
    assert len(list((tmp_path / "jobs").glob("*_result.pkl"))) == 2
