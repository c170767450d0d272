"""Wrappers of a language model with a vision part: the language part alone, images before text, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from opcast.datasets.devices import load_device
from opcast.simulator.graph import Graph
from opcast.simulator.question.requests import SimulateRequest, plan_of
from opcast.simulator.question.work import Work, WorkloadError
from opcast.simulator.step.images import with_images
from opcast.simulator.trace import TraceError, Workload, trace
from opcast.simulator.trace.image_tokens import image_size

HIDDEN = 64
TEXT: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "head_dim": 16,
    "pad_token_id": 0,
}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAVA = {
    "model_type": "llava",
    "text_config": {"model_type": "llama", **TEXT},
    "vision_config": {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, **VISION},
    "image_token_index": 500,
}
QWEN = {
    "model_type": "qwen3_vl",
    "text_config": {
        "model_type": "qwen3_vl_text",
        **TEXT,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": HIDDEN,
        "deepstack_visual_indexes": [1],
        "num_position_embeddings": 64,
    },
}
GEMMA = {
    "model_type": "gemma3",
    "mm_tokens_per_image": 4,
    "text_config": {"model_type": "gemma3_text", **TEXT},
    "vision_config": {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14, **VISION},
}
MISTRAL = {
    "model_type": "mistral3",
    "spatial_merge_size": 2,
    "text_config": {"model_type": "mistral", **TEXT, "sliding_window": None},
    "vision_config": {"model_type": "pixtral", "image_size": 56, "patch_size": 14, "head_dim": 16, **VISION},
}
WRAPPERS = {each["model_type"]: each for each in (LLAVA, QWEN, GEMMA, MISTRAL)}
PROMPT = Workload("prefill", 2, 48, attention="fused", cache="static", optimizer="none")


def prompt(model: dict[str, Any], **changes: Any) -> Graph:
    given = {name: getattr(PROMPT, name) for name in ("batch", "seq_len", "attention", "cache", "optimizer")}
    return trace(model, Workload("prefill", **given | changes))


def attended(graph: Graph) -> list[int]:
    """Queries a sequence of each attention."""
    ops = [node.op for node in graph.nodes() if node.op is not None and node.op.kind == "attention_prefill"]
    return [op.seq_q for op in ops]


@pytest.mark.parametrize("kind", list(WRAPPERS))
def test_without_images_it_is_its_language_model(kind: str) -> None:
    graph = prompt(WRAPPERS[kind])
    assert attended(graph) == [48] * TEXT["num_hidden_layers"]
    weights = {node.path.split(".")[1] for node in graph.nodes() if node.path.startswith("model.")}
    assert weights <= {"language_model"}


def test_language_part_is_that_of_the_plain_model() -> None:
    plain = prompt({"model_type": "llama", **TEXT})
    assert prompt(LLAVA).parameters == plain.parameters


@pytest.mark.parametrize(("kind", "image_px", "tokens"), [("llava", 0, 4), ("qwen3_vl", 64, 4), ("gemma3", 0, 4)])
def test_images_go_before_the_text(kind: str, image_px: int, tokens: int) -> None:
    model = WRAPPERS[kind]
    assert image_size(model, image_px).tokens == tokens
    graph = prompt(model, images=2, image_px=image_px)
    seen = attended(graph)
    assert seen[-TEXT["num_hidden_layers"] :] == [48] * TEXT["num_hidden_layers"]  # images are part of the 48
    assert len(seen) > TEXT["num_hidden_layers"]  # the vision part attends, too
    assert graph.parameters > prompt(model).parameters


def test_encoder_of_any_size_sees_more_of_a_larger_image() -> None:
    assert [image_size(QWEN, px).tokens for px in (64, 128, 0)] == [4, 16, 1024]
    assert image_size(MISTRAL, 112).tokens == 16
    large = prompt(MISTRAL, images=1, image_px=56)
    assert large.parameters > prompt(MISTRAL).parameters


def test_training_learns_from_images() -> None:
    graph = trace(LLAVA, Workload("train", 1, 32, attention="fused", images=1))
    paths = {node.path for node in graph.nodes() if node.phase == "backward" and "vision_tower" in node.path}
    assert paths


def test_images_make_sequences_longer() -> None:
    work = with_images(LLAVA, Work("prefill", input_len=100, images=3))
    assert work.input_len == 100 + 3 * 4
    with pytest.raises(WorkloadError, match=r"workload\.input_len"):
        Work("decode", images=1)
    with pytest.raises(TraceError, match="needs a model with a vision part"):
        with_images({"model_type": "llama", **TEXT}, Work("prefill", images=1))
    with pytest.raises(TraceError, match="sees images of 28 pixels alone"):
        image_size(LLAVA, 100)


def test_what_is_left_out_is_said() -> None:
    device = load_device("h100_sxm")
    without = plan_of(SimulateRequest(model=LLAVA, work=Work("prefill"), device=device), device)
    assert any("vision part of the model is left out" in note for note in without.notes)
    flat = {"model_type": "qwen2_5_vl", **TEXT, "vision_config": {"hidden_size": 32}}  # no text_config
    without = plan_of(SimulateRequest(model=flat, work=Work("prefill"), device=device), device)
    assert any("vision part of the model is left out" in note for note in without.notes)
    within = plan_of(SimulateRequest(model=LLAVA, work=Work("prefill", images=1), device=device), device)
    assert not within.notes


def test_a_language_model_without_its_wrapper_and_the_other_way_round() -> None:
    text = prompt(QWEN["text_config"])
    assert text.parameters == prompt(QWEN).parameters
    unknown = {"model_type": "a_wrapper_of_their_own", "text_config": {"model_type": "llama", **TEXT}}
    assert prompt(unknown).parameters == prompt(LLAVA).parameters


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("vit", "works on images, not on tokens: give it as module:callable"),
        ("clip", "works on images"),
        ("resnet", "works on images"),
        ("whisper", "works on sound"),
        ("mimo", r"not part of transformers .* set model_type .* or give your own as module:callable"),
        ("deepseek_ref", r"deepseek_v3.* or give your own as module:callable"),
    ],
)
def test_what_cannot_run_says_what_can(model_type: str, said: str) -> None:
    with pytest.raises(TraceError, match=said) as caught:
        prompt({"model_type": model_type})
    assert "Unrecognized" not in str(caught.value)
    assert "\n" not in str(caught.value)
