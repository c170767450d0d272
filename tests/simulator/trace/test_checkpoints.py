"""What a checkpoint says of the format of its weights, in the words of each library, module by module."""

from __future__ import annotations

from typing import Any

import pytest

from opcast.datasets.precisions import known_precisions, precision_of
from opcast.simulator.passes.quantize import RECIPES
from opcast.simulator.question.as_stored import WEIGHTS_ALONE
from opcast.simulator.trace import TraceError
from opcast.simulator.trace.checkpoints import TORCHAO, stored_format
from opcast.simulator.trace.models import known_models, resolve
from opcast.simulator.trace.stored_formats import WeightFormat, modules_of
from opcast.simulator.trace.weight_formats import ALGORITHMS

FP8 = {"num_bits": 8, "type": "float"}
INT4 = {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"}
FP4 = {"num_bits": 4, "type": "float", "group_size": 16}


def group(weights: dict[str, Any], inputs: dict[str, Any] | None = None, *targets: str) -> dict[str, Any]:
    return {"weights": weights, "input_activations": inputs, "targets": list(targets or ("Linear",))}


def tensors(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    named = {f"group_{at}": each for at, each in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": named, **more}


def packed(said: dict[str, Any], path: str, source: str = "aten.mm") -> str | None:
    """The format of a module's weights, None where no rule names it."""
    stored = stored_format(said)
    assert stored is not None
    names = modules_of(path, source)
    return next((rule.weights.name for rule in stored.rules if any(map(rule.covers, names))), None)


KNOWN: list[tuple[dict[str, Any] | None, WeightFormat | None]] = [
    (None, None),
    ({}, None),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, WeightFormat("fp8_block")),
    ({"quant_method": "fp8", "weight_block_size": [1, 32]}, WeightFormat("mxfp8")),
    ({"quant_method": "fp8"}, WeightFormat("fp8")),
    ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, WeightFormat("fp8")),
    ({"quant_method": "gptq", "bits": 4, "group_size": 64}, WeightFormat("w4a16", 64, 2.0)),
    ({"quant_method": "gptq", "bits": 8, "group_size": -1}, WeightFormat("w8a16", 1 << 20, 2.0)),
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, WeightFormat("w4a16", 128, 2.5)),
    ({"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}, WeightFormat("w4a16", 128, 2.0)),
    ({"quant_method": "mxfp4"}, WeightFormat("mxfp4a16")),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, WeightFormat("nf4", 64, 4.0)),
    ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, WeightFormat("nf4", 64, 1 + 4 / 256)),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, WeightFormat("int8")),
    ({"quant_method": "quanto", "weights": "int4"}, WeightFormat("w4a16", 128, 2.0)),
    ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}, WeightFormat("w4a16")),
    ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}, WeightFormat("w4a16", 64, 4.0)),
    (tensors(group(FP8, FP8)), WeightFormat("fp8")),
    (tensors(group(FP8 | {"strategy": "block", "block_structure": [128, 128]}, FP8)), WeightFormat("fp8_block")),
    (tensors(group(INT4)), WeightFormat("w4a16", 32, 2.0)),
    (tensors(group({"num_bits": 8, "type": "int"}, {"num_bits": 8, "type": "int"})), WeightFormat("int8", 0, 2.0)),
    (tensors(group(FP4, FP4), format="nvfp4-pack-quantized"), WeightFormat("nvfp4")),
    (tensors(group(FP4), format="nvfp4-pack-quantized"), WeightFormat("w4a16", 16, 1.0)),
    (tensors(group(FP4 | {"group_size": 32}), format="mxfp4-pack-quantized"), WeightFormat("mxfp4a16")),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, WeightFormat("nvfp4")),
    ({"quantization": {"quant_algo": "fp8_pb_wo"}}, WeightFormat("fp8_block")),
    ({"quantization": {"quant_algo": "W4A16_AWQ", "group_size": 64}}, WeightFormat("w4a16", 64)),
    ({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, WeightFormat("")),
    ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}}, WeightFormat("mxfp4a16")),
]


@pytest.mark.parametrize(("said", "weights"), KNOWN)
def test_the_words_of_each_library_are_read(said: dict[str, Any] | None, weights: WeightFormat | None) -> None:
    stored = stored_format(said)
    assert (stored and stored.rules[-1].weights) == weights
    assert stored is None or stored.precision == weights.name  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"quant_method": "spqr"}, "quant_method='spqr'"),
        ({"bits": 3}, "quant_method=None"),
        ({"quant_method": "gptq", "bits": 3}, "weights of 3 bits"),
        ({"quant_method": "modelopt", "quant_algo": "FP3"}, "quant_algo='FP3'"),
        (tensors(group({"num_bits": 2, "type": "int"})), "weights of 2 bits"),
        (tensors(group(INT4, {"num_bits": 4, "type": "int"})), "weights of int4 with activations in int4"),
        ({"quant_method": "compressed-tensors"}, "without config_groups"),
        ({"quant_method": "torchao", "quant_type": "int3"}, "quant_type='int3'"),
        ({"quant_method": "fp8", "modules_to_not_convert": [["a"]]}, "must be a list of modules' names"),
        ({"quant_method": "fp8", "weight_block_size": "large"}, "cannot be read"),
        (tensors(group(FP8, FP8), ignore=["re:(("]), "no regular expression"),
        (tensors({"weights": None, "targets": None}), "no format of weights"),
        ({"quant_method": "quark"}, "no format of weights"),
        ({"quant_method": "bitsandbytes"}, "neither load_in_4bit nor load_in_8bit"),
        ({"quant_method": "hqq"}, "cannot be read"),
        ({"quant_method": "fp8", "weight_block_size": [0, 0]}, "blocks of [0, 0]"),
        ({"quant_method": ["fp8"]}, "quant_method=['fp8']"),
    ],
)
def test_what_nobody_knows_is_refused_in_one_line(said: dict[str, Any], words: str) -> None:
    with pytest.raises(TraceError) as refused:
        stored_format(said, "its config.json", "mine")
    assert words in str(refused.value)
    assert str(refused.value).startswith("model mine: its config.json")
    assert "\n" not in str(refused.value)


LAYER = "model.layers.1"
DOWN, OUT, EXPERTS = f"{LAYER}.mlp.down_proj", f"{LAYER}.self_attn.o_proj", f"{LAYER}.mlp.experts"
SKIPPING: list[tuple[dict[str, Any], str, str, str | None]] = [
    # ModelOpt: globs, parts of names, and wrappers' names of layers
    ({"quant_algo": "NVFP4", "ignore": [f"{LAYER}.self_attn*"]}, OUT, "", ""),
    ({"quant_algo": "NVFP4", "ignore": [f"{LAYER}.self_attn*"]}, f"{LAYER}.self_attn", "fused.qkv", ""),
    ({"quant_algo": "NVFP4", "ignore": [f"{LAYER}.self_attn*"]}, f"{LAYER}1.self_attn.o_proj", "", "nvfp4"),
    ({"quant_algo": "NVFP4", "ignore": [f"{LAYER}.self_attn*"]}, f"{LAYER}.mlp", "fused.gate_up", "nvfp4"),
    ({"quant_algo": "NVFP4", "ignore": ["model.language_model.layers.1*"]}, DOWN, "", ""),
    ({"quant_algo": "NVFP4", "ignore": ["backbone.layers.1.mixer.in_proj"]}, f"{LAYER}.mixer.in_proj", "", ""),
    ({"quant_algo": "NVFP4", "ignore": ["*.shared_experts.*"]}, f"{LAYER}.mlp.shared_experts", "fused.gate_up", ""),
    ({"quant_algo": "NVFP4", "ignore": [f"{LAYER}.mlp.gate*"]}, f"{LAYER}.mlp", "fused.gate_up", "nvfp4"),
    ({"quant_algo": "NVFP4", "ignore": ["lm_head"]}, "language_model.lm_head", "", ""),
    # compressed-tensors: regular expressions from the start, and whole names
    (tensors(group(FP8, FP8), ignore=["re:.*self_attn.*"]), f"{LAYER}.self_attn", "fused.qkv", ""),
    (tensors(group(FP8, FP8), ignore=["re:self_attn"]), OUT, "", "fp8"),
    (tensors(group(INT4), ignore=[r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]), EXPERTS, "", "w4a16"),
    (tensors(group(INT4), ignore=[r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]), f"{LAYER}.mlp", "fused.gate_up", ""),
    (tensors(group(INT4), ignore=["re:.*mlp.experts.*"]), EXPERTS, "fused.moe", ""),
    # groups of targets: a name goes before a pattern, a pattern before a class; what no target names stays
    (tensors(group(FP8, FP8), group(FP4, FP4, "re:.*experts.*")), EXPERTS, "fused.moe", "nvfp4"),
    (tensors(group(FP8, FP8), group(FP4, FP4, "re:.*experts.*")), OUT, "", "fp8"),
    (tensors(group(FP4, FP4, DOWN)), DOWN, "", "nvfp4"),
    (tensors(group(FP4, FP4, DOWN)), "model.layers.2.mlp.down_proj", "", None),
    # transformers: a regular expression that ends with a name, a name at the end
    ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, EXPERTS, "", "mxfp4a16"),
    ({"quant_method": "mxfp4"}, OUT, "", None),
    ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.*.self_attn"]}, OUT, "", ""),
    (
        {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.*.mlp.gate"]},
        f"{LAYER}.mlp.gate_proj",
        "",
        "fp8",
    ),
    ({"quant_method": "fp8", "modules_to_not_convert": ["down_proj"]}, DOWN, "", ""),
    ({"load_in_4bit": True, "llm_int8_skip_modules": ["self_attn"]}, f"{LAYER}.self_attn", "fused.qkv", ""),
    # AutoAWQ: a name anywhere; MoE layers by their older name
    ({"quant_method": "awq", "modules_to_not_convert": ["self_attn"]}, f"{LAYER}.self_attn.q_proj", "", ""),
    ({"quant_method": "awq", "modules_to_not_convert": ["block_sparse_moe.experts"]}, EXPERTS, "", ""),
    # GPTQ: rules of its own, and the modules that are meant
    ({"quant_method": "gptq", "dynamic": {"-:.*self_attn.*": {}}}, OUT, "", ""),
    ({"quant_method": "gptq", "dynamic": {"+:.*down_proj": {"bits": 8}}}, DOWN, "", "w8a16"),
    ({"quant_method": "gptq", "modules_in_block_to_quantize": [["self_attn.o_proj"]]}, DOWN, "", None),
    ({"quant_method": "auto-round", "extra_config": {DOWN: {"bits": 16}}}, DOWN, "", ""),
    (
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}, "exclude": ["re:.*attn.*"]},
        OUT,
        "",
        "",
    ),
]


@pytest.mark.parametrize(("said", "path", "source", "wanted"), SKIPPING)
def test_lists_of_modules_are_read_as_their_libraries_read_them(
    said: dict[str, Any], path: str, source: str, wanted: str | None
) -> None:
    method = {} if "quant_method" in said or "load_in_4bit" in said else {"quant_method": "modelopt"}
    assert packed({**method, **said}, path, source) == wanted


MIXED = {
    "producer": {"name": "modelopt"},
    "quantization": {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["mtp*"],
        "quantized_layers": {
            **{f"backbone.layers.1.mixer.experts.{at}.up_proj": {"quant_algo": "NVFP4"} for at in range(8)},
            "model.language_model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
            "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        },
    },
}


@pytest.mark.parametrize(
    ("path", "source", "wanted"),
    [
        ("model.layers.1.mixer.experts", "fused.moe", "nvfp4"),
        ("model.layers.0.self_attn", "fused.qkv", "fp8"),
        ("model.layers.0.mlp", "fused.gate_up", None),
        ("lm_head", "aten.mm", "w4a16"),
    ],
)
def test_a_checkpoint_of_several_formats_names_the_one_of_each_module(path: str, source: str, wanted: str) -> None:
    assert packed(MIXED, path, source) == wanted
    stored = stored_format(MIXED)
    assert stored is not None
    assert (stored.precision, stored.kv_dtype) == ("nvfp4", "fp8")


@pytest.mark.parametrize(
    ("said", "kv_dtype"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"type": "float", "num_bits": 8}}, "fp8"),
        ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "INT8"}}, "int8"),
        ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}, ""),
        (tensors(group(FP8, FP8), kv_cache_scheme={"num_bits": 8, "type": "float"}), "fp8"),
    ],
)
def test_the_format_of_keys_and_values_is_read(said: dict[str, Any], kv_dtype: str) -> None:
    stored = stored_format(said)
    assert stored is not None
    assert (stored.kv_dtype, stored.remarks) == (kv_dtype, ())


def test_a_format_of_keys_and_values_that_is_not_simulated_is_said() -> None:
    stored = stored_format({"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}})
    assert stored is not None
    assert stored.kv_dtype == ""
    assert "keys and values in NVFP4" in stored.remarks[0]


def test_every_format_that_can_be_read_is_a_precision_and_has_a_recipe() -> None:
    read = {each.name for _, each in KNOWN if each} | {each.name for each in ALGORITHMS.values()}
    read |= {*TORCHAO.values(), *WEIGHTS_ALONE, *(each.name for each in WEIGHTS_ALONE.values())}
    named = {precision_of(name)[1] for name in known_precisions()}
    assert read - {""} <= named
    of_any_bits = {name for name in named if "." in name}  # w4.84a16: weights alone
    assert named - {"", "tf32"} - of_any_bits == set(RECIPES)


PUBLISHED = {
    **dict.fromkeys(("deepseek_r1", "deepseek_v3", "deepseek_v3_2", "kimi_k2", "minimax_m2_5"), "fp8_block"),
    **dict.fromkeys(("gpt_oss_20b", "gpt_oss_120b"), "mxfp4a16"),
    "kimi_k2_5": "w4a16",
}


def test_shipped_models_carry_the_format_of_their_published_checkpoint() -> None:
    found = {}
    for name in known_models():
        source = resolve(name)
        stored = stored_format(source.quantization, source.quantized_in, name)
        if stored is not None:
            found[name] = stored.precision
    assert found == PUBLISHED


def test_what_is_no_mapping_is_taken_for_the_method() -> None:
    said = resolve({"model_type": "llama", "name": "mine", "quantization_config": "spqr"}).quantization
    assert said == {"quant_method": "spqr"}
