"""A campaign as tasks of a Ray cluster, spread over its nodes; a task whose worker or node dies is run again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...harness.environment import JOB
from ...simulator.search.ray_connection import connected
from ..show import BadInputError
from .places import Ray


def run_parts(target: Ray, store: Path, campaign: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run every part; each one's name and summary as they come in. BadInputError without Ray or a cluster.

    RuntimeError, with all other parts through, when a part fails for good.
    """
    with connected(BadInputError, "where=ray", {"address": target.address}) as ray:
        resources = {"num_cpus": target.cpus, "num_gpus": target.gpus or 0, "max_retries": target.restarts}
        task = ray.remote(_part).options(**resources, scheduling_strategy="SPREAD", name=campaign)
        names = [f"{index}/{target.parts}" for index in range(target.parts)]
        waiting = {task.remote(str(store), campaign, name): name for name in names}
        failed: list[str] = []
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1)
            name = waiting.pop(done[0])
            try:
                yield name, ray.get(done[0])
            except ray.exceptions.RayError as error:
                failed.append(f"part {name}: {str(error).strip().splitlines()[-1]}")
    if failed:
        raise RuntimeError("; ".join(failed))


def _part(store: str, campaign: str, part: str) -> dict[str, Any]:
    import ray

    from opcast.harness.part_run import run_part

    os.environ[JOB] = f"ray {ray.get_runtime_context().get_node_id()[:8]}"
    return run_part(store, campaign, part)
