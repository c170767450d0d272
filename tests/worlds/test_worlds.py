"""From a campaign to the answer in one world: the parts that the benchmark puts together, on a few cases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from opcast.datasets.kernels import KERNELS
from opcast.datasets.ops import make_op
from opcast.datasets.store import Store
from opcast.harness import campaign
from opcast.harness.cases import BUILDERS
from opcast.harness.plan import CampaignPlan, Case, Settings
from opcast.tests.benchmarks.worlds import summary, worse
from opcast.tests.worlds.chain import plan_of, prove, share
from opcast.tests.worlds.chip import World, make_world
from opcast.tests.worlds.emulation import Emulator
from opcast.tests.worlds.laws import latency_us
from opcast.tests.worlds.measurer import WorldMeasurer
from opcast.tests.worlds.steps import STEPS

ROPE = make_op("rope", tokens=4096, heads=40, head_dim=128)
SMALL = {
    "rope": ROPE,
    "silu_mul": make_op("silu_mul", rows=64, cols=256),
    "silu_mul_backward": make_op("silu_mul_backward", rows=64, cols=256),
    "quantize": make_op("quantize", "bf16", "fp8", rows=64, cols=256, block=128),
    "mla_decode": make_op("mla_decode", batch=2, heads=16, seq_q=1, seq_kv=256),
    "cross_entropy": make_op("cross_entropy", "fp32", tokens=64, vocab=256),
    "cross_entropy_backward": make_op("cross_entropy_backward", "fp32", tokens=64, vocab=256),
    "moe_route": make_op("moe_route", "fp32", tokens=64, experts=16, topk=2),
    "rms_norm": make_op("rms_norm", rows=64, cols=256),
}


@pytest.fixture(scope="module")
def world() -> World:
    return make_world("unlike_any", 1)


@pytest.fixture(scope="module")
def emulator(world: World) -> Emulator:
    return Emulator(world.device)


@pytest.mark.parametrize("kind", SMALL)
def test_eager_forms_launch_as_many_kernels_as_they_are_said_to(emulator: Emulator, kind: str) -> None:
    launches = emulator.launches(SMALL[kind], "torch")
    assert max(len(launches), 1) == KERNELS.get((kind, "torch"), 1)
    assert all(each.bytes > 0 for each in launches)


def test_kernels_of_packages_are_one_call(emulator: Emulator) -> None:
    for kind, op in SMALL.items():
        for backend in ("inductor", "triton:rope", "vllm:rms_norm"):
            if (kind, backend) in BUILDERS:
                assert not emulator.launches(op, backend)


def test_a_campaign_measures_what_the_laws_say(world: World, emulator: Emulator, tmp_path: Path) -> None:
    store = Store(tmp_path)
    product = make_op("gemm", m=4096, n=4096, k=4096)
    refused = make_op("gemm", "mxfp8", "bf16", m=128, n=128, k=128)
    huge = make_op("elementwise", numel=2**40, inputs=1)
    gather = make_op("all_gather", size_bytes=2**28, ranks=16)
    cases = (Case(ROPE), Case(ROPE, "triton:rope"), Case(product, "cublas"), Case(refused, "cublas"), Case(huge))
    plan = CampaignPlan("some", (*cases, Case(gather, "nccl")), settings=Settings(device="cuda"))
    found = campaign.run(plan, store, measurer=WorldMeasurer(world, emulator, plan.settings, nodes=2))
    assert dict(found.statuses) == {"ok": 4, "unsupported": 1, "oom": 1}
    assert store.device(world.device.id) == world.device
    rows = store.read("rope", world.device.id).to_pylist()
    by_backend = {row["backend"]: row["latency_us"] for row in rows}
    eager = latency_us(world, ROPE, "aten", "warm", emulator.launches(ROPE, "torch"))
    assert by_backend["torch"] == pytest.approx(eager, rel=0.02)
    assert by_backend["triton:rope"] == pytest.approx(latency_us(world, ROPE, "triton"), rel=0.02)
    assert by_backend["torch"] > 2 * by_backend["triton:rope"]
    assert {row["ranks_per_node"] for row in store.read("all_gather", world.device.id).to_pylist()} == {8}


def test_the_first_part_of_a_plan_has_something_of_every_kind() -> None:
    plan = plan_of("full")
    part = share(plan, 0.25)
    assert len(part.cases) == round(len(plan.cases) / 4)
    assert {case.op.kind for case in part.cases} == {case.op.kind for case in plan.cases}


@pytest.mark.slow
def test_builders_take_a_plan_as_a_gpu_would(world: World, emulator: Emulator, tmp_path: Path) -> None:
    plan = plan_of("full")
    some = replace(plan, cases=tuple(each for each in plan.cases[::25] if "linear" not in each.op.kind), canaries=())
    found = campaign.run(some, Store(tmp_path), measurer=WorldMeasurer(world, emulator, some.settings))
    assert "error" not in found.statuses
    assert found.statuses["ok"] > 0.9 * sum(found.statuses.values())


@pytest.mark.slow
def test_measuring_what_a_model_needs_makes_every_step_better(tmp_path: Path) -> None:
    """The whole way, on three of the benchmark's steps in a world that no shipped device resembles."""
    steps = [each for each in STEPS if each.name in ("8b torchtitan bf16", "v3 decode vllm", "qwen3 decode vllm")]
    answers = dict(prove(make_world("unlike_any", 5), tmp_path, tmp_path, ["model"], steps, say=lambda line: None))
    before, after = summary(answers["before"]), summary(answers["model"])
    assert not worse(answers["before"], answers["model"])
    assert after["median"] <= 0.03
    assert after["worst"] <= 0.08
    assert after["coverage"] == 1.0
    assert after["width"] < before["width"] / 2
