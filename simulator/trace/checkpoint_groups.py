"""Checkpoints whose modules are packed in groups of their own: compressed-tensors, ModelOpt, Quark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .module_lists import CLASS_NAME, all_but_skipped, entries, list_rule, unquantized_rules
from .stored_formats import EVERY_MODULE, ModuleRule, WeightFormat
from .weight_formats import UnknownFormatError, algorithm_format, group_format

QuantizationConfig = Mapping[str, Any]
ModuleRules = tuple[ModuleRule, ...]


def compressed_tensors(config: QuantizationConfig) -> ModuleRules:
    """``config_groups``, each with ``targets``: names, patterns, or a class of modules for all others; then ``ignore``.

    The most precise target decides (``match_targets``): a name, then a pattern, then a class.
    """
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise UnknownFormatError("compressed-tensors without config_groups")
    by_name, by_pattern, by_class = [], [], []
    for group in groups.values():
        weights = group_format(group, str(config.get("format") or ""))
        targets = entries(group.get("targets"), "targets")
        target_rule = list_rule(weights, [target for target in targets if not CLASS_NAME.match(target)], "targets")
        by_name += [ModuleRule(weights, names=target_rule.names)] if target_rule.names else []
        by_pattern += [ModuleRule(weights, patterns=target_rule.patterns)] if target_rule.patterns else []
        by_class += [ModuleRule(weights, patterns=EVERY_MODULE)] if any(map(CLASS_NAME.match, targets)) else []
    return *unquantized_rules(config), *by_name, *by_pattern, *by_class


def modelopt(config: QuantizationConfig) -> ModuleRules:
    """One ``quant_algo`` for all but what is excluded, or MIXED_PRECISION: what ``quantized_layers`` names, no more."""
    inner = config.get("quantization")
    block = inner if isinstance(inner, Mapping) else config
    algorithm_name = str(block.get("quant_algo") or "").upper()
    if algorithm_name == "MIXED_PRECISION":
        return *unquantized_rules(block), *_named_layers(block)
    if not algorithm_name and isinstance(block.get("config_groups"), Mapping):
        return compressed_tensors(block)
    return all_but_skipped(block, algorithm_format(algorithm_name, block.get("group_size")), globs=True)


def _named_layers(block: QuantizationConfig) -> ModuleRules:
    layers = block.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        return compressed_tensors({**block, "ignore": ()})
    by_format: dict[WeightFormat, list[str]] = {}
    for name, layer in layers.items():
        by_format.setdefault(algorithm_format(layer.get("quant_algo"), layer.get("group_size")), []).append(str(name))
    return tuple(list_rule(weights, names, "quantized_layers") for weights, names in by_format.items())


def quark(config: QuantizationConfig) -> ModuleRules:
    """AMD's Quark: ``global_quant_config`` for all, ``layer_quant_config`` for what globs name, but for ``exclude``."""
    layer_configs = config.get("layer_quant_config")
    layers = [
        list_rule(_quark_format(layer or {}), [str(name)], "layer_quant_config")
        for name, layer in (layer_configs.items() if isinstance(layer_configs, Mapping) else ())
    ]
    default = config.get("global_quant_config") or {}
    return *unquantized_rules(config), *layers, ModuleRule(_quark_format(default), patterns=EVERY_MODULE)


def _quark_format(config: QuantizationConfig) -> WeightFormat:
    def spec(name: str) -> QuantizationConfig:
        value: Any = config.get(name) or {}
        return value[0] if isinstance(value, (list, tuple)) and value else value

    weight, inputs = spec("weight"), spec("input_tensors")
    dtype, input_dtype = str(weight.get("dtype") or ""), str(inputs.get("dtype") or "")
    if not dtype:
        return WeightFormat()
    if dtype == "fp4" and (input_dtype in ("", "fp4") or input_dtype.startswith("fp8")):
        return WeightFormat("mxfp4a8" if input_dtype.startswith("fp8") else "mxfp4a16")
    if dtype.startswith("fp8") and input_dtype.startswith("fp8"):
        return WeightFormat("fp8")
    if dtype == "int8" and input_dtype == "int8":
        return WeightFormat("int8")
    if dtype in ("int4", "uint4", "int8") and not input_dtype:
        return WeightFormat("w8a16" if dtype == "int8" else "w4a16", int(weight.get("group_size") or 0))
    raise UnknownFormatError(f"weights of {dtype} with activations in {input_dtype or '16 bits'}")
