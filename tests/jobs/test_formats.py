"""Formats of checkpoints from the command line and from Python: what is read is said, what is not known is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import opcast
from opcast.jobs.cli import main

CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1024,
}
FP8 = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
SAID = "weights in fp8, as the checkpoint stores them (its hf_quant_config.json); in 16 bits stay lm_head"
DECODE = ("simulate", "workload=decode", "workload.input_len=64", "stack=vllm", "device=h100_sxm")


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(FP8))
    return str(tmp_path)


def test_what_was_read_is_said_in_text_and_json(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DECODE, f"model={checkpoint}"]) == 0
    said = capsys.readouterr()
    assert SAID in said.out + said.err
    assert main([*DECODE, f"model={checkpoint}", "format=json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (found["precision"], found["notes"][0]) == ("fp8", SAID)


def test_a_step_that_does_not_fit_says_it_too(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DECODE, f"model={checkpoint}", "precision=bf16", "workload.batch=2000000"]) == 0
    said = capsys.readouterr()
    assert "DOES NOT FIT" in said.out
    assert "the checkpoint stores fp8; simulated in bf16, as asked" in said.out + said.err


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["precision=mxfp4"], "precision=mxfp4 does not exist; did you mean mxfp4a16"),
        (
            ["precision=mxfp8"],
            "has no mxfp8 matrix units; it has fp64, fp32",
        ),
        (["precision=nvfp4"], "engines unpack such weights there: take precision=w4a16"),
        (["precision=fp8", "device=a100_sxm_80gb"], "engines unpack such weights there: take precision=w8a16"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    checkpoint: str, words: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*DECODE, f"model={checkpoint}", *words]) == 2
    said = capsys.readouterr().err
    assert answer in said
    assert said.count("\n") == 1


def test_a_format_that_nobody_knows_is_refused_from_python(tmp_path: Path) -> None:
    model = {**CONFIG, "quantization_config": {"quant_method": "spqr"}}
    with pytest.raises(ValueError, match="says quant_method='spqr', which opcast does not know"):
        opcast.simulate(model, "decode", device="h100_sxm", input_len=64, home=tmp_path)


@pytest.mark.slow
def test_a_served_model_says_what_it_is_stored_in(tmp_path: Path) -> None:
    model = {**CONFIG, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    traffic = {"requests": 20, "rate": 2.0, "input": {"mean": 64}, "output": {"mean": 8}}
    report = opcast.serving(model, device="h100_sxm", traffic=traffic, home=tmp_path)
    assert report.notes[0].startswith("weights in fp8_block, as the checkpoint stores them")
