"""``opcast serving``: the verb, its JSON, its files and its complaints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import opcast
from opcast.datasets.devices import DeviceError, load_device
from opcast.datasets.own_warnings import OpcastWarning
from opcast.jobs import questions, serving
from opcast.jobs.api import verb_request
from opcast.jobs.cli import main
from opcast.jobs.composing import as_override
from opcast.jobs.show import BadInputError
from opcast.simulator.question.canonical import RequestError
from opcast.simulator.question.requests import SimulateRequest, plan_of
from opcast.simulator.question.serving import IterationLaw, KvMemory, ServingRequest
from opcast.simulator.question.sources import Sources
from opcast.simulator.question.work import Work
from opcast.simulator.step.checks import prepared

LAW = ["law={base_us: 8000, decode_us: 20, prefill_token_us: 40}", "kv.blocks=2000"]
COUNTED = ("kv.blocks", "kv.block_tokens", "scheduler.max_tokens", "traffic.concurrency", "scheduler.max_seqs")
FEW = ["traffic.requests=40", "traffic.rate=10", "traffic.input.mean=200", "traffic.output.mean=20"]


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["serving", *words, *LAW, *FEW, "format=json"]) == 0
    found: dict = json.loads(capsys.readouterr().out)
    return found


def test_the_answer_has_what_the_contract_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import pandas as pd

    path = tmp_path / "requests.parquet"
    found = asked(capsys, f"requests={path}", "slo.ttft_ms=100")
    assert found["requests"] == found["completed"] == 40
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "queue_ms"):
        assert {"mean", "p50", "p90", "p99"} == set(found[name])
        assert found[name]["p50"] <= found[name]["p90"] <= found[name]["p99"]
    for name in ("output_tokens_per_s_per_gpu", "goodput", "kv_peak", "preemptions", "wall_time_s"):
        assert name in found
    rows = pd.read_parquet(path)
    assert len(rows) == 40
    assert rows.ttft_ms.mean() == pytest.approx(found["ttft_ms"]["mean"])
    assert rows.tpot_ms.mean() == pytest.approx(found["tpot_ms"]["mean"])


def test_who_is_not_served_has_no_times(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A time that nobody had is null and a dash, never 0; of answers of one token that is so of TPOT and ITL."""
    none = ["scheduler.max_model_len=2", "traffic.classes=[{name: chat}]"]
    found = asked(capsys, f"report={tmp_path / 'none.html'}", "slo.ttft_ms=100", *none)
    assert found["completed"] == 0
    times = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "queue_ms", "normalised_ms")
    for seen in (*(found[name] for name in times), found["classes"]["chat"]["ttft_ms"]):
        assert seen == {"mean": None, "p50": None, "p90": None, "p99": None}
    for words, said in (((), "none served"), (("sweep", "rates=[5]"), " - ")):
        assert main(["serving", *words, *LAW, *FEW, *none]) == 0
        out = capsys.readouterr().out
        assert said in out
        assert "nan" not in out
    assert main(["serving", "capacity", *LAW, *FEW, *none, "slo.ttft_ms=100"]) == 2
    assert "nobody is served" in capsys.readouterr().err
    assert main(["serving", *LAW, *FEW, "traffic.output.mean=1", "format=json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert (one["tpot_ms"]["mean"], one["itl_ms"]["p99"]) == (None, None)
    assert one["ttft_ms"]["mean"] > 0


def test_how_many_tokens_fit_is_in_every_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """2,000 blocks of 16 tokens; four ranks have as many each, and so has each pool."""
    found = asked(capsys)
    assert (found["kv_tokens"], found["kv_rank_tokens"]) == (32_000, 32_000)
    assert found["kv_peak_tokens"] == round(found["kv_peak"] * 32_000) > 0
    assert asked(capsys, "attention_dp=4")["kv_tokens"] == 128_000
    pools = asked(capsys, "decode_pool.replicas=1")["pools"]
    assert [pool["kv_tokens"] for pool in pools.values()] == [32_000, 32_000]
    for words, said in (
        ((), "32,000 tokens a replica"),
        (("attention_dp=4",), "128,000 tokens a replica (4 ranks of 32,000)"),
        (("decode_pool.replicas=1",), "KV memory: 32,000 tokens a replica"),
        (("sweep", "rates=[5,10]"), "KV memory: 32,000 tokens a replica"),
        (("compare", "replicas=2"), "32,000 / 32,000"),
    ):
        assert main(["serving", *words, *LAW, *FEW]) == 0
        assert said in capsys.readouterr().out, words


def test_the_verdict_of_a_capacity_is_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serving", "capacity", "slo.ttft_ms=60", *LAW, *FEW]) == 0
    assert "capacity: " in capsys.readouterr().out


def test_python_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = {"input": {"mean": 200}, "output": {"mean": 20}}
    report = opcast.serving(
        law={"base_us": 8000, "decode_us": 20, "prefill_token_us": 40},
        kv={"blocks": 2000},
        traffic={"requests": 40, "rate": 10, **lengths},
    )
    assert report.to_dict()["ttft_ms"] == asked(capsys)["ttft_ms"]


def test_python_writes_every_request_down(tmp_path: Path) -> None:
    import pandas as pd

    law, path = {"base_us": 8000}, tmp_path / "requests.parquet"
    given = {"kv": {"blocks": 2000}, "traffic": {"requests": 20}}
    report = opcast.serving(law=law, requests=path, **given)
    assert pd.read_parquet(path).e2e_ms.mean() == pytest.approx(report.e2e_ms.mean)
    with pytest.raises(BadInputError, match="requests"):
        opcast.serving(law=law, requests=tmp_path / "no" / "such" / "x.parquet", **given)
    with pytest.raises(RequestError, match="tp say what a model runs on"):
        opcast.serving(law=law, tp=2, **given)
    with pytest.raises(RequestError, match="model, cluster say what a model runs on"):
        opcast.serving("llama3_8b", law=law, cluster="dgx_h100", **given)


def test_capacity_is_where_users_still_have_what_they_expect(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, "capacity", "slo.ttft_ms=60")
    over = min(each["rate"] for each in found["tried"] if not each["met"])
    assert found["rates"][0] < over <= 1.04 * found["rates"][0]
    assert found["rate"] == found["interval"][0] <= found["interval"][1]
    assert min(found["rates"]) <= found["rate"] <= max(found["rates"])
    assert len(found["attained"]) == len(set(found["rates"])) == 5
    assert sum(found["attained"]) / 5 >= 0.9
    assert found["at_rate"]["slo_attainment"] >= 0.9
    assert found["seeds_met"] == sum(share >= 0.9 for share in found["attained"]) > 0
    assert found["rates_of_errors"] is None


def test_the_run_shown_with_a_capacity_has_the_share_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """The first of these seeds misses it at the lower end of the interval."""
    found = asked(capsys, "capacity", "slo.ttft_ms=60", "traffic.seed=1")
    assert found["attained"][0] < 0.9 <= found["at_rate"]["slo_attainment"]
    assert 0 < found["seeds_met"] < 5
    assert main(["serving", "capacity", "slo.ttft_ms=60", "traffic.seed=1", *LAW, *FEW]) == 0
    assert f"at this rate {found['seeds_met']} of 5 seeds have the share of slo" in capsys.readouterr().out


def test_there_are_no_times_of_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serving", *LAW, *FEW, "traffic.input.mean=1e9"]) == 0
    shown = capsys.readouterr().out
    assert "0 served, 40 rejected (40 by kv memory)" in shown
    assert "TTFT" not in shown


def test_a_capacity_says_where_its_run_is_too_short_to_tell(capsys: pytest.CaptureFixture[str]) -> None:
    note = asked(capsys, "capacity", "slo.ttft_ms=1e6")["at_rate"]["notes"][-1]
    assert "more of traffic.requests (now 40)" in note


def test_a_capacity_of_a_trace_says_so_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = [f"{each},100,50" for each in range(20)]
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "\n".join(rows) + "\n", encoding="utf-8")
    assert main(["serving", "capacity", f"traffic.trace={path}", "slo.ttft_ms=1e6", *LAW]) == 0
    said = capsys.readouterr()
    assert "take a longer trace for a rate that lasts" in said.out + said.err
    assert "e+" not in said.out + said.err


def test_overload_is_said_without_exponents(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serving", *LAW, "traffic.rate=1e9", "traffic.requests=200", "traffic.output.mean=5"]) == 0
    said = capsys.readouterr()
    assert "overload: when 180 requests had come" in said.err
    assert "e+" not in said.out + said.err


def test_a_sweep_of_a_trace_is_by_its_speed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,100,10\n1,200,20\n", encoding="utf-8")
    assert main(["serving", "sweep", "rates=[1,2]", f"traffic.trace={path}", *LAW]) == 0
    assert "times its speed" in capsys.readouterr().out
    assert main(["serving", f"traffic.trace={path}", "traffic.warmup=2", *LAW]) == 2
    assert "leaves none of 2 requests" in capsys.readouterr().err


@pytest.mark.slow
def test_runs_in_processes_say_the_same(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    own, wall = asked(capsys, "sweep", "rates=[1,20,4]")["rates"], "wall_time_s"
    monkeypatch.setattr(serving, "WORTH_S", 0.0)
    others = asked(capsys, "sweep", "rates=[1,20,4]", "workers=2")["rates"]
    assert [{**each, wall: 0} for each in own] == [{**each, wall: 0} for each in others]


def test_a_sweep_has_one_answer_for_each_rate(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, "sweep", "rates=[1,20]")
    slow, fast = found["rates"]
    assert (slow["rate"], fast["rate"]) == (1, 20)
    assert slow["ttft_ms"]["mean"] < fast["ttft_ms"]["mean"]


def test_one_command_sets_pools_beside_replicas_that_do_both(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, "compare", "replicas=3", "slo.ttft_ms=60", "kv.bytes_per_token=1e5")["ways"]
    assert sorted((each["prefill"], each["decode"]) for each in found) == [(1, 2), (2, 1), (3, 0)]
    assert all(each["devices"] == 3 for each in found)
    assert [each["goodput"] for each in found] == sorted((each["goodput"] for each in found), reverse=True)
    for each in found:
        assert (each["kv_transfer_bytes"] > 0) == bool(each["decode"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["replicas=0"], "replicas=0 serves nobody"),
        (["scheduler.policy=vlm"], "scheduler.policy='vlm' is not one of vllm"),
        (["router=no.module:function"], "router=no.module:function cannot be loaded"),
        (["capacity"], "capacity needs what users expect"),
        (["traffic.arrival=closed"], "opcast: traffic.arrival=closed needs traffic.concurrency"),
        (["traffic.arrival=closed", "traffic.concurrency=2"], "traffic.rate=10 is not read"),
        (["model=llama3_8b"], "model=llama3_8b says what a model runs on: with law there is none"),
        (["parallel.tp=8"], "parallel.tp=8 says what a model runs on"),
        (["decode_pool.replicas=1", "decode_pool.device=h100_sxm"], "decode_pool.device=h100_sxm says what"),
        (["engine=vllm", "args=-tp 2 --max-num-seqs 8", "model=x"], "model=x says what a model runs on"),
        (["capacity", "slo.ttft_ms=1"], "no rate meets slo"),
        (["sweep", "rates=x"], "rates='x' must be a number"),
        (["sweep", "workers=-1"], "workers=-1"),
        (["traffic.warmup=40"], "traffic.warmup=40 leaves none"),
        (["what=else"], "what='else' is not one of run, capacity, sweep, compare"),
        (["compare"], "compare needs two replicas"),
        (["compare", "replicas=2", "trace=/tmp/x.json"], "trace=/tmp/x.json is of one run"),
        (["decode_pool.replicas=-1"], "decode_pool.replicas=-1"),
        (["decode_pool.share=0.5"], "decode_pool.share=0.5 must be between 0 and 1, of replicas=2 or more"),
        (["decode_pool.share=0.5", "decode_pool.replicas=1", "replicas=2"], "say the same"),
        (["decode_pool.link_gbps=0", "decode_pool.replicas=1"], "decode_pool.link_gbps=0"),
        (["decode_pool.max_seqs=3"], "decode_pool.max_seqs=3 is not read with decode_pool.replicas=0"),
        (["tiers.host_gbps=20"], "tiers.host_gbps=20 is not read without tiers.host_gib: leave it out"),
        *(([f"{name}={10**24}"], f"{name}={10**24} must be at most") for name in COUNTED),
        (["tiers.load=async"], "tiers.load=async is not read without tiers.host_gib"),
        (["tiers.remote_us=9", "tiers.host_gib=1"], "tiers.remote_us=9 is not read without tiers.remote_gib"),
        (["scheduler.queue=priority"], "scheduler.queue=priority is not read without traffic.classes"),
        (["second_kind.replicas=1", "second_kind.device=h100_sxm"], "second_kind.device=h100_sxm says what"),
        (["second_kind.max_seqs=3"], "second_kind.max_seqs=3 is not read with second_kind.replicas=0"),
        (["second_kind.replicas=1", "decode_pool.replicas=1"], "leave out one of them"),
        (["scorers.queue=1"], "scorers.queue=1 is not read with router=round_robin"),
        (["autoscale.target=2"], "autoscale.target=2 is not read with autoscale.policy=null"),
        (["failures.repair_s=5"], "failures.repair_s=5 is not read with failures.mtbf_h=null"),
        (["cold_start.seconds=5"], "cold_start.seconds=5 is not read with autoscale.policy=null and"),
        (["autoscale.policy=queue", "cold_start.seconds=5"], "autoscale.policy=queue needs a target"),
        (["autoscale.policy=no.module:f", "cold_start.seconds=5"], "autoscale.policy=no.module:f cannot be loaded"),
        (["failures.mtbf_h=1"], "give cold_start.seconds=90, or cold_start.store_gbps"),
        (["failures.mtbf_h=1", "cold_start.store_gbps=2"], "give cold_start.weights_gb"),
        (
            ["compare", "replicas=2", "failures.mtbf_h=1", "cold_start.seconds=5"],
            "compare is of replicas that are alike",
        ),
        (["traffic.arrival=daily", "traffic.swing=1"], "traffic.swing=1 must be a share below 1"),
        (["rates=[1,2]"], "rates=[1, 2] are of `opcast serving sweep`"),
        (["capacity", "slo.ttft_ms=60", "chakra=/tmp/x"], "chakra=/tmp/x is of one run"),
        (["replicas=1000000"], "replicas=1,000,000"),
        (["traffic.speed=2"], "traffic.speed=2 is of a trace"),
        (["traffic.prefixes=2"], "traffic.prefixes=2 needs traffic.prefix_tokens"),
        (["traffic.input.kind=zipf", "traffic.input.high=1000000000"], "must be at most 16,777,216"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serving", *LAW, *FEW, *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["traffic.trace=/nowhere.csv"], "/nowhere.csv does not exist"),
        (["traffic.trace=x.csv", "traffic.turns=2"], "a trace has its own"),
        (["traffic.trace=x.csv", "traffic.rate=2"], "traffic.trace=x.csv does not exist"),
        (
            ["traffic.trace=azure_code_like", "traffic.trace_format=azure"],
            "traffic.trace_format=azure is not read with traffic.trace=azure_code_like: leave it out",
        ),
        (["sweep", "traffic.arrival=closed", "traffic.concurrency=2"], "take poisson for sweep"),
    ],
)
def test_other_traffic_that_cannot_be_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["serving", *LAW, *words]) == 2
    assert said in capsys.readouterr().err


def test_experts_and_the_pool_that_decodes_are_those_asked_for() -> None:
    from opcast.jobs.composing import compose
    from opcast.jobs.resolve import request_of

    own = ["decode_pool.replicas=1", "decode_pool.cluster=dgx_h200", "decode_pool.parallel={tp: 8}"]
    words = ["model=deepseek_v3", "cluster=dgx_h100", "parallel.tp=4", "expert_load='zipf:0.5'", *own]
    request = request_of("serving", compose("serving", words))
    assert request.step is not None
    assert request.decode_pool.step is not None
    assert request.step.work.expert_load == request.decode_pool.step.work.expert_load == "zipf:0.5"
    assert (request.step.parallel.tp, request.decode_pool.step.parallel.tp) == (4, 8)
    assert request.decode_pool.step.cluster.id == "dgx_h200"
    assert request.decode_pool.step.device.id == "h200_sxm"


def test_a_second_kind_is_on_devices_of_its_own() -> None:
    from opcast.jobs.composing import compose
    from opcast.jobs.resolve import request_of

    own = ["second_kind.replicas=4", "second_kind.cluster=pcie_4xl40s", "second_kind.parallel={tp: 2}"]
    request = request_of("serving", compose("serving", ["model=llama3_8b", "cluster=dgx_h100", "parallel.tp=4", *own]))
    assert request.step is not None
    assert request.second_kind.step is not None
    assert (request.step.parallel.tp, request.second_kind.step.parallel.tp) == (4, 2)
    assert (request.step.cluster.id, request.second_kind.step.cluster.id) == ("dgx_h100", "pcie_4xl40s")


def test_fleets_are_told_and_on_the_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two kinds; a queue that an autoscaler sees; a replica that fails some times within the run."""
    start, page = "cold_start.seconds=0.5", tmp_path / "fleet.html"
    scale = ["autoscale.policy=utilisation", "autoscale.target=1", "autoscale.max_replicas=3", "autoscale.interval_s=1"]
    for words, told, shown in (
        (["second_kind.replicas=1"], "kinds of replicas", "Kinds of replicas"),
        ([*scale, start], "GPU-hours", "Replicas, and requests that come"),
        (["failures.mtbf_h=0.0005", start], "without failures", "without failures"),
    ):
        assert main(["serving", *words, *LAW, *FEW, "slo.ttft_ms=100", f"report={page}"]) == 0
        assert told in capsys.readouterr().out
        assert shown in page.read_text()
    picture = tmp_path / "fleet.svg"
    found = asked(capsys, *scale, start, f"picture={picture}")
    assert picture.read_text().count("<path") == 2
    assert found["fleet"]["gpu_hours"] > 0
    assert {"s", "ready", "requests_per_s"} <= found["fleet_over_time"][0].keys()


def test_a_share_of_the_replicas_decodes() -> None:
    kv = {"blocks": 10}
    made = ServingRequest.from_dict({"law": {"base_us": 5}, "kv": kv, "replicas": 6, "decode_pool": {"share": 0.66}})
    assert (made.replicas, made.decode_pool.replicas) == (2, 4)
    assert ServingRequest.from_json(made.to_json()) == made


def test_a_request_is_json_and_comes_back() -> None:
    request = ServingRequest(law=IterationLaw(base_us=5.0), kv=KvMemory(blocks=10), router="power_of_two")
    assert ServingRequest.from_json(request.to_json()) == request
    assert ServingRequest.from_json(request.to_json()).key() == request.key()


@pytest.mark.slow
def test_a_model_is_served_on_its_device(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=tiny_llama_100m", "device=h100_sxm", *FEW, "scheduler.max_tokens=512", "scheduler.max_seqs=16"]
    assert main(["serving", *words, "format=json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["completed"] == 40
    assert 0 < found["tpot_ms"]["mean"] < found["ttft_ms"]["mean"]


LOGS = {  # lines of start-up logs as the engines write them
    "vllm": """INFO 05-01 model_runner.py:1188] Model loading took 15.0764 GiB and 30.1 seconds
INFO 05-01 gpu_worker.py:227] Available KV cache memory: 35.40 GiB
INFO 05-01 kv_cache_utils.py:637] GPU KV cache size: 231,984 tokens""",
    "sglang": """[2025-11-02 10:00:01 TP0] Load weight end. type=LlamaForCausalLM, avail mem=63.1 GB, \
mem usage=15.08 GB.
[2025-11-02 10:00:02 TP0] KV Cache is allocated. #tokens: 494000, K size: 15.10 GB, V size: 15.10 GB""",
    "trtllm": """[11/02/2025-10:00:01] [TRT-LLM] [I] [MemUsageChange]\
 Allocated 62.24 GiB for max tokens in paged KV cache \
(409664).""",
}
ARGUMENTS = {
    "vllm": "--tensor-parallel-size 2 --max-num-seqs 8 --gpu-memory-utilization 0.8",
    "sglang": "--tp 2 --max-running-requests 8 --mem-fraction-static 0.8",
    "trtllm": "--tp_size 2 --max_batch_size 8 --kv_cache_free_gpu_memory_fraction 0.8",
}


@pytest.mark.parametrize("engine", LOGS)
def test_an_engine_is_given_as_its_users_start_it(engine: str, tmp_path: Path) -> None:
    from opcast.jobs.composing import compose
    from opcast.jobs.resolve import request_of

    log = tmp_path / "engine.log"
    log.write_text(LOGS[engine])
    words = [f"engine={engine}", f"args={ARGUMENTS[engine]}", f"calibrate={log}", "model=llama3_8b", "cluster=dgx_h100"]
    request = request_of("serving", compose("serving", [as_override(serving, word) for word in words]))
    assert request.step is not None
    assert (request.step.parallel.tp, request.step.stack.id) == (2, engine)
    assert (request.scheduler.policy, request.scheduler.max_seqs, request.kv.fraction) == (engine, 8, 0.8)
    assert {"vllm": 231_984, "sglang": 494_000, "trtllm": 409_664}[engine] == request.kv.seen["kv_tokens"]
    assert request.scheduler.prefix_caching


@pytest.mark.parametrize(
    ("model", "engine", "args", "ranks", "replicas"),
    [
        ("llama3_8b", "vllm", "-tp 2 -dp 2 --enable-expert-parallel", 1, 2),
        ("qwen3_30b_a3b", "vllm", "-tp 2 -dp 2 --enable-expert-parallel", 2, 1),
        ("qwen3_30b_a3b", "sglang", "--tp 2 --dp 2", 1, 2),
        ("qwen3_30b_a3b", "sglang", "--tp 4 --dp 4 --enable-dp-attention", 4, 1),
    ],
)
def test_data_ranks_are_in_lockstep_or_copies(model: str, engine: str, args: str, ranks: int, replicas: int) -> None:
    from opcast.jobs.composing import compose
    from opcast.jobs.resolve import request_of

    words = [f"engine={engine}", f"args={args}", f"model={model}", "cluster=dgx_h100"]
    request = request_of("serving", compose("serving", [as_override(serving, word) for word in words]))
    assert (request.attention_dp, request.replicas) == (ranks, replicas)


@pytest.mark.parametrize(
    ("engine", "device", "format_", "runs"),
    [
        ("vllm", "a100_sxm_80gb", "fp8", "w8a16"),
        ("sglang", "rtx_3090", "fp8", "w8a16"),
        ("vllm", "h100_sxm", "fp8", "fp8"),
        ("vllm", "h100_sxm", "modelopt_fp4", "w4a16"),
    ],
)
def test_a_format_without_units_is_unpacked_as_the_engine_does(
    engine: str, device: str, format_: str, runs: str
) -> None:
    request = questions.request_of(
        "serving",
        {"model": "tiny_llama_100m", "device": device, "engine": engine, "args": f"--quantization {format_}"},
        Sources(),
        print,
    )
    plan = plan_of(request.step, load_device(device))
    assert plan.quantization == runs
    assert any("keeps such weights packed and multiplies in bf16" in note for note in plan.notes) == (runs != "fp8")
    assert prepared(plan, request.step.work, load_device(device)).quantization == runs


def test_a_format_without_units_that_a_user_names_is_refused() -> None:
    step = SimulateRequest(model="tiny_llama_100m", work=Work("decode"), device="a100_sxm_80gb", quantization="fp8")
    device = load_device("a100_sxm_80gb")
    with pytest.raises(DeviceError, match="take precision=w8a16"):
        prepared(plan_of(step, device), step.work, device)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["engine=vlm"], "vllm"),
        (["engine=vllm", "args=--tensor-paralel-size 2"], "--tensor-parallel-size"),
        (["engine=vllm", "args=--max-num-seqs many"], "whole number"),
        (["args=--tp 2"], "engine=vllm"),
        (["calibrate=nowhere.log"], "nowhere.log"),
        (["engine=vllm", "args=-tp 16", "cluster=dgx_h100"], "args need 16 devices, cluster=dgx_h100"),
        (["engine=vllm", "args=--max-num-seqs 8", "scheduler.max_seqs=4"], "args say scheduler.max_seqs=8, but it is"),
        (["engine=vllm", "scheduler.policy=sglang"], "args say scheduler.policy=vllm, but it is set to sglang"),
        (
            ["engine=vllm", "args=-q fp8", "precision=nvfp4"],
            "args say precision.quantization=fp8",
        ),
        (
            ["engine=vllm", "args=--no-enable-prefix-caching", "scheduler.prefix_caching=true"],
            "args say scheduler.prefix_caching=False",
        ),
        (["engine=vllm", "args=--gpu-memory-utilization 0.8", *LAW], "args say kv.fraction=0.8, which needs a model"),
    ],
)
def test_arguments_that_no_engine_has_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["serving", *words, *FEW]) == 2
    assert said in capsys.readouterr().err


def test_python_takes_an_engine_as_it_is_started(tmp_path: Path) -> None:
    from opcast.jobs.questions import settings
    from opcast.jobs.serving_engine import apply_engine

    log = tmp_path / "engine.log"
    log.write_text(LOGS["vllm"])
    args = "--tensor-parallel-size 2 --max-num-seqs 8 --kv-cache-dtype fp8 --enforce-eager --moe-backend triton"
    asked = {"model": "llama3_8b", "cluster": "dgx_h100", "nodes": 1, "scheduler": {"prefix_caching": False}}
    told: list[str] = []
    given = apply_engine({**asked, "engine": "vllm", "args": args, "calibrate": log}, settings("serving"), told.append)
    assert ["not simulated: --moe-backend" in each for each in told] == [True]
    stack = given["stack"]
    assert (given["tp"], given["kv_dtype"], stack.cuda_graph, stack.eager) == (2, "fp8", False, True)
    assert given["scheduler"] == {"policy": "vllm", "max_seqs": 8, "max_model_len": None, "prefix_caching": False}
    assert given["kv"]["seen"]["kv_tokens"] == 231_984
    with pytest.raises(BadInputError, match="but it is set to 4"):
        apply_engine(
            {"model": "llama3_8b", "cluster": "dgx_h100", "tp": 4, "engine": "vllm", "args": "-tp 2"},
            settings("serving"),
            str,
        )

    law = {"law": {"base_us": 8000}, "kv": {"blocks": 2000}, "traffic": {"requests": 20, "rate": 20}}
    with pytest.warns(OpcastWarning, match="not simulated: --moe-backend") as told:
        one = opcast.serving(engine="vllm", args="--max-num-seqs 1 --moe-backend triton", **law)
    assert told[0].filename == __file__  # the line that asked, and none of opcast
    with pytest.warns(OpcastWarning) as told:
        verb_request("serving", None, {"engine": "vllm", "args": "--moe-backend triton", **law}, None)
    assert told[0].filename == __file__
    assert one.ttft_ms == opcast.serving(scheduler={"max_seqs": 1}, **law).ttft_ms
    with pytest.raises(BadInputError, match="which needs a model"):
        opcast.serving(engine="vllm", args="--kv-cache-dtype fp8", **law)
    with pytest.raises(RequestError, match="device, calibrate say what a model runs on"):
        opcast.serving(device="h100_sxm", calibrate=log, **law)


CAPPED = [
    "model=tiny_llama_100m",
    "device=h100_sxm",
    "traffic.requests=200",
    "traffic.rate=100",
    "traffic.input.mean=400",
    "traffic.output.mean=50",
]


def test_a_power_cap_slows_prompts_and_saves_watts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serving", "caps", *CAPPED, "power_caps_w=[180]", "node_w=500", "pue=1.5", "format=json"]) == 0
    own, held = json.loads(capsys.readouterr().out)["caps"]
    assert (own["cap_w"], held["cap_w"]) == (None, 180.0)
    assert held["power_w"] <= 180.0 < own["power_w"]
    assert held["ttft_ms"]["p50"] > own["ttft_ms"]["p50"]
    assert own["joules_per_token"] == pytest.approx(
        1.5 * (own["gpu_joules_per_token"] + 500 / own["output_tokens_per_s"])
    )
    assert own["gpu_joules_per_token"] == pytest.approx(own["kwh_per_million_tokens"] * 3.6, rel=0.05)
    assert own["front"] or held["front"]
    assert main(["serving", *CAPPED, "power_cap_w=180", "format=json"]) == 0
    assert json.loads(capsys.readouterr().out)["ttft_ms"]["p50"] == pytest.approx(held["ttft_ms"]["p50"], rel=0.01)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["caps", *CAPPED], "needs power_caps_w=[600,500,400]"),
        (["caps", *CAPPED, "power_caps_w=[-1]"], "power_caps_w=-1 must be"),
        (["caps", *CAPPED, "power_caps_w=[0]"], "power_caps_w=0 lets a GPU draw nothing"),
        (["caps", *CAPPED, "power_caps_w=[300]", "admission.max_requests=0"], "nobody was served"),
        (["caps", *CAPPED, "power_caps_w=[300]", "power_cap_w=200"], "both hold GPUs back"),
        (["caps", *CAPPED, "power_caps_w=[300]", "pue=0.5"], "pue=0.5 must be"),
        ([*CAPPED, "power_caps_w=[300]"], "are of `opcast serving caps`"),
    ],
)
def test_caps_that_make_no_sense_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serving", *words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert said in lines[0]


def test_the_line_of_goodput_speaks_of_slo_only_where_one_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in ((["slo.ttft_ms=100"], "of requests had all of slo"), ([], "no slo is set")):
        assert main(["serving", *words, *LAW, *FEW]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if "goodput" in line)
        assert line.rstrip().endswith(said)


def test_no_table_speaks_of_slo_where_none_is_set(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Rates, classes, ways and failures; the page shows the same rows as the terminal."""
    classes, page = "traffic.classes=[{name: chat},{name: batch}]", tmp_path / "page.html"
    fails = ["failures.mtbf_h=0.0005", "cold_start.seconds=0.5"]
    for words in ([classes], ["sweep", "rates=[5]"], ["compare", "replicas=2"], fails):
        for slo, said in ((["slo.ttft_ms=100"], False), ([], True)):
            assert main(["serving", *words, *slo, *LAW, *FEW]) == 0
            assert ("no slo is set" in capsys.readouterr().out) is said, words
    assert main(["serving", classes, *LAW, *FEW, f"report={page}"]) == 0
    assert page.read_text().count("no slo is set") == 3
    rows = [line.split("  ")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    for name in ("per output token", "goodput", "KV memory", "iterations"):
        assert name in rows
        assert f">{name}<" in page.read_text()
