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
    for states in _states_of(cache):
        yield from (state for _, state in _tensors_in(states))


def drop_prompt(cache: Any) -> None:
    """Keep of a filled cache what later tokens read, as it is from the second token on.

    A window is a slice of the keys and values of the whole prompt, which stay in memory until a token moves it on.
    """
    copies: dict[int, torch.Tensor] = {}  # by the slice: a model may keep one under two names
    for states in _states_of(cache):
        for name, state in _tensors_in(states):
            if state.untyped_storage().nbytes() > state.nbytes:
                copy = copies.setdefault(id(state), state.clone())
                states[name] = copy


def _states_of(cache: Any) -> Iterator[dict[Any, Any]]:
    """What each layer of a cache holds by name, and the mappings among that."""
    for layers_of in (getattr(cache, "self_attention_cache", cache), getattr(cache, "cross_attention_cache", None)):
        for layer in getattr(layers_of, "layers", ()):
            yield vars(layer)
            yield from (value for value in vars(layer).values() if isinstance(value, dict))


def _tensors_in(states: dict[Any, Any]) -> list[tuple[Any, torch.Tensor]]:
    import torch

    return [(name, state) for name, state in states.items() if isinstance(state, torch.Tensor)]
