"""Layers that learn to predict tokens further on (multi-token prediction), which transformers leaves out of its models.

Each has what DeepSeek-V3 (arXiv 2412.19437, sec. 2.2) and Megatron-Core give it: norms of the states before it and of
the next tokens' embeddings, one product that joins the two, a layer of the model's own, a norm, and the model's
embedding and head. Its loss is added to the model's. In hybrids of one mixer a layer it has the last layer that
attends, and the last one (Nemotron 3: ``*E``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .workload import TraceError

PREFIX = "mtp"  # of the names of these layers in the model: mtp1, mtp2, …
LOSS_SHARE = 0.1  # of its loss in the whole, as Megatron-Core has it; no time depends on it


class FurtherToken(nn.Module):
    """One further token: states [batch, tokens, hidden] and embeddings of the next tokens to states of its own."""

    def __init__(self, layers: list[nn.Module], norm: nn.Module, hidden: int) -> None:
        super().__init__()
        weight = next(norm.parameters())
        options: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        self.state_norm, self.token_norm, self.last_norm = (copy_module(norm) for _ in range(3))
        self.join = nn.Linear(2 * hidden, hidden, bias=False, **options)
        for name, layer in zip(("first", "second"), layers, strict=False):
            self.add_module(name, copy_module(layer))

    def forward(self, states: torch.Tensor, tokens: torch.Tensor, arguments: list[dict[str, Any]]) -> torch.Tensor:
        """``arguments`` are those that the model gave to the layers that these are copies of."""
        joined = self.join(torch.cat([self.token_norm(tokens), self.state_norm(states)], dim=-1))
        for name, layer_arguments in zip(("first", "second"), arguments, strict=False):
            output = self.get_submodule(name)(joined, **layer_arguments)
            joined = output[0] if isinstance(output, tuple) else output
        return self.last_norm(joined)


def add_next_tokens(model: Any, count: int, name: str) -> None:
    """Gives a model of transformers ``count`` layers of further tokens; TraceError where it is no plain decoder."""
    layers, norm = _layers_and_norm(model, name)
    for index in range(count):
        model.add_module(f"{PREFIX}{index + 1}", FurtherToken(layers, norm, model.config.hidden_size))


def loss_with_next_tokens(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of a training step with all its further tokens."""
    layers, norm = _layers_and_norm(model, type(model).__name__)
    arguments_of_layer: dict[nn.Module, dict[str, Any]] = {}
    last_states: list[torch.Tensor] = []

    def record_arguments(layer: nn.Module, _: Any, arguments: dict[str, Any]) -> None:
        arguments_of_layer[layer] = arguments

    hooks = [layer.register_forward_pre_hook(record_arguments, with_kwargs=True) for layer in layers]
    hooks.append(norm.register_forward_hook(lambda _, __, states: last_states.append(states)))
    try:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    finally:
        for hook in hooks:
            hook.remove()
    states = last_states[-1]
    embed: Callable[..., torch.Tensor] = model.get_input_embeddings()
    head: Callable[..., torch.Tensor] = model.get_output_embeddings()
    for block in further_layers(model):
        states = block(states, embed(tokens), [arguments_of_layer[layer] for layer in layers])
        extra = model.loss_function(logits=head(states), labels=tokens, vocab_size=model.config.vocab_size)
        loss = loss + extra * LOSS_SHARE
    return loss


def further_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of further tokens that a model was given."""
    return [child for child in model.children() if isinstance(child, FurtherToken)]


def copy_module(module: nn.Module) -> nn.Module:
    """A module like one, with tensors of its own."""
    tensors = [*module.parameters(), *module.buffers()]
    copies: dict[int, Any] = {
        id(tensor): nn.Parameter(torch.empty_like(tensor), tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else torch.empty_like(tensor)
        for tensor in tensors
    }
    return copy.deepcopy(module, copies)


def _layers_and_norm(model: Any, name: str) -> tuple[list[nn.Module], nn.Module]:
    """The layers of a model that those of further tokens are like, and the norm behind the last."""
    base, config = getattr(model, "base_model", None), getattr(model, "config", None)
    children = list(base.children()) if base is not None else []
    depth = getattr(config, "num_hidden_layers", 0)
    stacks = [child for child in children if isinstance(child, nn.ModuleList) and len(child) == depth]
    norms = [child for child in children if "norm" in type(child).__name__.lower()]
    if len(stacks) != 1 or not norms or model.get_output_embeddings() is None:
        raise TraceError(f"workload.mtp_layers: {name} is no decoder with one list of layers, a norm and a head")
    last = stacks[0][-1]
    attending = [layer for layer in stacks[0] if _attends(layer)]
    return ([last] if _attends(last) or not attending else [attending[-1], last]), norms[-1]


def _attends(layer: nn.Module) -> bool:
    return any("attention" in type(module).__name__.lower() for module in layer.modules())
