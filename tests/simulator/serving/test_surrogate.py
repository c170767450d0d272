"""Tables of iterations: what they say of batches that they were not made from, and how they are kept."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from opcast.datasets.clusters import load_cluster
from opcast.simulator.question.plan import Parallel, load_stack
from opcast.simulator.question.requests import SimulateRequest
from opcast.simulator.question.serving import KvMemory, ServingRequest
from opcast.simulator.question.sources import Sources
from opcast.simulator.question.traffic import Lengths, RequestTraffic
from opcast.simulator.question.work import Work
from opcast.simulator.serving.connect import replicas_of
from opcast.simulator.serving.host import HostTime
from opcast.simulator.serving.iteration import iteration_us
from opcast.simulator.serving.serve import serve
from opcast.simulator.serving.steps import steps_of
from opcast.simulator.serving.surrogate import Surrogate, key_of, random_batches, read, surrogate
from opcast.simulator.serving.tabulate import Extent, points_up_to
from opcast.simulator.workbench import Workbench

EXTENT = Extent(sequences=16, tokens=256, context=1024)
SIZES = {"hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 4096}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(Sources.at(str(tmp_path_factory.mktemp("home")), order=("network", "analytical")))


@pytest.fixture(scope="module")
def made(small_model, bench):
    """A function: the surrogate of a small model, made once."""
    known: dict[str, tuple[SimulateRequest, Surrogate]] = {}

    def make(family: str, **degrees: int) -> tuple[SimulateRequest, Surrogate]:
        if family not in known:
            ranks = degrees.get("tp", 1) * degrees.get("dp", 1)
            sizes = SIZES if family == "llama" else {"max_position_embeddings": 4096}
            request = SimulateRequest(
                model=small_model(family, **sizes),
                cluster=replace(load_cluster("dgx_h100"), devices_per_node=ranks),
                device="h100_sxm",
                parallel=Parallel(**degrees),
                stack=load_stack("vllm"),
                sources=bench.sources,
            )
            known[family] = request, surrogate(request, bench, EXTENT)
        return known[family]

    return make


FAMILIES = [("llama", {"tp": 2}), ("deepseek_v3", {"dp": 2, "ep": 2}), ("gemma2", {})]


@pytest.mark.parametrize(("family", "degrees"), FAMILIES)
def test_batches_that_no_table_was_made_from_take_as_long_as_their_simulation(family, degrees, made):
    _, own = made(family, **degrees)
    assert own.held_out.n == 16
    assert own.held_out.median_ape < 2.0  # of steps of 60 us; those of real models are within 0.3 to 1.5
    assert own.held_out.max_ape < 8.0


@pytest.mark.parametrize(("family", "degrees"), FAMILIES)
def test_no_table_falls(family, degrees, made):
    for name, table in made(family, **degrees)[1].tables._asdict().items():
        assert np.all(np.isfinite(table))
        for axis in range(np.ndim(table)) if name != "kernels" else ():
            assert np.all(np.diff(table, axis=axis) >= 0), name
    for name, axis in made(family, **degrees)[1].tables._asdict().items():
        if not name.endswith(("_us", "kernels")) and np.ndim(axis):
            assert np.all(np.diff(axis) > 0), name


def test_a_served_prompt_waits_for_its_host_as_a_simulated_one_does(small_model, bench):
    """Of an engine whose CUDA graphs are of decoding alone; sums that normalise make small passes fewer kernels."""
    request = SimulateRequest(
        model=small_model("llama", **SIZES),
        work=Work("batch", prompts=((64, 0),)),
        cluster=replace(load_cluster("dgx_h100"), devices_per_node=2),
        parallel=Parallel(tp=2),
        stack=load_stack("trtllm"),
        sources=bench.sources,
    )
    tables = surrogate(request, bench, EXTENT).tables
    steps = steps_of(request, bench)
    issued = tables._replace(issue_us=steps.plan.prompt_issue_us)
    for new in (64, 256):
        batch = request.work.iteration if new == 64 else replace(request.work, prompts=((new, 0),)).iteration
        serves = iteration_us(issued, 0, 0, new, batch.prefill_pairs, 0, 1)
        simulated = bench.simulate(replace(request, work=Work("prefill", batch=1, input_len=new))).ttft_ms * 1e3
        assert serves == pytest.approx(simulated, rel=0.15)  # head and last kernel of four small layers
        assert simulated > 4 * iteration_us(tables, 0, 0, new, batch.prefill_pairs, 0, 1)
    decoding = replace(request, work=Work("decode", batch=8, input_len=64))
    compiled = replace(decoding, stack=load_stack("trtllm_cpp"))
    assert bench.simulate(decoding).tpot_ms == bench.simulate(compiled).tpot_ms


def test_more_of_anything_takes_no_less(made):
    own = made("llama", tp=2)[1]

    def us(decodes=((4, 100),), prompts=((64, 0),)):
        return own.iteration_us(Work("batch", decodes=decodes, prompts=prompts))

    usual = us()
    assert us(decodes=((5, 100),)) >= usual
    assert us(decodes=((4, 900),)) > usual
    assert us(prompts=((128, 0),)) > usual
    assert us(prompts=((64, 500),)) > usual


def test_a_latent_cache_makes_cached_tokens_cost_more_than_their_pairs(made):
    latent, plain = made("deepseek_v3", dp=2, ep=2)[1].tables, made("llama", tp=2)[1].tables
    assert latent.cached_us[-1] > 0
    assert plain.cached_us[-1] == 0


def test_what_was_made_is_kept_and_found(made, bench, tmp_path):
    request, own = made("llama", tp=2)
    first = surrogate(request, bench, EXTENT, tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.stem == key_of(request, bench, EXTENT)
    written = path.stat().st_mtime_ns
    found = surrogate(request, bench, EXTENT, tmp_path)
    assert path.stat().st_mtime_ns == written
    assert found.held_out == first.held_out == own.held_out
    for one, other in zip(found.tables, own.tables, strict=True):
        assert np.array_equal(one, other)


def test_a_damaged_file_is_made_again(tmp_path):
    assert read(tmp_path / "none.npz") is None
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 no archive")
    assert read(tmp_path / "bad.npz") is None


def test_whatever_changes_the_answer_changes_the_key(made, bench):
    request, _ = made("llama", tp=2)
    keys = {key_of(request, bench, EXTENT), key_of(request, bench, replace(EXTENT, tokens=512))}
    keys |= {key_of(replace(request, stack=load_stack("trtllm")), bench, EXTENT)}
    keys |= {key_of(replace(request, quantization="fp8"), bench, EXTENT)}
    assert len(keys) == 4
    assert key_of(replace(request, work=Work("decode", batch=7)), bench, EXTENT) in keys


def test_the_format_of_a_folder_changes_the_key(small_model, bench, tmp_path):
    request = SimulateRequest(str(tmp_path), Work("decode"), "h100_sxm")
    (tmp_path / "config.json").write_text(json.dumps(small_model("llama", 2)))
    plain = key_of(request, bench, EXTENT)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert key_of(request, bench, EXTENT) != plain


def test_axes_reach_as_far_as_asked():
    assert points_up_to((1, 2, 4), 4) == (1, 2, 4)
    assert points_up_to((1, 2, 4), 3) == (1, 2, 3)
    assert points_up_to((1, 2, 4), 20) == (1, 2, 4, 8, 16, 20)
    assert points_up_to((1, 2, 4), 1) == (1, 2)


def test_random_batches_are_the_same_again_and_stay_within_the_extent():
    found = random_batches(EXTENT, 60, seed=3)
    assert found == random_batches(EXTENT, 60, seed=3)
    assert {(bool(work.prompts), bool(work.decodes)) for work in found} == {(True, True), (True, False), (False, True)}
    for work in found:
        assert work.iteration.decoding <= EXTENT.sequences
        assert work.iteration.prefill_tokens <= EXTENT.tokens


def test_a_request_alone_and_a_static_batch_are_a_generation(small_model, tmp_path):
    bench = Workbench(Sources.at(str(tmp_path), order=("network", "analytical"), calibration="none"))
    step = SimulateRequest(
        model=small_model("llama", max_position_embeddings=4096),
        cluster=replace(load_cluster("dgx_h100"), devices_per_node=1),
        device="h100_sxm",
        stack=load_stack("vllm"),
        sources=bench.sources,
    )
    for batch in (1, 4):
        traffic = RequestTraffic(
            arrival="closed", concurrency=batch, requests=batch, input=Lengths(mean=500), output=Lengths(mean=33)
        )
        kv = KvMemory(blocks=4000, block_tokens=16, graphs=0)
        replica, _ = replicas_of(ServingRequest(step=step, traffic=traffic, kv=kv), bench)
        assert replica.max_model_len == 4096
        alone = serve(ServingRequest(step=step, traffic=traffic, kv=kv), replace(replica, host=HostTime())).report
        work = Work("generate", batch=batch, input_len=500, output_len=33, cache="static")
        whole = bench.simulate(replace(step, work=work))
        assert alone.ttft_ms.mean == pytest.approx(whole.ttft_ms, rel=0.1)
        assert alone.tpot_ms.mean == pytest.approx(whole.tpot_ms, rel=0.03)
        assert alone.duration_s * 1e3 == pytest.approx(whole.e2e_ms, rel=0.03)
