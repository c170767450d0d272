"""What is said of a model beside its answer: parts that are left out, and sequences that it is not made for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..trace.context import context_of
from ..trace.models import resolve
from .work import Work


def model_notes(model: Any, work: Work) -> tuple[str, ...]:
    """Notes on the parts of a model that are not simulated, and on sequences beyond its context."""
    config = resolve(model).config or {}
    return (*_vision_left_out(config, work), *_beyond_context(config, work))


def _vision_left_out(config: Mapping[str, Any], work: Work) -> tuple[str, ...]:
    if work.images or not config.get("vision_config"):
        return ()
    where = "" if work.kind in ("train", "prefill", "generate") else " of workload=prefill"
    return (f"the vision part of the model is left out, its weights too: workload.images=1{where} simulates it",)


def _beyond_context(config: Mapping[str, Any], work: Work) -> tuple[str, ...]:
    """Positions that are computed, not looked up in a table, have no end: the model runs, but was not made for it."""
    most, longest = context_of(config), work.longest
    if longest <= most:
        return ()
    refused = "" if work.kind == "train" else "; engines refuse such requests unless its positions are stretched"
    return (f"{longest:,} tokens are more than the {most:,} of the model's configuration{refused}",)
