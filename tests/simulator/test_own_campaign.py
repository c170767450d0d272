"""A third of the full campaign on a synthetic H100: every step of eight moves towards the truth, none away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opcast.datasets.kernels import is_eager, lacking
from opcast.datasets.ops import KINDS
from opcast.datasets.store import Store
from opcast.harness.plan import Case
from opcast.harness.rank_map import RankMap, localize
from opcast.jobs.cli import main
from opcast.models.choice import OTHER, OWN
from opcast.models.registry import Registry
from opcast.models.training import train
from opcast.tests.harness.test_plan import shipped
from opcast.tests.simulator.synthetic_h100 import H100, measured, truth

pytestmark = pytest.mark.slow

SHARE = 0.35
NODE = RankMap((0,) * 8, (0,) * 8)  # eight GPUs, joined by NVLink
PACKAGES = (
    "vllm:",
    "sglang:",
    "transformer_engine:",
    "flash_mla:",
    "flashinfer:",
    "flash_attn:",
    "deep_gemm:",
    "mamba_ssm:",
    "fla:",
    "causal_conv1d:",
    "deep_ep",
)
TRUTH = "engine.order=['opcast.tests.simulator.synthetic_h100:make',network,analytical]"
LLAMA_70B = "model=llama3_70b cluster=dgx_h100 calibration=none"
DEEPSEEK = "model=deepseek_v3 cluster=dgx_h200 cluster.device=h100_sxm parallel.tp=8 calibration=none"
STEPS = {
    "Megatron-Core in FP8": f"workload=train {LLAMA_70B} cluster.nodes=8 parallel.tp=8 parallel.pp=4 precision=fp8 "
    "workload.global_batch=64 stack=megatron_core",
    "torchtitan": f"workload=train {LLAMA_70B} cluster.nodes=8 parallel.zero_stage=3 stack=torchtitan",
    "PyTorch, eager": "workload=train model=llama3_8b device=h100_sxm stack=torch calibration=none",
    "PyTorch, compiled": "workload=train model=llama3_8b device=h100_sxm stack=torchtitan calibration=none",
    "vLLM decodes": f"workload=decode {LLAMA_70B} parallel.tp=8 stack=vllm workload.batch=32 workload.input_len=2048",
    "vLLM prefills": f"workload=prefill {LLAMA_70B} parallel.tp=8 stack=vllm workload.input_len=4096",
    "DeepSeek decodes": f"workload=decode {DEEPSEEK} stack=vllm workload.batch=32 workload.input_len=4096",
    "DeepSeek prefills": f"workload=prefill {DEEPSEEK} stack=sglang workload.input_len=4096",
}
WANTED = {
    "gemm": "gemm@cublas/",
    "rope": ("rope@triton:rope/", "rope@inductor/"),
    "silu_mul": ("silu_mul@triton:silu_mul/", "silu_mul@inductor/"),
    "quantize": ("quantize@triton:quantize/", "quantize@inductor/"),
    "elementwise": "elementwise@torch/",
}


def campaign() -> list[Case]:
    """What a bare machine without packages of engines measures, as far as the campaign came."""
    found = []
    for name in ("full", "collectives"):
        cases = shipped(name, "cuda").cases
        found += [here for each in cases[: round(len(cases) * SHARE)] for here in localize(each, NODE)]
    runs = (c for c in found if not c.backend.startswith(PACKAGES) and not lacking(c.op, c.backend, H100))
    return [each for each in runs if KINDS[each.op.kind].family in ("host", "copy") or H100.supports(each.op.dtype)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the rows of the campaign and what was learned from them."""
    folder = tmp_path_factory.mktemp("home")
    store = Store(folder / "store")
    for state in ("warm", "cold"):
        part = [each for each in campaign() if each.cache == state]
        times = truth([each.op for each in part], state).tolist()
        store.write([measured(each.op, each.backend, state, us) for each, us in zip(part, times, strict=True)], "r")
    train(store, H100, registry=Registry(folder / "predictors"))
    return folder


@pytest.mark.parametrize("name", STEPS)
def test_no_step_gets_worse_by_measuring(
    name: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def asked(place: Path, *more: str) -> dict[str, Any]:
        given = (f"home={place}", f"graphs={home / 'graphs'}", "format=json", *more)
        code = main(["simulate", *STEPS[name].split(), *given])
        out = capsys.readouterr().out
        assert code == 0, out
        found: dict[str, Any] = json.loads(out)
        return found

    before, after, real = asked(tmp_path), asked(home), asked(tmp_path, TRUTH)
    times = [found.get("step_time_s") or found["e2e_ms"] for found in (before, after, real)]
    errors = [abs(each / times[2] - 1) for each in times]
    assert errors[1] < errors[0]
    eager = "eager" in name
    own = [
        (share["kind"], each["predictor"])
        for share in after["breakdown"]["by_op"]
        for each in share["known_by"]
        if each["clause"] in (OWN, OTHER) and "@" in each["predictor"]
    ]
    assert own
    for kind, predictor in own:
        backend = predictor.partition("@")[2].partition("/")[0]
        assert eager or not is_eager(kind, backend), predictor
        assert eager or kind not in WANTED or predictor.startswith(WANTED[kind]), predictor
    assert any("own rows" in source for source in after["sources"])
