"""What a checkpoint stores: the format of each module's weights, by rules that name modules as its libraries do.

A rule names modules in two ways. A name (``lm_head``, ``model.layers.0.mlp.gate``) is a module and all that is in it. A
pattern is a regular expression that has to match from the start of a module's whole name. Names are compared without
what stands before the layers: wrappers call them ``model.language_model.layers``, ``language_model.model.layers`` or
``backbone.layers``, and patterns see every one of these spellings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

LANGUAGE_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "backbone.", "model.")
MERGED_PARTS = {  # modules that one node of a graph stands for -> their names in a checkpoint
    "fused.qkv": ("q_proj", "k_proj", "v_proj"),
    "fused.gate_up": ("gate_proj", "up_proj"),
    "fused.latent_down": ("q_a_proj", "kv_a_proj_with_mqa"),
}
EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "gate_up_proj")


@dataclass(frozen=True)
class WeightFormat:
    """How a weight is stored: a format of ``conf/precision`` (empty: as it computes), weights to a scale and its bytes.

    ``group`` and ``scale_bytes`` 0 are those that the format usually has.
    """

    name: str = ""
    group: int = 0
    scale_bytes: float = 0.0


@dataclass(frozen=True)
class ModuleRule:
    """Modules, by ``names`` and ``patterns``, whose weights are packed alike."""

    weights: WeightFormat
    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()

    @cached_property
    def bare_names(self) -> frozenset[str]:
        return frozenset(map(strip_prefix, self.names))

    @cached_property
    def compiled(self) -> tuple[re.Pattern[str], ...]:
        return tuple(map(re.compile, self.patterns))

    def names_it(self, name: str) -> bool:
        """Whether one of the names is that of a module, or of one that it is in."""
        return bool(self.names) and any(run in self.bare_names for run in _word_runs(strip_prefix(name)))

    def covers(self, name: str) -> bool:
        """Whether the rule is about a module."""
        if self.names_it(name):
            return True
        return any(pattern.match(spelling) for pattern in self.compiled for spelling in iterate_spellings(name))


EVERY_MODULE = (".*",)  # the pattern of a rule for all modules that no other rule names


@dataclass(frozen=True)
class StoredFormat:
    """The format of a checkpoint's weights, and of its keys and values.

    ``precision`` is the format that most of them have, ``rules`` are asked in order, and a module that none of them
    names is stored as it computes. ``where`` it was read, ``kept`` are the first entries of the list of what stays in
    16 bits as they were written, ``remarks`` what was read but is not simulated.
    """

    precision: str
    rules: tuple[ModuleRule, ...]
    kv_dtype: str = ""
    where: str = ""
    kept: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def modules_of(path: str, source: str = "") -> tuple[str, ...]:
    """The modules that a node of a graph stands for, as a checkpoint has them: one by one where they were merged."""
    if source in MERGED_PARTS:
        return tuple(f"{path}.{name}" for name in MERGED_PARTS[source])
    if path.rpartition(".")[2] == "experts":
        return (path, *(f"{path}.0.{name}" for name in EXPERT_PARTS))
    return (path,)


def strip_prefix(name: str) -> str:
    """A module's name without what stands before the layers."""
    plain = ".".join("mlp" if word == "block_sparse_moe" else word for word in name.split("."))
    prefix = next((candidate for candidate in LANGUAGE_PREFIXES if plain.startswith(candidate)), "")
    return plain[len(prefix) :]


def iterate_spellings(name: str) -> Iterator[str]:
    """The names that checkpoints have for a module; for one of the language model also those of wrappers."""
    stripped = strip_prefix(name)
    prefixes = LANGUAGE_PREFIXES if stripped.startswith(("layers.", "lm_head")) else ("model.",)
    yield name
    yield from (prefix + stripped for prefix in ("", *prefixes) if prefix + stripped != name)
    if ".mlp." in stripped:
        yield "model." + stripped.replace(".mlp.", ".block_sparse_moe.")


def _word_runs(name: str) -> Iterator[str]:
    """Every run of words of a name: ``a.b``, ``a``, ``b`` of ``a.b``."""
    words = name.split(".")
    for first in range(len(words)):
        for last in range(len(words), first, -1):
            yield ".".join(words[first:last])
