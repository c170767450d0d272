"""The clusters that other tests run on: they run jobs, on several nodes, and start again what was killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

GONE = {"COMPLETED", "FAILED", "CANCELLED"}


def test_slurm_runs_an_array_on_all_its_nodes(slurm: Any, tmp_path: Path) -> None:
    script = f"echo $SLURMD_NODENAME >> {tmp_path}/$SLURM_ARRAY_TASK_ID; sleep 1"
    words = ["--parsable", "--requeue", "--output=/dev/null", "--array=0-3", f"--wrap={script}"]
    job = slurm.command("sbatch", *words).strip()
    slurm.wait(lambda: not set(slurm.states(job).values()) - GONE, "the end of the array")
    assert {(tmp_path / str(i)).read_text().strip() for i in range(4)} == set(slurm.nodes)


@pytest.mark.slow
def test_ray_runs_again_elsewhere_what_a_removed_node_ran(ray_cluster: Any, tmp_path: Path) -> None:
    import time

    import ray

    @ray.remote(max_retries=3, num_cpus=1)
    def where(marks: str) -> str:
        node = str(ray.get_runtime_context().get_node_id())
        (Path(marks) / node).touch()
        time.sleep(1.5 if len(list(Path(marks).iterdir())) == 1 else 0)
        return node

    waiting = where.remote(str(tmp_path))
    deadline = time.monotonic() + 60
    while not list(tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    first = next(tmp_path.iterdir()).name
    node = next(each for each in ray_cluster.list_all_nodes() if each.node_id == first)
    ray_cluster.remove_node(node, allow_graceful=False)
    ray_cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    assert ray.get(waiting, timeout=60) != first
