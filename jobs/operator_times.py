"""How long every operator of a real step takes, one by one, below autograd: what predictions are compared with.

On the host's clock a call is timed from its dispatch to its return. On a CUDA device that would be its launch and the
wait for it: there each call is issued behind a kernel that keeps the device busy meanwhile, and events time what the
device does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

FIRST_GUESS_US = 200.0  # that issuing a call takes, before it was seen
HOST_MARGIN = 2.0  # the device is kept busy that many times as long as the host needed for the call before
LEAST_HIDE_US = 20.0
LEAST_US = 0.1
EMPTY_SAMPLES = 50
CALLS = 400  # of an addition of one element, to find what recording adds

Step = Callable[[], object]
Names = list[str]


def time_operators(step: Step, device: str, repeats: int, wait: Step) -> dict[str, Any]:
    """Names and median microseconds of every operator call of a step, in order; ``wait`` waits for the device.

    Of ``repeats`` steps after one that is not counted; one that calls other operators than the last is left out.
    """
    recorded = _on_device(step, repeats) if device == "cuda" else _on_host(step, repeats, wait)
    names = recorded[-1][0]
    same = [us for step_names, us in recorded[1:] if step_names == names]
    return {"names": names, "us": np.maximum(np.median(same, axis=0), LEAST_US).tolist()}


# --- on the host's clock -------------------------------------------------------------------------------


def _on_host(step: Step, repeats: int, wait: Step) -> list[tuple[Names, np.ndarray]]:
    added = recording_us(wait)
    steps = []
    for _ in range(repeats + 1):
        names, spans = _host_calls(step, wait)
        steps.append((names, np.array(spans) - added))
    return steps


def _host_calls(step: Step, wait: Step) -> tuple[Names, list[float]]:
    names: Names = []
    spans: list[float] = []

    def around(name: str, call: Step) -> object:
        wait()
        start = time.perf_counter_ns()
        result = call()
        wait()
        spans.append((time.perf_counter_ns() - start) / 1e3)
        names.append(name)
        return result

    with recorder(around):
        step()
    return names, spans


def recording_us(wait: Step) -> float:
    """Microseconds that recording adds to an operator call on the host's clock."""
    import torch

    one = torch.zeros(1)
    plain = []
    with torch.no_grad():
        _, recorded = _host_calls(lambda: [one.add(one) for _ in range(CALLS)], wait)
        for _ in range(CALLS):
            wait()
            start = time.perf_counter_ns()
            one.add(one)
            wait()
            plain.append((time.perf_counter_ns() - start) / 1e3)
    return max(statistics.median(recorded) - statistics.median(plain), 0.0)


# --- on a CUDA device ----------------------------------------------------------------------------------


def _on_device(
    step: Step, repeats: int, now_ns: Callable[[], int] = time.perf_counter_ns
) -> list[tuple[Names, np.ndarray]]:
    """Each step hides what the host needed for the same call in the step before."""
    empty_us = _empty_us()
    host_us: list[float] = []
    steps = []
    for _ in range(repeats + 1):
        names, spans, host_us = _device_calls(step, host_us, now_ns)
        steps.append((names, np.array(spans) - empty_us))
    return steps


def _device_calls(
    step: Step, host_us: list[float], now_ns: Callable[[], int]
) -> tuple[Names, list[float], list[float]]:
    """Names, spans on the device, and host times of a step's calls."""
    import torch

    from ..harness.cuda_timer import block

    names: Names = []
    marks: list[tuple[Any, Any]] = []
    issued: list[float] = []

    def around(name: str, call: Step) -> object:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        guess = host_us[len(names)] if len(names) < len(host_us) else FIRST_GUESS_US
        block(max(HOST_MARGIN * guess, LEAST_HIDE_US))
        start.record()
        begun = now_ns()
        result = call()
        issued.append((now_ns() - begun) / 1e3)
        end.record()
        marks.append((start, end))
        names.append(name)
        return result

    with recorder(around):
        step()
    torch.cuda.synchronize()
    return names, [start.elapsed_time(end) * 1e3 for start, end in marks], issued


def _empty_us() -> float:
    """What two events without a kernel between them read."""
    import torch

    from ..harness.cuda_timer import block

    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(EMPTY_SAMPLES)]
    for start, end in marks:
        block(LEAST_HIDE_US)
        start.record()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1e3 for start, end in marks)


def recorder(around: Callable[[str, Step], object]) -> Any:
    """A dispatch mode that has ``around`` run every operator call, given its name and the call."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return around(str(func), lambda: func(*args, **(kwargs or {})))

    return Recorder()
