"""Images before a prompt: the vision part of a wrapper, its inputs, and how many tokens it makes of an image.

A wrapper (LLaVA, Qwen-VL, Gemma 3, …) has an encoder of images and a projector beside its language model. Without
images both are left out. With images they run on all of them, as transformers runs them (``get_image_features``), and
their tokens go before those of the text. Each image has the encoder's own size where its positions are learned for
that; encoders of any size take ``image_px`` pixels a side.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from .image_tokens import ImageSize, image_size
from .workload import TraceError, Workload


def drop_vision(module: nn.Module) -> nn.Module:
    """The module, changed in place, without what is beside its language model."""
    base = _base(module)
    language = _language(base)
    for name, child in list(base.named_children()) if language is not None else ():
        if child is not language:
            base._modules[name] = None
    return module


def embed_with_images(model: nn.Module, tokens: torch.Tensor, workload: Workload) -> torch.Tensor:
    """Embeddings [batch, seq_len, hidden] of images, then of as many ``tokens`` as there is room for."""
    images = _features(model, workload)
    count = images.shape[0] // workload.batch
    if count >= workload.seq_len:
        raise TraceError(f"workload.images={workload.images} are {count} tokens, which leaves none of the text")
    embed: Any = model
    text = embed.get_input_embeddings()(tokens[:, count:])
    return torch.cat([images.view(workload.batch, count, -1).to(text.dtype), text], dim=1)


def module_with_head(model: nn.Module) -> nn.Module:
    """What is called with embeddings: the wrapper, or its language model where that has a head of its own (Llama 4)."""
    language: Any = _language(_base(model))
    has_head = language is not None and language.get_output_embeddings() is not None
    return language if has_head else model


def _features(model: nn.Module, workload: Workload) -> torch.Tensor:
    """What the vision part makes of all images [tokens, hidden]."""
    config: Any = model.config
    size = image_size(config.to_dict(), workload.image_px)
    base: Any = _base(model)
    if not hasattr(base, "get_image_features"):
        raise TraceError(
            f"{type(model).__name__} puts images elsewhere than before the prompt: leave workload.images out"
        )
    try:
        output = base.get_image_features(**_pixels(base, size, workload.batch * workload.images))
    except TraceError as error:
        raise TraceError(
            f"the vision part of {type(model).__name__} is not simulated ({error}): leave workload.images out"
        ) from None
    rows = _rows(base, output)
    expected = workload.batch * workload.images * size.tokens
    if rows.shape[0] != expected:
        raise TraceError(f"{type(model).__name__} makes {rows.shape[0]} tokens of its images, not {expected}")
    return rows


def _rows(base: Any, output: Any) -> torch.Tensor:
    """Tokens of all images below each other; what was not projected yet (Llama 4) is."""
    projected = getattr(output, "pooler_output", None)
    features = output.last_hidden_state if projected is None else projected
    rows = torch.cat(
        [feature.flatten(0, -2) for feature in (features if isinstance(features, (list, tuple)) else [features])]
    )
    return base.multi_modal_projector(rows) if projected is None else rows


def _pixels(base: nn.Module, size: ImageSize, count: int) -> dict[str, Any]:
    """Arguments of ``get_image_features`` for so many square images."""
    features: Any = base
    parameters = inspect.signature(inspect.unwrap(features.get_image_features)).parameters
    dtype = next(p.dtype for p in base.parameters() if p.is_floating_point())
    patches = size.side // size.patch
    if "image_grid_thw" in parameters:
        grid = torch.tensor([[1, patches, patches]] * count)
        rows = torch.zeros(count * patches**2, *size.row, dtype=dtype)
        return {"pixel_values": rows, "image_grid_thw": grid}
    if "image_position_ids" in parameters:
        positions = torch.stack(torch.meshgrid(torch.arange(patches), torch.arange(patches), indexing="xy"), -1)
        rows = torch.zeros(count, patches**2, 3 * size.patch**2, dtype=dtype)
        return {"pixel_values": rows, "image_position_ids": positions.view(1, -1, 2).expand(count, -1, -1)}
    pixels = torch.zeros(count, 3, size.side, size.side, dtype=dtype)
    size_parameter = parameters.get("image_sizes")
    if size_parameter is not None and size_parameter.default is inspect.Parameter.empty:
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[size.side, size.side]] * count)}
    return {"pixel_values": pixels}


def _base(module: nn.Module) -> nn.Module:
    """The part of a wrapper that has language model and vision part beside each other."""
    inner = getattr(module, getattr(module, "base_model_prefix", "") or "-", module)
    return inner if isinstance(inner, nn.Module) else module


def _language(base: nn.Module) -> nn.Module | None:
    return next((child for name, child in base.named_children() if name in ("language_model", "text_model")), None)
