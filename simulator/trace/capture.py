"""One step of a model run on fake tensors, and what it amounts to: nodes in execution order, and tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from ..graph import Node, Tensor
from .accelerated import accelerate
from .attention import fused_attention
from .build import Built, new_on_conversion, quiet, uninitialised
from .caches import cached_tensors, kept
from .kbit import autocast
from .mixers import fused_mixers, index_sparsely
from .nodes import as_eager, to_graph, to_node
from .steps import loss_of, prepare
from .tracer import ModulePaths, Tracer, real_paths
from .workload import Workload


@dataclass(frozen=True)
class Capture:
    """A recorded step. ``parameters`` counts trained elements."""

    nodes: list[Node]
    tensors: list[Tensor]
    parameters: int


def capture(make: Callable[[], Built], workload: Workload) -> Capture:
    """Build a model on fake tensors and record one step of it."""
    tracer, roles, parameters = record(make, workload)
    calls = as_eager(tracer.calls)
    nodes, tensors = to_graph([to_node(call) for call in calls], tracer.storages, roles)
    return Capture(nodes, tensors, parameters)


def record(make: Callable[[], Built], workload: Workload) -> tuple[Tracer, dict[int, str], int]:
    """The tracer after the step, the role of each storage that has one, and the number of trained elements."""
    tracer = Tracer(workload.expert_load)
    attention = fused_attention() if workload.attention == "fused" else nullcontext()
    with quiet(), tracer, real_paths(), attention, torch.random.fork_rng(devices=[]), ExitStack() as kernels:
        with uninitialised(), new_on_conversion():
            built = make()
        if workload.attention == "fused":
            accelerate(built.module)
            index_sparsely(built.module)
            kernels.enter_context(fused_mixers(built.module))
        roles = _run(tracer, built, workload)
    trained = {id(p): p.numel() for p in built.module.parameters() if p.requires_grad}
    return tracer, roles, sum(trained.values())


def _run(tracer: Tracer, built: Built, workload: Workload) -> dict[int, str]:
    """Record the phases of the step; returns roles by storage.

    What the caller of a model holds on to (inputs, output, cache, gradients) is held until all is recorded.
    """
    paths = ModulePaths(tracer, built.module)
    with torch.set_grad_enabled(workload.training):
        step = prepare(built.module, workload, built.example)
        if workload.training and workload.accumulate:
            for parameter in built.module.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        roles = dict.fromkeys(tracer.alive(), "input")
        roles |= _all(tracer, cached_tensors(step.cache), "cache")
        with tracer.phase("forward"), paths.watch(), autocast(built.module, workload):
            output = step.run()
        if workload.training:
            loss = loss_of(output)
            paths.follow_backward(loss)
            with tracer.phase("backward"):
                loss.backward()
    tracer.close()
    roles |= _all(tracer, cached_tensors(kept(output)), "cache")
    return roles | _held_by(tracer, built.module, workload)


def _held_by(tracer: Tracer, module: nn.Module, workload: Workload) -> dict[int, str]:
    """Roles of a module's buffers, parameters and their gradients."""
    parameters = list(module.parameters())
    frozen = [p for p in parameters if workload.training and not p.requires_grad]
    gradients = [p.grad for p in parameters if p.grad is not None]
    return (
        _all(tracer, module.buffers(), "buffer")
        | _all(tracer, parameters, "weight")
        | _all(tracer, frozen, "frozen")
        | _all(tracer, gradients, "gradient")
    )


def _all(tracer: Tracer, tensors: Iterable[torch.Tensor], role: str) -> dict[int, str]:
    return {tracer.storage_id(tensor): role for tensor in tensors}
