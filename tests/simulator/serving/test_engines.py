"""Serving engines as data: their arguments, CUDA graphs, KV memory and host."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.simulator.question.plan import load_stack
from opcast.simulator.question.requests import SimulateRequest
from opcast.simulator.question.serving import IterationLaw, Scheduler
from opcast.simulator.question.sources import Sources
from opcast.simulator.serving.engine_args import FLAGS, read_arguments
from opcast.simulator.serving.engines import DIRECTORY, ServingEngineError, known_serving_engines, load_serving_engine
from opcast.simulator.serving.host import FIGURES, FittedHost, FittedHosts, HostTime, fitted_hosts, host_name
from opcast.simulator.serving.kv import KvError
from opcast.simulator.serving.kv_memory import (
    EngineMemory,
    Overheads,
    TokenBytes,
    available_gib,
    beside_states,
    blocks_of,
    overheads_of,
    usual_fraction,
)
from opcast.simulator.serving.replica import by_hand
from opcast.simulator.serving.setup import rules
from opcast.simulator.serving.steps import steps_of
from opcast.simulator.trace.context import LONG, context_of
from opcast.simulator.workbench import Workbench

ENGINES = known_serving_engines()
VLLM, SGLANG, TRTLLM = (load_serving_engine(name) for name in ("vllm", "sglang", "trtllm"))
USED = EngineMemory(total_gib=80.0, weights_gib=33.0, activations_gib=2.0, other_gib=1.0)


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_is_read_and_names_its_stack_and_sources(name):
    engine = load_serving_engine(name)
    assert load_stack(engine.stack).id == engine.stack
    assert {"kv", "graphs", "limits", "host"} <= set(engine.sources)
    for argument, meaning in engine.arguments.items():
        if meaning == "file" or meaning.startswith("null "):
            continue
        for value in ("7", "0.5", "fp8"):
            try:
                read_arguments(engine, f"{argument} {value}" if not _flag(meaning) else argument)
                break
            except ServingEngineError:
                continue
        else:
            pytest.fail(f"{argument} takes none of the values")


def _flag(meaning: str) -> bool:
    return meaning.removeprefix("no ") in FLAGS


def test_arguments_become_layout_limits_and_memory():
    text = (
        "--tensor-parallel-size 4 --max-num-seqs=64 --gpu-memory-utilization 0.85 --no-enable-prefix-caching --port 80"
    )
    found = read_arguments(VLLM, text)
    assert found.parallel == {"tp": 4}
    assert found.limits == {"max_seqs": 64, "prefix_caching": False}
    assert found.kv == {"fraction": 0.85}
    assert found.ignored == ("--port",)
    assert read_arguments(VLLM, "-tp 2 -dp 2 --enable-expert-parallel").parallel == {"tp": 2, "dp": 2, "ep": 4}
    attention = read_arguments(SGLANG, "--tp 8 --dp 8 --enable-dp-attention --quantization modelopt_fp4")
    assert attention.parallel == {"tp": 1, "dp": 8, "ep": 8}
    assert attention.quantization == "nvfp4"
    assert read_arguments(TRTLLM, "--tp_size 8 --kv_cache_free_gpu_memory_fraction 0.8").kv == {"fraction": 0.8}


VLLM_COMMAND = r"""vllm serve openai/gpt-oss-120b --host 0.0.0.0 --port 8000 --tensor-parallel-size=8 \
  --gpu_memory_utilization 0.9 --max-model-len 10k --max-num-seqs 512 --async-scheduling --no-enable-prefix-caching \
  --compilation-config '{"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4]}' -O3 \
  --speculative-config '{"method": "mtp", "num_speculative_tokens": 2}' --kv-cache-memory-bytes 20G \
  --stream-interval 20 --disable-log-requests --moe-backend triton"""
SGLANG_COMMAND = """python3 -m sglang.launch_server --model-path deepseek-ai/DeepSeek-R1-0528 --host 0.0.0.0 --tp 8 \
  --dp=8 --enable-dp-attention --cuda-graph-bs 1 2 4 8 16 --chunked-prefill-size -1 --disable-radix-cache
  --max-running-requests 256 --mem-fraction-static 0.82 --attention-backend flashinfer \
  --speculative-algorithm EAGLE --speculative-num-steps 3
  --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --trust-remote-code"""
TRTLLM_FILE = """
cuda_graph_config: {enable_padding: true, max_batch_size: 512}
enable_attention_dp: true
attention_dp_config: {enable_balance: true, batching_wait_iters: 0, timeout_iters: 60}
kv_cache_config: {dtype: fp8, free_gpu_memory_fraction: 0.8, enable_block_reuse: false}
scheduler_config: {capacity_scheduler_policy: MAX_UTILIZATION}
speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 3}
print_iter_log: true
stream_interval: 10
moe_config: {backend: DEEPGEMM}
"""


def test_whole_commands_of_recipes_are_read(tmp_path):
    vllm = read_arguments(VLLM, VLLM_COMMAND)
    assert (vllm.parallel, vllm.speculation, vllm.host) == ({"tp": 8}, 2, {"overlapped": True})
    assert vllm.limits == {"max_model_len": 10_000, "max_seqs": 512, "prefix_caching": False}
    assert vllm.kv == {"fraction": 0.9, "bytes": 20 * 2**30}
    assert vllm.graphs == {"sizes": [1, 2, 4]}
    assert vllm.not_simulated == ("--compilation-config.cudagraph_mode", "-O3", "--stream-interval", "--moe-backend")
    sglang = read_arguments(SGLANG, SGLANG_COMMAND)
    assert (sglang.parallel, sglang.replicas, sglang.speculation) == ({"tp": 1, "dp": 8, "ep": 8}, 1, 3)
    assert sglang.graphs == {"sizes": [1, 2, 4, 8, 16]}
    assert sglang.limits["chunk"] > 1_000_000
    assert "--attention-backend" in sglang.not_simulated
    (tmp_path / "extra.yml").write_text(TRTLLM_FILE)
    command = "trtllm-serve deepseek-ai/DeepSeek-R1 --max_batch_size 1024 --tp_size 8 --ep_size 8 --pp_size 1"
    trtllm = read_arguments(TRTLLM, f"{command} --trust_remote_code --extra_llm_api_options {tmp_path / 'extra.yml'}")
    assert trtllm.parallel == {"tp": 1, "pp": 1, "dp": 8, "ep": 8}
    assert trtllm.limits == {
        "max_seqs": 1024,
        "prefix_caching": False,
        "balance_iterations": 60,
        "gather_iterations": 0,
    }
    assert (trtllm.kv, trtllm.policy) == ({"dtype": "fp8", "fraction": 0.8}, "trtllm_max_utilization")
    assert (trtllm.graphs, trtllm.speculation, trtllm.not_simulated) == ({"most": 512}, 3, ("--moe_config.backend",))


def test_data_ranks_are_replicas_where_the_engine_has_it_so():
    assert (read_arguments(SGLANG, "--tp 2 --dp 4").replicas, read_arguments(VLLM, "-tp 2 -dp 4").replicas) == (4, 1)
    assert read_arguments(SGLANG, "--tp 2 --dp 4").parallel == {"tp": 2}
    said = read_arguments(SGLANG, "--speculative-algorithm EAGLE")
    assert (said.speculation, said.not_simulated) == (0, ("EAGLE without a number of tokens",))


def test_an_argument_that_exists_and_changes_what_is_not_simulated_is_named():
    text = "--moe-backend triton -O3 --no-enable-eplb --scheduling-policy fcfs --attention-config.backend=TRITON_MLA"
    assert read_arguments(VLLM, text).not_simulated == (
        "--moe-backend",
        "-O3",
        "--no-enable-eplb",
        "--attention-config.backend",
    )
    with pytest.raises(ServingEngineError, match="did you mean --max-running-requests"):
        read_arguments(SGLANG, "--max-running-request 8")
    with pytest.raises(ServingEngineError, match=r"trtllm 1\.2 has no argument '--max-num-seqs'.*--max_num_tokens"):
        read_arguments(TRTLLM, "--max-num-seqs 8")


def test_every_name_of_an_engine_is_listed_once():
    for name in ENGINES:
        engine = load_serving_engine(name)
        names = [*engine.arguments, *engine.without_effect, *engine.not_simulated]
        assert len(names) == len({each.replace("_", "-") for each in names})
        lines = (DIRECTORY / f"{name}.yaml").read_text().splitlines()
        keys = [found[1] for line in lines if (found := re.match(r"  (-[\w.-]+): ", line))]
        assert len(keys) == len(set(keys)) == len(engine.arguments)


def test_a_section_that_is_null_switches_graphs_off(tmp_path):
    (tmp_path / "extra.yml").write_text("cuda_graph_config: null\n")
    assert read_arguments(TRTLLM, f"--config {tmp_path / 'extra.yml'}").eager
    assert not read_arguments(TRTLLM, "--tp_size 2").eager


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("--tensor-paralel-size 4", "did you mean --tensor-parallel-size"),
        ("--max-num-sequences 4", "did you mean --max-num-seqs"),
        ("--max-batch-size 8", "engine=vllm 0.33.0 has no argument '--max-batch-size' that opcast knows; did you mean"),
        ("--qwertzuiop 8", "leave it out if another version has it"),
        ("--max-num-seqs", "needs a value"),
        ("--max-num-seqs many", "--max-num-seqs=many must be a whole number"),
        ("--gpu-memory-utilization 1.5", "out of range"),
        ("-tp 0", "out of range"),
        ("--max-num-seqs '4", "cannot be read"),
        ("--max-num-seqs 4 8", "takes one value"),
        ("--enforce-eager twice", "takes no value, but got 'twice'"),
        ("--max-model-len 32q", "must be a whole number"),
        ("--max-model-len 1.5", "must be a whole number"),
        ("--compilation-config '{bad'", "is no JSON"),
        ("--config /nowhere.yml", "/nowhere.yml"),
        ("--speculative-config '{\"num_speculative_token\": 3}'", "did you mean --speculative-config.num_speculative"),
    ],
)
def test_what_an_engine_does_not_take_is_one_line(text, says):
    with pytest.raises(ServingEngineError, match=says):
        read_arguments(VLLM, text)


def test_graphs_are_those_that_engines_capture():
    assert VLLM.graphs.sizes(1, 1024)[:5] == (1, 2, 4, 8, 16)
    assert VLLM.graphs.sizes(1, 1024)[-1] == 512
    assert VLLM.graphs.sizes(1, 64)[-1] == 128
    assert SGLANG.graphs.sizes(2, 2048)[-1] == 256
    assert SGLANG.graphs.sizes(8, 2048)[-1] == 512
    for name in ENGINES:
        sizes = load_serving_engine(name).graphs.sizes(8, 4096)
        assert list(sizes) == sorted(set(sizes))


def test_each_rule_is_its_engines_own():
    vllm = available_gib(VLLM.kv, USED)
    assert vllm == pytest.approx(0.9 * 80 - 33 - 2 - 1 - VLLM.kv.spare_gib)
    trtllm = available_gib(TRTLLM.kv, USED)
    assert trtllm == pytest.approx(0.9 * (80 - 33 - 2 - 1 - TRTLLM.kv.spare_gib))
    static = available_gib(replace(SGLANG.kv, fraction=0.82), USED)
    assert static == pytest.approx(80 - 33 - 1 - SGLANG.kv.spare_gib - 80 * 0.18)
    assert usual_fraction(80.0, 8192, 256, 1) == pytest.approx(1 - (512 + 1.5 * 8192 + 512 + 128) / 1024 / 80)
    with pytest.raises(KvError, match=r"leave no KV memory of 80\.0 GiB"):
        available_gib(VLLM.kv, replace(USED, weights_gib=79.0))


@given(st.floats(1, 60), st.floats(0.1, 10), st.sampled_from(ENGINES))
def test_more_weights_never_leave_more_blocks(weights, more, name):
    rule = load_serving_engine(name).kv
    sizes = []
    for gib in (weights, weights + more):
        try:
            available = available_gib(rule, replace(USED, weights_gib=gib, total_gib=141.0))
            sizes.append(blocks_of(rule, available, TokenBytes(1e5)).blocks)
        except KvError:
            sizes.append(0)
    assert sizes[0] >= sizes[1]


VLLM_LOG = """INFO 05-01 model_runner.py:1188] Model loading took 65.7412 GiB and 30.1 seconds
INFO worker.py:267] the current vLLM instance can use total_gpu_memory (79.25GiB) x gpu_memory_utilization (0.90) \
= 71.32GiB; model weights take 32.96GiB; non_torch_memory takes 1.52GiB; PyTorch activation peak memory takes \
1.40GiB; the rest of the memory reserved for KV Cache is 35.44GiB.
INFO 05-01 gpu_worker.py:227] Available KV cache memory: 35.40 GiB
INFO 05-01 kv_cache_utils.py:637] GPU KV cache size: 231,984 tokens""".splitlines()


SGLANG_LOG = """[2025-11-02 10:00:01 TP0] Load weight end. elapsed=20.31 s, type=LlamaForCausalLM, avail mem=63.1 GB, \
mem usage=15.08 GB.
[2025-11-02 10:00:02 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 494000, K size: 15.10 GB, \
V size: 15.10 GB
[2025-11-02 10:00:03 TP0] Memory pool end. avail mem=32.41 GB
[2025-11-02 10:00:09 TP0] max_total_num_tokens=494000, chunked_prefill_size=8192, max_prefill_tokens=16384, \
max_running_requests=4096, context_len=131072, available_gpu_mem=31.11 GB""".splitlines()
TRTLLM_LOG = """[TensorRT-LLM][INFO] [MemUsageChange] Allocated 0.56 GiB for max tokens in paged KV cache (8224).
[TRT-LLM] [I] Memory used after loading model weights (inside torch) in memory usage profiling: 63.52 GiB
[TRT-LLM] [I] Memory used after loading model weights (outside torch) in memory usage profiling: 49.78 GiB
[TRT-LLM] [I] Memory dynamically allocated during inference (inside torch) in memory usage profiling: 0.85 GiB
[TRT-LLM] [I] Memory used outside torch (e.g., NCCL and CUDA graphs) in memory usage profiling: 49.28 GiB
[TRT-LLM] [I] Peak memory during memory usage profiling (torch + non-torch): 113.65 GiB, available KV cache memory \
when calculating max tokens: 5.95 GiB, fraction is set 0.8999999761581421, kv size is 73728
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 5.95 GiB for max tokens in paged KV cache (86720).""".splitlines()


def test_a_start_up_log_says_what_memory_went_to():
    found = overheads_of(VLLM_LOG)
    assert (found.weights_gib, found.activations_gib, found.other_gib) == (32.96, 1.40, 1.52)
    assert (found.kv_gib, found.kv_tokens) == (35.40, 231_984)
    assert found.bytes_per_token == pytest.approx(163_850, rel=0.001)
    sglang = overheads_of(["KV Cache is allocated. dtype: torch.bfloat16, #tokens: 494000, K size: 15.1 GB"])
    assert sglang == Overheads(kv_tokens=494_000)
    parts = overheads_of(SGLANG_LOG)
    assert parts == Overheads(weights_gib=15.08, kv_gib=30.2, kv_tokens=494_000)
    latent = overheads_of(["KV Cache is allocated. dtype: torch.bfloat16, #tokens: 1000, KV size: 3.50 GB"])
    assert latent == Overheads(kv_gib=3.5, kv_tokens=1000)
    assert overheads_of(["# GPU blocks: 14499, # CPU blocks: 2048"]) == Overheads(kv_tokens=16 * 14499)
    whole = overheads_of(TRTLLM_LOG)
    assert whole == Overheads(63.52, 0.85, 49.28, 5.95, 86_720)
    trtllm = overheads_of(["[TRT-LLM] [I] Allocated 62.24 GiB for max tokens in paged KV cache (409664)."])
    assert (trtllm.kv_gib, trtllm.kv_tokens) == (62.24, 409_664)
    with pytest.raises(KvError, match="no line of an engine's memory"):
        overheads_of(["nothing of it"], "engine.log")


def test_of_several_kinds_of_cache_the_line_of_concurrency_says_what_fits():
    """Qwen3.5-27B on H20, https://github.com/vllm-project/vllm/issues/40691: 33.04 x 32,768 tokens fit."""
    said: list[str] = []
    size = "GPU KV cache size: 290,864 tokens"
    log = [size, "Maximum concurrency for 32,768 tokens per request: 33.04x"]
    assert overheads_of(log, tell=said.append).kv_tokens == 1_082_655
    assert "290,864" in said[0]
    assert "1,082,655" in said[0]
    alike = [size, "Maximum concurrency for 8,192 tokens per request: 35.51x"]
    assert overheads_of(alike, tell=said.append).kv_tokens == 290_864
    assert len(said) == 1


def refuse(works):
    raise AssertionError(f"{len(works)} steps were timed")


def test_a_budget_is_simulated_and_a_log_goes_before_it(small_model, tmp_path):
    bench = Workbench(Sources.at(str(tmp_path), order=("network", "analytical")))
    request = SimulateRequest(
        model=small_model("gemma2", max_position_embeddings=65_536),
        cluster=replace(load_cluster("dgx_h100"), devices_per_node=1),
        device="h100_sxm",
        stack=load_stack("vllm"),
        sources=bench.sources,
    )
    every = replace(request, stack=replace(load_stack("vllm"), windows="alike"))
    untimed = replace(steps_of(request, bench), simulate_all=refuse)  # memory is asked without any times
    own, alike = untimed.kv_budget(VLLM.kv, 512), steps_of(every, bench).kv_budget(TRTLLM.kv, 512)
    layer = 2 * 2 * 16 * 2  # heads, keys and values, width, bytes
    assert alike.bytes_per_token == 3 * layer
    assert round(own.bytes_per_token) in (layer, 2 * layer)
    assert own.tokens * own.bytes_per_token / 2**30 == pytest.approx(0.9 * 79.1 - 0.5 - 0.5, abs=0.2)
    said = steps_of(request, bench).kv_budget(VLLM.kv, 512, overheads_of(VLLM_LOG))
    assert said.tokens == pytest.approx(231_984, abs=16)
    assert steps_of(request, bench).kv_budget(SGLANG.kv, 512, Overheads(kv_tokens=494_000)).tokens == pytest.approx(
        494_000, abs=1
    )


def test_layers_with_a_window_keep_all_of_a_short_sequence_and_little_of_a_long_one(small_model, tmp_path):
    bench = Workbench(Sources.at(str(tmp_path), order=("network", "analytical")))
    layer, stack = 2 * 2 * 16 * 2, load_stack("vllm")
    every = {"max_position_embeddings": 65_536, "sliding_window": 8}

    def budget(model, rule=VLLM.kv, stack=stack, cached=LONG, seen=None):
        cluster = replace(load_cluster("dgx_h100"), devices_per_node=1)
        request = SimulateRequest(model, cluster=cluster, device="h100_sxm", stack=stack, sources=bench.sources)
        return steps_of(request, bench).kv_budget(rule, 512, seen, cached=cached)

    mistral = small_model("mistral", **every)  # all its layers have a window
    layers = mistral["num_hidden_layers"]
    short, long = budget(mistral, cached=4), budget(mistral, cached=799)
    assert short.bytes_per_token == layers * layer
    assert long.bytes_per_token == pytest.approx(layers * layer * 8 / 800, rel=0.2)
    assert short.longest > 1000 * short.tokens
    logged = budget(mistral, cached=4, seen=Overheads(kv_tokens=8_000_000))
    assert logged.longest == pytest.approx(8_000_000, rel=0.01)  # an engine's log counts tokens of a long one
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "state_size": 16}
    mamba = {
        "model_type": "mamba2",
        "vocab_size": 256,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **sizes,
    }
    states = [budget(mamba, cached=tokens) for tokens in (99, 199)]  # nothing is kept of a token
    assert states[0].bytes_per_token == pytest.approx(2 * states[1].bytes_per_token)
    assert states[0].longest == pytest.approx(states[1].longest, rel=0.01)
    gemma, sglang = small_model("gemma2", **every), load_stack("sglang")  # two of three layers
    shares = [budget(gemma, replace(SGLANG.kv, window_share={"gemma2": share}), sglang) for share in (1, 0.5)]
    assert shares[0].bytes_per_token == 3 * layer
    assert shares[1].bytes_per_token == pytest.approx(2 * layer)


def test_beside_keys_and_values_sglang_needs_room_for_a_chunk_and_others_for_a_whole_pass():
    assert SGLANG.kv.pass_tokens(16_384, 8192) == 8192
    assert VLLM.kv.pass_tokens(16_384, 8192) == TRTLLM.kv.pass_tokens(16_384, 8192) == 16_384


def test_a_version_tells_whether_the_engine_schedules_a_step_ahead():
    assert host_name("vllm", VLLM.host, "0.18.0") == host_name("vllm", VLLM.host) == "vllm"
    assert host_name("vllm", VLLM.host, "0.12.0") == "vllm serial"
    assert host_name("vllm", VLLM.host, "nightly-5b8c30d6") == "vllm"
    assert host_name("vllm", VLLM.host, "0.18.0", overlapped=False) == "vllm serial"
    serial = FittedHost({"step_us": 2000.0}, most_clients=48)
    hosts = FittedHosts({"all": FittedHost({"step_us": 5.0}), "vllm serial": serial})
    assert hosts.of("vllm serial") == HostTime(2000.0, overlapped=False, most_clients=48)
    assert hosts.of("sglang") == HostTime(5.0)
    assert FittedHosts({}).of("sglang") == HostTime()


def test_the_hosts_that_ship_are_those_of_every_engine_with_their_rows():
    hosts = fitted_hosts()
    assert {"all", "vllm", "vllm serial", "sglang", "trtllm"} <= set(hosts.engines)
    for each in hosts.engines.values():
        assert set(each.value) == set(each.error) == set(FIGURES)
        assert each.rows >= 8
        assert each.groups >= 1
    known = {name: values[0] for name, values in hosts.known.items()}
    for quantity in ("tpot", "ttft", "throughput"):
        widths = [hosts.width(run, quantity) or 0 for run in (known, known | {"model": "another"}, {})]
        assert 0 < widths[0] <= widths[1] <= widths[2] < 3


def test_an_engine_that_does_not_exist_is_one_line():
    with pytest.raises(ServingEngineError, match="vllm"):
        load_serving_engine("vlm")


def test_states_take_of_the_kv_memory_what_their_sequences_need_and_no_more_than_a_part():
    each = TokenBytes(whole=40_000.0, state=2.0**26)
    assert beside_states(40.0, each, 128) == pytest.approx(40.0 - 128 / 16)
    assert beside_states(40.0, each, 100_000) == pytest.approx(40.0 / 1.9)
    assert beside_states(40.0, TokenBytes(40_000.0), 128) == 40.0


def test_limits_are_those_of_the_engine_on_a_device():
    def of(engine, name):
        device = load_device(name)
        return engine.limits_on(device.name, device.memory_gib)

    assert [of(VLLM, name).max_tokens for name in ("h100_sxm", "b200_sxm", "a100_sxm_80gb", "l40s")] == [
        8192,
        16_384,
        2048,
        2048,
    ]
    assert [of(SGLANG, name).chunk for name in ("h100_sxm", "b200_sxm", "l40s")] == [8192, 16_384, 4096]
    assert of(TRTLLM, "h100_sxm").max_seqs == 2048
    replica = replace(by_hand(IterationLaw(1.0), 9, 16, 0.0), limits=of(VLLM, "a100_sxm_80gb"))
    assert (rules(Scheduler(), replica).max_tokens, rules(Scheduler(max_tokens=99), replica).max_tokens) == (2048, 99)


@pytest.mark.parametrize(
    ("described", "tokens"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"text_config": {"max_position_embeddings": 262_144}}, 262_144),
        (
            {
                "max_position_embeddings": 32_768,
                "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32_768},
            },
            131_072,
        ),
        ({"max_position_embeddings": 8192, "rope_scaling": "linear"}, 8192),
        ({"max_position_embeddings": 8192, "rope_scaling": {"factor": [2]}}, 8192),
        ({"max_position_embeddings": [2048]}, 1 << 30),
        ({}, 1 << 30),
    ],
)
def test_the_context_is_that_of_the_model(described, tokens):
    assert context_of(described) == tokens
