"""What of a model is trained: all of it, all but what is frozen, or low-rank adapters beside frozen weights (LoRA).

LoRA (Hu et al. 2021, arXiv 2106.09685, sec. 4.1) adds to a frozen product ``x W`` the thin one ``(x A) B``, of which
alone A [k, r] and B [r, n] learn. What autograd then leaves out (gradients of frozen weights, and of inputs that
nothing trained comes before) is left out of the trace by itself.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from .workload import TraceError, Workload


class LowRank(nn.Module):
    """A Linear whose weights are frozen, with a product through ``rank`` features that trains beside it."""

    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__()
        weight: Any = base.weight
        wide, narrow = weight.shape if isinstance(base, nn.Linear) else weight.shape[::-1]
        self.base = base
        options: dict[str, Any] = {"bias": False, "dtype": weight.dtype, "device": weight.device}
        self.lora_a = nn.Linear(narrow, rank, **options)
        self.lora_b = nn.Linear(rank, wide, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The frozen product, and the scaled thin one added to it."""
        return self.base(x) + self.lora_b(self.lora_a(x)) * 2.0


def choose_trained(model: nn.Module, workload: Workload, name: str) -> nn.Module:
    """The model with adapters where the workload wants them, and without gradients where it wants none.

    TraceError where the workload names no Linear of the model, or freezes all that there is.
    """
    if workload.lora_rank:
        _adapt(model, workload, name)
    if workload.frozen:
        pattern = re.compile(workload.frozen)
        frozen = [parameter for path, parameter in model.named_parameters() if pattern.search(path)]
        if not frozen:
            raise TraceError(
                f"workload.frozen={workload.frozen!r} matches no weight of {name}, {_example_weight(model)}"
            )
        for parameter in frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TraceError(f"workload.frozen={workload.frozen!r} leaves nothing of {name} to train")
    return model


def _adapt(model: nn.Module, workload: Workload, name: str) -> None:
    from transformers.pytorch_utils import Conv1D

    model.requires_grad_(False)
    pattern = re.compile(workload.lora_modules)
    linears = [path for path, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))]
    adapted = [path for path in linears if pattern.search(path)]
    if not adapted:
        raise TraceError(
            f"workload.lora_modules={workload.lora_modules!r} matches no Linear of {name}, such as {linears[-1]}"
            if linears
            else f"{name} has no Linear that workload.lora_modules={workload.lora_modules!r} could adapt"
        )
    for path in adapted:
        model.set_submodule(path, LowRank(model.get_submodule(path), workload.lora_rank))


def _example_weight(model: nn.Module) -> str:
    """A weight of a model as an example of their names."""
    path = next((path for path, _ in model.named_parameters()), "")
    return f"such as {path}" if path else "which has none"
