"""A campaign as a job array of Slurm, submitted with submitit: one node a part, requeued when it is preempted.

Each task runs :func:`...harness.part_run.run_part`, which measures what the store lacks of its part. So a task that
Slurm starts again, for whatever reason, goes on where the last one stopped. Before its time is over Slurm sends
SIGUSR2: what was measured is written, and the task is queued again.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..show import BadInputError
from .places import Slurm

if TYPE_CHECKING:
    from submitit import Job

SRUN_CPUS = "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"  # srun does not ask sbatch's since Slurm 22.05
WARNING_S = 90  # before the end of a task's time: enough to end a case and to write


@dataclass(frozen=True)
class PartJob:
    """What submitit sends to a node."""

    store: str
    campaign: str

    def __call__(self, part: str) -> dict[str, Any]:
        """Run the part; raises where it cannot, which Slurm then shows as failed."""
        from ...harness.part_run import run_part

        return run_part(self.store, self.campaign, part)

    def checkpoint(self, part: str) -> Any:
        """The same again: the store knows what is done."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, part)


def submit(place: Slurm, store: Path, campaign: str) -> list[Job[dict[str, Any]]]:
    """Queue every part; the jobs, in the parts' order. BadInputError where Slurm refuses."""
    executor = executor_of(place, store, campaign)
    parts = [f"{index}/{place.parts}" for index in range(place.parts)]
    try:
        return executor.map_array(PartJob(str(store), campaign), parts)
    except Exception as error:  # submitit has no class of its own for what sbatch says
        asked = f"where.cpus={place.cpus} where.memory_gib={place.memory_gib} where.gpus={place.gpus}"
        raise BadInputError(f"Slurm takes no job ({asked}): {error}") from None


def executor_of(place: Slurm, store: Path, campaign: str) -> Any:
    """submitit's executor with the settings of ``where=slurm``. BadInputError without submitit or Slurm."""
    try:
        import submitit
    except ImportError:
        raise BadInputError("where=slurm needs submitit: pip install 'opcast[cluster]'") from None
    if submitit.SlurmExecutor.affinity() < 0:
        raise BadInputError("where=slurm needs Slurm's commands, and there is no srun here: log in to the cluster")
    folder = Path(place.logs).expanduser() if place.logs else store / "campaigns" / f"{campaign}-slurm"
    executor = submitit.SlurmExecutor(folder=folder, max_num_timeout=place.restarts, python=interpreter(place))
    executor.update_parameters(**parameters(place, campaign))
    return executor


def interpreter(place: Slurm) -> str | None:
    """What runs Python on a node, as a shell has it; None = the interpreter of this process."""
    if not place.container:
        return shlex.quote(place.python) if place.python else None
    python = place.python or "python3"
    if place.runtime == "pyxis":  # srun enters the container
        return shlex.quote(python)
    words = [
        place.runtime,
        "exec",
        *(["--nv"] if place.gpus else []),
        *(["--bind", place.mounts] if place.mounts else []),
    ]
    return shlex.join([*words, place.container, python])


def memory(place: Slurm) -> str | None:
    """What ``--mem`` says, in MiB; all of a node's where the part has it alone."""
    if place.exclusive:
        return "0"
    return None if place.memory_gib is None else f"{round(1024 * place.memory_gib)}M"


def parameters(place: Slurm, campaign: str) -> dict[str, Any]:
    """submitit's parameters, those that are not set left out."""
    entered = place.container and place.runtime == "pyxis"
    container = [f"--container-image={place.container}"] if entered else []
    container += [f"--container-mounts={place.mounts}"] if entered and place.mounts else []
    given = {
        "job_name": campaign,
        "nodes": 1,
        "ntasks_per_node": 1,
        "time": place.time_min,
        "signal_delay_s": min(WARNING_S, place.time_min * 30),
        "array_parallelism": place.at_once or place.parts,
        "partition": place.partition,
        "account": place.account,
        "qos": place.qos,
        "constraint": place.constraint,
        "gpus_per_node": place.gpus,
        "cpus_per_task": place.cpus,
        "mem": memory(place),
        "exclusive": place.exclusive or None,
        "srun_args": container or None,
        "setup": ["export OPCAST_NODE=$SLURMD_NODENAME", *([SRUN_CPUS] if place.cpus else []), *place.setup],
        "additional_parameters": {"requeue": True, **place.extra},
    }
    return {name: value for name, value in given.items() if value is not None}
