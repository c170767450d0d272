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

from ...datasets.installing import install_command
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


def submit(target: Slurm, store: Path, campaign: str) -> list[Job[dict[str, Any]]]:
    """Queue every part; the jobs, in the parts' order. BadInputError where Slurm refuses."""
    executor = executor_of(target, store, campaign)
    parts = [f"{index}/{target.parts}" for index in range(target.parts)]
    try:
        return executor.map_array(PartJob(str(store), campaign), parts)
    except Exception as error:  # submitit has no class of its own for what sbatch says
        resources = f"where.cpus={target.cpus} where.memory_gib={target.memory_gib} where.gpus={target.gpus}"
        raise BadInputError(f"Slurm takes no job ({resources}): {error}") from None


def executor_of(target: Slurm, store: Path, campaign: str) -> Any:
    """submitit's executor with the settings of ``where=slurm``. BadInputError without submitit or Slurm."""
    try:
        import submitit
    except ImportError:
        raise BadInputError(f"where=slurm needs submitit: {install_command('cluster')}") from None
    if submitit.SlurmExecutor.affinity() < 0:
        raise BadInputError("where=slurm needs Slurm's commands, and there is no srun here: log in to the cluster")
    folder = Path(target.logs).expanduser() if target.logs else store / "campaigns" / f"{campaign}-slurm"
    executor = submitit.SlurmExecutor(folder=folder, max_num_timeout=target.restarts, python=interpreter(target))
    executor.update_parameters(**parameters(target, campaign))
    return executor


def interpreter(target: Slurm) -> str | None:
    """What runs Python on a node, as a shell has it; None = the interpreter of this process."""
    if not target.container:
        return shlex.quote(target.python) if target.python else None
    python = target.python or "python3"
    if target.runtime == "pyxis":  # srun enters the container
        return shlex.quote(python)
    words = [
        target.runtime,
        "exec",
        *(["--nv"] if target.gpus else []),
        *(["--bind", target.mounts] if target.mounts else []),
    ]
    return shlex.join([*words, target.container, python])


def memory(target: Slurm) -> str | None:
    """What ``--mem`` says, in MiB; all of a node's where the part has it alone."""
    if target.exclusive:
        return "0"
    return None if target.memory_gib is None else f"{round(1024 * target.memory_gib)}M"


def parameters(target: Slurm, campaign: str) -> dict[str, Any]:
    """submitit's parameters, those that are not set left out."""
    entered = target.container and target.runtime == "pyxis"
    container = [f"--container-image={target.container}"] if entered else []
    container += [f"--container-mounts={target.mounts}"] if entered and target.mounts else []
    settings = {
        "job_name": campaign,
        "nodes": 1,
        "ntasks_per_node": 1,
        "time": target.time_min,
        "signal_delay_s": min(WARNING_S, target.time_min * 30),
        "array_parallelism": target.at_once or target.parts,
        "partition": target.partition,
        "account": target.account,
        "qos": target.qos,
        "constraint": target.constraint,
        "gpus_per_node": target.gpus,
        "cpus_per_task": target.cpus,
        "mem": memory(target),
        "exclusive": target.exclusive or None,
        "srun_args": container or None,
        "setup": ["export OPCAST_NODE=$SLURMD_NODENAME", *([SRUN_CPUS] if target.cpus else []), *target.setup],
        "additional_parameters": {"requeue": True, **target.extra},
    }
    return {name: value for name, value in settings.items() if value is not None}
