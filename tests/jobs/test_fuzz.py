"""Random words after every verb, and random files in their settings: always an exit code and a line, never a surprise.

``OPCAST_FUZZ_TRIALS=1000 OPCAST_FUZZ_SEED=7 pytest tests/jobs/test_fuzz.py`` tries more, with other random numbers.
A trial fails when it ends in another exit code than 0, 1, 2 and 130, when an exception reaches the net of the command
line, when it prints a traceback, when ``format=json`` prints no object, or when it takes longer than LIMIT_S.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import FrameType

import pytest
from opcast.jobs import cli

TRIALS = int(os.environ.get("OPCAST_FUZZ_TRIALS", "120"))
SEED = int(os.environ.get("OPCAST_FUZZ_SEED", "20"))
LIMIT_S = 20
BLOCKS = 4

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
    *("'٣'", "1,2", "a,b", "${nope}", "${home}", "???", "'{x}'", "[", "{", "'", "=", "x=y"),
)
GEMM = ["op=gemm", "op.m=64", "op.n=128", "op.k=256", "device=h100_sxm"]
RING = ["op=all_reduce", "op.size_bytes=1MiB", "op.ranks=4", "device=h100_sxm", "cluster=dgx_h100"]
STEP = ["model=tiny_llama_100m", "device=h100_sxm", "workload.seq_len=64"]
FAR = ["model=tiny_llama_100m", "cluster=dgx_h100", "workload.seq_len=64"]
STARTS: dict[str, list[list[str]]] = {
    "predict": [GEMM, RING, [*RING, "network=flow"], ["op=gemm", "device=h100_sxm", "shapes={files}/shapes.csv"]],
    "simulate": [
        *([*STEP, "workload=train"], [*STEP[:2], "workload=decode", "workload.input_len=64"]),
        *([*FAR, "workload=train"], [*FAR[:2], "workload=generate", "workload.input_len=64", "workload.output_len=4"]),
    ],
    "validate": [["truth={files}/truth.csv"]],
    "import": [[f"source={name}", "path={files}/" + file] for name, file in (
        ("csv", "shapes.csv"), ("kineto", "trace.json"), ("nccl-tests", "text.txt"), ("vidur", ""), ("neusight", ""),
    )],
    "data": [[], ["check"]],
    "train": [["device=h100_sxm", "tracking=null"]],
    "profile": [["plan_out={files}/plan.json"]],
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
        *("trace", "simai", "graphs", "backend", "engine.order", "device.tdp_w", "device.vendor"),
    ),
    "validate": ("truth", "rival", "details", "limit", "device", "cluster", "stack", "cluster.nic_gbps", "backend"),
    "import": ("source", "path", "systems", "tables", "frameworks", "link", "collective", "measured_at", "mapping"),
    "data": ("what",),
    "train": (
        *("device", "op", "eval", "promote", "power", "predictor", "predictor.folds", "predictor.families"),
        *("predictor.candidates", "predictor.lightgbm", "predictor.coverage", "tracking"),
    ),
    "profile": (
        *("campaign", "campaign.cases", "campaign.budget_s", "campaign.dtype", "campaign.settings", "settings"),
        *("model",),
        *("campaign.settings.device", "campaign.canaries", "campaign.name", "workloads", "precision", "plan_out"),
    ),
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
    "trace.json": b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 2, "args": {}}]}',
    "text.txt": b"# nThread 1 nGpus 8\n  1048576  262144  float  sum  -1  40.0 26.2 45.9 0\n",
    "config.json": b'{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}',
    "map.yaml": b"kind: gemm\ncolumns: {m: m, n: n, k: k}\n",
    "jobs.yaml": b"- {collective: all_reduce, group: [0, 1], size_bytes: 1MiB}\n",
}


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

    before = signal.signal(signal.SIGALRM, ring)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def damaged(random: Random, content: bytes) -> bytes:
    """A file's content as it may come: cut, with bytes that are none of a text, empty, doubled."""
    way = random.randrange(7)
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


def command(random: Random, files: Path) -> list[str]:
    """A verb with a sensible start and up to three settings that may be anything."""
    verb = random.choice(list(STARTS))
    words = [word.format(files=files) if "{files}" in word else word for word in random.choice(STARTS[verb])]
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
    signal.alarm(LIMIT_S)
    try:
        code = cli.main(arguments)
    except TooLongError:
        return f"took more than {LIMIT_S} s"
    except BaseException as error:
        return f"ended in {type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
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
            found = json.loads(out)
        except ValueError:
            return f"format=json printed no object: {out[:100]!r}"
        if code == 2 and "error" not in found:
            return "exit code 2 without an error in its object"
    return ""


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
        if found := wrong(arguments, nets, capsys):
            failed.append(f"opcast {' '.join(map(repr, arguments))}: {found}")
    assert not failed, "\n".join(failed)
