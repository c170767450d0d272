"""Checkpoints whose modules are packed in groups of their own: compressed-tensors, ModelOpt, Quark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .module_lists import OF_CLASS, entries, kept, rule, skipping
from .stored import EVERY, ModuleRule, WeightFormat
from .weight_formats import UnknownFormatError, algorithm, group_format

Said = Mapping[str, Any]
Rules = tuple[ModuleRule, ...]


def compressed_tensors(said: Said) -> Rules:
    """``config_groups``, each with ``targets``: names, patterns, or a class of modules for all others; then ``ignore``.

    The most precise target decides (``match_targets``): a name, then a pattern, then a class.
    """
    groups = said.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise UnknownFormatError("compressed-tensors without config_groups")
    named, patterned, classes = [], [], []
    for group in groups.values():
        weights = group_format(group, str(said.get("format") or ""))
        targets = entries(group.get("targets"), "targets")
        listed = rule(weights, [each for each in targets if not OF_CLASS.match(each)], "targets")
        named += [ModuleRule(weights, names=listed.names)] if listed.names else []
        patterned += [ModuleRule(weights, patterns=listed.patterns)] if listed.patterns else []
        classes += [ModuleRule(weights, patterns=EVERY)] if any(map(OF_CLASS.match, targets)) else []
    return *kept(said), *named, *patterned, *classes


def modelopt(said: Said) -> Rules:
    """One ``quant_algo`` for all but what is excluded, or MIXED_PRECISION: what ``quantized_layers`` names, no more."""
    inner = said.get("quantization")
    block = inner if isinstance(inner, Mapping) else said
    word = str(block.get("quant_algo") or "").upper()
    if word == "MIXED_PRECISION":
        return *kept(block), *_named_layers(block)
    if not word and isinstance(block.get("config_groups"), Mapping):
        return compressed_tensors(block)
    return skipping(block, algorithm(word, block.get("group_size")), globs=True)


def _named_layers(block: Said) -> Rules:
    layers = block.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        return compressed_tensors({**block, "ignore": ()})
    by_format: dict[WeightFormat, list[str]] = {}
    for name, own in layers.items():
        by_format.setdefault(algorithm(own.get("quant_algo"), own.get("group_size")), []).append(str(name))
    return tuple(rule(weights, names, "quantized_layers") for weights, names in by_format.items())


def quark(said: Said) -> Rules:
    """AMD's Quark: ``global_quant_config`` for all, ``layer_quant_config`` for what globs name, but for ``exclude``."""
    own = said.get("layer_quant_config")
    layers = [
        rule(_quark_format(each or {}), [str(name)], "layer_quant_config")
        for name, each in (own.items() if isinstance(own, Mapping) else ())
    ]
    usual = said.get("global_quant_config") or {}
    return *kept(said), *layers, ModuleRule(_quark_format(usual), patterns=EVERY)


def _quark_format(own: Said) -> WeightFormat:
    def spec(name: str) -> Said:
        found: Any = own.get(name) or {}
        first: Said = found[0] if isinstance(found, (list, tuple)) and found else found
        return first

    weight, inputs = spec("weight"), spec("input_tensors")
    dtype, into = str(weight.get("dtype") or ""), str(inputs.get("dtype") or "")
    if not dtype:
        return WeightFormat()
    if dtype == "fp4" and (into in ("", "fp4") or into.startswith("fp8")):
        return WeightFormat("mxfp4a8" if into.startswith("fp8") else "mxfp4a16")
    if dtype.startswith("fp8") and into.startswith("fp8"):
        return WeightFormat("fp8")
    if dtype == "int8" and into == "int8":
        return WeightFormat("int8")
    if dtype in ("int4", "uint4", "int8") and not into:
        return WeightFormat("w8a16" if dtype == "int8" else "w4a16", int(weight.get("group_size") or 0))
    raise UnknownFormatError(f"weights of {dtype} with activations in {into or '16 bits'}")
