"""What the fuzzers draw from: a sensible start of every verb, all settings as declared, odd values and files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from opcast.datasets.clusters import Cluster
from opcast.datasets.devices import Device
from opcast.datasets.ops import KINDS
from opcast.harness.plan import build_plan
from opcast.jobs.cli import HYDRA_FLAGS
from opcast.jobs.questions import CHOICES, of_choice
from opcast.jobs.settings import ENDINGS, FILES, FOLDERS, PARTS, defaults
from opcast.simulator.question.predictions import PredictRequest
from opcast.simulator.question.requests import SimulateRequest, ValidateRequest
from opcast.simulator.question.stack import Stack

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
VALUES = (  # and in the place of a setting's value
    *("null", "true", "false", "0", "1", "-1", "2", "3", "7", "0.5", "-0.5", "1e9", "1e30", "999999999999999999999999"),
    *("nan", "inf", "-inf", "''", "' '", "foo", "FOO", "üñí", "'a b'", "'%s'", "a/b", "../x", "~", "/"),
    *("/nowhere/nope", "/proc/version", "[]", "[1]", "[1,2]", "[null]", "[[1]]", "[foo]", "{}", "{a: 1}", "'\\x00'"),
    *("{a: {b: [1]}}", "[{a: 1}]", "1GiB", "1e400", "9" * 400, "9" * 5000, "[" * 200 + "]" * 200),
    *("[" * DEEP + "]" * DEEP, "{a: " * 200 + "1" + "}" * 200, "'٣'", "1,2", "a,b", "${nope}", "${home}", "???"),
    *("'{x}'", "[", "{", "'", "=", "x=y", "${oc.env:HOME}"),
)
GEMM = "op=gemm op.m=64 op.n=128 op.k=256 device=h100_sxm"
RING = "op=all_reduce op.size_bytes=1MiB op.ranks=4 device=h100_sxm cluster=dgx_h100"
STEP = "model=tiny_llama_100m device=h100_sxm workload.seq_len=64"
FAR = "model=tiny_llama_100m cluster=dgx_h100 workload.seq_len=64"
BATCH = f"{FAR} workload.global_batch=64"
SPACE = "space.tp=[1,2] space.pp=1 space.cp=1 space.micro_batch=1 space.recompute=none workers=1"
LAW = "law={base_us:5000,decode_us:20,prefill_token_us:60} kv.blocks=1000 traffic.requests=20"
SERVED = "model=tiny_llama_100m device=h100_sxm traffic.requests=20 traffic.output.mean=4"
RL = "model=tiny_llama_100m cluster=dgx_h100 workload.seq_len=128 prompts=8 lives=20 batches=1"
TABLE = "table={files}/out.parquet workers=1"
STARTS: dict[str, tuple[str, ...]] = {  # what follows a verb; {files} is the folder of CONTENTS
    "predict": (
        *(GEMM, RING, f"{RING} network=flow", "op=gemm device=h100_sxm shapes={files}/shapes.csv"),
        *(f"{RING} network=flow cluster.topology.file={{files}}/{name}" for name in ("links.yaml", "astra.yaml")),
        *("op=gemm device=h100_sxm shapes={files}/shapes.json", "transfers={files}/jobs.yaml cluster=dgx_h100"),
    ),
    "simulate": (
        *(f"{STEP} workload=train", "model=tiny_llama_100m device=h100_sxm workload=decode workload.input_len=64"),
        "model={files}/config.json device=h100_sxm workload.seq_len=64",
        "workload=simai workload.file={files}/simai.txt workload.busbw={files}/busbw.txt cluster=dgx_h100",
        *(
            f"launch={{files}}/{name} model=tiny_llama_100m cluster=dgx_h100"
            for name in ("titan.toml", "accelerate.yaml", "megatron.sh")
        ),
        f"{FAR} workload=train",
        "model=tiny_llama_100m cluster=dgx_h100 workload=generate workload.input_len=64 workload.output_len=4",
    ),
    "validate": ("truth={files}/truth.csv", "truth={files}/step.csv"),
    "import": (
        *("source=csv path={files}/shapes.csv mapping={files}/map.yaml", "source=kineto path={files}/trace.json"),
        *("source=nccl-tests path={files}/text.txt", "source=vidur path={files}", "source=neusight path={files}"),
    ),
    "data": (
        *("", "check", "gain", "nodes", "repeat against={files}", "drift against={files}"),
        "bundle output={files}/out.tar.gz site=here license=MIT",
    ),
    "train": ("device=h100_sxm tracking=null",),
    "profile": ("plan_out={files}/out.json",),
    "profile_coverage": (STEP,),
    "onboard": ("",),
    "quickstart": ("",),
    "trace": (
        *("check path={files}/trace.json", "convert path={files}/trace.json output={files}/out.et"),
        *("link path={files}/trace.json output={files}/out", "analyse path={files}/trace.json"),
        *(f"{what} path={{files}}/trace.json" for what in ("collect", "replay", "generate", "view", "reconstruct")),
        *("explain predicted={files} measured={files}/trace.json", "calibrate predicted={files} measured={files}"),
        "measure path={files}/trace.json",
    ),
    "calibrate": ("tables=[{files}/truth.csv]",),
    "serving": (
        *(LAW, SERVED, "launch={files}/start.sh device=h100_sxm traffic.requests=20 traffic.output.mean=4"),
        *(f"capacity {LAW} slo.ttft_ms=500 workers=1", f"sweep {LAW} rates=[1] workers=1"),
        *(f"compare {LAW} replicas=2 workers=1", f"caps {SERVED} power_caps_w=[400] workers=1"),
        *(f"calibrate {SERVED} log={{files}}/log.jsonl output={{files}}/out.json", f"{LAW} tiers.host_gib=1"),
        f"{LAW} traffic.trace=azure_code_like traffic.speed=0.1",
    ),
    "serving_observe": ("url=http://127.0.0.1:9 model_name=m most_requests=2 output={files}/out.parquet seconds=1",),
    "search": (f"{BATCH} {SPACE}",),
    "search_serving": ("model=tiny_llama_100m cluster=dgx_h100 space.tp=[1,2] space.batch=[8] workers=1",),
    "plan": (f"{BATCH} tokens=1e9 lives=20", f"{BATCH} steps=100 step_time_s=0.1 checkpoint.size_gb=1 lives=20"),
    "compare": (f"chips {BATCH} others=[dgx_h200]",),
    "upgrade": (
        "model=tiny_llama_100m device=h100_sxm workload=decode workload.input_len=64 stack=vllm changes=[engine]",
    ),
    "posttrain": (f"method=sft {RL}", f"method=grpo responses=2 {RL}", f"method=dpo {RL}"),
    "sweep": (
        f"plan {BATCH} steps=100 step_time_s=0.1 checkpoint.size_gb=1 lives=20 cluster.nodes=1,2 {TABLE}",
        f"simulate {STEP} workload=train workload.micro_batch=1,2 {TABLE}",
    ),
    "api": ("port=0",),
    "mcp": ("",),
    "new": ("device mine like=h100_sxm to={files}/out.yaml", "cluster ours like=dgx_h100 to={files}/out.yaml"),
    "completion": ("bash", "zsh", "line='opcast simulate model=l'"),
    "list": tuple("devices chips clusters models ops predictors stacks figures precisions".split()),
}
STRANGE = (
    "foo",
    "~device",
    "~home",
    "+foo",
    "++foo",
    "op.mm",
    "+op.x",
    "device.foo",
    "hydra.run.dir",
    "cluster.device",
)
FLAGS = (*HYDRA_FLAGS, "job", "--foo", "-", "--version", "", "=")
OF_GROUPS: dict[str, tuple[str, ...]] = {
    "device": tuple(field.name for field in fields(Device)),
    "cluster": tuple(field.name for field in fields(Cluster)),
    "stack": tuple(field.name for field in fields(Stack)),
    "op": tuple(dict.fromkeys(dim.name for kind in KINDS.values() for dim in kind.dims)),
    "model": ("config.hidden_size", "config.num_hidden_layers", "config.num_attention_heads", "config.rope_theta"),
    "campaign": ("cases", "budget_s", "settings", "settings.device", "canaries", "name"),
    "predictor": ("folds", "families", "candidates", "lightgbm", "coverage"),
}
PLACES = (*FILES, *FOLDERS, *ENDINGS, "transfers", "model", "against", "plan_out", "to", "lengths", "file", "trace")


@cache
def settings_of(verb: str) -> tuple[str, ...]:
    """The names of all settings of a verb, those of its groups included."""

    def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
        for name, value in values.items():
            yield prefix + name
            if isinstance(value, Mapping):
                yield from flat(value, f"{prefix}{name}.")

    names = list(flat(defaults(verb)))
    for group in set(names) & (OF_GROUPS.keys() | CHOICES.keys() | PARTS.keys()):
        names += [f"{group}.{name}" for name in (*OF_GROUPS.get(group, ()), *PARTS.get(group, ()))]
        names += [f"{group}.{each.name}" for choice in CHOICES.get(group, ()) for each in of_choice(group, choice)]
    return tuple(dict.fromkeys(names))


def command_of(random: Random, files: Path) -> list[str]:
    """The words of a command: a verb with a sensible start, and up to three settings that may be anything."""
    verb = random.choice(list(STARTS))
    words = [word.replace("{files}", str(files)) for word in random.choice(STARTS[verb]).split()]
    for _ in range(random.choice((1, 1, 2, 3))):
        name = random.choice(STRANGE if random.random() < 0.1 else settings_of(verb))
        value = random.choice(VALUES)
        if name.rpartition(".")[2] in PLACES and random.random() < 0.7:
            value = str(files / random.choice([*CONTENTS, "", "none.csv", "none/x.json", "out.csv", "out.xyz"]))
        words.append(name if name.startswith("~") else f"{name}={value}")
    if random.random() < 0.08:
        words.insert(random.randrange(len(words) + 1), random.choice(FLAGS))
    if random.random() < 0.1 and words:
        words.pop(random.randrange(len(words)))
    return [*verb.split("_"), *words, *(["format=json"] if random.random() < 0.5 else [])]


def damaged(random: Random, content: bytes) -> bytes:
    """A file's content as it may come: cut, with bytes that are none of a text, empty, doubled, with odd words."""
    way = random.randrange(10)
    if way > 6:
        return with_odd_word(random, content)
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


def with_odd_word(random: Random, content: bytes) -> bytes:
    """A file's content with something else in the place of a word or number."""
    words = list(re.finditer(rb"[^\s,:{}\[\]()]+", content))
    at = random.choice(words)
    return content[: at.start()] + random.choice(ODD).encode() + content[at.end() :]


def body_of(random: Random, usual: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A body of a call with up to three fields that may be anything, at its top or within."""
    body = {name: dict(value) if isinstance(value, Mapping) else value for name, value in usual.items()}
    for _ in range(random.choice((1, 1, 2, 3))):
        value = deepcopy(random.choice(JSON_VALUES))  # a case changes nothing of the next one
        parts = [part for part in body.values() if isinstance(part, dict) and part]
        if parts and random.random() < 0.4:
            part = random.choice(parts)
            part[random.choice([*part, "foo"])] = value
        else:
            body[random.choice(names) if random.random() < 0.9 else "foo"] = value
    return body


JSON_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 64, 0.5, -0.5, 1e9, 1e30, 10**24, 2**53, -(2**63), "", " ", "foo", "1"),
    *("üñí", "%s", "../x", "/proc/version", "~", "${oc.env:HOME}", "nan", "inf", "a:b", "x" * 3000, "\x00", "\ud800"),
    *([], [1], [[1]], [None], ["foo"], [{}], {}, {"a": 1}, {"a": {"b": [1]}}, {"": 1}, [{"a": 1}], [1e308, -1], "٣"),
    *(float("nan"), float("inf"), [0] * 1000, {str(at): at for at in range(300)}),
)
CONTENTS = {
    "shapes.csv": b"m,n,k\n64,128,256\n1,2,3\n",
    "truth.csv": b"id,kind\n1,training\n",
    "step.csv": b"row_id,model_canon,gpu_canon,num_gpus,precision,tp,pp,seq_len_tokens,gbs_seqs,step_time_s,"
    b"layers,hidden,heads,extra\n1,gpt,A100,8,BF16,8,1,128,8,1.5,2,64,4,stage 1\n",
    "shapes.json": b'[{"m": 64, "n": 128, "k": 256}, {"m": 1, "n": 2, "k": 3, "dtype": "fp16"}]',
    "trace.json": b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 2, "args": {}}]}',
    "text.txt": b"# nThread 1 nGpus 8\n  1048576  262144  float  sum  -1  40.0 26.2 45.9 0\n",
    "log.jsonl": b'{"worker_id": "a", "dp_rank": 0, "counter_id": 1, "wall_time": 0.01, "scheduled_requests": '
    b'{"num_prefill_requests": 1, "sum_prefill_tokens": 100, "num_decode_requests": 4, "sum_decode_kv_tokens": 900}}\n',
    "config.json": b'{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}',
    "map.yaml": b"kind: gemm\ncolumns: {m: m, n: n, k: k, latency_us: {column: k, unit: us}}\n"
    b"constants: {dtype: bf16, device_id: h100_sxm, backend: torch, measured_at: 2025-01-31, license: MIT}\n",
    "jobs.yaml": b"- {name: a, collective: all_reduce, group: [0, 1], size_bytes: 1MiB, start_us: 0}\n"
    b"- {collective: all_gather, group: {ranks: 4, stride: 1, first: 0}, size_bytes: 4096, after: [a]}\n",
    "links.yaml": b"nodes: [{name: a, rank: true}, {name: b, rank: true}]\n"
    b"links: [{from: a, to: b, bandwidth_gbps: 50, latency_us: 1, kind: ib}]\n",
    "astra.yaml": b"topology: [Ring, Switch]\nnpus_count: [4, 2]\nbandwidth: [50.0, 25.0]\nlatency: [500.0, 700]\n",
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
