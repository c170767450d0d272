"""What models of transformers keep from token to token, whatever the release calls it.

A model takes its cache as an argument and returns it as a field of the same name. transformers calls it ``cache`` from
5.24 on. Before, it was ``past_key_values``, and ``cache_params`` in models of states alone. Nothing else here knows
these names.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

CACHE_NAMES = (
    "cache",
    "past_key_values",
    "cache_params",
)  # newest first: a model that takes two of them warns of the older


def cache_name(model: nn.Module) -> str:
    """What a model calls its cache; "" for one that takes none."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), "")


def returned_cache(output: Any) -> Any:
    """The cache in a model's output, or among the named arguments that one of its modules was given; else None."""
    fields = output if isinstance(output, Mapping) else vars(output) if hasattr(output, "__dict__") else {}
    return next((fields[name] for name in CACHE_NAMES if fields.get(name) is not None), None)


def cached_tensors(cache: Any) -> Iterator[torch.Tensor]:
    """The tensors that a cache of transformers holds, layer by layer: keys, values, states, those of the prompt too."""
    import torch

    for layers_of in (getattr(cache, "self_attention_cache", cache), getattr(cache, "cross_attention_cache", None)):
        for layer in getattr(layers_of, "layers", ()):
            for value in vars(layer).values():
                states = value.values() if isinstance(value, dict) else (value,)
                yield from (state for state in states if isinstance(state, torch.Tensor))
