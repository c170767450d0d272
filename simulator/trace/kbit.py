"""A model whose frozen weights are stored in few bits, as peft prepares it for training (QLoRA, arXiv 2305.14314).

bitsandbytes keeps the Linears in few bits, but for the head of the language model; their product runs in 16 bits,
whatever comes in, and its result is given back in the format that came in (``Linear4bit.forward``). peft casts all that
is left in 16 bits to fp32 (``prepare_model_for_kbit_training``): embeddings, norms, the head. The Trainer runs the
forward pass under autocast, so that products in between are in bf16. Adapters are in bf16, as in the authors' code.

What weights weigh in few bits, and the kernels that unpack them, are the pass's (:mod:`..passes.kbit`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn

from .adapters import LowRank
from .workload import Workload

EXPERTS_NDIM = 3  # [experts, rows, columns]


def prepare_kbit(module: nn.Module) -> nn.Module:
    """The module, changed in place: Linears as bitsandbytes runs them, everything else that is frozen in fp32."""
    packed = _replace_linears(module)
    for parameter in module.parameters():
        if not parameter.requires_grad and id(parameter) not in packed and parameter.is_floating_point():
            parameter.data = parameter.data.float()
    return module


def _replace_linears(module: nn.Module) -> set[int]:
    """The identities of weights that are stored in few bits; their Linears get bitsandbytes' forward call.

    Matrices of experts in one tensor are, too (``Experts4bit``).
    """
    head = _output_head(module)
    packed = {id(p) for name, p in module.named_parameters() if p.ndim == EXPERTS_NDIM and "expert" in name}
    for linear in module.modules():
        if isinstance(linear, nn.Linear) and linear is not head and not linear.weight.requires_grad:
            linear.forward = MethodType(_forward, linear)  # type: ignore[method-assign]
            packed.add(id(linear.weight))
    return packed


def _output_head(module: nn.Module) -> nn.Module | None:
    """The head of a language model, which bitsandbytes leaves as it is."""
    get_head = getattr(module, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    return head.base if isinstance(head, LowRank) else head


def _forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    dtype = self.weight.dtype
    bias = None if self.bias is None else self.bias.to(dtype)
    return torch.nn.functional.linear(x.to(dtype), self.weight, bias).to(x.dtype)


def autocast(module: nn.Module, workload: Workload) -> AbstractContextManager[Any]:
    """Within, products run in the format of adapters whatever they are given, where the workload is one of these."""
    trained = next((p.dtype for p in module.parameters() if p.requires_grad), torch.float32)
    return torch.autocast("cpu", trained) if workload.kbit and trained != torch.float32 else nullcontext()
