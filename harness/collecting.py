"""A PyTorch program recorded: its host trace and its profile, which `opcast trace link` makes one execution trace of.

from opcast.harness.collecting import collect

with collect("traces") as step:
    for batch in batches:
        train(batch)
        step()
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HOST, PROFILE = "host", "profile"


class CollectError(ValueError):
    """A program that cannot be recorded. The message says why."""


@contextmanager
def collect(folder: str | Path, rank: int = 0) -> Iterator[Callable[[], None]]:
    """Record what runs inside: ``FOLDER/host/host.RANK.json`` and ``FOLDER/profile/profile.RANK.json``.

    Shapes are recorded, and kernels where there is a GPU. The function it gives marks the end of a step.
    """
    import torch
    from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, record_function

    root = Path(folder)
    host, trace = root / HOST / f"{HOST}.{rank}.json", root / PROFILE / f"{PROFILE}.{rank}.json"
    for file in (host, trace):
        file.parent.mkdir(parents=True, exist_ok=True)
    observer = ExecutionTraceObserver()
    observer.register_callback(str(host))
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=kinds, record_shapes=True, execution_trace_observer=observer) as recorded:

        def step() -> None:
            with record_function("opcast step"):
                pass

        try:
            yield step
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    observer.unregister_callback()
    export(recorded, trace, rank)


def export(recorded: Any, path: Path, rank: int) -> None:
    """A profile of PyTorch's as a file that says whose it is."""
    recorded.export_chrome_trace(str(path))
    trace = json.loads(path.read_text())
    trace.setdefault("distributedInfo", {})["rank"] = rank
    path.write_text(json.dumps(trace))


def run_program(program: Path, arguments: Sequence[str], folder: Path) -> None:
    """Run a Python program from its beginning to its end inside :func:`collect`, as if it had been started itself.

    CollectError where there is no such program; what it raises itself goes on.
    """
    if not program.is_file():
        raise CollectError(f"{program} is no Python program: name the file to run")
    before, sys.argv = sys.argv, [str(program), *arguments]
    try:
        with collect(folder):
            runpy.run_path(str(program), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise CollectError(f"{program} ended with {end.code!r}; what ran until then is recorded") from None
    finally:
        sys.argv = before
