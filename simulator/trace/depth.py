"""How many layers of a model need to be traced, because the rest are like them.

The whole model is built as bare structure. Layers with the same modules, shapes and settings are alike; where
the list of layers ends in a pattern that repeats, a model with a few rounds of it stands for all.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from .deepen import MIN_ROUNDS
from .workload import TraceError

MAX_PERIOD = 16


@dataclass(frozen=True)
class DepthPlan:
    """Trace ``traced`` layers of ``stack``; from layer ``first`` on they repeat, and ``missing`` more follow."""

    stack: str
    first: int
    traced: int
    missing: int


def plan_depth(model: nn.Module, config: Any, rounds: int = MIN_ROUNDS) -> DepthPlan | None:
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
    kinds = layer_kinds(model.get_submodule(stacks[0]), text, per_layer_settings(text))
    choices = [_tail(kinds, period) for period in range(1, min(MAX_PERIOD, layers) + 1)]
    traced, first = min((first + rounds * period, first) for first, period in choices)
    return DepthPlan(stacks[0], first, traced, layers - traced) if traced < layers else None


def shorten_config(config: Any, layers: int) -> Any:
    """The configuration with only the first ``layers`` layers; lists with an entry for each layer are cut."""
    short = copy.deepcopy(config)
    text = short.get_text_config()
    values = text.to_dict()
    for name in per_layer_settings(text):
        if isinstance(getattr(text, name, None), type(values[name])):
            setattr(text, name, values[name][:layers])
    text.num_hidden_layers = layers
    return short


def per_layer_settings(text_config: Any) -> list[str]:
    """Settings with an entry for each layer."""
    layers = text_config.num_hidden_layers
    return [
        name
        for name, value in text_config.to_dict().items()
        if isinstance(value, (list, tuple)) and len(value) == layers
    ]


def layer_kinds(stack: nn.Module, text_config: Any, lists: Sequence[str]) -> list[int]:
    """A number for each layer, equal for layers that are alike: in structure and in these lists of the configuration.

    The lists are those of the whole model: that a shorter one has as many layers as there are, say, ids of the last
    token makes these none of a layer's settings.
    """
    layers = list(stack.children())
    descriptions = [dict(_describe(layer)) for layer in layers]
    keys = {key for description in descriptions for key in description}
    counting = {key for key in keys if _counts({i: d[key] for i, d in enumerate(descriptions) if key in d})}
    values = text_config.to_dict()
    per_layer = [values[name] for name in lists if not _counts(dict(enumerate(values[name])))]
    kinds: dict[str, int] = {}
    numbers = []
    for index, description in enumerate(descriptions):
        settings = {key: value for key, value in description.items() if key not in counting}
        text = repr((sorted(settings.items()), [entries[index] for entries in per_layer]))
        numbers.append(kinds.setdefault(text, len(kinds)))
    return numbers


def _counts(values: Mapping[int, object]) -> bool:
    """Whether a setting of some layers is each one's own index, which makes no difference between them."""
    return len(values) > 1 and all(type(value) is int and value == index for index, value in values.items())


def _is_stack(module: nn.Module, layers: object) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) == layers


def _describe(layer: nn.Module) -> list[tuple[str, Any]]:
    """Modules, their plain settings, and the shapes of what they hold."""
    description: list[tuple[str, Any]] = []
    for name, module in layer.named_modules():
        description.append((name, type(module).__qualname__))
        for key, value in vars(module).items():
            if isinstance(value, (bool, int, float, str, type(None))) and key != "training":
                description.append((f"{name}.{key}", value))
        for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            description.append((f"{name}.{key}", (tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)))
    return description


def _tail(kinds: Sequence[int], period: int) -> tuple[int, int]:
    """The first layer from which whole rounds of ``period`` layers repeat up to the last, and the period."""
    first = len(kinds) - period
    while first > 0 and kinds[first - 1] == kinds[first - 1 + period]:
        first -= 1
    return first + (len(kinds) - first) % period, period
