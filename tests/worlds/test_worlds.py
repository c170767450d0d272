"""From a campaign to the answer in one world: the parts that the benchmark puts together, on a few cases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.kernels import kernels, lacking
from opcast.datasets.ops import make_op
from opcast.datasets.store import Store
from opcast.harness import campaign
from opcast.harness.cases import BUILDERS
from opcast.harness.plan import CampaignPlan, Case, Settings
from opcast.simulator.report.needs import Need
from opcast.tests.benchmarks.worlds import GOOD, gains, summary, worse
from opcast.tests.worlds.chain import Spoken, plan_of, prove, share
from opcast.tests.worlds.chip import World, make_world
from opcast.tests.worlds.emulation import Emulator
from opcast.tests.worlds.laws import clock_kept, held_back, latency_us
from opcast.tests.worlds.measurer import WorldMeasurer
from opcast.tests.worlds.steps import STEPS, steps_of

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
    assert max(len(launches), 1) == kernels(kind, "torch")
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


def test_a_product_that_runs_for_long_is_had_at_the_clock_of_the_power_limit(tmp_path: Path) -> None:
    worlds = [make_world("like_h100", seed) for seed in range(1, 40)]
    world = next(each for each in worlds if each.chip.limit < 0.8)
    long, short = make_op("gemm", m=32768, n=32768, k=32768), make_op("gemm", m=4096, n=4096, k=4096)
    plan = CampaignPlan("long", tuple(Case(op, "cublas") for op in (long, short)), settings=Settings(device="cuda"))
    store = Store(tmp_path)
    campaign.run(plan, store, measurer=WorldMeasurer(world, Emulator(world.device), plan.settings))
    rows = {row["m"]: row for row in store.read("gemm", world.device.id).to_pylist()}
    assert {m: row["clocks"] for m, row in rows.items()} == {32768: "steady", 4096: "burst"}
    burst = latency_us(world, long, "cublas")
    clock, _ = clock_kept(world, long, burst)
    assert rows[32768]["sm_clock_mhz"] == pytest.approx(clock * rows[4096]["sm_clock_mhz"])
    assert rows[32768]["latency_us"] == pytest.approx(burst * held_back(world, long, burst), rel=0.02)


def test_a_world_asks_what_its_stacks_run() -> None:
    """TensorRT-LLM has no experts in blocks of fp8 on Ada: nobody can measure what nobody runs."""
    asked = {name: [step.name for step in steps_of(make_world(name, 1))] for name in ("unlike_any", "slow_pcie")}
    assert {name: len(steps) for name, steps in asked.items()} == {"unlike_any": 13, "slow_pcie": 13}
    assert "v3 decode trtllm" in asked["unlike_any"]
    assert [each for each in asked["slow_pcie"] if "trtllm" in each] == ["qwen3 decode trtllm"]


def test_what_was_lucky_before_is_told_from_what_is_bad() -> None:
    before, good, bad = (Spoken("step", 100.0 + off, 90.0, 110.0, 100.0) for off in (0.2, 2.0, 4.0))
    assert worse([before], [good]) == worse([before], [bad]) == ["step"]
    assert not worse([before], [good], GOOD)
    assert worse([before], [bad], GOOD) == ["step"]


def test_what_a_kind_is_worth_measuring_is_its_share_times_what_is_not_known_of_it() -> None:
    known, unknown = (Need(op, us, 1 / apart, apart, "learned", True) for op, us, apart in (
        (ROPE, 90.0, 1.01), (make_op("gemm", m=8, n=8, k=8), 10.0, 2.0)))  # fmt: skip
    worth = gains([[known, unknown], [known]])
    assert list(worth) == ["gemm", "rope"]
    assert worth["gemm"] == pytest.approx(0.1 * np.log(2.0) / 2)
    assert worth["rope"] == pytest.approx((0.9 + 1.0) * np.log(1.01) / 2)


def test_the_score_of_an_interval_is_its_width_and_what_it_misses_by() -> None:
    held, missed = (Spoken("step", 100.0, 90.0, 110.0, true_ms) for true_ms in (105.0, 112.0))
    assert held.score == pytest.approx(0.2)
    assert missed.score == pytest.approx(0.2 + 20.0 * 0.02)


def test_the_first_part_of_a_plan_has_something_of_every_kind() -> None:
    plan = plan_of("full")
    part = share(plan, 0.25)
    assert len(part.cases) == round(len(plan.cases) / 4)
    assert {case.op.kind for case in part.cases} == {case.op.kind for case in plan.cases}


@pytest.mark.slow
def test_builders_take_a_plan_as_a_gpu_would(world: World, emulator: Emulator, tmp_path: Path) -> None:
    plan = plan_of("full")
    able = (c for c in plan.cases[::25] if not lacking(c.op, c.backend, world.device))
    some = replace(plan, cases=tuple(each for each in able if "linear" not in each.op.kind), canaries=())
    assert len(some.cases) > 200
    found = campaign.run(some, Store(tmp_path), measurer=WorldMeasurer(world, emulator, some.settings))
    assert "error" not in found.statuses
    assert found.statuses["ok"] > 0.95 * sum(found.statuses.values())


@pytest.mark.slow
def test_measuring_what_a_model_needs_makes_every_step_better(tmp_path: Path) -> None:
    """The whole way, on three of the benchmark's steps in a world that no shipped device resembles."""
    steps = [each for each in STEPS if each.name in ("8b torchtitan bf16", "v3 decode vllm", "qwen3 decode vllm")]
    answers = dict(prove(make_world("unlike_any", 5), tmp_path, tmp_path, ["model"], steps, say=lambda line: None))
    before, after = summary(answers["before"]), summary(answers["model"])
    assert not worse(answers["before"], answers["model"], GOOD)
    assert after["median"] <= 0.03
    assert after["worst"] <= 0.08
    assert after["score"] < before["score"] / 2
    assert after["width"] < before["width"] / 2
