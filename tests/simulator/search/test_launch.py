"""Launch files say what the point says, and the frameworks know what they are told."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from opcast.simulator.question.plan import load_stack
from opcast.simulator.search.launch import MEGATRON_BRIDGE, launch_file
from opcast.simulator.search.request import SearchRequest, asked, request_of
from opcast.simulator.search.space import AXES


@pytest.fixture(scope="module")
def step(asking: Callable[..., SearchRequest]) -> Callable[..., Any]:
    """A function: axes -> the step of that point."""

    def make(**axes: Any) -> Any:
        made = asked(asking({}))
        usual = {name: values[0] for name, values in made.axes.items()}
        assert axes.keys() <= set(AXES)
        return request_of(made, {**usual, **axes})

    return make


def test_megatron_is_told_of_every_degree(step: Callable[..., Any]) -> None:
    text = launch_file(step(tp=2, pp=2, vpp=3, cp=2, zero_stage=1, recompute="full", micro_batch=4), "megatron-lm")
    lines = text.splitlines()
    for line in (
        *("--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--context-parallel-size 2"),
        *("--num-virtual-stages-per-pipeline-rank 3", "--use-distributed-optimizer", "--sequence-parallel"),
        *(
            "--recompute-granularity full",
            "--recompute-method uniform",
            "--micro-batch-size 4",
            "--global-batch-size 64",
        ),
        *("--num-layers 6", "--hidden-size 1024", "--bf16", "--overlap-grad-reduce", "--tp-comm-overlap"),
    ):
        assert line in lines
    plain = launch_file(step(tp=1, zero_stage=0, overlap="none"), "megatron-lm")
    assert not {"--sequence-parallel", "--use-distributed-optimizer", "--overlap-grad-reduce"} & set(plain.splitlines())


def test_megatron_bridge_gets_overrides(step: Callable[..., Any]) -> None:
    lines = launch_file(step(tp=2, precision="fp8"), "megatron-bridge").splitlines()
    assert "model.tensor_model_parallel_size=2" in lines
    assert "mixed_precision=bf16_with_fp8_current_scaling_mixed" in lines
    assert {line.partition("=")[0] for line in lines[1:]} <= set(MEGATRON_BRIDGE)


def test_torchtitan_gets_toml(step: Callable[..., Any]) -> None:
    titan = replace(step(tp=2, pp=2, zero_stage=3, micro_batch=4), stack=load_stack("torchtitan"))
    found = tomllib.loads(launch_file(titan, "torchtitan"))
    assert found["parallelism"]["tensor_parallel_degree"] == 2
    assert found["parallelism"]["data_parallel_shard_degree"] == 2
    assert found["parallelism"]["fsdp_reshard_after_forward"] == "always"
    assert found["parallelism"]["pipeline_parallel_layers_per_stage"] == 3
    assert (found["training"]["local_batch_size"], found["training"]["global_batch_size"]) == (32, 64)


@pytest.mark.parametrize(
    ("axes", "framework", "says"),
    [
        ({"zero_stage": 1}, "torchtitan", r"take space.zero_stage=\[0,2,3\]"),
        ({"pp": 2, "schedule": "zb-h1"}, "torchtitan", "schedule=zb-h1 has no name"),
        ({"pp": 2, "schedule": "zb-h1"}, "megatron-lm", "is none of Megatron's"),
        ({"recompute": "full:3"}, "megatron-lm", "recompute=full:3 has no argument"),
        ({}, "deepspeed", "launch=deepspeed is no framework"),
    ],
)
def test_what_a_framework_cannot_be_told(
    axes: dict[str, Any], framework: str, says: str, step: Callable[..., Any]
) -> None:
    with pytest.raises(ValueError, match=says):
        launch_file(step(**{"zero_stage": 0, **axes}), framework)
