"""What of a model is trained: all of it, all but what is frozen, or low-rank adapters beside frozen weights (LoRA).

LoRA (Hu et al. 2021, arXiv 2106.09685, sec. 4.1) adds to a frozen product ``x W`` the thin one ``(x A) B``, of which
alone A [k, r] and B [r, n] learn. Dropout acts on x before A, as in PEFT (``lora_B(lora_A(dropout(x)))``) and in NeMo
(``ParallelLinearAdapter``, ``dropout_position`` "pre"). What autograd then leaves out (gradients of frozen weights, and
of inputs that nothing trained comes before) is left out of the trace by itself.

PEFT has an adapter beside each Linear. Where a framework runs several Linears as one product (NeMo's ``linear_qkv``),
one adapter stands beside it: one dropout and one A for all of them, and one B, of which each Linear has its columns.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from .workload import TOGETHER, TraceError, Workload


class FirstProduct(nn.Linear):
    """The first product of an adapter and the dropout before it, once for all ``readers`` of one input.

    On an accelerator dropout is torch's one kernel, which writes its mask of a byte an element. A CPU draws, scales
    and multiplies (``aten/src/ATen/native/Dropout.cpp``).
    """

    readers = 1

    def __init__(self, narrow: int, workload: Workload, **options: Any) -> None:
        super().__init__(narrow, workload.lora_rank, bias=False, **options)
        self.dropout, self.fused = workload.lora_dropout, workload.attention == "fused"
        self._calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., rank] of [..., features]; what was made of the last input is let go after as many calls as readers."""
        if self.readers == 1:
            return super().forward(self._drop(x))
        thins = [thin for tensor, thin in self._calls if tensor is x]
        thin = thins[-1] if thins else super().forward(self._drop(x))
        self._calls.append((x, thin))
        if len(self._calls) == self.readers:
            self._calls.clear()
        return thin

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        if not self.dropout:
            return x
        if self.fused:
            return torch.native_dropout(x, self.dropout, True)[0]
        return nn.functional.dropout(x, self.dropout)


class LowRank(nn.Module):
    """A Linear whose weights are frozen, with a product through a few features that trains beside it.

    ``first`` is the first product where another adapter has one that this one shares.
    """

    def __init__(self, base: nn.Module, workload: Workload, first: FirstProduct | None = None) -> None:
        super().__init__()
        weight: Any = base.weight
        narrow, wide = _widths(base)
        self.base = base
        options: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        self.lora_a = first or FirstProduct(narrow, workload, **options)
        self.lora_b = nn.Linear(workload.lora_rank, wide, bias=False, **options)

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
    shared: dict[tuple[Any, ...], FirstProduct] = {}
    for path in adapted:
        base = model.get_submodule(path)
        group = _group(path, workload)
        first = shared.get((group, _widths(base)[0]))
        adapter = LowRank(base, workload, first)
        model.set_submodule(path, adapter)
        if first is not None:
            first.readers += 1
        elif group:
            shared[group, _widths(base)[0]] = adapter.lora_a


def _group(path: str, workload: Workload) -> tuple[str, str] | None:
    """The module and the name of the group of Linears that a Linear is run in; None where it is run alone."""
    names = (name for name in workload.lora_groups if re.search(rf"{TOGETHER[name]}$", f".{path}"))
    return next(((path.rpartition(".")[0], name) for name in names), None)


def _widths(base: nn.Module) -> tuple[int, int]:
    """Features of a Linear's input and result; transformers' Conv1D has its weight the other way round."""
    weight: Any = base.weight
    narrow, wide = weight.shape[::-1] if isinstance(base, nn.Linear) else weight.shape
    return narrow, wide


def _example_weight(model: nn.Module) -> str:
    """A weight of a model as an example of their names."""
    path = next((path for path, _ in model.named_parameters()), "")
    return f"such as {path}" if path else "which has none"
