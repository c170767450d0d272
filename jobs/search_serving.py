"""``opcast search serving``: the best ways to serve a model on so many GPUs, and the front of speed against use."""

from __future__ import annotations

from functools import partial
from typing import Any

from . import search

FREE_CHOICE = search.FREE_CHOICE
ADDED = (*search.ADDED, "precision.kv_dtype", "prices.")
WORDS = search.WORDS
words = partial(search.words, verb="search_serving")


def run(config: dict[str, Any]) -> int:
    """Search, or compare two ways to serve, and print what was found; returns the exit code, 1 where none can be."""
    return search.run(config, "search_serving")
