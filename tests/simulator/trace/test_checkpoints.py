"""What a config.json says of the format of its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opcast.datasets.devices import load_device
from opcast.simulator.engines import build_engine
from opcast.simulator.question.work import Work
from opcast.simulator.report.answer import InferenceReport
from opcast.simulator.simulate import alone, simulate
from opcast.simulator.trace import TraceError
from opcast.simulator.trace.checkpoints import weight_format

GROUP = {"weights": {"num_bits": 8, "type": "float"}, "input_activations": {"num_bits": 8, "type": "float"}}


@pytest.mark.parametrize(
    ("said", "recipe"),
    [
        (None, ""),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "gptq", "bits": 4}, "w4a16"),
        ({"quant_method": "awq", "bits": 8}, "w8a16"),
        ({"quant_method": "mxfp4"}, "mxfp4a16"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "w4a16"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
    ],
)
def test_known_methods_have_a_recipe(said, recipe) -> None:
    assert weight_format(said) == recipe


@pytest.mark.parametrize("said", [{"quant_method": "spqr"}, {"quant_method": "gptq", "bits": 3}])
def test_unknown_methods_are_refused_in_one_line(said) -> None:
    with pytest.raises(TraceError, match="not known"):
        weight_format(said, "mine")


def test_a_quantized_checkpoint_weighs_and_takes_less(small_model, tmp_path: Path) -> None:
    device = load_device("h100_sxm")
    config = small_model("llama", 4, hidden_size=2048, intermediate_size=8192, num_attention_heads=16)
    reports = []
    for name, said in (("plain", {}), ("packed", {"quantization_config": {"quant_method": "gptq", "bits": 4}})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | said))
        work = Work("decode", input_len=256, cache="static")
        reports.append(
            simulate(str(tmp_path / name), work, alone(device, "fp16"), device, build_engine(device, [], []))
        )
    plain, packed = reports
    assert isinstance(plain, InferenceReport)
    assert isinstance(packed, InferenceReport)
    assert packed.memory.weights_gib < 0.4 * plain.memory.weights_gib
    products = [next(s.time_s for s in r.breakdown.by_op if s.kind == "gemm") for r in (plain, packed)]
    assert products[1] < products[0]
    assert packed.precision == "w4a16"
