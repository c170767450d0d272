"""A worker whose cases can crash, hang, be killed or take too much memory; the campaign tests start it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable

from opcast.datasets.ops import Op
from opcast.harness import worker
from opcast.harness.cases.base import Inputs, Run, Unsupported, case


def _at_the_second_call(act: Callable[[], object]) -> Run:
    """Preparation calls an op once; the act comes when it is measured."""
    calls = iter((lambda: 0, act))
    return lambda: next(calls, act)()


@case("gelu", "abort")
def abort(op: Op, inputs: Inputs) -> Run:
    return _at_the_second_call(os.abort)


@case("gelu", "exit")
def leave(op: Op, inputs: Inputs) -> Run:
    def act() -> None:
        print("the driver is gone", file=sys.stderr, flush=True)
        os._exit(7)

    return _at_the_second_call(act)


@case("gelu", "segfault")
def segfault(op: Op, inputs: Inputs) -> Run:
    return _at_the_second_call(lambda: ctypes.string_at(0))


@case("gelu", "hang")
def hang(op: Op, inputs: Inputs) -> Run:
    return _at_the_second_call(lambda: time.sleep(3600))


COMPILED: list[Op] = []


@case("gelu", "triton:slow_to_compile")
def slow_to_compile(op: Op, inputs: Inputs) -> Run:
    if not COMPILED:
        time.sleep(8.0)
        COMPILED.append(op)
    return lambda: 0


@case("gelu", "triton:never_compiled")
def never_compiled(op: Op, inputs: Inputs) -> Run:
    time.sleep(3600)
    return lambda: 0


@case("gelu", "killed")
def killed(op: Op, inputs: Inputs) -> Run:
    return _at_the_second_call(lambda: os.kill(os.getpid(), signal.SIGKILL))


@case("gelu", "greedy")
def greedy(op: Op, inputs: Inputs) -> Run:
    import torch

    return _at_the_second_call(lambda: torch.ones(1 << 40))


@case("gelu", "refused")
def refused(op: Op, inputs: Inputs) -> Run:
    raise Unsupported("no such kernel here")


@case("gelu", "raises")
def raises(op: Op, inputs: Inputs) -> Run:
    def act() -> None:
        raise KeyError("what")

    return _at_the_second_call(act)


@case("gelu", "chatty")
def chatty(op: Op, inputs: Inputs) -> Run:
    def act() -> None:
        print('{"status": "ok", "latency_us": 1.0}', flush=True)
        os.write(1, b"not a reply\n")

    return act


if __name__ == "__main__":
    worker.main()
