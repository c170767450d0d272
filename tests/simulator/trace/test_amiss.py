"""Errors of a model's code name the setting of its configuration that they are about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from opcast.simulator.trace import TraceError, Workload, trace
from opcast.simulator.trace.amiss import explained

PROMPT = Workload("prefill", batch=1, seq_len=16)


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("llama", "rope_scaling", "linear"),  # said by the configuration, of a name and a value of its own
        ("llama", "rope_scaling.type", "linier"),
        ("llama", "rms_norm_eps", "small"),
        ("llama", "hidden_act", "swush"),  # said where a layer is built
        ("llama", "rope_theta", "big"),
        ("llama", "pad_token_id", 50_000),
        ("mixtral", "num_experts_per_tok", 9),  # said where it runs
        ("mixtral", "num_local_experts", 0),  # said of the choice of experts
    ],
)
def test_an_error_of_transformers_names_the_setting_and_its_value(
    family: str, name: str, value: Any, small_model: Callable[..., dict[str, Any]]
) -> None:
    outer, _, inner = name.partition(".")
    config = small_model(family) | {outer: {inner: value, "factor": 2.0} if inner else value}
    with pytest.raises(TraceError) as refused:
        trace(config, PROMPT, "bf16")
    said = str(refused.value)
    assert f"model.config.{name}={value!r}" in said
    assert "\n" not in said


def test_nothing_is_named_that_an_error_is_not_about() -> None:
    def fail(width: int) -> None:
        raise ValueError(f"too wide by {width - 3}")

    with pytest.raises(ValueError, match="too wide") as error:
        fail(4)
    assert explained(error.value, {"hidden_size": 512, "use_cache": True, "pad_token_id": None}) == "too wide by 1"
    assert explained(error.value, None) == "too wide by 1"
    assert explained(KeyError("swush"), {"act": "swush"}) == "there is no 'swush'; look at model.config.act='swush'"
