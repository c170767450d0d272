"""The number format that a checkpoint says its weights are stored in, as :class:`.stored.StoredFormat`.

It is said in ``quantization_config`` of a config.json, or in the ``hf_quant_config.json`` beside it (ModelOpt). Each
library has words of its own; :data:`METHODS` reads them, by ``quant_method``. What none of them reads is refused, never
taken for 16 bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from .checkpoint_groups import compressed_tensors, modelopt, quark
from .module_lists import SKIPPED, checked, entries, kept, rule, skipping
from .stored import EVERY, ModuleRule, StoredFormat, WeightFormat
from .weight_formats import BLOCK, UnknownFormatError, fp8_blocks, weight_only
from .workload import TraceError

Said = Mapping[str, Any]
Rules = tuple[ModuleRule, ...]

KEPT = WeightFormat()


def stored_format(said: Said | None, where: str = "", name: str = "model") -> StoredFormat | None:
    """What a checkpoint says of its format; None where its weights are stored as they compute.

    ``said`` is its ``quantization_config`` or what its ``hf_quant_config.json`` holds. TraceError, with the way out,
    for words that nobody knows.
    """
    if not said:
        return None
    place = where or "quantization_config"
    try:
        rules = _reader(said)(said)
        kv_dtype, remarks = _kv_dtype(said)
        if not (_main(rules) or kv_dtype or remarks or "quant_algo" in _block(said)):
            raise UnknownFormatError("no format of weights")
        listed = [each for key in SKIPPED for each in entries(_block(said).get(key), key)]
    except UnknownFormatError as unknown:
        raise TraceError(
            f"model {name}: {place} says {unknown}, which opcast does not know: name the nearest with precision=… "
            "(`opcast list precisions`)"
        ) from None
    except TraceError as error:
        raise TraceError(f"model {name}: {place}: {error}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"model {name}: {place} cannot be read ({error}): name precision=…") from None
    return StoredFormat(_main(rules), rules, kv_dtype, place, tuple(listed), remarks)


def _reader(said: Said) -> Callable[[Said], Rules]:
    """What reads these words: by their ``quant_method``, and where that is missing by what only one library says."""
    method = str(said.get("quant_method") or "").lower()
    known = {name: read for names, read in METHODS.items() for name in names}
    for word, usual in USUAL.items() if not method else ():
        if said.get(word):
            method = usual
    if method not in known:
        raise UnknownFormatError(f"quant_method={said.get('quant_method')!r}")
    return known[method]


def _main(rules: Rules) -> str:
    """The format that most modules have: the one of all others, else the one that most are named with."""
    every = [each.weights.name for each in rules if each.patterns == EVERY and each.weights.name]
    counts = Counter[str]()
    for each in rules:
        if each.weights.name:
            counts[each.weights.name] += len(each.names) + len(each.patterns)
    return every[0] if every else counts.most_common(1)[0][0] if counts else ""


def _block(said: Said) -> Said:
    """Where ModelOpt's own file has its settings, one level down."""
    inner = said.get("quantization")
    return inner if isinstance(inner, Mapping) else said


def _kv_dtype(said: Said) -> tuple[str, tuple[str, ...]]:
    """The format of keys and values (empty: that of activations), and what of it is not simulated."""
    block = _block(said)
    scheme = block.get("kv_cache_scheme")
    words = str(block.get("kv_cache_quant_algo") or "")
    if isinstance(scheme, Mapping):
        words = f"{scheme.get('type', 'float')}{scheme.get('num_bits', 8)}"
    elif "fp8" in str(block.get("kv_cache_quant_config") or ""):  # Quark: what keys and values are rounded to
        words = "fp8"
    known = {"": "", "none": "", "auto": "", "fp8": "fp8", "float8": "fp8", "int8": "int8"}
    if words.lower() in known:
        return known[words.lower()], ()
    return "", (f"keys and values in {words}, as the checkpoint says, are not simulated: they stay in 16 bits",)


def _fp8(said: Said) -> Rules:
    block = said.get("weight_block_size")
    return skipping(said, fp8_blocks(block) if block else WeightFormat("fp8"))


def _mxfp4(said: Said) -> Rules:
    """Experts alone are packed (transformers ``Mxfp4GptOssExperts``, vLLM ``Mxfp4Config``)."""
    return *kept(said, globs=False), ModuleRule(WeightFormat("mxfp4a16"), ("experts",))


def _gptq(said: Said) -> Rules:
    def packed(own: Said) -> WeightFormat:
        bits, group = int(own.get("bits", said.get("bits", 4))), int(own.get("group_size", said.get("group_size", 128)))
        return weight_only(bits, group, bool(own.get("sym", said.get("sym", True))))

    rules = []
    dynamic = said.get("dynamic")
    for key, own in dynamic.items() if isinstance(dynamic, Mapping) else ():
        pattern = checked(str(key).lstrip("+-").removeprefix(":"), "dynamic")
        rules.append(ModuleRule(KEPT if str(key).startswith("-") else packed(own or {}), patterns=(pattern,)))
    if said.get("lm_head") is True:
        rules.append(ModuleRule(packed({}), ("lm_head",)))
    chosen = said.get("modules_in_block_to_quantize")
    if chosen:
        names = [each for some in chosen for each in (some if isinstance(some, (list, tuple)) else [some])]
        return *rules, ModuleRule(packed({}), tuple(sorted(map(str, names))))
    return *rules, *skipping(said, packed({}))


def _awq(said: Said) -> Rules:
    bits = int(said.get("bits", said.get("w_bit", 4)))
    group = int(said.get("group_size", said.get("q_group_size", BLOCK)))
    return skipping(said, weight_only(bits, group, not said.get("zero_point", True)))


def _auto_round(said: Said) -> Rules:
    """AutoRound; ``extra_config`` has modules with settings of their own, by name or regular expression."""

    def packed(own: Said) -> WeightFormat:
        bits, group = (int(own.get(key, said.get(key, usual))) for key, usual in (("bits", 4), ("group_size", BLOCK)))
        kind = str(own.get("data_type", said.get("data_type", "int"))).lower()
        if bits >= 16:
            return KEPT
        if kind.startswith("mx_fp"):
            return WeightFormat("mxfp4a16" if bits == 4 else "mxfp8")
        if kind.startswith("nv_fp"):
            return WeightFormat("nvfp4")
        if kind.startswith("fp"):
            return WeightFormat("fp8")
        return weight_only(bits, group, bool(own.get("sym", said.get("sym", True))))

    extra = said.get("extra_config")
    rules = [
        rule(packed(own or {}), [name], "extra_config", globs=False)
        for name, own in (extra.items() if isinstance(extra, Mapping) else ())
    ]
    return *rules, *skipping(said, packed({}))


def _hqq(said: Said) -> Rules:
    params = (said.get("quant_config") or {}).get("weight_quant_params") or said
    bits, group = int(params.get("nbits", said.get("bits"))), int(params.get("group_size") or 64)
    return skipping(said, weight_only(bits, group, scale_bytes=4.0))


def _bitsandbytes(said: Said) -> Rules:
    """LLM.int8 or NF4 (a scale of 4 bytes for 64 weights; with double quantization, one byte)."""
    if said.get("load_in_8bit"):
        return skipping(said, WeightFormat("int8"))
    if not (said.get("load_in_4bit") or said.get("_load_in_4bit")):
        raise UnknownFormatError("neither load_in_4bit nor load_in_8bit")
    scale_bytes = 1 + 4 / 256 if said.get("bnb_4bit_use_double_quant") else 4.0
    return skipping(said, WeightFormat("nf4", 64, scale_bytes))


def _quanto(said: Said) -> Rules:
    weights = str(said.get("weights", "int8")).lower()
    if weights.startswith("float8"):
        return skipping(said, WeightFormat("w8a16"))
    if weights not in ("int8", "int4"):
        raise UnknownFormatError(f"weights={weights!r}")
    return skipping(said, weight_only(int(weights[3:]), BLOCK))


TORCHAO = {
    "int4weightonly": "w4a16",
    "int8weightonly": "w8a16",
    "float8weightonly": "w8a16",
    "int8dynamicactivationint8weight": "int8",
    "float8dynamicactivationfloat8weight": "fp8",
}


def _torchao(said: Said) -> Rules:
    kind = said.get("quant_type")
    if isinstance(kind, Mapping):
        kind = (kind.get("default") or {}).get("_type")
    word = str(kind or "").lower().replace("_", "").removesuffix("config")
    if word not in TORCHAO:
        raise UnknownFormatError(f"quant_type={kind!r}")
    return skipping(said, WeightFormat(TORCHAO[word]))


USUAL = {  # a setting that only one library has -> its ``quant_method``
    "load_in_4bit": "bitsandbytes",
    "load_in_8bit": "bitsandbytes",
    "config_groups": "compressed-tensors",
    "weight_block_size": "fp8",
    "quant_algo": "modelopt",
    "quantization": "modelopt",
}
METHODS: dict[tuple[str, ...], Callable[[Said], Rules]] = {
    ("fp8", "fbgemm_fp8"): _fp8,
    ("mxfp4", "gpt_oss_mxfp4"): _mxfp4,
    ("gptq", "gptq_marlin"): _gptq,
    ("awq", "awq_marlin"): _awq,
    ("auto-round", "auto_round", "intel/auto-round"): _auto_round,
    ("hqq",): _hqq,
    ("bitsandbytes",): _bitsandbytes,
    ("quanto",): _quanto,
    ("eetq",): lambda said: skipping(said, WeightFormat("w8a16")),
    ("torchao",): _torchao,
    ("compressed-tensors", "compressed_tensors"): compressed_tensors,
    ("modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8"): modelopt,
    ("quark",): quark,
}
