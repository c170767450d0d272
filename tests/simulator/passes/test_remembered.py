"""Passes that are remembered make what they make without a memory."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import reduce

import numpy as np
import pytest

from opcast.simulator.passes import remembered
from opcast.simulator.passes.order import INFERENCE, TRAINING, apply_passes
from opcast.simulator.passes.rewriting.draft import Draft
from opcast.simulator.question.plan import Plan, load_stack

LAYOUTS = (
    {"tp": 2, "pp": 2, "zero_stage": 1},
    {"tp": 2, "pp": 4, "zero_stage": 1},
    {"tp": 2, "pp": 2, "vpp": 2, "zero_stage": 1},
    {"tp": 4, "pp": 2, "sequence_parallel": True},
    {"tp": 2, "cp": 2, "zero_stage": 3},
    {"tp": 2, "pp": 2, "zero_stage": 1},
)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_what_is_remembered_is_what_would_be_made(family: str, traced, planned) -> None:
    graph = traced(family)
    for stack in ("megatron", "torchtitan"):
        for layout in LAYOUTS:
            for recompute in ("none", "full"):
                plan = replace(planned(**layout), stack=load_stack(stack), recompute=recompute, micro_batches=4)
                assert apply_passes(graph, plan) == reduce(lambda made, each: each(made, plan), TRAINING, graph)


def test_passes_of_inference_are_remembered_too(traced, planned) -> None:
    graph = traced("llama", "prefill")
    for layout in LAYOUTS[3:]:
        plan = replace(planned(**{**layout, "zero_stage": 0}), stack=load_stack("vllm"), options={"kv_dtype": "fp8"})
        assert apply_passes(graph, plan, INFERENCE) == reduce(lambda made, each: each(made, plan), INFERENCE, graph)


def test_a_draft_that_nobody_changed_hands_on_the_very_same_blocks(traced) -> None:
    graph = traced("llama")
    draft = Draft(graph)
    draft.sections[0].items[0].change(path="elsewhere")
    changed, *same = draft.graph().blocks
    assert changed != graph.blocks[0]
    assert all(block is of for block, of in zip(same, graph.blocks[1:], strict=True))


def test_plans_that_are_the_same_to_a_pass_share_its_graph(traced, planned) -> None:
    graph = traced("llama")
    plans = [replace(planned(tp=2, pp=2, vpp=vpp), micro_batches=4) for vpp in (1, 2)]
    one, other = (apply_passes(graph, plan) for plan in plans)
    assert one is other
    assert apply_passes(graph, replace(plans[0], recompute="full")) is not one


def test_every_question_that_a_plan_answers_is_noted(planned) -> None:
    """Fields one by one, methods as a whole: a method added to a plan is noted by itself."""
    plan = replace(planned(tp=2, pp=2), stack=load_stack("megatron"))
    asked = {
        "group": ("dp",),
        "members": ("tp",),
        "stage_devices": (1,),
        "neighbours": (0, 1),
        "scales": ("h100_sxm", "train"),
        "regime": ("train",),
    }
    methods = {name for name, each in vars(Plan).items() if callable(each) and not name.startswith("_")}
    assert methods == set(asked)
    for name, given in asked.items():
        noted: dict[tuple[object, ...], object] = {}
        found = getattr(remembered._noting(plan, noted), name)(*given)
        assert np.array_equal(found, getattr(plan, name)(*given))
        assert set(noted) == {(name, *given)}
    for each in fields(Plan):
        noted = {}
        value = getattr(remembered._noting(plan, noted), each.name)
        assert each.name == "parallel" or (set(noted) == {("plan", each.name)} and value is getattr(plan, each.name))


def test_the_memory_is_bounded(traced, planned) -> None:
    graph = traced("llama")

    def named(made, plan):
        return replace(made, name=f"{plan.micro_batches}")

    for count in range(1, 2 * remembered.MADE):
        plan = replace(planned(tp=2), micro_batches=count)
        assert remembered.run(named, graph, plan).name == str(count)
    assert len(remembered._KNOWN[id(graph), named].made) == remembered.MADE
