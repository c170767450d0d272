"""Random words after every verb, and random files in their settings: always an exit code and a line, never a surprise.

``OPCAST_FUZZ_TRIALS=1000 OPCAST_FUZZ_SEED=7 pytest tests/jobs/test_fuzz.py`` tries more, with other random numbers.
A trial fails when it ends in another exit code than 0, 1, 2 and 130, when an exception reaches the net of the command
line, when it prints a traceback, when ``format=json`` prints no object, or when it takes longer than LIMIT_S.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import FrameType

import pytest

from opcast.datasets.reading import read_json, read_yaml
from opcast.harness.plan import CampaignPlan, build_plan
from opcast.jobs import cli
from opcast.simulator.formats.simai import read_busbw, read_workload
from opcast.simulator.network.astra import read_astra_system
from opcast.simulator.network.build import read_topology as read_topology
from opcast.simulator.network.query import read_transfers as read_transfers
from opcast.simulator.question.predictions import PredictRequest
from opcast.simulator.question.requests import SimulateRequest, ValidateRequest
from opcast.simulator.search.launch_reading import settings_of_launch
from opcast.simulator.search.served.servers import settings_of_servers

TRIALS = int(os.environ.get("OPCAST_FUZZ_TRIALS", "120"))
SEED = int(os.environ.get("OPCAST_FUZZ_SEED", "20"))
LIMIT_S = 20
BLOCKS = 4

DEEP = 10_000
BOMB = "[" + ", ".join(f"&a{n} [{', '.join([f'*a{n - 1}' if n else '1'] * 10)}]" for n in range(9)) + "]"
# What may stand in the place of a word of a file
ODD = (
    *("[" * DEEP, "[" * DEEP + "]" * DEEP, '{"a":' * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "- " * DEEP + "1"),
    *("1e400", "-1e400", "NaN", "Infinity", ".nan", "-.inf", "9" * 400, "9" * 5000, "-" + "9" * 400, "1" + "0" * 30),
    *("&a [*a]", "&b {b: *b}", BOMB, "!!int ''", "!!bool foo", "!!float ''", "!!timestamp x", "!!set {a}", "null"),
    *("2001-99-99", "2001-01-01", "true", "0", "-1", "1000000000", "0.5", "[]", "{}", "[1]", '{"a": 1}', '""', "' '"),
    *("!!binary a", '"\\ud800"', "'='", "'=" + "(" * 300 + "'", "{low: 1, high: 2, sample: 1000000000}", "٣"),
)
VALUES = (
    *("null", "true", "false", "0", "1", "-1", "2", "3", "7", "0.5", "-0.5", "1e9", "1e30", "999999999999999999999999"),
    *(
        "nan",
        "inf",
        "-inf",
        "''",
        "' '",
        "foo",
        "FOO",
        "üñí",
        "'a b'",
        "'%s'",
        "a/b",
        "../x",
        "~",
        "/",
        "/nowhere/nope",
        "/etc/passwd",
    ),
    *("[]", "[1]", "[1,2]", "[null]", "[[1]]", "[foo]", "{}", "{a: 1}", "{a: {b: [1]}}", "[{a: 1}]", "1GiB", "'\\x00'"),
    *("1e400", "9" * 400, "9" * 5000, "[" * 200 + "]" * 200, "[" * DEEP + "]" * DEEP, "{a: " * 200 + "1" + "}" * 200),
    *("'٣'", "1,2", "a,b", "${nope}", "${home}", "???", "'{x}'", "[", "{", "'", "=", "x=y"),
)
GEMM = ["op=gemm", "op.m=64", "op.n=128", "op.k=256", "device=h100_sxm"]
RING = ["op=all_reduce", "op.size_bytes=1MiB", "op.ranks=4", "device=h100_sxm", "cluster=dgx_h100"]
STEP = ["model=tiny_llama_100m", "device=h100_sxm", "workload.seq_len=64"]
FAR = ["model=tiny_llama_100m", "cluster=dgx_h100", "workload.seq_len=64"]
TINY_SPACE = ["space.tp=[1,2]", "space.pp=1", "space.cp=1", "space.micro_batch=1", "space.recompute=none"]
STARTS: dict[str, list[list[str]]] = {
    "predict": [
        *(GEMM, RING, [*RING, "network=flow"], ["op=gemm", "device=h100_sxm", "shapes={files}/shapes.csv"]),
        *([*RING, "network=flow", "cluster.topology.file={files}/" + name] for name in ("links.yaml", "astra.yaml")),
        ["op=gemm", "device=h100_sxm", "shapes={files}/shapes.json"],
        ["transfers={files}/jobs.yaml", *RING[3:]],
    ],
    "simulate": [
        *([*STEP, "workload=train"], [*STEP[:2], "workload=decode", "workload.input_len=64"]),
        ["model={files}/config.json", *STEP[1:]],
        ["workload=simai", "workload.file={files}/simai.txt", "workload.busbw={files}/busbw.txt", "cluster=dgx_h100"],
        *([f"launch={{files}}/{name}", *FAR[:2]] for name in ("titan.toml", "accelerate.yaml", "megatron.sh")),
        *([*FAR, "workload=train"], [*FAR[:2], "workload=generate", "workload.input_len=64", "workload.output_len=4"]),
    ],
    "validate": [["truth={files}/truth.csv"], ["truth={files}/step.csv"]],
    "import": [[f"source={name}", "path={files}/" + file] for name, file in (
        ("csv", "shapes.csv mapping={files}/map.yaml"), ("kineto", "trace.json"), ("nccl-tests", "text.txt"),
        ("vidur", ""), ("neusight", ""),
    )],
    "data": [[], ["check"]],
    "train": [["device=h100_sxm", "tracking=null"]],
    "profile": [["plan_out={files}/plan.json"]],
    "trace": [["check", "path={files}/trace.json"], ["convert", "path={files}/trace.json", "output={files}/made.et"],
              *(["link", "path={files}/trace.json", "output={files}/linked"], ["analyse", "path={files}/trace.json"])],
    "calibrate": [["tables=[{files}/truth.csv]"]],
    "serving": [
        ["law={base_us:5000,decode_us:20,prefill_token_us:60}", "kv.blocks=1000", "traffic.requests=20"],
        ["model=tiny_llama_100m", "device=h100_sxm", "traffic.requests=20", "traffic.output.mean=4"],
        ["launch={files}/start.sh", "device=h100_sxm", "traffic.requests=20", "traffic.output.mean=4"],
    ],
    "search": [[*FAR, "workload.global_batch=64", "workers=1", *TINY_SPACE]],
    "plan": [[*FAR, "workload.global_batch=64", "tokens=1e9", "lives=20"]],
    "compare": [["chips", *FAR, "others=[dgx_h200]", "workload.global_batch=64"]],
    "list": [["devices"], ["models"], ["ops"], ["predictors"], ["clusters"]],
}  # fmt: skip
SETTINGS: dict[str, tuple[str, ...]] = {
    "*": ("store", "predictors", "home", "format", "foo", "~device", "~home", "+foo", "++foo"),
    "predict": (
        *("op", "op.m", "op.n", "op.dtype", "op.out_dtype", "op.layout", "op.ranks", "op.size_bytes", "op.mm", "+op.x"),
        *("device", "device.memory_gbps", "device.foo", "device.tensor_tflops", "device.id", "device.name", "cluster"),
        *("cluster.nodes", "cluster.nic_gbps", "cluster.topology", "cluster.nccl", "cluster.device", "shapes"),
        *("output",),
        *("cache", "backend", "power_cap_w", "sm_clock_mhz", "engine", "engine.order", "network", "group", "stride"),
        *("all_groups", "algorithm", "transfers", "faults", "fault_draw", "faults_study", "report", "picture"),
    ),
    "simulate": (
        *("model", "model.config", "model.config.hidden_size", "model.config.num_hidden_layers", "model.name"),
        *("model.config.num_attention_heads", "model.config.vocab_size", "model.config.rope_theta", "workload"),
        *("stack", "device"),
        *("workload.seq_len", "workload.micro_batch", "workload.global_batch", "workload.batch", "workload.input_len"),
        *("workload.recompute", "workload.expert_load", "workload.cache", "workload.kind", "workload.data_loading_ms"),
        *("parallel", "parallel.tp", "parallel.pp", "parallel.dp", "parallel.cp", "parallel.ep", "parallel.vpp"),
        *("parallel.zero_stage", "parallel.schedule", "parallel.order", "parallel.placement", "parallel.stages"),
        *("precision", "precision.dtype", "precision.quantization", "cluster.nodes", "cluster.topology", "cluster"),
        *("stack.fusion", "stack.id", "options", "options.zigzag", "offload", "passes", "stragglers", "strict"),
        *("network", "faults", "fault_draw", "faults_study", "within_s", "price_per_gpu_hour", "expand", "report"),
        *("chakra", "durations", "policy"),
        *("trace", "simai", "graphs", "backend", "calibration", "engine.order", "device.tdp_w", "device.vendor"),
    ),
    "validate": ("truth", "rival", "details", "limit", "device", "cluster", "stack", "cluster.nic_gbps", "backend"),
    "calibrate": ("tables", "rows", "output", "scores", "picture", "calibration", "graphs"),
    "import": ("source", "path", "systems", "tables", "frameworks", "link", "collective", "measured_at", "mapping"),
    "data": ("what",),
    "trace": ("what", "path", "output", "host", "other", "report", "predicted", "measured", "steps"),
    "train": (
        *("device", "op", "eval", "promote", "power", "predictor", "predictor.folds", "predictor.families"),
        *("predictor.candidates", "predictor.lightgbm", "predictor.coverage", "tracking"),
    ),
    "profile": (
        *("campaign", "campaign.cases", "campaign.budget_s", "campaign.dtype", "campaign.settings", "settings"),
        *("model",),
        *("campaign.settings.device", "campaign.canaries", "campaign.name", "workloads", "precision", "plan_out"),
    ),
    "serving": (
        *("law", "law.base_us", "traffic", "traffic.rate", "traffic.arrival", "traffic.requests", "traffic.input"),
        *("traffic.input.mean", "traffic.output.kind", "traffic.prefixes", "traffic.turns", "traffic.trace", "slo"),
        *("traffic.speed", "traffic.seed", "scheduler", "scheduler.policy", "scheduler.max_seqs", "scheduler.chunk"),
        *("kv", "kv.blocks", "kv.fraction", "slo.ttft_ms", "slo.share", "replicas", "attention_dp", "router"),
        *("autoscale", "autoscale.policy", "autoscale.target", "cold_start.seconds", "failures.mtbf_h", "second_kind"),
        *("second_kind.replicas", "scorers", "scorers.queue", "traffic.swing"),
        *("decode_pool", "decode_pool.replicas", "speculation", "engine", "args", "calibrate", "what", "rates"),
        *("requests", "report", "trace", "parallel.tp", "precision", "cluster", "price_per_gpu_hour", "launch"),
    ),
    "search": (
        *("space", "space.tp", "space.pp", "space.zero_stage", "space.rules", "space.recompute", "space.overlap"),
        *("objectives", "constraints", "points", "report", "launch", "framework", "workers", "top", "sampler"),
        *("workload.global_batch", "cluster.nodes", "stack", "precision", "crew", "crew.engine", "model"),
    ),
    "plan": (
        *("tokens", "lives", "layout", "failures", "failures.fleet", "checkpoint", "checkpoint.every_minutes"),
        *("checkpoint.store_gbps", "restart.minutes", "spares", "energy.pue", "price_per_gpu_hour", "step_time_s"),
        *("report", "picture", "cluster.nodes", "workload.global_batch", "parallel.tp", "seed"),
    ),
    "compare": ("others", "prices", "power_caps_w", "price_per_kwh", "pue", "cluster", "workload", "what", "model"),
    "list": ("what",),
}  # fmt: skip
FLAGS = ("--help", "--cfg", "job", "--info", "--foo", "-", "--version", "--resolve", "", "=", "-m")
PATHS = {
    "shapes",
    "output",
    "truth",
    "path",
    "mapping",
    "transfers",
    "model",
    "report",
    "trace",
    "plan_out",
    "graphs",
    "store",
}
CONTENTS = {
    "shapes.csv": b"m,n,k\n64,128,256\n1,2,3\n",
    "truth.csv": b"id,kind\n1,training\n",
    "step.csv": b"row_id,model_canon,gpu_canon,num_gpus,precision,tp,pp,seq_len_tokens,gbs_seqs,step_time_s,"
    b"layers,hidden,heads,extra\n1,gpt,A100,8,BF16,8,1,128,8,1.5,2,64,4,stage 1\n",
    "shapes.json": b'[{"m": 64, "n": 128, "k": 256}, {"m": 1, "n": 2, "k": 3, "dtype": "fp16"}]',
    "trace.json": b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 2, "args": {}}]}',
    "text.txt": b"# nThread 1 nGpus 8\n  1048576  262144  float  sum  -1  40.0 26.2 45.9 0\n",
    "config.json": b'{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}',
    "map.yaml": b"kind: gemm\ncolumns: {m: m, n: n, k: k, latency_us: {column: k, unit: us}}\n"
    b"constants: {dtype: bf16, device_id: h100_sxm, backend: torch, measured_at: 2025-01-31, license: MIT}\n",
    "jobs.yaml": b"- {name: a, collective: all_reduce, group: [0, 1], size_bytes: 1MiB, start_us: 0}\n"
    b"- {collective: all_gather, group: {ranks: 4, stride: 1, first: 0}, size_bytes: 4096, after: [a]}\n",
    "links.yaml": b"nodes: [{name: a, rank: true}, {name: b, rank: true}]\n"
    b"links: [{from: a, to: b, bandwidth_gbps: 50, latency_us: 1, kind: ib}]\n",
    "astra.yaml": b"topology: [Ring, Switch]\nnpus_count: [4, 2]\nbandwidth: [50.0, 25.0]\nlatency: [500.0, 700]\n",
    "system.json": b'{"all-reduce-implementation": ["ring", "direct4"], "active-chunks-per-dimension": 4}',
    "simai.txt": b"HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 4 ep: 2 pp: 1 vpp: 1 ga: 1 all_gpus: 8 "
    b"checkpoints: 0 checkpoint_initiates: 0 pp_comm 1024\n1\nattention -1 5000 ALLGATHER 503 70 NONE 0 1 NONE 0 100\n",
    "titan.toml": b"[training]\nseq_len = 64\nlocal_batch_size = 1\n[parallelism]\ntensor_parallel_degree = 2\n"
    b"pipeline_parallel_degree = 2\npipeline_parallel_schedule = '1F1B'\n[activation_checkpoint]\nmode = 'full'\n",
    "accelerate.yaml": b"distributed_type: FSDP\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\n"
    b"fsdp_config: {fsdp_version: 2}\nparallelism_config: {parallelism_config_dp_shard_size: 8}\n",
    "megatron.sh": b"torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 2 --seq-length 64 --bf16\n",
    "start.sh": b"#!/bin/sh\ncat > both.yaml <<'END'\nenable_attention_dp: false\nEND\n"
    b"trtllm-serve tiny_llama_100m --tp_size 1 --max_batch_size 8 --extra_llm_api_options both.yaml --port 8000 &\n",
    "start.yaml": b"kind: Deployment\nspec: {replicas: 2, template: {spec: {containers: [{command: [vllm, serve, "
    b"tiny_llama_100m], args: [--max-num-seqs, '8']}]}}}\n",
    "busbw.txt": b"opcast\nTP:\n  allreduce,: 100.5\n  allgather,: null\nPP:\n  busbw: 40\n",
    "plan.json": build_plan(
        {"name": "few", "ops": [{"kind": "gemm", "m": 1, "n": 2, "k": 3}],
         "canaries": [{"kind": "copy", "size_bytes": 4}]}
    ).to_json().encode(),
    "campaign.yaml": b"{name: few, budget_s: 10, settings: {device: cpu, seed: 20, threads: 1, ci_width: 0.03}, "
    b"cases: [{kind: gemm, share: 3, case_s: 1, m: {low: 8, high: 64, align: tokens}, n: {log2: [1, 64, 4]}, "
    b"k: '=m * 2', where: 'm > 1'}, {kind: copy, size_bytes: [4, 8], dtype: fp32}]}",
    "predict.json": PredictRequest.from_dict(
        {"ops": [{"kind": "all_reduce", "size_bytes": 8, "ranks": 4, "dtype": "bf16"}], "device": "h100_sxm",
         "cluster": "dgx_h100", "group": [0, 1]}
    ).to_json().encode(),
    "simulate.json": SimulateRequest.from_dict(
        {"model": {"model_type": "llama"}, "device": "h100_sxm", "cluster": "dgx_h100", "options": {"zigzag": True},
         "stragglers": [{"node": 0, "slowdown": 1.5}],
         "network": {"fidelity": "flow", "faults": [{"node": "leaf0", "gone": True}]}}
    ).to_json().encode(),
    "validate.json": ValidateRequest("x.csv", device={"tdp_w": 3}, cluster={"nodes": 2}).to_json().encode(),
}  # fmt: skip
READERS: dict[str, Callable[[Path], object]] = {
    "links.yaml": read_topology,
    "astra.yaml": read_topology,
    "jobs.yaml": lambda path: read_transfers(path, 16),
    "system.json": lambda path: read_astra_system(path.read_text()),
    "simai.txt": lambda path: read_workload(path.read_text()),
    "busbw.txt": lambda path: read_busbw(path.read_text()),
    "plan.json": CampaignPlan.from_json,
    "campaign.yaml": lambda path: build_plan(read_yaml(path, FileError)),
    "predict.json": lambda path: PredictRequest.from_json(path.read_text()),
    "simulate.json": lambda path: SimulateRequest.from_json(path.read_text()),
    "validate.json": lambda path: ValidateRequest.from_json(path.read_text()),
    "config.json": lambda path: read_json(path, FileError),
    **{
        name: lambda path: settings_of_launch(path, "tiny_llama_100m")
        for name in ("titan.toml", "accelerate.yaml", "megatron.sh")
    },
    **dict.fromkeys(("start.sh", "start.yaml"), settings_of_servers),
}


class FileError(ValueError):
    """A file that a reader refuses."""


@pytest.fixture
def nets(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """The exceptions that nobody foresaw."""
    met: list[BaseException] = []
    said = cli.unforeseen

    def noted(error: Exception) -> str:
        met.append(error)
        return said(error)

    monkeypatch.setattr(cli, "unforeseen", noted)
    return met


class TooLongError(BaseException):
    """A trial that does not end."""


@pytest.fixture
def alarm() -> Iterator[None]:
    """Ends a trial that takes too long; a BaseException, which nothing on the way takes for its own."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGPROF, ring)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


def damaged(random: Random, content: bytes) -> bytes:
    """A file's content as it may come: cut, with bytes that are none of a text, empty, doubled, with odd words."""
    way = random.randrange(10)
    if way > 6:
        return odd(random, content)
    if way == 0:
        return content[: random.randrange(len(content) + 1)]
    if way == 1:
        at = random.randrange(len(content))
        return content[:at] + bytes(random.randrange(256) for _ in range(4)) + content[at + 4 :]
    if way == 2:
        return random.choice(
            (b"", b"\n", b"\x00", b"\xff\xfe", b"[[[[", b"{}", b"[]", b"null", b"5", b"[" * 20_000, b"\x1f\x8b")
        )
    if way == 3:
        return content.replace(
            random.choice((b"1", b"a", b",", b":", b"{", b"\n")), random.choice((b"", b"-", b"\xc3\xa9", b'"'))
        )
    return content * 2 if way == 4 else content


def odd(random: Random, content: bytes) -> bytes:
    """A file's content with something else in the place of a word or number."""
    words = list(re.finditer(rb"[^\s,:{}\[\]()]+", content))
    at = random.choice(words)
    return content[: at.start()] + random.choice(ODD).encode() + content[at.end() :]


def command(random: Random, files: Path) -> list[str]:
    """A verb with a sensible start and up to three settings that may be anything."""
    verb = random.choice(list(STARTS))
    given = " ".join(random.choice(STARTS[verb])).split()
    words = [word.format(files=files) if "{files}" in word else word for word in given]
    for _ in range(random.choice((1, 1, 2, 3))):
        name = random.choice(SETTINGS["*"] if random.random() < 0.15 else SETTINGS[verb])
        value = random.choice(VALUES)
        if name.lstrip("+~") in PATHS and random.random() < 0.7:
            value = str(
                files / random.choice([*CONTENTS, "", "none.csv", "none/x.json", "out.csv", "out.parquet", "out.xyz"])
            )
        words.append(name if name.startswith("~") else f"{name}={value}")
    if random.random() < 0.08:
        words.insert(random.randrange(len(words) + 1), random.choice(FLAGS))
    if random.random() < 0.1 and words and verb != "profile":  # which without plan_out= would measure
        words.pop(random.randrange(len(words)))
    return [verb, *words, *(["format=json"] if random.random() < 0.5 else [])]


def wrong(arguments: list[str], nets: list[BaseException], capsys: pytest.CaptureFixture[str]) -> str:
    """What is wrong with how a command ended; "" where nothing is."""
    nets.clear()
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        code = cli.main(arguments)
    except TooLongError:
        return f"took more than {LIMIT_S} s"
    except BaseException as error:
        return f"ended in {type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        out, err = capsys.readouterr()
    if nets:
        return f"unforeseen {type(nets[0]).__name__}: {nets[0]}"
    if code not in (0, 1, 2, 130):
        return f"exit code {code}"
    if "Traceback" in err:
        return "printed a traceback"
    if code == 2 and "opcast: " not in err:
        return "exit code 2 without a line"
    plain = not any(word.startswith("-") for word in arguments)
    if plain and [word for word in arguments if word.startswith("format=")][-1:] == ["format=json"]:
        try:
            found = json.loads(out, parse_constant=no_constant)
        except ValueError:
            return f"format=json printed no object: {out[:100]!r}"
        if code == 2 and "error" not in found:
            return "exit code 2 without an error in its object"
    return ""


def no_constant(name: str) -> None:
    raise ValueError(name)


def strays(folder: Path, arguments: list[str]) -> str:
    """What lies in a folder beside the files, the home and what words name; it is taken away."""
    named = " ".join((*arguments, "multirun" if "-m" in arguments else ""))
    extra = [path for path in sorted(folder.iterdir()) if path.name not in ("files", "home")]
    for path in extra:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    unnamed = [path.name for path in extra if path.name not in named]
    return f"wrote {', '.join(unnamed)}, which nothing named" if unnamed else ""


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_words_and_no_files_surprise_the_command(
    block: int,
    nets: list[BaseException],
    alarm: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("OPCAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    failed = []
    for trial in range(TRIALS // BLOCKS):
        random = Random(f"{SEED} {block} {trial}")
        files = tmp_path / "files"
        shutil.rmtree(files, ignore_errors=True)
        files.mkdir()
        for name, content in CONTENTS.items():
            (files / name).write_bytes(damaged(random, content) if random.random() < 0.5 else content)
        arguments = command(random, files)
        if found := wrong(arguments, nets, capsys) or strays(tmp_path, arguments):
            failed.append(f"opcast {' '.join(map(repr, arguments))}: {found}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("name", READERS)
def test_no_content_surprises_a_reader(name: str, alarm: None, tmp_path: Path):
    failed = []
    for trial in range(TRIALS // 2):
        random = Random(f"{SEED} {name} {trial}")
        content = damaged(random, CONTENTS[name]) if random.random() < 0.2 else odd(random, CONTENTS[name])
        (tmp_path / name).write_bytes(content)
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        try:
            READERS[name](tmp_path / name)
        except (Exception, TooLongError) as error:
            refused = type(error).__module__.startswith("opcast") and isinstance(error, ValueError)
            if not refused and not isinstance(error, (UnicodeDecodeError, FileError)):
                failed.append(f"{content[:500]!r}: {type(error).__name__}: {str(error)[:200]}")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    assert not failed, "\n".join(failed)
