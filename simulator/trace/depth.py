"""How many layers of a model need to be traced, because the rest are like them.

The whole model is built as bare structure. Layers with the same modules, shapes and settings are alike; where
the list of layers ends in a pattern that repeats, a model with a few rounds of it stands for all.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from .deepen import FEWEST_ROUNDS
from .workload import TraceError

LONGEST_PERIOD = 16


@dataclass(frozen=True)
class DepthPlan:
    """Trace ``traced`` layers of ``stack``; from layer ``first`` on they repeat, and ``missing`` more follow."""

    stack: str
    first: int
    traced: int
    missing: int


def plan(model: nn.Module, config: Any, rounds: int = FEWEST_ROUNDS) -> DepthPlan | None:
    """What to trace of a model, or None when that is all of it. TraceError for a model without layers.

    ``rounds`` of what repeats are traced.
    """
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", None)
    if isinstance(layers, int) and layers < 1:
        raise TraceError(f"the model's num_hidden_layers={layers} leaves nothing to run; take at least 1")
    stacks = [name for name, module in model.named_modules() if _is_stack(module, layers)]
    if len(stacks) != 1 or not isinstance(layers, int):
        return None
    kinds = layer_kinds(model.get_submodule(stacks[0]), text)
    choices = [_tail(kinds, period) for period in range(1, min(LONGEST_PERIOD, layers) + 1)]
    traced, first = min((first + rounds * period, first) for first, period in choices)
    return DepthPlan(stacks[0], first, traced, layers - traced) if traced < layers else None


def shortened(config: Any, layers: int) -> Any:
    """The configuration with only the first ``layers`` layers; lists with an entry for each layer are cut."""
    short = copy.deepcopy(config)
    text = short.get_text_config()
    whole = text.num_hidden_layers
    for name, value in list(text.to_dict().items()):
        if (
            isinstance(value, (list, tuple))
            and len(value) == whole
            and isinstance(getattr(text, name, None), type(value))
        ):
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return short


def layer_kinds(stack: nn.Module, text_config: Any) -> list[int]:
    """A number for each layer, equal for layers that are alike: in structure and in the configuration's lists."""
    layers = list(stack.children())
    described = [dict(_describe(layer)) for layer in layers]
    counting = {key for key in described[0] if all(d.get(key) == i for i, d in enumerate(described))}
    per_layer = [v for v in text_config.to_dict().values() if isinstance(v, (list, tuple)) and len(v) == len(layers)]
    kinds: dict[str, int] = {}
    numbers = []
    for index, description in enumerate(described):
        own = {key: value for key, value in description.items() if key not in counting}
        text = repr((sorted(own.items()), [entries[index] for entries in per_layer]))
        numbers.append(kinds.setdefault(text, len(kinds)))
    return numbers


def _is_stack(module: nn.Module, layers: object) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) == layers


def _describe(layer: nn.Module) -> list[tuple[str, Any]]:
    """Modules, their plain settings, and the shapes of what they hold."""
    out: list[tuple[str, Any]] = []
    for name, module in layer.named_modules():
        out.append((name, type(module).__qualname__))
        for key, value in vars(module).items():
            if isinstance(value, (bool, int, float, str, type(None))) and key != "training":
                out.append((f"{name}.{key}", value))
        for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            out.append((f"{name}.{key}", (tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)))
    return out


def _tail(kinds: Sequence[int], period: int) -> tuple[int, int]:
    """The first layer from which whole rounds of ``period`` layers repeat up to the last, and the period."""
    first = len(kinds) - period
    while first > 0 and kinds[first - 1] == kinds[first - 1 + period]:
        first -= 1
    return first + (len(kinds) - first) % period, period
