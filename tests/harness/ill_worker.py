"""A worker on a modelled GPU that falls ill as its cases say; the tests of unhealthy devices start it.

``python ill_worker.py FOLDER PARENT``. The device is ill as long as the file ``ill`` is in the folder: then no process
passes its check. Every start is a line in ``starts``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from opcast.datasets.ops import Op
from opcast.harness import worker
from opcast.harness.cases.base import Inputs, Run, case

sys.path.insert(0, str(Path(__file__).parent))
from stream_model import STICKY, ModelGPU

GPU = ModelGPU()
FOLDER = Path(sys.argv.pop(1))
CUDA = ("cuda",)


def _kernels(at_the_second_call) -> Run:
    """A kernel of 12 us; preparation calls it once, then the act comes."""
    calls = iter([lambda: None])

    def run() -> None:
        next(calls, at_the_second_call)()
        GPU.kernel(12.0)

    return run


@case("gelu", "good", devices=CUDA)
def good(op: Op, inputs: Inputs) -> Run:
    return _kernels(lambda: None)


@case("gelu", "illegal", devices=CUDA)
def illegal(op: Op, inputs: Inputs) -> Run:
    """The context of this process is lost, the device is not."""

    def act() -> None:
        GPU.sticky = STICKY

    return _kernels(act)


@case("gelu", "last_breath", devices=CUDA)
def last_breath(op: Op, inputs: Inputs) -> Run:
    """Measured, and only then does the device say what went wrong."""
    GPU.fails_to_free = STICKY
    return _kernels(lambda: None)


@case("gelu", "falls_off", devices=CUDA)
def falls_off(op: Op, inputs: Inputs) -> Run:
    """The device is gone for every process, unless it was mended."""

    def act() -> None:
        if (FOLDER / "mended").exists():
            return
        (FOLDER / "ill").touch()
        GPU.sticky = "CUDA error: GPU is lost"

    return _kernels(act)


@case("gelu", "exits", devices=CUDA)
def exits(op: Op, inputs: Inputs) -> Run:
    return _kernels(lambda: os._exit(7))


@case("gelu", "waits", devices=CUDA)
def waits(op: Op, inputs: Inputs) -> Run:
    """Cannot be captured, and nobody said so."""
    import torch

    return _kernels(torch.cuda.synchronize)


if __name__ == "__main__":
    with (FOLDER / "starts").open("a") as file:
        print(os.getpid(), file=file)
    GPU.sticky = "CUDA error: GPU is lost" if (FOLDER / "ill").exists() else ""
    GPU.install(setattr)
    worker.main()
