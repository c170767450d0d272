"""A function applied to many parts, here, in processes, on a Ray or in a Slurm array: the same answers in one order.

- ``joblib``: so many processes on this machine.
- ``ray``: tasks of a running cluster (``RAY_ADDRESS``, or one that Ray starts here). What a node took with it when it
  went is run again elsewhere.
- ``slurm``: one array of so many jobs through submitit; parts go round among them. Jobs and what they need lie in a
  ``folder`` that all nodes see. Jobs that are requeued start anew.

Parts are what is sent, so they should be small; ``function`` must be importable by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...datasets.installing import install_command
from ...datasets.loading import choice, whole
from ..question.canonical import RequestError
from .ray_connection import connected

ENGINES = ("joblib", "ray", "slurm")
Function = Callable[..., Any]
Progress = Callable[[int], AbstractContextManager[Callable[[int], None]]]  # opens a bar of so many parts


@dataclass(frozen=True)
class Crew:
    """Who simulates: ``count`` processes, Ray tasks at a time or jobs of an array. ``options`` are those of
    ``ray.init`` or of submitit's ``update_parameters`` (``slurm_partition``, ``timeout_min``, …)."""

    count: int = 1
    engine: str = "joblib"
    folder: str = "search-jobs"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        whole(RequestError, "workers", self.count, 1)
        choice(RequestError, "crew.engine", self.engine, ENGINES)

    @property
    def alone(self) -> bool:
        """Whether this process does it all."""
        return self.count == 1 and self.engine == "joblib"

    def ready(self) -> AbstractContextManager[Any]:
        """Within, all that is applied shares one connection (to a Ray, which is what the others have no need of)."""
        if self.engine != "ray":
            return nullcontext()
        return connected(RequestError, "crew.engine=ray with crew.options", self.options)

    def apply(self, function: Function, parts: Sequence[tuple[Any, ...]]) -> Iterable[Any]:
        """The function's answer for each part, in their order, as they come. RequestError where the engine is not
        installed or knows no such option; what the function raises."""
        if self.alone or (len(parts) < 2 and self.engine == "joblib"):
            return (function(*arguments) for arguments in parts)
        return {"joblib": in_processes, "ray": on_ray, "slurm": in_slurm}[self.engine](self, function, parts)


def processors() -> int:
    """Processors that this process may use: by affinity, by a container's limit, and by $LOKY_MAX_CPU_COUNT."""
    from joblib import cpu_count

    return int(cpu_count())


def in_processes(crew: Crew, function: Function, parts: Sequence[tuple[Any, ...]]) -> Iterable[Any]:
    """By joblib, in processes of this machine."""
    from joblib import Parallel, delayed

    pool = Parallel(n_jobs=crew.count, return_as="generator", batch_size=1, pre_dispatch="all")
    return pool(delayed(function)(*arguments) for arguments in parts)


def on_ray(crew: Crew, function: Function, parts: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
    """By Ray, as many parts at a time as there are workers, tried again as often as nodes go."""
    with crew.ready() as ray:
        task = ray.remote(num_cpus=1, max_retries=-1)(function)
        waiting: list[Any] = [task.remote(*arguments) for arguments in parts[: crew.count]]
        for at in range(len(parts)):
            yield ray.get(waiting[at])
            waiting[at] = None  # what was read needs no memory of the cluster
            if len(waiting) < len(parts):
                waiting.append(task.remote(*parts[len(waiting)]))


def in_slurm(crew: Crew, function: Function, parts: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
    """By Slurm, one job of an array for every ``count``-th part."""
    try:
        import submitit
    except ImportError:
        raise RequestError(f"crew.engine=slurm needs submitit: {install_command('cluster')}") from None
    folder = Path(crew.folder).expanduser()
    jobs = min(crew.count, len(parts))
    try:
        executor = submitit.SlurmExecutor(folder=folder, max_num_timeout=3)
        options = {"array_parallelism": jobs, "time": 60, "cpus_per_task": 1, "job_name": "opcast-search"}
        executor.update_parameters(**{**options, **crew.options})
    except (RuntimeError, OSError, ValueError, NameError) as error:
        raise RequestError(f"crew.engine=slurm cannot be used: {' '.join(str(error).split())[:300]}") from None
    shares = [[parts[at] for at in range(first, len(parts), jobs)] for first in range(jobs)]
    array = executor.map_array(each_of, [function] * jobs, shares)
    answers: dict[int, Iterator[Any]] = {}
    for at in range(len(parts)):
        mine = at % jobs
        if mine not in answers:
            answers[mine] = iter(array[mine].result())
        yield next(answers[mine])


def each_of(function: Function, parts: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The function's answers for some parts, one after the other."""
    return [function(*arguments) for arguments in parts]
