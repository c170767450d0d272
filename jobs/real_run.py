"""Runs a model's step for real, in a process of its own: what a simulated step is compared with.

``python -P -m opcast.jobs.real_run`` reads one JSON request per line and answers each with one JSON line, so that
its caller can interleave real steps with other measurements. The calls are the ones that tracing records
(``simulator/trace/steps.py``); the process gets the thread count and allocator settings of the harness's workers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from ..harness.environment import child_environment, core_ids, default_threads, environment
from ..simulator.trace.models import resolve
from ..simulator.trace.workload import Workload
from .operator_times import time_operators


class RealRunError(RuntimeError):
    """The process that runs the model failed; the message is its last word."""


@dataclass
class RealRunner:
    """The caller's side: one child process that holds the model and runs steps of several workloads."""

    model: str | dict[str, Any]
    workloads: dict[str, Workload]
    precision: str
    device: str
    threads: int = 0  # 0 = as many as there are physical cores
    process: subprocess.Popen[str] | None = field(default=None, init=False)

    def __enter__(self) -> RealRunner:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "opcast.jobs.real_run"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(self.threads),
        )
        if self.workloads:
            self.load(self.model, self.workloads)
        return self

    def load(self, model: str | dict[str, Any], workloads: Mapping[str, Workload]) -> None:
        """Have the process hold a model, and make steps of these workloads ready."""
        self._ask(
            {
                "model": model,
                "precision": self.precision,
                "device": self.device,
                "threads": self.threads or default_threads(),
                "workloads": {name: asdict(workload) for name, workload in workloads.items()},
            }
        )

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def seconds(self, workload: str, repeats: int) -> list[float]:
        """Wall time of ``repeats`` steps, after one that is not counted."""
        return self._ask({"do": "time", "workload": workload, "repeats": repeats})["seconds"]

    def operators(self, workload: str, repeats: int) -> tuple[list[str], list[float]]:
        """Every operator call of a step in order: its name and its median microseconds over ``repeats`` steps."""
        times = self._ask({"do": "operators", "workload": workload, "repeats": repeats})
        return times["names"], times["us"]

    def environment_facts(self) -> dict[str, Any]:
        """The software and threads that real steps and measurements ran with, as the process that runs them sees it."""
        return self._ask({"do": "environment", "device": self.device, "threads": self.threads})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RealRunError(f"the process that runs {self.model} ended with code {self.process.wait()}")
        return self._checked(json.loads(line))

    def _checked(self, reply: dict[str, Any]) -> dict[str, Any]:
        if "error" in reply:
            raise RealRunError(f"running {self.model} failed: {reply['error']}")
        return reply


class Turns:
    """What is run now and then while a campaign goes on, evenly, so that a drifting machine is met by both alike."""

    def __init__(self, turns: Sequence[Callable[[], None]]) -> None:
        self.turns, self.taken = turns, 0

    def due(self, share_done: float) -> None:
        """Take the next turn when the campaign has come far enough. The last one is left for its end."""
        last = len(self.turns) - 1
        if self.taken < last and share_done >= self.taken / last:
            self._take()

    def finish(self) -> None:
        """Take what turns are left."""
        while self.taken < len(self.turns):
            self._take()

    def _take(self) -> None:
        self.turns[self.taken]()
        self.taken += 1


def serve() -> None:
    """The child's side: answers requests on stdin until it closes."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what libraries print must not mix with the answers
    runs: dict[str, RealRun] = {}
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line), runs)) + "\n")
        answers.flush()


def answer(request: dict[str, Any], runs: dict[str, RealRun]) -> dict[str, Any]:
    """What a request gets; ``runs`` keeps the steps that the first one made ready."""
    try:
        if "do" not in request:
            runs |= load(request)
            return {"ready": True}
        if request["do"] == "environment":
            threads = request["threads"] or default_threads()
            return {**environment(request["device"], threads), "threads": threads}
        run = runs[request["workload"]]
        if request["do"] == "time":
            return {"seconds": [run() for _ in range(request["repeats"] + 1)][1:]}
        return time_operators(run, run.device, request["repeats"], partial(synchronize, run.device))
    except (RuntimeError, ValueError, OSError, ImportError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def load(request: dict[str, Any]) -> dict[str, RealRun]:
    """The model with random weights, and per workload a call that runs one step."""
    import torch

    from ..simulator.trace.build import build
    from ..simulator.trace.steps import ForwardCall, prepare, training_step

    device = request["device"]
    if device == "cpu":
        take_place(request["threads"])
        torch.set_num_threads(request["threads"])
    torch.manual_seed(0)
    workloads = {name: Workload(**values) for name, values in request["workloads"].items()}
    runs: dict[str, RealRun] = {}
    with torch.device(device):
        built = build(resolve(request["model"]), next(iter(workloads.values())), request["precision"])
        for name, workload in workloads.items():
            if workload.training:
                step = ForwardCall(training_step(built.module, workload, built.example))
            else:
                with torch.no_grad():
                    step = prepare(built.module, workload, built.example)
            runs[name] = RealRun(built.module, step.run, step.cache, workload, device)
    return runs


@dataclass(frozen=True)
class RealRun:
    """One step of one workload. A model is shared between workloads, so each run sets the mode it needs."""

    model: Any
    call: Callable[[], Any]
    cache: Any
    workload: Workload
    device: str

    def __call__(self) -> float:
        """Run the step and return its seconds. A decode step then forgets its token, to see the same context again."""
        import torch

        training = self.workload.training
        growing = self.cache if self.workload.kind == "decode" and self.workload.cache == "dynamic" else None
        before = layers_of(growing)
        if self.model.training is not training:
            self.model.train(training)
        with torch.set_grad_enabled(training):
            synchronize(self.device)
            start = time.perf_counter()
            output = self.call()
            synchronize(self.device)
            seconds = time.perf_counter() - start
        del output
        if growing is not None:
            for layer, values in zip(growing.layers, before, strict=True):
                vars(layer).update(values)
        elif self.workload.kind == "decode" and self.cache is not None:
            self.cache.crop(-1)
        return seconds


def layers_of(cache: Any) -> list[dict[str, Any]]:
    """What each layer of a cache holds now. Keys and values that grow by copying are other tensors after a step; cut
    off again (``cache.crop``) they would have gaps, which torch copies several times more slowly.
    """
    return [] if cache is None else [dict(vars(layer)) for layer in cache.layers]


def take_place(threads: int) -> None:
    """Bind this process to one logical processor per core, as the harness's workers are."""
    cores = core_ids()
    if hasattr(os, "sched_setaffinity") and threads <= len(cores):
        os.sched_setaffinity(0, cores[:threads])


def synchronize(device: str) -> None:
    """Wait for the accelerator."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


if __name__ == "__main__":
    serve()
