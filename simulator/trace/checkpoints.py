"""The number format that a checkpoint says its weights are stored in, as :class:`.stored_formats.StoredFormat`.

It is said in ``quantization_config`` of a config.json, or in the ``hf_quant_config.json`` beside it (ModelOpt). Each
library has words of its own; :data:`METHODS` reads them, by ``quant_method``. What none of them reads is refused, never
taken for 16 bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from .checkpoint_groups import compressed_tensors, modelopt, quark
from .module_lists import SKIP_SETTINGS, all_but_skipped, check_pattern, entries, list_rule, unquantized_rules
from .stored_formats import EVERY_MODULE, ModuleRule, StoredFormat, WeightFormat
from .weight_formats import BLOCK, UnknownFormatError, fp8_blocks, weight_only
from .workload import TraceError

QuantizationConfig = Mapping[str, Any]
ModuleRules = tuple[ModuleRule, ...]

UNQUANTIZED = WeightFormat()


def stored_format(config: QuantizationConfig | None, where: str = "", name: str = "model") -> StoredFormat | None:
    """What a checkpoint says of its format; None where its weights are stored as they compute.

    ``config`` is its ``quantization_config`` or what its ``hf_quant_config.json`` holds. TraceError, with the way out,
    for words that nobody knows.
    """
    if not config:
        return None
    source = where or "quantization_config"
    try:
        rules = _reader(config)(config)
        kv_dtype, remarks = _kv_dtype(config)
        if not (_main(rules) or kv_dtype or remarks or "quant_algo" in _block(config)):
            raise UnknownFormatError("no format of weights")
        skipped = [entry for key in SKIP_SETTINGS for entry in entries(_block(config).get(key), key)]
    except UnknownFormatError as unknown:
        raise TraceError(
            f"model {name}: {source} says {unknown}, which opcast does not know: name the nearest with precision=… "
            "(`opcast list precisions`)"
        ) from None
    except TraceError as error:
        raise TraceError(f"model {name}: {source}: {error}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"model {name}: {source} cannot be read ({error}): name precision=…") from None
    return StoredFormat(_main(rules), rules, kv_dtype, source, tuple(skipped), remarks)


def _reader(config: QuantizationConfig) -> Callable[[QuantizationConfig], ModuleRules]:
    """What reads these words: by their ``quant_method``, and where that is missing by what only one library says."""
    method = str(config.get("quant_method") or "").lower()
    readers = {name: reader for names, reader in METHODS.items() for name in names}
    for setting, default_method in METHOD_OF_SETTING.items() if not method else ():
        if config.get(setting):
            method = default_method
    if method not in readers:
        raise UnknownFormatError(f"quant_method={config.get('quant_method')!r}")
    return readers[method]


def _main(rules: ModuleRules) -> str:
    """The format that most modules have: the one of all others, else the one that most are named with."""
    general = [
        module_rule.weights.name
        for module_rule in rules
        if module_rule.patterns == EVERY_MODULE and module_rule.weights.name
    ]
    counts = Counter[str]()
    for module_rule in rules:
        if module_rule.weights.name:
            counts[module_rule.weights.name] += len(module_rule.names) + len(module_rule.patterns)
    return general[0] if general else counts.most_common(1)[0][0] if counts else ""


def _block(config: QuantizationConfig) -> QuantizationConfig:
    """Where ModelOpt's own file has its settings, one level down."""
    inner = config.get("quantization")
    return inner if isinstance(inner, Mapping) else config


def _kv_dtype(config: QuantizationConfig) -> tuple[str, tuple[str, ...]]:
    """The format of keys and values (empty: that of activations), and what of it is not simulated."""
    block = _block(config)
    scheme = block.get("kv_cache_scheme")
    algorithm = str(block.get("kv_cache_quant_algo") or "")
    if isinstance(scheme, Mapping):
        algorithm = f"{scheme.get('type', 'float')}{scheme.get('num_bits', 8)}"
    elif "fp8" in str(block.get("kv_cache_quant_config") or ""):  # Quark: what keys and values are rounded to
        algorithm = "fp8"
    formats = {"": "", "none": "", "auto": "", "fp8": "fp8", "float8": "fp8", "int8": "int8"}
    if algorithm.lower() in formats:
        return formats[algorithm.lower()], ()
    return "", (f"keys and values in {algorithm}, as the checkpoint says, are not simulated: they stay in 16 bits",)


def _fp8(config: QuantizationConfig) -> ModuleRules:
    block = config.get("weight_block_size")
    return all_but_skipped(config, fp8_blocks(block) if block else WeightFormat("fp8"))


def _mxfp4(config: QuantizationConfig) -> ModuleRules:
    """Experts alone are packed (transformers ``Mxfp4GptOssExperts``, vLLM ``Mxfp4Config``)."""
    return *unquantized_rules(config, globs=False), ModuleRule(WeightFormat("mxfp4a16"), ("experts",))


def _gptq(config: QuantizationConfig) -> ModuleRules:
    def format_of(settings: QuantizationConfig) -> WeightFormat:
        bits, group = (
            int(settings.get("bits", config.get("bits", 4))),
            int(settings.get("group_size", config.get("group_size", 128))),
        )
        return weight_only(bits, group, bool(settings.get("sym", config.get("sym", True))))

    rules = []
    dynamic = config.get("dynamic")
    for key, settings in dynamic.items() if isinstance(dynamic, Mapping) else ():
        pattern = check_pattern(str(key).lstrip("+-").removeprefix(":"), "dynamic")
        rules.append(
            ModuleRule(UNQUANTIZED if str(key).startswith("-") else format_of(settings or {}), patterns=(pattern,))
        )
    if config.get("lm_head") is True:
        rules.append(ModuleRule(format_of({}), ("lm_head",)))
    modules = config.get("modules_in_block_to_quantize")
    if modules:
        names = [name for group in modules for name in (group if isinstance(group, (list, tuple)) else [group])]
        return *rules, ModuleRule(format_of({}), tuple(sorted(map(str, names))))
    return *rules, *all_but_skipped(config, format_of({}))


def _awq(config: QuantizationConfig) -> ModuleRules:
    bits = int(config.get("bits", config.get("w_bit", 4)))
    group = int(config.get("group_size", config.get("q_group_size", BLOCK)))
    return all_but_skipped(config, weight_only(bits, group, not config.get("zero_point", True)))


def _auto_round(config: QuantizationConfig) -> ModuleRules:
    """AutoRound; ``extra_config`` has modules with settings of their own, by name or regular expression."""

    def format_of(settings: QuantizationConfig) -> WeightFormat:
        bits, group = (
            int(settings.get(key, config.get(key, default))) for key, default in (("bits", 4), ("group_size", BLOCK))
        )
        kind = str(settings.get("data_type", config.get("data_type", "int"))).lower()
        if bits >= 16:
            return UNQUANTIZED
        if kind.startswith("mx_fp"):
            return WeightFormat("mxfp4a16" if bits == 4 else "mxfp8")
        if kind.startswith("nv_fp"):
            return WeightFormat("nvfp4")
        if kind.startswith("fp"):
            return WeightFormat("fp8")
        return weight_only(bits, group, bool(settings.get("sym", config.get("sym", True))))

    extra = config.get("extra_config")
    rules = [
        list_rule(format_of(settings or {}), [name], "extra_config", globs=False)
        for name, settings in (extra.items() if isinstance(extra, Mapping) else ())
    ]
    return *rules, *all_but_skipped(config, format_of({}))


def _hqq(config: QuantizationConfig) -> ModuleRules:
    params = (config.get("quant_config") or {}).get("weight_quant_params") or config
    bits, group = int(params.get("nbits", config.get("bits"))), int(params.get("group_size") or 64)
    return all_but_skipped(config, weight_only(bits, group, scale_bytes=4.0))


def _bitsandbytes(config: QuantizationConfig) -> ModuleRules:
    """LLM.int8 or NF4 (a scale of 4 bytes for 64 weights; with double quantization, one byte)."""
    if config.get("load_in_8bit"):
        return all_but_skipped(config, WeightFormat("int8"))
    if not (config.get("load_in_4bit") or config.get("_load_in_4bit")):
        raise UnknownFormatError("neither load_in_4bit nor load_in_8bit")
    scale_bytes = 1 + 4 / 256 if config.get("bnb_4bit_use_double_quant") else 4.0
    return all_but_skipped(config, WeightFormat("nf4", 64, scale_bytes))


def _quanto(config: QuantizationConfig) -> ModuleRules:
    weights = str(config.get("weights", "int8")).lower()
    if weights.startswith("float8"):
        return all_but_skipped(config, WeightFormat("w8a16"))
    if weights not in ("int8", "int4"):
        raise UnknownFormatError(f"weights={weights!r}")
    return all_but_skipped(config, weight_only(int(weights[3:]), BLOCK))


TORCHAO = {
    "int4weightonly": "w4a16",
    "int8weightonly": "w8a16",
    "float8weightonly": "w8a16",
    "int8dynamicactivationint8weight": "int8",
    "float8dynamicactivationfloat8weight": "fp8",
}


def _torchao(config: QuantizationConfig) -> ModuleRules:
    kind = config.get("quant_type")
    if isinstance(kind, Mapping):
        kind = (kind.get("default") or {}).get("_type")
    word = str(kind or "").lower().replace("_", "").removesuffix("config")
    if word not in TORCHAO:
        raise UnknownFormatError(f"quant_type={kind!r}")
    return all_but_skipped(config, WeightFormat(TORCHAO[word]))


METHOD_OF_SETTING = {  # a setting that only one library has -> its ``quant_method``
    "load_in_4bit": "bitsandbytes",
    "load_in_8bit": "bitsandbytes",
    "config_groups": "compressed-tensors",
    "weight_block_size": "fp8",
    "quant_algo": "modelopt",
    "quantization": "modelopt",
}
METHODS: dict[tuple[str, ...], Callable[[QuantizationConfig], ModuleRules]] = {
    ("fp8", "fbgemm_fp8"): _fp8,
    ("mxfp4", "gpt_oss_mxfp4"): _mxfp4,
    ("gptq", "gptq_marlin"): _gptq,
    ("awq", "awq_marlin"): _awq,
    ("auto-round", "auto_round", "intel/auto-round"): _auto_round,
    ("hqq",): _hqq,
    ("bitsandbytes",): _bitsandbytes,
    ("quanto",): _quanto,
    ("eetq",): lambda config: all_but_skipped(config, WeightFormat("w8a16")),
    ("torchao",): _torchao,
    ("compressed-tensors", "compressed_tensors"): compressed_tensors,
    ("modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8"): modelopt,
    ("quark",): quark,
}
