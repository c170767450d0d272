"""One step of a model run on fake tensors, and what it amounts to: nodes in execution order, and tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from ..graph import Node, Tensor
from .accelerated import accelerate
from .attention import fused_attention
from .build import BuiltModel, replace_on_conversion, silence_libraries, skip_initialisation
from .kbit import autocast
from .mixers import fused_mixers, index_sparsely
from .model_caches import cached_tensors, returned_cache
from .nodes import to_eager_calls, to_graph, to_node
from .steps import loss_of, prepare
from .tracer import ModulePaths, Tracer, take_real_paths
from .workload import Workload


@dataclass(frozen=True)
class Capture:
    """A recorded step. ``parameters`` counts trained elements."""

    nodes: list[Node]
    tensors: list[Tensor]
    parameters: int


def capture(make: Callable[[], BuiltModel], workload: Workload) -> Capture:
    """Build a model on fake tensors and record one step of it."""
    tracer, roles, parameters = record(make, workload)
    calls = to_eager_calls(tracer.calls)
    nodes, tensors = to_graph([to_node(call) for call in calls], tracer.storages, roles)
    return Capture(nodes, tensors, parameters)


def record(make: Callable[[], BuiltModel], workload: Workload) -> tuple[Tracer, dict[int, str], int]:
    """The tracer after the step, the role of each storage that has one, and the number of trained elements."""
    tracer = Tracer(workload.expert_load)
    attention = fused_attention() if workload.attention == "fused" else nullcontext()
    with (
        silence_libraries(),
        tracer,
        take_real_paths(),
        one_thread(),
        attention,
        torch.random.fork_rng(devices=[]),
        ExitStack() as kernels,
    ):
        with skip_initialisation(), replace_on_conversion():
            built = make()
        if workload.attention == "fused":
            accelerate(built.module)
            index_sparsely(built.module)
            kernels.enter_context(fused_mixers(built.module))
        roles = _record_step(tracer, built, workload)
    trained = {id(p): p.numel() for p in built.module.parameters() if p.requires_grad}
    return tracer, roles, sum(trained.values())


@contextmanager
def one_thread() -> Iterator[None]:
    """Within, torch computes in one thread: values beside a trace are small, and threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _record_step(tracer: Tracer, built: BuiltModel, workload: Workload) -> dict[int, str]:
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
        roles |= _roles_of(tracer, cached_tensors(step.cache), "cache")
        with tracer.phase("forward"), paths.watch(), autocast(built.module, workload):
            output = step.run()
        if workload.training:
            loss = loss_of(output)
            paths.follow_backward(loss)
            with tracer.phase("backward"):
                loss.backward()
    tracer.close()
    roles |= _roles_of(tracer, cached_tensors(returned_cache(output)), "cache")
    return roles | _module_roles(tracer, built.module, workload)


def _module_roles(tracer: Tracer, module: nn.Module, workload: Workload) -> dict[int, str]:
    """Roles of a module's buffers, parameters and their gradients."""
    parameters = list(module.parameters())
    frozen = [p for p in parameters if workload.training and not p.requires_grad]
    gradients = [p.grad for p in parameters if p.grad is not None]
    return (
        _roles_of(tracer, module.buffers(), "buffer")
        | _roles_of(tracer, parameters, "weight")
        | _roles_of(tracer, frozen, "frozen")
        | _roles_of(tracer, gradients, "gradient")
    )


def _roles_of(tracer: Tracer, tensors: Iterable[torch.Tensor], role: str) -> dict[int, str]:
    return {tracer.storage_id(tensor): role for tensor in tensors}
