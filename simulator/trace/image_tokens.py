"""How many tokens a wrapper makes of an image, by its configuration alone: without torch, as a question is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .workload import TraceError

DEFAULT_SIDE_PX = 1024  # a side of an image, for encoders of any size
DEFAULT_PATCH_PX = 14


@dataclass(frozen=True)
class ImageSize:
    """A square image: pixels of a ``side`` and of a ``patch``, and the ``tokens`` that the language model sees of it.

    ``row`` is the shape of one patch where an encoder is given patches.
    """

    side: int
    patch: int
    tokens: int
    row: tuple[int, ...] = ()


def image_size(config: Mapping[str, Any], image_px: int = 0) -> ImageSize:
    """The images of a wrapper's configuration; TraceError for one without a vision part, or of another size."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise TraceError(f"workload.images needs a model with a vision part; {config.get('model_type')} has none")
    patch, merge, fixed_side = (
        _side(vision.get("patch_size")) or DEFAULT_PATCH_PX,
        _merge(config, vision),
        _side(vision.get("image_size")),
    )
    if fixed_side and not merge and image_px not in (0, fixed_side):
        raise TraceError(
            f"workload.image_px={image_px}: {config.get('model_type')} sees images of {fixed_side} pixels alone"
        )
    side = fixed_side if fixed_side and not merge else image_px or DEFAULT_SIDE_PX
    if merge:
        side = max(side // (patch * merge), 1) * patch * merge
    tokens = (side // patch // (merge or 1)) ** 2 * _tokens_per_patch(config, vision)
    return ImageSize(side, patch, int(config.get("mm_tokens_per_image") or round(tokens)), _patch_shape(vision, patch))


def _side(value: Any) -> int:
    """A side, of a square where it is given as both."""
    return int(value[0] if isinstance(value, (list, tuple)) else value or 0)


def _merge(config: Mapping[str, Any], vision: Mapping[str, Any]) -> int:
    """Patches along a side that become one token in encoders of any size; 0 for an encoder of one size."""
    factors = (vision.get("spatial_merge_size"), vision.get("merge_kernel_size"), vision.get("pooling_kernel_size"))
    return next((_side(factor) for factor in (*factors, config.get("spatial_merge_size")) if factor), 0)


def _tokens_per_patch(config: Mapping[str, Any], vision: Mapping[str, Any]) -> float:
    """Tokens of a patch in encoders of one size, whose projector joins neighbours."""
    ratio = vision.get("pixel_shuffle_ratio") or config.get("downsample_ratio") or 1 / (config.get("scale_factor") or 1)
    return float(ratio) ** 2


def _patch_shape(vision: Mapping[str, Any], patch: int) -> tuple[int, ...]:
    if vision.get("merge_kernel_size"):
        return (3, patch, patch)
    channels = int(vision.get("in_channels") or vision.get("in_chans") or 3)
    return (channels * int(vision.get("temporal_patch_size") or 1) * patch**2,)
