"""The calls that make one step: the same ones are traced on fake tensors and can be run for real.

A model of transformers is called as its users call it; any other module is called on its example inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .classes import encodes, translates
from .model_caches import cache_name, drop_prompt, returned_cache
from .next_tokens import loss_with_next_tokens
from .vision import embed_with_images, module_with_head
from .workload import TraceError, Workload

Call = Callable[[], Any]


@dataclass(frozen=True)
class ForwardCall:
    """A forward call that is ready to run, and the cache of keys and values that it was given."""

    run: Call
    cache: Any = None


def prepare(model: nn.Module, workload: Workload, example: Callable[[Workload], Any] | None = None) -> ForwardCall:
    """One forward call with its inputs made; for decode the prompt has been run and its cache is filled.

    ``example`` gives the inputs of a module that is not from transformers: a tuple of positional or a mapping of
    keyword arguments. Without it the module's own ``example_inputs(workload)`` is asked.
    """
    model.train(workload.training)
    example = example or getattr(model, "example_inputs", None)
    if example is not None:
        return ForwardCall(_example_call(model, example(workload)))
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise TraceError(
            f"{type(model).__name__} is not from transformers and has no example_inputs(workload): "
            "add that method, or return (module, function) from the factory"
        )
    tokens = token_ids(model, workload.batch, workload.seq_len)
    if encodes(model.config):
        return ForwardCall(_encoder_call(model, tokens, workload))
    if translates(model.config):
        return _encoder_decoder_step(model, tokens, workload)
    if workload.images:
        return _image_step(model, tokens, workload)
    if workload.training:
        if workload.mtp_layers:
            return ForwardCall(lambda: loss_with_next_tokens(model, tokens))
        return ForwardCall(lambda: model(input_ids=tokens, labels=tokens, use_cache=False))
    keep, name = _last_logits(model, workload), cache_name(model)
    cache = _cache(model, workload, name)
    if workload.kind == "prefill":
        return ForwardCall(lambda: model(input_ids=tokens, use_cache=True, **cache, **keep), cache.get(name))
    token = token_ids(model, workload.batch, 1)
    filled = returned_cache(model(input_ids=tokens, use_cache=True, **cache, **keep)) if name else None
    if filled is None:
        raise TraceError(f"{type(model).__name__} keeps no keys and values, so that workload=decode has none to read")
    drop_prompt(filled)
    return ForwardCall(lambda: model(input_ids=token, use_cache=True, **{name: filled}, **keep), filled)


def _image_step(model: nn.Module, tokens: torch.Tensor, workload: Workload) -> ForwardCall:
    """A training step or a prompt of images and text."""
    wrapper = module_with_head(model)
    if workload.training:
        return ForwardCall(
            lambda: wrapper(inputs_embeds=embed_with_images(model, tokens, workload), labels=tokens, use_cache=False)
        )
    keep, cache = _last_logits(model, workload), _cache(model, workload, name := cache_name(model))
    return ForwardCall(
        lambda: wrapper(inputs_embeds=embed_with_images(model, tokens, workload), use_cache=True, **cache, **keep),
        cache.get(name),
    )


def training_step(model: nn.Module, workload: Workload, example: Callable[[Workload], Any] | None = None) -> Call:
    """Forward, backward, optimizer and freed gradients, as one call on a real model."""
    forward = prepare(model, workload, example)
    optimizer = make_optimizer(model) if workload.optimizer == "adamw" else None

    def step() -> None:
        output = forward.run()
        loss_of(output).backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)

    return step


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW in its fused form, which updates all parameters of one dtype in one call."""
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-5, fused=True)


def token_ids(model: nn.Module, batch: int, length: int) -> torch.Tensor:
    """int64 [batch, length]: every token of the vocabulary in turn."""
    config: Any = model.config
    vocabulary = config.get_text_config().vocab_size
    return torch.arange(batch * length).remainder(vocabulary).view(batch, length)


def loss_of(output: Any) -> torch.Tensor:
    """The scalar to differentiate: the output itself or its ``loss``; TraceError when there is none."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    loss = output if loss is None else loss
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    raise TraceError("workload=train needs a forward that returns a scalar loss, or an output with one in .loss")


def _example_call(model: nn.Module, inputs: Any) -> Call:
    if isinstance(inputs, Mapping):
        return lambda: model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return lambda: model(*inputs)
    raise TraceError(f"example inputs must be a tuple or a mapping of arguments, not {type(inputs).__name__}")


def _encoder_decoder_step(model: nn.Module, tokens: torch.Tensor, workload: Workload) -> ForwardCall:
    """An encoder with a decoder: the prompt goes to the encoder, and the decoder begins with one token.

    In training, and with logits of ``all`` positions, the decoder is given as many tokens as the encoder. A decode step
    reads the keys and values of the prompt, and the decoder's own of one token.
    """
    if workload.training:
        return ForwardCall(lambda: model(input_ids=tokens, decoder_input_ids=tokens, labels=tokens, use_cache=False))
    decoder_tokens = tokens if workload.logits == "all" and workload.kind == "prefill" else tokens[:, :1]
    any_model: Any = model

    def decode(encoded: Any, use_cache: bool = True, **caches: Any) -> Any:
        return model(encoder_outputs=encoded, decoder_input_ids=decoder_tokens, use_cache=use_cache, **caches)

    def encode() -> Any:  # by itself, for some encoders refuse use_cache, which their models hand on to them
        return any_model.get_encoder()(input_ids=tokens)

    if workload.kind == "prefill":
        return ForwardCall(lambda: decode(encode(), workload.logits != "all"))
    encoded = encode()
    filled = returned_cache(decode(encoded))
    return ForwardCall(lambda: decode(encoded, **{cache_name(model): filled}), filled)


def _encoder_call(model: nn.Module, tokens: torch.Tensor, workload: Workload) -> Call:
    """All tokens at once, with no cache to fill; TraceError for a decode step, which encoders do not have."""
    if workload.kind == "decode":
        raise TraceError(
            f"{type(model).__name__} is an encoder, which generates nothing: take workload=prefill or train"
        )
    if workload.training:
        return lambda: model(input_ids=tokens, labels=tokens)
    return lambda: model(input_ids=tokens)


def _cache(model: nn.Module, workload: Workload, name: str) -> dict[str, Any]:
    """Nothing for the cache that the model makes by itself, else one with room for the step.

    Layers that transformers has no static cache for (DeepSeek-V4's compressed ones) keep the model's own.
    """
    if workload.cache == "dynamic" or not name:
        return {}
    from transformers import StaticCache

    config: Any = model.config
    room = workload.seq_len + (workload.kind == "decode")
    try:
        return {name: StaticCache(config=config, max_cache_len=room)}
    except KeyError:
        return {}


def _last_logits(model: nn.Module, workload: Workload) -> dict[str, int]:
    """Only the last position needs logits to go on generating; most models can be told."""
    if workload.logits == "all":
        return {}
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
