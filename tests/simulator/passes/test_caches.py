"""Keys and values: whole heads, whole latents, windows and states on a rank, and everybody counts the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.datasets.ops import make_op
from opcast.simulator.memory.breakdown import GIB
from opcast.simulator.passes.kept import cache_bytes, keeps, kept_bytes
from opcast.simulator.question.plan import Parallel, Plan, load_stack
from opcast.simulator.question.requests import SimulateRequest
from opcast.simulator.question.sources import Sources
from opcast.simulator.question.work import Work
from opcast.simulator.serving.engines import load_serving_engine
from opcast.simulator.serving.steps import steps_of
from opcast.simulator.simulate import laid_out
from opcast.simulator.step.build import LaidOut
from opcast.simulator.trace.models import shipped_config
from opcast.simulator.workbench import Workbench

H100 = load_device("h100_sxm")
NODE = load_cluster("dgx_h100")
LONG = 1024
WIDE = {"hidden_size": 256, "num_attention_heads": 16, "head_dim": 16, "max_position_embeddings": 1 << 17}
STATES = {
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "vocab_size": 256,
    "head_dim": 16,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
Make = Callable[..., dict[str, Any]]
Lay = Callable[..., LaidOut]


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture(scope="module")
def lay(graphs: Path) -> Lay:
    """A function: a model and its layout -> the step as it lies in memory, on nodes of eight H100."""

    def make(model: Any, stack: Any = "vllm", nodes: int = 1, kind: str = "decode", work: Any = (), **own: Any) -> Any:
        framework = load_stack(stack) if isinstance(stack, str) else stack
        of_plan = {name: own.pop(name) for name in ("quantization", "kv_dtype", "options", "offload") if name in own}
        plan = Plan(Parallel(**own), replace(NODE, nodes=nodes), framework, **of_plan)
        return laid_out(model, Work(kind, **dict(work)), plan, H100, graphs)

    return make


def kv_gib(laid: LaidOut) -> float:
    """What simulate says."""
    return max(memory.by_class.get("KV cache", 0.0) for memory in laid.memories)


def of_shipped(name: str, layers: int = 2) -> dict[str, Any]:
    """A shipped model at its real widths with few layers."""
    config = dict(shipped_config(name), num_hidden_layers=layers)
    return {key: value[:layers] if key == "layer_types" else value for key, value in config.items()}


@pytest.mark.parametrize(("tp", "gib"), [(2, 12.0), (4, 6.0), (8, 6.0)])
def test_a_rank_keeps_whole_heads(tp: int, gib: float, lay: Lay) -> None:
    """Qwen3-30B-A3B, 8 x 32k tokens: 4 heads of keys; 48 layers x 1 head x 128 x 2 x 2 B x 262,144 tokens."""
    for stack in ("vllm", "sglang", "trtllm", "torch"):
        laid = lay("qwen3_30b_a3b", stack, tp=tp, work={"batch": 8, "input_len": 32767, "cache": "static"})
        assert kv_gib(laid) == pytest.approx(gib, rel=1e-4)


def test_a_batch_that_does_not_fit_is_told(lay: Lay) -> None:
    laid = lay("qwen3_30b_a3b", tp=8, work={"batch": 176, "input_len": 32768})
    assert laid.peak_gib == pytest.approx(7.15 + 132.0 + 0.7, abs=0.3)
    assert laid.peak_gib > H100.memory_gib


def test_weights_of_keys_and_values_are_held_as_their_heads_are(lay: Lay) -> None:
    """One head's 2,048 x 128 of keys and of values at TP 4 and at TP 8: what TP 8 saves is half of all the rest."""
    weights = {tp: lay("qwen3_30b_a3b", tp=tp, work={"batch": 1, "input_len": 32}).memories[0] for tp in (2, 4, 8)}
    two, four, eight = (weights[tp].weights_gib for tp in (2, 4, 8))
    head = 48 * 2048 * 128 * 2 * 2 / GIB
    assert four - eight == pytest.approx((two - four - head) / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("model", "quantization", "work", "gib"),
    [
        ("qwen3_235b_a22b", "fp8", {"batch": 1, "input_len": 32767}, 94 * 1 * 128 * 2 * 2 * 32768 / GIB),  # 1.469
        ("deepseek_v2_lite", "", {"batch": 32, "input_len": 4095}, 32 * 4096 * 27 * 576 * 2 / GIB),  # 3.80
    ],
)
def test_published_models_at_tp_8(model: str, quantization: str, work: Any, gib: float, lay: Lay) -> None:
    found = lay(model, tp=8, quantization=quantization, work=work)
    assert kv_gib(found) == pytest.approx(gib, rel=1e-4)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_latent_is_whole_on_every_rank(tp: int, lay: Lay) -> None:
    """DeepSeek-V3 on 32 GPUs: 64 x 4,096 x 61 x 576 x 2 B at any TP."""
    for stack, kind in (("vllm", "decode"), ("trtllm", "decode"), ("vllm", "prefill")):
        work = {"batch": 64 if kind == "decode" else 1, "input_len": 4096 - (kind == "decode")}
        laid = lay("deepseek_v3", stack, nodes=4, kind=kind, tp=tp, ep=32, work=work)
        assert kv_gib(laid) == pytest.approx(work["batch"] * 4096 * 61 * 576 * 2 / GIB, rel=1e-3)


def test_layers_with_a_window_keep_it_alone_where_the_engine_does(lay: Lay) -> None:
    """Gemma 3 12B at TP 8: of 48 layers every sixth sees all; a head of 256 of each on a rank, windows of 1,024."""
    token, work = 2 * 256 * 2, {"batch": 8, "input_len": 32767}
    own, alike = (kv_gib(lay("gemma3_12b", stack, tp=8, work=work)) for stack in ("vllm", "trtllm"))
    assert own == pytest.approx(8 * token * (8 * 32768 + 40 * 1024) / GIB, rel=1e-4)
    assert alike == pytest.approx(8 * token * 48 * 32768 / GIB, rel=1e-4)


def test_different_heads_in_layers_with_and_without_a_window() -> None:
    """MiMo-V2-Flash-like: 4 heads of keys where all is seen, 8 under the window; keys of 192, values of 128."""
    whole = make_op(
        "attention_decode", batch=1, heads_q=8, heads_kv=1, head_dim=192, v_head_dim=128, seq_q=1, seq_kv=32768
    )
    window = whole.replace(seq_kv=128)
    assert cache_bytes(whole) == 32768 * 320 * 2
    assert cache_bytes(window) == 128 * 320 * 2
    assert cache_bytes(window, context=32768) == cache_bytes(whole)
    assert cache_bytes(whole.replace(kv_dtype="fp8")) == cache_bytes(whole) / 2


def test_the_keys_of_an_indexer_are_kept_beside_the_latent() -> None:
    """DeepSeek-V3.2: 576 elements of a latent and 128 of the indexer's key for each token, whole on every rank."""
    index = make_op("sparse_index_decode", batch=2, heads=8, head_dim=128, seq_q=1, seq_kv=4096, topk=2048)
    latent = make_op(
        "sparse_attention_decode",
        batch=2,
        heads_q=16,
        heads_kv=1,
        head_dim=576,
        v_head_dim=512,
        seq_q=1,
        seq_kv=4096,
        topk=2048,
        latent="yes",
    )
    assert cache_bytes(index) + cache_bytes(latent) == 2 * 4096 * (576 + 128) * 2


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_states_of_linear_attention_are_shared_out_and_heads_are_whole(tp: int, lay: Lay) -> None:
    """Qwen3-Next 80B: 12 layers with 2 heads of 256; 36 with 32 states of 128 x 128 in fp32 and 4 x 8,192."""
    work = {"batch": 8, "input_len": 32767}
    heads, state = max(1, 2 // tp), (32 * 128 * 128 * 4 + 4 * 8192 * 2) / tp
    right = 8 * (32768 * 12 * heads * 512 * 2 + 36 * state)
    assert kv_gib(lay("qwen3_next_80b_a3b", tp=tp, work=work)) == pytest.approx(right / GIB, rel=1e-4)


@pytest.mark.parametrize("stack", ["vllm", "sglang", "trtllm", "torch"])
@pytest.mark.parametrize("model", ["llama3_8b", "deepseek_v2_lite"])
def test_the_format_of_the_cache_is_what_is_asked_else_the_engines(model: str, stack: str, lay: Lay) -> None:
    def size(**own: Any) -> float:
        return kv_gib(
            lay(of_shipped(model), stack, tp=2, work={"batch": 8, "input_len": 4096, "cache": "static"}, **own)
        )

    usual = size()
    assert size(kv_dtype="fp8") == size(options={"kv_dtype": "fp8"}) == pytest.approx(usual / 2, rel=1e-3)
    assert size(quantization="fp8", kv_dtype="same") == usual
    assert size(quantization="fp8_block") == usual
    exported = stack == "trtllm"  # its checkpoints in FP8 bring scales of an FP8 cache
    assert size(quantization="fp8") == pytest.approx(usual / 2 if exported else usual, rel=1e-3)


def test_a_served_batch_keeps_what_its_sequences_have_come_to(lay: Lay) -> None:
    batch = {"prompts": ((512, 0), (512, 1000)), "decodes": ((64, 394),)}
    for stack in ("vllm", "trtllm"):
        tokens = 512 + 1512 + 64 * 395
        laid = lay("deepseek_v2_lite", stack, kind="batch", tp=8, work=batch)
        assert kv_gib(laid) == pytest.approx(tokens * 27 * 576 * 2 / GIB, rel=1e-3)


# --- everybody counts the same -----------------------------------------------------------------------------


MODELS: dict[str, Callable[[Make], dict[str, Any]]] = {
    "heads": lambda make: make("llama", 4, num_key_value_heads=4, **WIDE),
    "one head": lambda make: make("llama", 4, num_key_value_heads=1, **WIDE),
    "windows": lambda make: make("gemma2", 4, num_key_value_heads=2, **(WIDE | {"sliding_window": 64})),
    "latent": lambda make: make("deepseek_v3", 4, num_attention_heads=16, num_key_value_heads=16),
    "states": lambda _: {"model_type": "qwen3_next", "num_hidden_layers": 4, **STATES},
}


def by_hand(model: dict[str, Any], length: int, tp: int, alike: bool, size: int) -> float:
    """Bytes of a sequence of ``length`` on one rank, from the configuration alone."""
    layers = model["num_hidden_layers"]
    if "kv_lora_rank" in model:
        return layers * length * (model["kv_lora_rank"] + model["qk_rope_head_dim"]) * size
    token = 2 * max(1, model["num_key_value_heads"] // tp) * model["head_dim"] * size
    if "sliding_window" in model:
        seen = length if alike else min(length, model["sliding_window"])
        return layers // 2 * token * (length + seen)
    if "layer_types" in model:
        channels = 8 * 16 * 3 // tp
        return token * length + 3 * (8 // tp * 16 * 16 * 4 + channels * 4 * 2)
    return layers * token * length


@settings(max_examples=25)
@given(
    name=st.sampled_from(sorted(MODELS)),
    tp=st.sampled_from((1, 2, 4, 8)),
    pp=st.sampled_from((1, 2)),
    batch=st.sampled_from((1, 3, 8)),
    length=st.integers(100, 5000),
    windows=st.sampled_from(("own", "alike")),
    kv_dtype=st.sampled_from(("same", "fp8")),
)
def test_everybody_counts_the_same_bytes(
    lay: Lay, small_model: Make, graphs: Path, name: str, tp: int, pp: int, batch: int, length: int, windows: str,
    kv_dtype: str,
) -> None:  # fmt: skip
    """Simulate, serving and so search and transfers, and what offload moves, against the configuration by hand."""
    model, stack = MODELS[name](small_model), replace(load_stack("vllm"), windows=windows)
    pp = 1 if name == "states" else pp
    kv_dtype = "same" if name == "states" else kv_dtype
    about = {"nodes": 2, "tp": tp, "pp": pp, "kv_dtype": kv_dtype, "work": {"batch": batch, "input_len": length - 1}}
    laid = lay(model, stack, **about)
    size = 1 if kv_dtype == "fp8" else 2
    right = by_hand(model, length, tp, windows == "alike", size) / pp

    assert kv_gib(laid) * GIB == pytest.approx(batch * right, rel=0.01, abs=512 * 8 * 4)  # blocks are rounded to 512 B
    of_ops = max(kept_bytes([chunk.graph], length).all for chunk in laid.pipelines[0])
    assert of_ops == pytest.approx(batch * right, rel=1e-3)

    away = lay(model, stack, **about, offload=("kv",))
    nodes = [node for chunk in away.pipelines[0][:1] for node in chunk.graph.nodes()]
    moved = sum(node.op.size_bytes for node in nodes if node.op is not None and node.source == "copy.cache_in")
    assert moved == pytest.approx(kept_bytes([laid.pipelines[0][0].graph], length).all, rel=1e-3)
    assert kv_gib(away) == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_serving_and_transfers_count_what_simulate_does(
    name: str, tp: int, lay: Lay, small_model: Make, tmp_path: Path
) -> None:
    bench = Workbench(Sources.at(str(tmp_path), order=("network", "analytical")))
    model = MODELS[name](small_model)
    cluster = replace(NODE, devices_per_node=tp)
    request = SimulateRequest(
        model, cluster=cluster, parallel=Parallel(tp=tp), stack=load_stack("vllm"), sources=bench.sources
    )
    each = steps_of(request, bench).kv_budget(load_serving_engine("vllm").kv, 512).bytes_per_token / tp
    longer, shorter = (kv_gib(lay(model, tp=tp, work={"batch": 512, "input_len": n})) for n in (40_000, 36_000))
    assert each == pytest.approx((longer - shorter) * GIB / 512 / 4000, rel=3e-3)  # a window is a little of a long one


def test_what_keeps_nothing_is_told() -> None:
    assert not keeps(None)
    assert not keeps(make_op("gemm", m=1, n=1, k=1))
    assert not keeps(make_op("causal_conv1d", rows=4, cols=64))
    assert keeps(make_op("causal_conv1d", rows=4, cols=64, update="yes"))


def test_an_encoder_keeps_nothing(lay: Lay, small_model: Make) -> None:
    laid = lay(
        small_model("bert", max_position_embeddings=8192),
        "fastertransformer_fused",
        kind="prefill",
        work={"batch": 2, "input_len": 64},
    )
    assert kv_gib(laid) == 0.0
