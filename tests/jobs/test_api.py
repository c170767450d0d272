"""The Python face: answers are kept from call to call, and what is added since is seen."""

from __future__ import annotations

import importlib
import json
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opcast
from opcast.datasets.clusters import ClusterError, load_cluster
from opcast.datasets.devices import DeviceError
from opcast.datasets.ops import make_op
from opcast.datasets.schema import Measurement
from opcast.datasets.store import Store
from opcast.jobs.composing import as_override, compose
from opcast.jobs.settings import names
from opcast.simulator.question.plan import Parallel, Plan, load_stack

SHAPE = {"m": 300, "n": 640, "k": 384, "dtype": "bf16"}


def test_a_measurement_that_is_added_answers_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = opcast.predict("gemm", "l4", home=tmp_path, **SHAPE)
    assert before.engine != "measured"
    now = datetime(2026, 1, 1, tzinfo=UTC)
    row = Measurement(op=make_op("gemm", **SHAPE), device_id="l4", run_id="test", measured_at=now, latency_us=123.0)
    Store(tmp_path / "store").write([row], "test")
    after = opcast.predict("gemm", "l4", home=tmp_path, **SHAPE)
    assert (after.engine, after.latency_us) == ("measured", 123.0)
    monkeypatch.setenv("OPCAST_HOME", str(tmp_path))  # as of the command
    assert opcast.predict("gemm", "l4", **SHAPE) == after


def test_the_same_question_again_takes_well_under_a_millisecond(tmp_path: Path) -> None:
    first = opcast.predict("gemm", "l4", home=tmp_path, **SHAPE)
    times = []
    for _ in range(50):
        began = time.process_time()
        assert opcast.predict("gemm", "l4", home=tmp_path, **SHAPE) == first
        times.append(time.process_time() - began)
    assert np.median(times) < 2e-3


def test_devices_folders_and_options_are_told_apart(tmp_path: Path) -> None:
    device = opcast.load_device("l4")
    base = opcast.predict("gemm", device, home=tmp_path, **SHAPE)
    assert opcast.predict("gemm", "l4", home=tmp_path, **SHAPE) == base
    assert opcast.predict("gemm", "l4", home=tmp_path, cache="cold", **SHAPE).latency_us >= base.latency_us
    assert opcast.predict("gemm", "l4", home=tmp_path, engines=["analytical"], **SHAPE).engine == "analytical"
    assert opcast.predict("gemm", "h100_sxm", home=tmp_path, **SHAPE).latency_us < base.latency_us


OWN: dict[str, Any] = {
    "device": replace(opcast.load_device("l4"), id="my_gpu", name="My GPU", memory_gbps=600.0),
    "cluster": replace(load_cluster("pcie_4xl40s"), id="mine", device="my_gpu", nodes=2),
}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Files of the figures of :data:`OWN`."""
    found = {name: str(tmp_path / f"{figures.id}.yaml") for name, figures in OWN.items()}
    for name, figures in OWN.items():
        Path(found[name]).write_text(json.dumps(figures.to_dict()))
    return found


@pytest.mark.parametrize(
    "verb", ["predict", "simulate", "serving", "search", "search_serving", "validate", "train", "import"]
)
def test_every_verb_takes_files_of_figures(verb: str, files: dict[str, str]) -> None:
    words = [f"{name}={file}" for name, file in files.items() if name in names(verb)]
    assert len(words) == (1 if verb in ("train", "import") else 2)
    module = importlib.import_module(f"opcast.jobs.{'importing' if verb == 'import' else verb}")
    config = compose(verb, [as_override(module, word) for word in words])
    for name in files:
        if name in names(verb):
            assert type(OWN[name]).from_dict(config[name]) == OWN[name]


def test_files_of_figures_name_devices_and_clusters(tmp_path: Path, files: dict[str, str]) -> None:
    own = OWN
    asked = {"size_bytes": "64MiB", "ranks": 8, "ranks_per_node": 4, "link": "roce", "home": tmp_path}
    assert opcast.predict("all_reduce", **files, **asked) == opcast.predict("all_reduce", **own, **asked)
    step = {"seq_len": 64, "global_batch": 8, "dp": 8, "home": tmp_path}
    assert opcast.simulate(TINY, **files, **step).step_time_s == opcast.simulate(TINY, **own, **step).step_time_s
    with pytest.raises(DeviceError, match=r"none\.yaml: there is no such file"):
        opcast.predict("gemm", str(tmp_path / "none.yaml"), home=tmp_path, **SHAPE)
    with pytest.raises(ClusterError, match=r"my_gpu\.yaml: there is no such file"):
        opcast.simulate(TINY, cluster="my_gpu.yaml")


TINY = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "vocab_size": 1024,
}


def test_steps_are_asked_about_links_as_on_the_command_line(tmp_path: Path) -> None:
    plan = Plan(Parallel(tp=4), replace(load_cluster("dgx_h100"), nodes=2), load_stack("megatron"))
    settings = {"plan": plan, "home": tmp_path, "seq_len": 256, "global_batch": 8}
    usual = opcast.simulate(TINY, "train", "h100_sxm", **settings)
    assert usual.network == {}
    flow = opcast.simulate(TINY, "train", "h100_sxm", network="flow", faults_study={"samples": 4}, **settings)
    assert flow.network["fidelity"] == "flow"
    assert flow.network["faults_study"]["trials"] == 4
    late = opcast.simulate(TINY, "train", "h100_sxm", stragglers=[{"node": 1, "slowdown": 3.0}], **settings)
    assert late.step_time_s > usual.step_time_s
    broken = opcast.simulate(TINY, "train", "h100_sxm", fault_draw={"count": 2}, **settings)
    assert len(broken.network["faults"]) == 2


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"network": "flow"}, "network=flow needs a cluster"),
        ({"faults": [{"link": "a-b"}]}, "needs a cluster"),
        ({"network": "guess"}, "is not one of auto"),
    ],
)
def test_what_needs_a_cluster_says_so(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        opcast.simulate(TINY, "train", "h100_sxm", seq_len=64, **asked)
    with pytest.raises(ValueError, match=says):
        opcast.predict("all_reduce", "h100_sxm", size_bytes=1, ranks=2, **asked)


STEP = {"cluster": "dgx_h100", "nodes": 2, "tp": 4, "stack": "megatron", "seq_len": 256, "global_batch": 8}


def test_plain_keywords_say_what_a_plan_says(tmp_path: Path) -> None:
    plan = opcast.Plan(
        opcast.Parallel(tp=4, zero_stage=1),
        replace(opcast.load_cluster("dgx_h100"), nodes=2),
        opcast.load_stack("megatron"),
        recompute="full",
    )
    one = opcast.simulate(TINY, home=tmp_path, zero_stage=1, recompute="full", **STEP)
    two = opcast.simulate(TINY, "train", plan=plan, home=tmp_path, seq_len=256, global_batch=8)
    assert one.step_time_s == two.step_time_s
    assert one.device == "h100_sxm"


def test_precision_counts_with_a_plan_too(tmp_path: Path) -> None:
    plan = Plan(Parallel(tp=4), replace(load_cluster("dgx_h100"), nodes=2), load_stack("megatron"))
    asked = {"plan": plan, "home": tmp_path, "seq_len": 256, "global_batch": 8}
    usual, small = (opcast.simulate(TINY, **asked, precision=name) for name in (None, "fp8"))
    assert small.step_time_s != usual.step_time_s
    assert small.precision == "fp8" or "fp8" in str(small.to_dict())
    with pytest.raises(ValueError, match="precision='banana' does not exist; choose from"):
        opcast.simulate(TINY, **asked, precision="banana")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"tpp": 8}, "simulate has no setting 'tpp'; did you mean tp"),
        ({"stack": {"id": "vllm"}}, "stack={'id': 'vllm'} must be a name, such as vllm, or a Stack"),
        ({"cluster": "dgx_h100", "host_gbps": -1}, "cluster.host_gbps=-1 must be a positive number"),
        ({"golbal_batch": 8}, "did you mean global_batch"),
        ({"nodes": 2}, "nodes=2 needs a cluster"),
        ({"tp": 2}, "parallel.tp=2 needs a cluster"),
        ({"cluster": "dgx_h10"}, "did you mean dgx_h100"),
        ({"cluster": "dgx_h100", "nodes": 0}, "cluster.nodes=0 must be a whole number"),
        ({"cluster": "dgx_h100", "stack": "megatorn"}, "unknown stack 'megatorn'"),
        ({"plan": Plan(Parallel(), load_cluster("dgx_h100")), "tp": 8}, "tp=8 is part of the plan"),
    ],
)
def test_a_setting_that_is_none_gets_the_nearest_name(asked: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        opcast.simulate(TINY, "train", "h100_sxm", home=tmp_path, **asked)
    assert "\n" not in str(caught.value)


def test_no_op_of_many_is_dropped(tmp_path: Path) -> None:
    op = make_op("gemm", **SHAPE)
    assert len(opcast.predict([op, op], "l4", home=tmp_path)) == 2
    assert opcast.predict([], "l4", home=tmp_path) == []
    for ops, says in (([op, "x", op], r"ops\[1\]='x' is no op"), (["gemm"], r"ops\[0\]='gemm' is no op")):
        with pytest.raises(ValueError, match=says):
            opcast.predict(ops, "l4", home=tmp_path)
    with pytest.raises(ValueError, match="nodes=2 needs a cluster"):
        opcast.predict(op, "l4", home=tmp_path, nodes=2)
    with pytest.raises(ValueError, match="m=3 is for an op by its name"):
        opcast.predict(op, "l4", home=tmp_path, m=3)


def test_a_step_that_does_not_fit_has_its_times_all_the_same(tmp_path: Path) -> None:
    roomy = opcast.simulate(TINY, "train", "l4", home=tmp_path, seq_len=64)
    found = opcast.simulate(TINY, "train", replace(opcast.load_device("l4"), memory_gib=0.1), home=tmp_path, seq_len=64)
    assert not found.fits
    assert found.memory.peak_gib > 0.1
    assert (found.step_time_s, found.mfu) == (roomy.step_time_s, roomy.mfu)
    told = found.to_dict()
    assert (told["fits"], told["step_time_s"]) == (False, roomy.step_time_s)
    assert "does not fit" in found._repr_html_()


def test_a_request_is_answered_as_its_keywords_are(tmp_path: Path) -> None:
    sources = opcast.Sources.at(str(tmp_path))
    asked = opcast.PredictRequest((make_op("gemm", **SHAPE),), "l4", sources=sources)
    assert opcast.predict(asked) == [opcast.predict("gemm", "l4", home=tmp_path, **SHAPE)]
    step = opcast.SimulateRequest(TINY, opcast.Work(seq_len=64), "l4", sources=sources)
    again = opcast.SimulateRequest.from_json(step.to_json())
    assert (
        opcast.simulate(again).step_time_s
        == opcast.simulate(TINY, "train", "l4", home=tmp_path, seq_len=64).step_time_s
    )
    with pytest.raises(ValueError, match="says all that is asked"):
        opcast.simulate(step, tp=2)


def test_every_public_name_is_there() -> None:
    assert all(getattr(opcast, name) is not None for name in opcast.__all__)


def test_the_format_of_the_cache_is_a_setting_of_every_face(tmp_path: Path) -> None:
    from opcast.jobs import simulate as verb
    from opcast.jobs.composing import as_override, compose
    from opcast.jobs.resolve import request_of
    from opcast.jobs.service.bodies import SimulateBody

    asked = {"cluster": "dgx_h100", "stack": "vllm", "batch": 8, "input_len": 500, "home": tmp_path}
    usual, fewer = (opcast.simulate(TINY, "decode", **asked, kv_dtype=kind).memory.by_class for kind in (None, "fp8"))
    assert fewer["KV cache"] == pytest.approx(usual["KV cache"] / 2, rel=0.01)
    with pytest.raises(ValueError, match="kv_dtype='fp3' is not one of same, fp8, int8"):
        opcast.simulate(TINY, "decode", **asked, kv_dtype="fp3")
    with pytest.raises(ValueError, match=r"kv_dtype=fp8 is for inference"):
        opcast.simulate(TINY, "train", home=tmp_path, device="l4", kv_dtype="fp8")
    assert SimulateBody(model="tiny_llama_100m", kv_dtype="fp8").kv_dtype == "fp8"
    words = ["workload=decode", "device=h100_sxm", "precision.kv_dtype=fp8"]
    config = compose("simulate", [as_override(verb, word) for word in words])
    assert request_of("simulate", config).kv_dtype == "fp8"
