"""``opcast profile coverage``: what of a step can be measured, by the command and on real steps."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
    pytest.skip("needs transformers: pip install 'opcast[hf]'", allow_module_level=True)

from opcast.datasets.devices import load_device
from opcast.datasets.installing import install_command
from opcast.datasets.ops import make_op
from opcast.datasets.schema import Measurement
from opcast.datasets.store import Store
from opcast.jobs.cli import main
from opcast.jobs.composing import compose
from opcast.jobs.planning import cases_of
from opcast.jobs.profile_coverage import MEASURABLE, MEASURED, NOT, measured_by, shares

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
TINY = ("model=tiny_llama_100m", "device=h100_sxm", "workload.seq_len=256")


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The JSON object of the verb."""
    assert main(["profile", "coverage", *words, "format=json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(autouse=True, scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home of these tests' own: each model is traced once."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("home")
        patch.setenv("OPCAST_HOME", str(path))
        yield path


def test_a_step_is_covered_op_by_op(capsys: pytest.CaptureFixture[str]) -> None:
    told = asked(capsys, *TINY, "stack=torchtitan")
    assert (told["device"], told["stack"]) == ("h100_sxm", "torchtitan")
    assert sum(told["shares"].values()) == pytest.approx(1.0)
    assert told["shares"]["measurable"] > 0.98
    assert sum(each["share"] for each in told["ops"]) == pytest.approx(1.0)
    assert told["seconds"] == pytest.approx(sum(each["seconds"] for each in told["ops"]))
    product = next(each for each in told["ops"] if each["op"]["kind"] == "gemm")
    assert product["backends"][0] == "cublas"
    assert all(each["why"] for each in told["ops"] if each["status"] == NOT)
    assert told["install"] == {}


def test_an_engine_s_step_says_which_packages_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    told = asked(capsys, *TINY[:2], "workload=decode", "workload.input_len=256", "stack=vllm")
    decode = next(each for each in told["ops"] if each["op"]["kind"] == "attention_decode")
    assert decode["backends"][0] == "vllm:paged"
    assert told["install"]["vllm"] == install_command("vllm")


def test_the_table_counts_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "coverage", *TINY, "least_share=0.05"]) == 0
    told = capsys.readouterr()
    said = told.out + told.err
    assert "not measurable" in said
    assert "below 5.0% each" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["least_share=2"], "least_share=2 must be a share"),
        (["stack=nosuch"], "nosuch"),
        (["what=1"], "what is no setting"),
        (["workload=simai"], "simai"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["profile", "coverage", *TINY[:2], *words]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1
    assert said in told[0]


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "coverage", "--help"]) == 0
    told = capsys.readouterr().out
    for words in (
        "No GPU is needed",
        "opcast profile coverage model=llama3_8b",
        "least_share: 0.005",
        "campaign=model",
    ):
        assert words in told


def test_rows_of_the_store_are_measured(tmp_path: Path) -> None:
    op, device = make_op("gemm", "bf16", m=64, n=64, k=64), load_device("h100_sxm")
    store = Store(tmp_path / "store")
    assert measured_by(op, device.id, store) == ()
    row = Measurement(
        op=op, device_id=device.id, run_id="run", latency_us=3.0, backend="cublas", cache="warm", measured_at=NOW
    )
    store.write([row], "run")
    assert measured_by(op, device.id, store) == ("cublas",)


def test_a_model_s_campaign_measures_on_the_stack_s_kernels(home: Path) -> None:
    config = compose("profile", [f"home={home}"])
    config["steps"] = ["workload=decode model=tiny_llama_100m device=h100_sxm stack=vllm workload.input_len=256"]
    made = cases_of(config)
    backends = {(each["kind"], each["backend"]) for each in made}
    assert ("attention_decode", "vllm:paged") in backends
    assert ("rms_norm", "vllm:rms_norm") in backends
    assert not {("rope", "torch"), ("silu_mul", "torch")} & backends


LLAMA = "workload=train workload.seq_len=8192 workload.micro_batch=1"
TITAN_8B = f"{LLAMA} model=llama3_8b stack=torchtitan cluster=dgx_h100 parallel.dp=8 parallel.zero_stage=3"
TITAN_70B = (
    f"{LLAMA} model=llama3_70b stack=torchtitan cluster=dgx_h100 cluster.nodes=8 parallel.dp=64 parallel.zero_stage=3 "
    "workload.global_batch=64 workload.recompute=full"
)
MEGATRON = (
    f"{LLAMA} model=llama3_70b stack=megatron_core cluster=dgx_h100 cluster.nodes=4 parallel.tp=8 parallel.pp=4 "
    "workload.global_batch=16"
)
TORCH = "workload=train workload.seq_len=4096 model=llama3_8b device=h200_sxm stack=torch precision=bf16"
JOINED = "stack.fusion=[rms_norm,rope,silu_mul,cross_entropy,add_norm,pointwise]"
DEEP = "model=deepseek_v3 workload.input_len=4096 parallel.tp=8"
QWEN = "model=qwen3_30b_a3b"
OSS = "workload=decode model=gpt_oss_120b workload.batch=64 workload.input_len=2048"
LEAST_SHARE = 0.98  # of each step, measurable on its hardware
STEPS = {
    "8B in torchtitan": f"{TITAN_8B} precision=bf16",
    "8B in torchtitan, float8": f"{TITAN_8B} precision=fp8",
    "70B in torchtitan": f"{TITAN_70B} precision=bf16",
    "70B in torchtitan, float8": f"{TITAN_70B} precision=fp8",
    "70B in Megatron-Core": f"{MEGATRON} precision=bf16",
    "70B in Megatron-Core, FP8": f"{MEGATRON} precision=fp8",
    "8B in eager torch": TORCH,
    "8B in compiled torch": f"{TORCH} {JOINED}",
    "DeepSeek-V3 decodes in vLLM": f"workload=decode {DEEP} cluster=dgx_h200 stack=vllm workload.batch=64",
    "DeepSeek-V3 reads a prompt in vLLM": f"workload=prefill {DEEP} cluster=dgx_h200 stack=vllm",
    "DeepSeek-V3 decodes in SGLang": f"workload=decode {DEEP} cluster=dgx_h200 stack=sglang workload.batch=64",
    "DeepSeek-V3 reads a prompt in SGLang": f"workload=prefill {DEEP} cluster=dgx_h200 stack=sglang",
    "DeepSeek-V3 decodes in TensorRT-LLM": f"workload=decode {DEEP} cluster=dgx_b200 stack=trtllm workload.batch=64",
    "DeepSeek-V3 reads a prompt in TensorRT-LLM": f"workload=prefill {DEEP} cluster=dgx_b200 stack=trtllm",
    "DeepSeek-V3 in NVFP4": f"workload=decode {DEEP} precision=nvfp4 cluster=dgx_b200 stack=trtllm",
    "Qwen3-30B-A3B in vLLM": f"workload=decode {QWEN} device=h100_sxm stack=vllm workload.batch=64",
    "Qwen3-30B-A3B in Megatron-Core": f"workload=train {QWEN} cluster=dgx_h100 parallel.ep=8 stack=megatron_core",
    "gpt-oss in MXFP4 in vLLM": f"{OSS} device=h100_sxm stack=vllm",
    "gpt-oss in MXFP4 in TensorRT-LLM": f"{OSS} device=b200_sxm stack=trtllm",
}


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_nearly_all_of_a_step_is_measurable_on_its_hardware(capsys: pytest.CaptureFixture[str], step: str) -> None:
    told = asked(capsys, *step.split())
    assert told["shares"]["measurable"] >= LEAST_SHARE
    assert set(told["shares"]) == {MEASURED, MEASURABLE, NOT.replace(" ", "_")}
    assert told["seconds"] < 600
    assert shares(()) == {MEASURED: 0.0, MEASURABLE: 0.0, NOT: 0.0}
