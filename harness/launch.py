"""What the host spends around the work: launches, dispatch, views, modules, autograd nodes, operators of a model.

Each is timed on the host's clock over many calls. On a GPU they run while no kernel's work is waited for; on a
CPU every op pays dispatch inside its own latency, and Python pays the rest between ops.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Call = Callable[[], object]

LAYER_OPERATORS = 40  # of the small decoder: what a layer calls that is no view
LAUNCH_QUEUE = 512  # half of the launches that CUDA queues before it makes the host wait


def host_calls(what: str, calls: int, device: str) -> Call:
    """A call that does ``what`` (a choice of ``host_overhead``) ``calls`` times.

    ``launch``: an empty kernel on CUDA, an operator on one element on the CPU. ``dispatch``: the same operator
    on empty tensors, which returns before any work. ``view`` and ``module``: one view, one module that returns
    its input. ``autograd``: that many additions recorded in a chain and run backward, which launches nothing
    but passes the gradient through; an addition's own dispatch is in it. ``operator``: that many operators of a small
    decoder (:mod:`.small_decoder`), whole layers of it; ValueError for another number.
    """
    if what == "operator":
        from .small_decoder import decoding

        layers, remainder = divmod(calls, LAYER_OPERATORS)
        if remainder:
            raise ValueError(f"{calls} operators are not whole layers of {LAYER_OPERATORS}")
        return decoding(layers, device)
    if what == "autograd":
        return _autograd(calls, device)
    once = {"launch": _launch, "dispatch": _dispatch, "view": _view, "module": _module}[what](device)

    def run() -> None:
        for _ in repeat(None, calls):
            once()

    return run


def _tensor(device: str, numel: int) -> torch.Tensor:
    import torch

    return torch.ones(numel, device=device)


def _launch(device: str) -> Call:
    import torch

    if device == "cuda":
        return lambda: torch.cuda._sleep(0)
    x, y = _tensor(device, 1), _tensor(device, 1)
    return lambda: torch.add(x, y)


def _dispatch(device: str) -> Call:
    import torch

    x, y = _tensor(device, 0), _tensor(device, 0)
    return lambda: torch.add(x, y)


def _view(device: str) -> Call:
    x = _tensor(device, 1)
    return lambda: x.view(1, 1)


def _module(device: str) -> Call:
    import torch

    class Through(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    x, module = _tensor(device, 1), Through()
    return lambda: module(x)


def _autograd(calls: int, device: str) -> Call:
    import torch

    numel = 1 if device == "cpu" else 0
    x, step = _tensor(device, numel).requires_grad_(), _tensor(device, numel)
    gradient = _tensor(device, numel)

    def run() -> None:
        with torch.enable_grad():
            y = x
            for _ in repeat(None, calls):
                y = torch.add(y, step)
        torch.autograd.grad(y, x, gradient)

    return run
