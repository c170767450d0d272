"""What a step weighs and how it runs when its model's checkpoint says how it is stored: few layers, real widths."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.datasets.precisions import precision_of
from opcast.simulator.question.plan import Parallel, Plan, load_stack
from opcast.simulator.question.requests import SimulateRequest, plan_of
from opcast.simulator.question.work import Work
from opcast.simulator.simulate import laid_out
from opcast.simulator.step.build import LaidOut
from opcast.simulator.trace import TraceError
from opcast.simulator.trace.models import shipped_config

H100, A100, B200 = (load_device(name) for name in ("h100_sxm", "a100_sxm_80gb", "b200_sxm"))
CPU = replace(H100, id="host", vendor="cpu")
DECODE = Work("decode", input_len=64, cache="static")
HIDDEN, WIDE, KV, VOCAB, LAYERS = 8192, 28672, 1024, 128256, 2
LLAMA = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}
ATTENTION = 2 * HIDDEN * HIDDEN + 2 * KV * HIDDEN  # elements of q, o, k and v
MLP = 3 * HIDDEN * WIDE
WHOLE = 2 * VOCAB * HIDDEN + (2 * LAYERS + 1) * HIDDEN  # embedding, head and norms

Folder = Callable[..., str]
LayOut = Callable[..., LaidOut]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A function: a configuration and what stands beside it -> the folder of a checkpoint."""

    def make(config: dict[str, Any], beside: dict[str, Any] | None = None) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config))
        if beside is not None:
            (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
        return str(tmp_path)

    return make


@pytest.fixture(scope="module")
def lay_out(tmp_path_factory: pytest.TempPathFactory) -> LayOut:
    """A function: a model on a device -> its decode step under vLLM, cut and weighed."""
    graphs = tmp_path_factory.mktemp("graphs")

    def make(model: Any, device: Any = H100, **asked: Any) -> LaidOut:
        request = SimulateRequest(**{"work": DECODE, "stack": load_stack("vllm"), **asked}, model=model, device=device)
        return laid_out(model, request.work, plan_of(request, device), device, graphs)

    return make


def weighed(laid: LaidOut) -> float:
    """Bytes of weights and their scales on a device."""
    tensors = laid.pipelines[0][0].graph.tensors
    return sum(t.size_bytes * t.count for t in tensors if t.role in ("weight", "frozen") or t.dtype == "uint8")


def formats(laid: LaidOut) -> dict[str, str]:
    """The dtype of each product, by the end of its module's path."""
    found = {}
    for node, _ in laid.pipelines[0][0].graph.weighted():
        if node.op is not None and node.op.kind in ("gemm", "fused_moe"):
            found[node.path.rpartition(".")[2]] = node.op.dtype
    return found


def plan(model: Any, device: Any = H100, kind: str = "decode", **asked: Any) -> Plan:
    return plan_of(SimulateRequest(model=model, device=device, work=Work(kind), **asked), device)


def test_globs_of_modelopt_leave_modules_in_16_bits(folder: Folder, lay_out: LayOut) -> None:
    skipped = ["lm_head", *(f"model.layers.{at}.self_attn*" for at in range(LAYERS))]
    said = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": skipped}
    laid = lay_out(folder({**LLAMA, "quantization_config": said}), B200)
    by_hand = 2 * (WHOLE + LAYERS * ATTENTION) + LAYERS * MLP * (1 / 2 + 1 / 16)
    assert weighed(laid) == pytest.approx(by_hand, rel=1e-6)
    assert formats(laid) == {
        "self_attn": "bf16",
        "o_proj": "bf16",
        "mlp": "nvfp4",
        "down_proj": "nvfp4",
        "lm_head": "bf16",
    }


def test_a_list_may_name_some_layers(folder: Folder, lay_out: LayOut) -> None:
    said = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.1"]}
    laid = lay_out(folder({**LLAMA, "quantization_config": said}))
    by_hand = 2 * (WHOLE + ATTENTION + MLP) + ATTENTION + MLP
    assert weighed(laid) == pytest.approx(by_hand, rel=1e-6)


def test_patterns_of_compressed_tensors_leave_modules_in_16_bits(folder: Folder, lay_out: LayOut) -> None:
    fp8 = {"num_bits": 8, "type": "float"}
    groups = {"group_0": {"weights": fp8, "input_activations": fp8, "targets": ["Linear"]}}
    said = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["re:.*self_attn.*", "lm_head"]}
    laid = lay_out(folder({**LLAMA, "quantization_config": said}))
    assert weighed(laid) == pytest.approx(2 * (WHOLE + LAYERS * ATTENTION) + LAYERS * MLP, rel=1e-6)


def test_what_modelopt_says_beside_the_configuration_is_read(folder: Folder, lay_out: LayOut) -> None:
    said = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    laid = lay_out(folder(LLAMA, said))
    assert weighed(laid) == pytest.approx(2 * WHOLE + LAYERS * (ATTENTION + MLP), rel=1e-6)
    assert laid.plan.kv_dtype == "fp8"
    assert "its hf_quant_config.json" in laid.plan.notes[0]
    assert "keys and values in fp8" in laid.plan.notes[1]


def test_a_checkpoint_without_a_format_of_the_cache_has_none(folder: Folder) -> None:
    said = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
    made = plan(folder(LLAMA, said), cluster=load_cluster("dgx_h100"), stack=load_stack("trtllm"))
    assert made.kv_dtype == "same"
    assert plan("llama3_8b", cluster=load_cluster("dgx_h100")).options == {}


def test_several_formats_weigh_each_their_own(folder: Folder, lay_out: LayOut) -> None:
    layers = {f"model.layers.{at}.mlp.{name}": {"quant_algo": "NVFP4"} for at in range(LAYERS) for name in ("gate_proj",
              "up_proj", "down_proj")}  # fmt: skip
    layers |= {f"model.layers.{at}.self_attn.o_proj": {"quant_algo": "FP8"} for at in range(LAYERS)}
    said = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    laid = lay_out(folder(LLAMA, said), B200)
    kept = WHOLE + LAYERS * (ATTENTION - HIDDEN * HIDDEN)
    by_hand = 2 * kept + LAYERS * (HIDDEN * HIDDEN + MLP * (1 / 2 + 1 / 16))
    assert weighed(laid) == pytest.approx(by_hand, rel=1e-6)
    assert formats(laid)["o_proj"] == "fp8"
    assert "weights in nvfp4 and fp8" in laid.plan.notes[0]


GEMMA = {
    "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "vocab_size": 262144,
        "tie_word_embeddings": True,
    },
}


def test_names_of_wrappers_are_those_of_the_language_model(folder: Folder, lay_out: LayOut) -> None:
    skipped = ["lm_head", "model.embed_vision*", *(f"model.language_model.layers.{at}.self_attn*" for at in range(2))]
    said = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": skipped}
    laid = lay_out(folder({**GEMMA, "quantization_config": said}), B200)
    window, whole = 5376 * 256 * (2 * 32 + 2 * 16), 5376 * 512 * (2 * 32 + 4)  # keys of a whole layer are its values
    by_hand = 2 * (262144 * 5376 + window + whole) + 2 * 3 * 5376 * 21504 * (1 / 2 + 1 / 16)
    assert weighed(laid) == pytest.approx(by_hand, rel=1e-4)  # norms


def shortened(name: str, layers: int) -> dict[str, Any]:
    return {"name": name, **shipped_config(name), "num_hidden_layers": layers}


def test_gpt_oss_has_experts_in_mxfp4_and_attention_in_16_bits(lay_out: LayOut) -> None:
    laid = lay_out(shortened("gpt_oss_120b", 2))
    experts, attention = 128 * (2880 * 5760 + 5760 + 2880 * 2880 + 2880), 2 * 2880 * 4096 + 2 * 2880 * 512
    by_hand = 2 * 2 * 201088 * 2880 + 2 * (experts * (1 / 2 + 1 / 32) + 2 * attention)
    assert weighed(laid) == pytest.approx(by_hand, rel=2e-3)  # biases, norms, routers
    assert (formats(laid)["experts"], formats(laid)["o_proj"]) == ("mxfp4a16", "bf16")


def test_kimi_k2_5_has_experts_alone_in_int4_with_groups_of_32(lay_out: LayOut) -> None:
    laid = lay_out(shortened("kimi_k2_5", 2))
    attention = 7168 * (1536 + 576) + 1536 * 64 * 192 + 512 * 64 * 256 + 64 * 128 * 7168
    kept = 2 * 163840 * 7168 + 2 * attention + 3 * 7168 * (18432 + 2048) + 384 * 7168
    assert weighed(laid) == pytest.approx(2 * kept + 384 * 3 * 7168 * 2048 * (1 / 2 + 2 / 32), rel=1e-3)
    assert laid.plan.quantization == "w4a16"


def test_deepseek_v3_is_stored_in_fp8_with_a_scale_for_each_block(lay_out: LayOut) -> None:
    laid = lay_out(shortened("deepseek_v3", 1) | {"first_k_dense_replace": 1})
    packed = 7168 * (1536 + 576) + 1536 * 128 * 192 + 128 * 128 * 7168 + 3 * 7168 * 18432
    kept = 2 * 129280 * 7168 + 512 * 128 * 256  # engines keep the up-projection of latents, which they absorb
    assert weighed(laid) == pytest.approx(2 * kept + packed * (1 + 4 / 128**2), rel=1e-3)


def test_a_precision_that_auto_chooses_can_be_typed_for_the_same_answer() -> None:
    chosen = plan("gpt_oss_20b")
    dtype, quantization = precision_of(chosen.quantization)
    typed = plan("gpt_oss_20b", precision=dtype, quantization=quantization)
    assert typed == chosen


@pytest.mark.parametrize(("stack", "rounds"), [("trtllm", True), ("sglang", True), ("vllm", False), ("torch", False)])
def test_a_framework_multiplies_weights_of_four_bits_in_eight_where_the_chip_can(stack: str, rounds: bool) -> None:
    """TensorRT-LLM and SGLang have no other kernel for gpt-oss on B200; 2 to 4 times as long, before."""
    of_stack = {"stack": load_stack(stack)}
    b200, h100 = (plan("gpt_oss_20b", load_device(name), **of_stack) for name in ("b200_sxm", "h100_sxm"))
    assert b200.quantization == ("mxfp4a8" if rounds else "mxfp4a16")
    assert {rule.weights.name for rule in b200.weight_rules} - {""} == {b200.quantization}
    assert any("rounds what such weights are multiplied by (mxfp4a8)" in note for note in b200.notes) == rounds
    assert h100.quantization == "mxfp4a16"
    for asked in ("mxfp4a16", b200.quantization):
        dtype, quantization = precision_of(asked)
        typed = plan("gpt_oss_20b", load_device("b200_sxm"), precision=dtype, quantization=quantization, **of_stack)
        assert typed.quantization == asked
        assert {rule.weights.name for rule in typed.weight_rules} - {""} == {asked}


def test_what_is_asked_goes_before_what_is_stored_and_is_said() -> None:
    made = plan("gpt_oss_20b", precision="bf16")
    assert (made.precision, made.quantization, made.weight_rules, made.options) == ("bf16", "", (), {})
    assert made.notes == ("the checkpoint stores mxfp4a16; simulated in bf16, as asked",)
    assert plan("gpt_oss_20b", quantization="fp8").quantization == "fp8"
    assert plan("gpt_oss_20b", options={"kv_dtype": "fp8"}).kv_dtype == "fp8"


def test_a_format_that_nobody_knows_is_refused_unless_a_precision_is_named(folder: Folder) -> None:
    model = folder({**LLAMA, "quantization_config": {"quant_method": "aqlm"}})
    with pytest.raises(TraceError, match=r"says quant_method='aqlm', which opcast does not know: .* precision=…"):
        plan(model)
    assert "does not know (quant_method='aqlm'); simulated in fp8" in plan(model, quantization="fp8").notes[0]
    assert "training is simulated in bf16" in plan(model, kind="train").notes[0]


def test_training_and_processors_unpack_what_is_stored_and_say_so() -> None:
    assert plan("deepseek_v3", kind="train").quantization == ""
    assert plan("deepseek_v3", kind="train").notes == (
        "the checkpoint stores fp8_block; training is simulated in bf16 (precision=fp8_block names it)",
    )
    assert plan("deepseek_v3", kind="train", quantization="fp8").notes == ()
    assert plan("llama3_8b", kind="train").notes == plan("llama3_8b").notes == ()
    assert "a CPU is simulated in fp32" in plan("gpt_oss_20b", CPU).notes[0]


@pytest.mark.parametrize(
    ("said", "device", "format_", "scales"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, A100, "w8a16", 4 / 128**2),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, H100, "w4a16", 1 / 16),
    ],
)
def test_units_that_a_device_lacks_leave_weights_packed(
    folder: Folder, lay_out: LayOut, said: dict[str, Any], device: Any, format_: str, scales: float
) -> None:
    laid = lay_out(folder({**LLAMA, "quantization_config": said}), device)
    bits = 8 if format_ == "w8a16" else 4
    assert weighed(laid) == pytest.approx(2 * WHOLE + LAYERS * (ATTENTION + MLP) * (bits / 8 + scales), rel=1e-6)
    assert laid.plan.quantization == format_
    assert "units: such weights stay packed, products are in bf16" in laid.plan.notes[1]


@pytest.mark.parametrize(
    ("config", "precision"),
    [
        ({"torch_dtype": "float16"}, "fp16"),
        ({"dtype": "torch.float16"}, "fp16"),
        ({"torch_dtype": "bfloat16"}, "bf16"),
        ({"torch_dtype": "float32"}, "bf16"),  # engines serve such weights in 16 bits
        ({"torch_dtype": 7}, "bf16"),
    ],
)
def test_the_dtype_of_a_checkpoint_is_that_of_its_activations(
    folder: Folder, config: dict[str, Any], precision: str
) -> None:
    assert plan(folder(LLAMA | config)).precision == precision
    assert plan(folder(LLAMA | config), kind="train").precision == "bf16"


def test_experts_share_tensor_ranks_with_their_scales(lay_out: LayOut) -> None:
    asked = {"cluster": load_cluster("dgx_h100"), "parallel": Parallel(tp=8)}
    whole, rank = (weighed(lay_out(shortened("kimi_k2_5", 2), **each)) for each in ({}, asked))
    assert rank == pytest.approx(whole / 8, rel=0.06)  # latents are whole on each rank
