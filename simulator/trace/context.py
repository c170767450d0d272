"""How long a sequence of a model may be, by its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NO_LIMIT = 1 << 30
LONG = 32768  # tokens of a sequence that is longer than any window


def context_of(described: Mapping[str, Any]) -> int:
    """The most tokens of a sequence by a model's configuration, stretched as its positions are; no limit where it does
    not say."""
    text = described.get("text_config")
    sizes = text if isinstance(text, Mapping) else described
    rope = sizes.get("rope_scaling") or sizes.get("rope_parameters")
    stretched = number_of(rope, "factor") * number_of(rope, "original_max_position_embeddings")
    positions = number_of(sizes, "max_position_embeddings") or number_of(sizes, "n_positions") or NO_LIMIT
    return int(max(positions, stretched))


def number_of(described: object, name: str) -> float:
    """A number by its name in a part of a configuration; 0 where that says none."""
    value = described.get(name) if isinstance(described, Mapping) else None
    return float(value) if isinstance(value, (int, float)) else 0.0


def long_context(described: Mapping[str, Any]) -> int:
    """Tokens that are cached before the last of the longest sequence, of at most :data:`LONG`: models whose positions
    are a table have none beyond."""
    return min(LONG, context_of(described) - 1)
