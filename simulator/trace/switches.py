"""Switch Transformers (arXiv 2101.03961) as a trace can run them: the same operators, without two turns of Python.

transformers converts a router's weights in every call, and finds an expert by the text of a tensor.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn


def simplify_switches(module: nn.Module) -> None:
    """Gives routers weights in their own format at once, and experts a forward call that counts them by numbers."""
    parts: Any = module.modules()
    for submodule in list(parts):
        if type(submodule).__name__ == "SwitchTransformersTop1Router":
            submodule.classifier = _convert_once(submodule.classifier, submodule.dtype)
        if type(submodule).__name__ == "SwitchTransformersExperts":
            submodule.forward = MethodType(_experts, submodule)


def _convert_once(classifier: nn.Module, dtype: torch.dtype) -> nn.Module:
    linear: Any = classifier
    options: dict[str, Any] = {"bias": linear.bias is not None, "dtype": dtype, "device": linear.weight.device}
    converted: Any = nn.Linear(linear.in_features, linear.out_features, **options)
    converted.to = lambda *_: converted
    return converted


def _experts(self: Any, states: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """States [tokens, hidden] through the experts that ``selected`` [tokens, 1, experts] marks, times their weights."""
    total, mask = torch.zeros_like(states), selected.permute(2, 1, 0)
    for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        choice, rows = torch.where(mask[hit].squeeze(0))
        inputs = states[None, rows].reshape(-1, states.shape[-1])
        outputs = self[f"expert_{int(hit[0])}"](inputs) * weights[rows, choice, None]
        total.index_add_(0, rows, outputs.to(states.dtype))
    return total
