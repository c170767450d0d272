"""Axes, sampling, filters, order and the file form of a plan; every shipped campaign can be planned."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.devices import load_device
from opcast.datasets.kernels import lacking, package_of
from opcast.datasets.ops import KINDS, Op, OpError, make_op
from opcast.harness.axes import ALIGNMENTS, AxisError, align, evaluate, parse_axis
from opcast.harness.plan import (
    CampaignPlan,
    CampaignPlanError,
    Case,
    Settings,
    build_plan,
)
from opcast.harness.plan_order import FIRST_OF_KIND

CAMPAIGNS = sorted((Path(__file__).resolve().parents[2] / "conf" / "campaign").glob("*.yaml"))


def gemm_spec(**changes: Any) -> dict[str, Any]:
    entry = {
        "kind": "gemm",
        "sample": 60,
        "m": {"low": 1, "high": 4096, "align": "tokens"},
        "n": {"low": 64, "high": 32768},
        "k": {"low": 64, "high": 8192},
        "layout": ["nn", "nt", "tn"],
    }
    return {"name": "t", "dtype": "fp32", "cache": ["cold", "warm"], "cases": [{**entry, **changes}]}


def ops(plan: CampaignPlan) -> set[tuple[int, ...]]:
    return {case.op.dims for case in plan.cases}


# --- axes ----------------------------------------------------------------------------------------------


@settings(deadline=None)  # other work on the machine must not fail it
@given(st.integers(1, 10**6), st.integers(0, 10**6), st.sampled_from([0, 1, 2, 8, 64, 128]), st.floats(0, 1))
def test_aligned_values_stay_in_range(low: int, more: int, multiple: int, share: float) -> None:
    high = low + more
    value = low * (high / low) ** share
    aligned = align(value, multiple, low, high)
    assert low <= aligned <= high
    assert 0.4 * value - 1 <= aligned <= 2 * value + 1


@settings(deadline=None)  # other work on the machine must not fail it
@given(st.integers(1, 200), st.integers(0, 100), st.sampled_from(sorted(ALIGNMENTS)))
def test_draws_cover_the_range_evenly_in_the_logarithm(count: int, seed: int, alignment: str) -> None:
    axis = parse_axis("n", {"low": 16, "high": 65536, "align": alignment})
    draws = sorted(value for (value,) in axis.draws(count, Random(seed)))
    assert len(draws) == count
    middle = sum(math.log2(value) for value in draws) / count
    assert abs(middle - 10) < 0.5 + 6 / count


def test_width_draws_are_mostly_aligned_and_sometimes_odd() -> None:
    draws = [value for (value,) in parse_axis("n", {"low": 256, "high": 65536}).draws(1000, Random(1))]
    aligned = Counter(128 if v % 128 == 0 else 8 if v % 8 == 0 else 2 if v % 2 == 0 else 1 for v in draws)
    assert 0.45 < aligned[128] / 1000 < 0.7
    assert 0.2 < aligned[8] / 1000 < 0.45
    assert aligned[1] > 20


@settings(deadline=None)  # other work on the machine must not fail it
@given(st.lists(st.integers(), min_size=1, max_size=9, unique=True), st.integers(1, 60), st.integers(0, 9))
def test_listed_values_are_drawn_equally_often(values: list[int], count: int, seed: int) -> None:
    drawn = Counter(value for (value,) in parse_axis("n", values).draws(count, Random(seed)))
    assert sum(drawn.values()) == count
    assert max(drawn.values()) - min(drawn.get(v, 0) for v in values) <= 1


def test_log2_steps_are_even() -> None:
    points = parse_axis("n", {"log2": [1, 4096, 13]}).points(Random(0))
    assert [p[0] for p in points] == [2**i for i in range(13)]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("n", [], "no values"),
        ("n", {"log2": [1, 2]}, "log2"),
        ("n", {"low": 9, "high": 3}, "low before high"),
        ("n", {"low": 0, "high": 3}, "at least 1"),
        ("n", {"low": 1, "high": 3, "align": "odd"}, "align"),
        ("n", {"lo": 1, "high": 3}, "neither"),
        ("m, n", [[1, 2, 3]], "lists of 2"),
        ("m, n", {"low": 1, "high": 3}, "only one dim"),
    ],
)
def test_malformed_axes_are_named(key: str, value: Any, words: str) -> None:
    with pytest.raises(AxisError, match=words):
        parse_axis(key, value)


numbers = st.integers(1, 50)


@settings(deadline=None)  # other work on the machine must not fail it
@given(numbers, numbers, numbers, st.sampled_from(["+", "-", "*", "//", "%"]), st.sampled_from(["<", "<=", "=="]))
def test_formulas_mean_what_python_means(a: int, b: int, c: int, operator: str, comparison: str) -> None:
    formula = f"a {operator} b * min(c, 7) {comparison} max(a, b) and not c == 3"
    expected = eval(formula, {}, {"a": a, "b": b, "c": c, "min": min, "max": max})
    assert evaluate("=" + formula, {"a": a, "b": b, "c": c}) == expected


@pytest.mark.parametrize("formula", ["a.real", "__import__('os')", "a[0]", "b", "1 +", "a // 0", "[a]", "a ** 9"])
def test_formulas_can_do_nothing_else(formula: str) -> None:
    with pytest.raises(AxisError):
        evaluate(formula, {"a": 1})


# --- plans ---------------------------------------------------------------------------------------------


def test_a_plan_is_deterministic_and_survives_its_file() -> None:
    plan = build_plan(gemm_spec())
    assert build_plan(gemm_spec()) == plan
    assert CampaignPlan.from_json(plan.to_json()) == plan
    assert build_plan({**gemm_spec(), "settings": {"seed": 1}}).cases != plan.cases
    assert len(plan.cases) == len(set(plan.cases)) == 60


def test_product_zip_and_each() -> None:
    axes = {"m": [1, 2], "n": [3, 4], "k": 5, "layout": "nt", "cache": ["cold", "warm"]}
    product = build_plan({"name": "t", "cases": [{"kind": "gemm", **axes}]})
    assert len(product.cases) == 8
    zipped = build_plan({"name": "t", "cases": [{"kind": "gemm", **axes, "zip": True}]})
    assert sorted((c.op.m, c.op.n) for c in zipped.cases) == [(1, 3), (1, 3), (2, 4), (2, 4)]
    drawn = build_plan(gemm_spec(each=["cache"]))
    by_op = Counter(case.op for case in drawn.cases)
    assert set(by_op.values()) == {2}
    assert len(by_op) == 30
    with pytest.raises(CampaignPlanError, match="as many values"):
        build_plan({"name": "t", "cases": [{"kind": "gemm", **axes, "k": [1, 2, 3], "zip": True}]})


def test_bundles_and_formulas_tie_dims_together() -> None:
    entry = {
        "kind": "attention_prefill",
        "sample": 40,
        "heads_q, head_dim": [[32, 128], [12, 64]],
        "_group": [1, 2, 4],
        "heads_kv": "=heads_q // _group",
        "v_head_dim": "=head_dim",
        "seq_q": {"low": 16, "high": 4096, "align": "tokens"},
        "seq_kv": "=seq_q + 7",
        "where": "heads_kv != 3",
    }
    plan = build_plan({"name": "t", "dtype": "fp32", "cases": [entry]})
    for op in (case.op for case in plan.cases):
        assert (op.heads_q, op.head_dim) in ((32, 128), (12, 64))
        assert op.v_head_dim == op.head_dim
        assert op.seq_kv == op.seq_q + 7
        assert op.heads_kv != 3
        assert op.heads_q % op.heads_kv == 0


def test_limits_drop_what_is_too_large_and_the_sample_stays_full() -> None:
    plan = build_plan(gemm_spec(max_flops=1e9, max_bytes=2e7))
    assert len(plan.cases) == 60
    assert max(float(c.op.cost.flops) for c in plan.cases) <= 1e9
    assert max(float(c.op.cost.bytes) for c in plan.cases) <= 2e7
    small = build_plan({**gemm_spec(), "settings": {"max_bytes": 10**6}})
    assert max(float(c.op.cost.bytes) for c in small.cases) <= 1e6
    with pytest.raises(CampaignPlanError, match="passes its limits"):
        build_plan(gemm_spec(max_flops=1))


def test_ops_and_exclude() -> None:
    own = make_op("gemm", m=77, n=1024, k=512, dtype="fp32")
    plan = build_plan({"name": "model", "cache": ["cold", "warm"], "ops": [own.to_dict()]})
    assert [(c.op, c.cache) for c in sorted(plan.cases)] == [(own, "cold"), (own, "warm")]
    left = build_plan(gemm_spec())
    victim = left.cases[0].op
    assert victim not in {c.op for c in build_plan({**gemm_spec(), "exclude": [victim.to_dict()]}).cases}


def test_the_budget_decides_how_many() -> None:
    spec = {**gemm_spec(), "case_s": 0.5}
    del spec["cases"][0]["sample"]
    spec["cases"][0]["share"] = 3
    counts = [len(build_plan({**spec, "budget_s": seconds}).cases) for seconds in (1, 10, 100)]
    assert counts == [8, 20, 200]
    assert build_plan({**spec, "budget_s": 100}).settings.deadline_s == 150
    with pytest.raises(CampaignPlanError, match="budget_s"):
        build_plan(spec)


def test_values_by_device() -> None:
    spec = gemm_spec(dtype={"cpu": "fp32", "cuda": ["bf16", "fp16"]})
    spec["cases"].append({"kind": "copy", "size_bytes": 64, "device": "cuda", "direction": "h2d"})
    on = {
        d: build_plan({**spec, "settings": {"device": d, "ci_width": {"cpu": 0.1, "cuda": 0.01}}})
        for d in ("cpu", "cuda")
    }
    assert {c.op.dtype for c in on["cpu"].cases} == {"fp32"}
    assert {c.op.dtype for c in on["cuda"].cases if c.op.kind == "gemm"} == {"bf16", "fp16"}
    assert {c.op.kind for c in on["cpu"].cases} == {"gemm"}
    assert {c.op.kind for c in on["cuda"].cases} == {"gemm", "copy"}
    assert on["cpu"].settings.ci_width == 0.1
    assert {c.backend for c in on["cuda"].cases if c.op.kind == "gemm"} == {"cublas"}


def test_collectives_are_cut_to_whole_shards() -> None:
    sizes = {"log2": [1024, 1 << 20, 11]}
    entries = [{"kind": k, "size_bytes": sizes, "ranks": [2, 3, 7]} for k in ("all_gather", "all_reduce")]
    plan = build_plan({"name": "t", "dtype": "bf16", "cases": entries})
    for case in plan.cases:
        assert case.backend == "gloo"
        if case.op.kind == "all_gather":
            assert case.op.size_bytes % (16 * case.op.ranks) == 0
        else:
            assert case.op.size_bytes & (case.op.size_bytes - 1) == 0


@settings(deadline=None)  # other work on the machine must not fail it
@given(st.integers(1, 40), st.integers(0, 30), st.integers(0, 3))
def test_batches_hold_every_case_once_and_canaries_around(batch_size: int, canary_every: int, canaries: int) -> None:
    kinds = {"gemm": {"m": [1, 2, 3], "n": [4, 5], "k": [6, 7]}, "gelu": {"rows": [1, 2, 3], "cols": [8, 9]}}
    spec = {
        "name": "t",
        "settings": {"batch_size": batch_size, "canary_every": canary_every},
        "cases": [{"kind": kind, "dtype": "fp32", **dims} for kind, dims in kinds.items()],
        "canaries": [{"kind": "gelu", "rows": 1, "cols": c + 1, "dtype": "fp32"} for c in range(canaries)],
    }
    plan = build_plan(spec)
    batches = plan.batches()
    assert list(itertools.chain.from_iterable(b.cases for b in batches if not b.round)) == list(plan.cases)
    assert max(len(b.cases) for b in batches if not b.round) <= batch_size
    assert all(len({c.op.kind for c in b.cases}) == 1 for b in batches if not b.round)
    rounds = [b.round for b in batches if b.round]
    assert rounds == list(range(1, len(rounds) + 1))
    if canary_every and canaries:
        assert batches[0].round == 1
        assert batches[-1].round == len(rounds) >= 2
        assert all(b.cases == plan.canaries for b in batches if b.round)
    else:
        assert not rounds


def test_a_prefix_of_the_plan_covers_every_kind() -> None:
    """First a few of each, then more of those that steps spend their time in."""
    entries = [
        {"kind": "gemm", "sample": 200, "m": {"low": 1, "high": 512}, "n": 64, "k": {"low": 1, "high": 512}},
        {"kind": "gelu", "sample": 40, "rows": {"low": 1, "high": 512}, "cols": {"low": 1, "high": 512}},
        {"kind": "reduce", "sample": 24, "outer": {"low": 1, "high": 512}, "length": {"low": 1, "high": 512}},
    ]
    plan = build_plan({"name": "t", "dtype": "fp32", "cases": entries})
    wanted = dict.fromkeys(("gemm", "gelu", "reduce"), FIRST_OF_KIND)
    first = sum(wanted.values())
    assert Counter(c.op.kind for c in plan.cases[:first]) == wanted
    total = Counter(c.op.kind for c in plan.cases[first:])
    half = Counter(c.op.kind for c in plan.cases[first : (first + len(plan.cases)) // 2])
    assert half["gemm"] / total["gemm"] > 0.5 > half["gelu"] / total["gelu"]


def test_a_prefix_of_the_plan_has_every_kernel_of_a_kind() -> None:
    """Each backend answers for itself: of one that comes late, a cut campaign would teach nothing."""
    usual = {"kind": "gelu", "sample": 200, "rows": {"low": 1, "high": 512}, "cols": {"low": 1, "high": 512}}
    rare = {**usual, "sample": 12, "backend": "inductor"}
    plan = build_plan({"name": "t", "dtype": "fp32", "cases": [usual, rare]})
    first = Counter(case.backend for case in plan.cases[: 2 * FIRST_OF_KIND])
    assert first == {"torch": FIRST_OF_KIND, "inductor": FIRST_OF_KIND}


def test_a_quarter_of_the_plan_has_most_rows_of_what_steps_spend_their_time_in() -> None:
    cases = shipped("full", "cuda").cases
    part = Counter((case.op.kind, case.backend, case.op.dtype) for case in cases[: len(cases) // 4])
    heavy = [kernel for kernel in part if kernel[0] in ("gemm", "fused_moe") and kernel[2] != "fp16"]
    assert min(part[kernel] for kernel in heavy) >= 2 * FIRST_OF_KIND
    assert part["gemm", "cublas", "bf16"] > 2 * part["gemm", "transformer_engine:gemm", "bf16"]  # as the plan draws
    assert sum(part[kernel] for kernel in part if kernel[0] == "rope") == 5 * FIRST_OF_KIND


def test_what_is_to_be_first_comes_first_in_its_order() -> None:
    own = [{**make_op("gelu", rows=rows, cols=64).to_dict(), "cache": "warm"} for rows in (9, 3)]
    spec = {**gemm_spec(), "first": {"cpu": own, "cuda": []}}
    plan = build_plan(spec)
    assert [case.op.rows for case in plan.cases[:2]] == [9, 3]
    assert plan.cases[2:] == build_plan(gemm_spec()).cases
    assert build_plan({**spec, "exclude": own[:1]}).cases[0].op.rows == 3


def test_mixtures_are_measured_with_all_kernels_that_stacks_launch() -> None:
    cases = shipped("moe", "cuda").cases
    moves = Counter(case.backend for case in cases if case.op.kind == "moe_permute")
    assert moves == {"torch": 60, "transformer_engine:permute": 40}
    choices = Counter(case.op.kernels for case in cases if case.op.kind == "moe_route" and case.backend == "torch")
    assert choices == {0: 25, 1: 25}


@pytest.mark.parametrize("name", ["full", "compute"])
def test_long_products_say_early_what_the_power_limit_leaves(name: str) -> None:
    cases = shipped(name, "cuda").cases[:5]
    assert {case.op.dtype for case in cases} == {"bf16", "fp8", "fp8_block", "mxfp8", "nvfp4"}
    assert all(float(case.op.cost.flops) > 5e13 for case in cases), "a tenth of a second on an H100"
    assert not any(float(case.op.cost.flops) > 1e12 for case in shipped(name, "cpu").cases)


def test_identity_ignores_operational_settings_and_order() -> None:
    plan = build_plan(gemm_spec())
    changed = {"case_timeout_s": 1.0, "batch_size": 3, "canary_every": 0, "deadline_s": 5.0, "start_timeout_s": 9.0}
    assert build_plan({**gemm_spec(), "settings": changed}).identity == plan.identity
    assert CampaignPlan(plan.name, plan.cases[::-1], plan.canaries, plan.settings).identity == plan.identity
    assert build_plan({**gemm_spec(), "settings": {"ci_width": 0.5}}).identity != plan.identity
    assert CampaignPlan(plan.name, plan.cases[1:], plan.canaries, plan.settings).identity != plan.identity


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"name": "t", "casse": []}, "did you mean cases"),
        ({"name": "t"}, "has no cases"),
        ({"name": "No Name", "ops": [{"kind": "gelu", "rows": 1, "cols": 1}]}, "lower case"),
        (gemm_spec(q=3), "no 'q'"),
        (gemm_spec(kind="gem"), "did you mean"),
        (gemm_spec(m={"low": 1}), "gemm: axis m"),
        (gemm_spec(m=0), "at least 1"),
        (gemm_spec(cache="hot"), "cold, warm"),
        (gemm_spec(dtype="fp33"), "unknown dtype"),
        (gemm_spec(each=["q"]), "no 'q'"),
        (gemm_spec(sample=-1), "above 0"),
        ({**gemm_spec(), "settings": {"device": "tpu"}}, "must be cpu or cuda"),
        ({**gemm_spec(), "settings": {"ci_width": "x"}}, "of type float"),
        ({**gemm_spec(), "settings": {"threads": True}}, "of type int"),
        ({**gemm_spec(), "settings": {"thread": 1}}, "did you mean threads"),
        ({**gemm_spec(), "settings": {"batch_size": 0}}, "above 0"),
        ({**gemm_spec(), "settings": {"case_budget_s": float("nan")}}, "at least 0"),
        ({**gemm_spec(), "settings": {"link": "string"}}, "nvlink"),
        ({"name": "t", "ops": [{"m": 1}]}, "needs its kind"),
    ],
)
def test_bad_specifications_are_one_clear_line(spec: dict[str, Any], words: str) -> None:
    with pytest.raises((CampaignPlanError, OpError), match=words) as caught:
        build_plan(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 99}', "null", '{"format": 1, "name": "x"}'])
def test_damaged_plans_are_refused(text: str) -> None:
    with pytest.raises(CampaignPlanError):
        CampaignPlan.from_json(text)


def test_a_newer_plan_says_so() -> None:
    values = json.loads(build_plan(gemm_spec()).to_json())
    with pytest.raises(CampaignPlanError, match="update opcast"):
        CampaignPlan.from_json(json.dumps({**values, "format": 2}))


def test_planning_needs_neither_torch_nor_yaml() -> None:
    code = (
        "import sys; sys.modules['yaml'] = None; sys.modules['hydra'] = None\n"
        "from opcast.harness.plan import build_plan\n"
        "build_plan({'name': 't', 'cases': [{'kind': 'gemm', 'm': 1, 'n': 2, 'k': 3, 'dtype': 'fp32'}]})\n"
        "assert 'torch' not in sys.modules and 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_case_names_itself() -> None:
    case = Case(make_op("gemm", m=1, n=2, k=3), "cublas", "cold")
    assert Case.from_dict(case.to_dict()) == case
    assert case.key == (case.op, "cublas", "cold")


# --- shipped campaigns ---------------------------------------------------------------------------------


def specification(path: Path, device: str) -> dict[str, Any]:
    """A shipped campaign as Hydra composes it: `compute@parts.compute` puts a file of the group under `parts`."""
    spec = yaml.safe_load(path.read_text())
    for default in spec.pop("defaults", []):
        if "@parts." in default:
            file, _, place = default.partition("@parts.")
            spec.setdefault("parts", {})[place] = yaml.safe_load((path.parent / f"{file}.yaml").read_text())
    spec["settings"]["device"] = device
    if spec["name"] == "model":
        spec["ops"] = [make_op("gemm", m=8, n=64, k=64).to_dict()]
    return spec


@pytest.mark.parametrize("path", CAMPAIGNS, ids=lambda path: path.stem)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_shipped_campaigns_can_be_planned(path: Path, device: str) -> None:
    plan = build_plan(specification(path, device))
    assert plan.name == path.stem
    assert CampaignPlan.from_json(plan.to_json()) == plan
    assert all(c.cache == "warm" for c in plan.cases if c.op.kind == "host_overhead")
    heads = [c.op for c in plan.cases if c.op.kind.startswith("attention")]
    assert all(op.heads_q % op.heads_kv == 0 for op in heads)


@cache
def shipped(name: str, device: str) -> CampaignPlan:
    """A campaign that comes along, planned once for all tests."""
    path = next(path for path in CAMPAIGNS if path.stem == name)
    return build_plan(specification(path, device))


def test_the_full_campaign_covers_every_computing_kind() -> None:
    plan = shipped("full", "cuda")
    wanted = {name for name, kind in KINDS.items() if not kind.collective} - {
        "host_pass"
    }  # its dims say how fast it is
    assert {c.op.kind for c in plan.cases} == wanted
    assert {"bf16", "fp16", "fp8"} <= {c.op.dtype for c in plan.cases if c.op.kind == "gemm"}


def test_no_attention_on_a_gpu_is_given_a_mask() -> None:
    """A dense mask does every score's work: up to 47 times the FLOPs that the op claims."""
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    from opcast.harness.cases import BUILDERS, Inputs
    from opcast.harness.cases.attention import needs_mask

    class Shapes(Inputs):
        def __init__(self) -> None:
            self.device, self.seed, self.bytes, self.kernel = "cuda", 0, 0, None

        @property
        def capability(self) -> tuple[int, int]:
            return 9, 0

        def normal(self, *shape: int, dtype: str) -> Any:
            return torch.empty(shape, dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[dtype], device="cuda")

    kinds = ("attention_prefill", "attention_decode", "attention_backward")
    attention = [c for c in shipped("full", "cuda").cases if c.op.kind in kinds]
    own = {c.backend for c in attention if c.op.kind == "attention_backward" and not c.backend.startswith(FOREIGN)}
    assert own == {"sdpa", "cudnn"}, "what torch picks, and what torchtitan asks it for"
    masked = [c for c in attention if c.backend == "sdpa" and needs_mask(c.op)]
    assert len(masked) > 100
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        for case in masked:
            inputs = Shapes()
            run = BUILDERS[case.op.kind, "sdpa"].build(case.op, inputs)
            assert inputs.kernel == "flash2", case.op
            assert not any(isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in run.args)


FOREIGN = ("vllm:", "flashinfer:", "flash_attn:", "deep_gemm:", "transformer_engine:", "sglang:", "flash_mla:")


def test_the_full_campaign_has_what_predictions_ask_for() -> None:
    plan = shipped("full", "cuda")
    asked = {(c.op.kind, c.op.dtype, c.backend) for c in plan.cases}
    assert {("gemm", dtype, "cublas") for dtype in ("fp8", "fp8_block", "mxfp8", "nvfp4")} <= asked
    blocks = {name for kind, dtype, name in asked if (kind, dtype) == ("gemm", "fp8_block")}
    assert blocks == {
        "cublas",
        "deep_gemm:fp8",
        "triton:block_scaled_mm",
        "transformer_engine:gemm",
        "vllm:cutlass_scaled_mm",
        "vllm:w8a8_triton_block_scaled_mm",
        "sglang:w8a8_block_fp8_matmul_triton",
    }
    assert {("gemm", "w4a16", name) for name in ("tinygemm", "vllm:marlin", "vllm:machete")} <= asked
    experts = {
        dtype: {name for kind, d, name in asked if (kind, d) == ("fused_moe", dtype)}
        for dtype in ("fp8_block", "mxfp4a16", "nvfp4")
    }
    assert experts["fp8_block"] == {
        "vllm:fused_experts",
        "sglang:fused_experts",
        "flashinfer:cutlass",
        "flashinfer:trtllm",
        "deep_gemm:experts",
    }
    assert experts["mxfp4a16"] == {"vllm:marlin", "flashinfer:cutlass", "flashinfer:trtllm"}
    assert experts["nvfp4"] == {"flashinfer:cutlass", "flashinfer:trtllm"}
    layouts = {(c.op.layout, c.op.out_dtype) for c in plan.cases if (c.op.kind, c.op.dtype) == ("gemm", "fp8")}
    assert {(0, "bf16"), (1, "bf16"), (2, "bf16"), (2, "fp32")} <= layouts
    assert any(c.op.n % 128 for c in plan.cases if c.op.kind == "gemm" and c.op.dtype == "fp8_block")
    assert any(c.op.kv_dtype for c in plan.cases if c.op.kind == "attention_decode")
    assert max(c.op.numel for c in plan.cases if c.op.kind == "adamw") > 2**31
    assert {("grouped_gemm", "fp8", "torch"), ("grouped_gemm", "fp8_block", "deep_gemm:fp8")} <= asked
    for kind in ("attention_decode", "attention_prefill"):
        paged = {backend for found, _, backend in asked if found == kind and backend.startswith(FOREIGN)}
        others = {"transformer_engine:attention"} if kind == "attention_prefill" else set()
        assert paged == {"flashinfer:paged", "flashinfer:trtllm", "vllm:paged", "flash_attn:2", "flash_attn:3"} | others
    windowed = [c for c in plan.cases if c.op.kind == "attention_backward" and c.op.window]
    assert len(windowed) >= 30
    summed = {c.backend for c in shipped("collectives", "cuda").cases if c.op.kind == "all_reduce"}
    carried = {f"flashinfer:{name}_all_reduce{norm}" for name in ("trtllm", "mnnvl") for norm in ("", "_norm")}
    assert {"vllm:custom_all_reduce", *carried} <= summed
    exchanges = {(c.op.kind, c.op.mode) for c in shipped("collectives", "cuda").cases if c.backend == "deep_ep"}
    sums = [c for c in shipped("collectives", "cuda").cases if c.op.dtype == "fp32" and c.op.kind == "reduce_scatter"]
    assert max(c.op.size_bytes for c in sums) == 2**32
    assert exchanges == {(kind, mode) for kind in ("ep_dispatch", "ep_combine") for mode in (0, 1)}


def test_the_full_campaign_fits_the_time_it_states() -> None:
    """Its header says how many cases it has, and about how many minutes they take on an H200.

    No environment has all packages: their versions of torch differ. That of vLLM has the most of them.
    """
    plan, h200 = shipped("full", "cuda"), load_device("h200_sxm")
    text = next(path for path in CAMPAIGNS if path.stem == "full").read_text()
    assert f"{len(plan.cases):,} cases" in text
    assert f"{sum(bool(package_of(c.backend)) for c in plan.cases):,} of" in text
    assert f"{sum(c.backend == 'inductor' for c in plan.cases)} are compiled" in text
    cases = [case for batch in plan.batches() for case in batch.cases]

    def minutes(*packages: str) -> float:
        here = [c for c in cases if package_of(c.backend) in ("", *packages) and not lacking(c.op, c.backend, h200)]
        return len(here) * 2 * plan.settings.case_budget_s / 60

    assert 20 < minutes() <= 21
    assert 26 < minutes("vllm", "flashinfer", "deep_gemm", "fla") <= 27
    assert minutes("sglang", "flashinfer", "deep_gemm") < 27
    assert minutes("transformer_engine", "flash_attn") < 27
    assert "about 27 minutes" in text
    assert "about 21 where" in text


def test_every_kernel_of_a_package_has_shapes_to_learn_from() -> None:
    """Forty shapes, one of which may come twice, for each kind, backend and, of products and experts, format."""
    shapes: dict[tuple[str, str, str], set[Op]] = {}
    for case in shipped("full", "cuda").cases:
        if package_of(case.backend):
            formatted = case.op.kind in ("gemm", "grouped_gemm", "fused_moe")
            key = (case.op.kind, case.backend, case.op.dtype if formatted else "")
            shapes.setdefault(key, set()).add(case.op)
    few = {key: len(ops) for key, ops in shapes.items() if len(ops) < 39}
    assert not few


def test_hydra_composes_the_full_campaign_as_planned_here() -> None:
    hydra = pytest.importorskip("hydra")
    from omegaconf import OmegaConf

    folder = CAMPAIGNS[0].parent.parent
    with hydra.initialize_config_dir(str(folder), version_base=None):
        config = hydra.compose(overrides=["+campaign=full", "campaign.settings.device=cuda"])
    spec = OmegaConf.to_container(config["campaign"], resolve=True)
    assert build_plan(spec) == shipped("full", "cuda")


def test_the_collectives_campaign_covers_every_collective() -> None:
    plan = shipped("collectives", "cuda")
    assert {c.op.kind for c in plan.cases} == {name for name, kind in KINDS.items() if kind.collective}
    assert min(c.op.size_bytes for c in plan.cases if "size_bytes" in KINDS[c.op.kind].names) <= 1024


def test_settings_know_their_operational_part() -> None:
    assert set(Settings.OPERATIONAL) <= set(Settings.__dataclass_fields__)


@pytest.mark.parametrize(
    "changes",
    [
        {"sample": 1_000_000},
        {"share": 1, "case_s": 1e-6, "sample": None},
        {"sample": None, "m": {"log2": [1, 2**40, 1_000_000]}},
        {"sample": None, "m": {"low": 1, "high": 4096, "sample": 1_000_000}},
        {"sample": None, **{name: list(range(1, 1001)) for name in "mnk"}},
        {"sample": None, **{name: list(range(1, 101)) for name in "mnk"}},
    ],
)
def test_no_plan_has_millions_of_cases(changes: dict[str, Any]) -> None:
    spec = gemm_spec(**changes)
    spec["cases"] = [{name: value for name, value in spec["cases"][0].items() if value is not None}]
    with pytest.raises(CampaignPlanError, match=r"more than (the 200,000 cases|4,000,000: give)"):
        build_plan({"budget_s": 10, **spec})


@pytest.mark.parametrize(
    "formula", ["(" * 10_000, "(" * 240 + "1" + ")" * 240, "1" + "+1" * 10_000, "'a' * 1000000000", "m * 'a'", "\0"]
)
def test_a_formula_that_nobody_can_work_with(formula: str) -> None:
    with pytest.raises(CampaignPlanError, match=r"formula|no arithmetic"):
        build_plan(gemm_spec(k="=" + formula))
