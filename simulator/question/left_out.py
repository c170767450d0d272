"""What of a model a question leaves out: the vision part of a wrapper where no images are given."""

from __future__ import annotations

from typing import Any

from ..trace.models import resolve
from .work import Work


def left_out(model: Any, work: Work) -> tuple[str, ...]:
    """A note on the parts of a model that are not simulated."""
    config = resolve(model).config or {}
    if work.images or not config.get("vision_config"):
        return ()
    where = "" if work.kind in ("train", "prefill", "generate") else " of workload=prefill"
    return (f"the vision part of the model is left out, its weights too: workload.images=1{where} simulates it",)
