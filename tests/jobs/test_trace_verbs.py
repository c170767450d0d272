"""Damaged files and odd settings given to every sub-command of `opcast trace`: an exit code and one line; and a profile
becomes rows that answers name as such.

``OPCAST_FUZZ_TRIALS=1000 OPCAST_FUZZ_SEED=7`` tries more, with other random numbers.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from opcast.datasets.ops import make_op
from opcast.datasets.traces import protobuf
from opcast.datasets.traces.builder import TraceBuilder
from opcast.datasets.traces.schema import CollectiveKind, NodeKind
from opcast.jobs import cli
from opcast.jobs.cli import main

TRIALS = int(os.environ.get("OPCAST_FUZZ_TRIALS", "120")) // 10
SEED = int(os.environ.get("OPCAST_FUZZ_SEED", "15"))
GEMM = make_op("gemm", m=4, n=4, k=4, dtype="fp32").to_dict()
NUMBERS = ("-1", "1e400", "NaN", "9" * 40, "null", "[]", '{"a": 1}', '"x"', "1e300", "0", "2147483647", "true", "1.5")
ODD = ("-1", "0", "nan", "[]", "[1]", "[3,1]", "{a: 1}", "'x y'", "9" * 30, "1e300", "null", "/nowhere/x", "[a,b]")
ASKED: dict[str, tuple[str, ...]] = {
    "convert": ("path={run}", "output={out}"),
    "explain": ("predicted={run}", "measured={profile}"),
    "calibrate": ("predicted={run}", "measured={profile}", "output={out}.json"),
    "view": ("path={run}", "output={out}.dot"),
    "view timeline": ("path={run}", "output={out}.json.gz"),
    "view hta": ("path={profile}", "output={out}"),
    "reconstruct": ("path={run}", "output={out}.csv"),
    "analyse": ("path={run}", "other={profile}", "report={out}.html"),
    "measure": ("path={profile}", "store={out}", "train=false"),
    "replay": ("path={run}", "target=cpu", "iterations=1", "warmup=0", "tensors=lazy"),
    "generate": ("output={out}", "generate.ranks=2", "generate.nodes=6"),
}
SETTINGS: dict[str, tuple[str, ...]] = {
    "convert": ("prune", "validate"), "explain": ("steps",), "calibrate": ("steps", "framework"), "view": ("nodes",),
    "reconstruct": ("policy",), "measure": ("measured_on", "train"), "analyse": ("other",),
    "replay": ("mode", "nodes", "ranks", "tensors", "warmup", "iterations", "against"),
    "generate": tuple(f"generate.{name}" for name in ("ranks", "nodes", "share", "overlap", "imbalance", "seed",
                                                      "compute", "communication")),
}  # fmt: skip


def profile_of(steps: int) -> dict[str, Any]:
    """Products and an all-reduce of NCCL over two ranks on an H100, as PyTorch's profiler writes them."""
    events: list[dict[str, Any]] = []

    def event(cat: str, name: str, ts: float, dur: float, where: tuple[int, int], **arguments: Any) -> None:
        events.append({"ph": "X", "cat": cat, "name": name, "pid": where[0], "tid": where[1], "ts": ts, "dur": dur,
                       "args": arguments})  # fmt: skip

    for step in range(steps):
        begin, host, device = 1000.0 * step, (1, 1), {"device": 0, "stream": 7}
        event("user_annotation", f"ProfilerStep#{step}", begin, 1000.0, host)
        shapes = {"Input Dims": [[4096, 4096], [4096, 4096]], "Input type": ["c10::BFloat16"] * 2}
        event("cpu_op", "aten::mm", begin, 30.0, host, **{"External id": step, **shapes})
        event("cuda_runtime", "cudaLaunchKernel", begin + 5, 8.0, host, correlation=2 * step + 1)
        event("kernel", "nvjet_tst_128x64", begin + 20, 210.0 + step, (0, 7), correlation=2 * step + 1, **device)
        event("cuda_runtime", "cudaLaunchKernelExC", begin + 40, 4.0, host, correlation=2 * step + 2)
        event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", begin + 300, 300.0, (0, 20), **{
            "correlation": 2 * step + 2, "device": 0, "stream": 20, "Collective name": "allreduce", "dtype": "BFloat16",
            "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20, "Group size": 2, "Process Group Name": "0",
            "Process Group Ranks": "[0, 1]"})  # fmt: skip
    return {"schemaVersion": 1, "traceEvents": events, "distributedInfo": {"rank": 0, "nccl_version": "2.26.2"},
            "deviceProperties": [{"id": each, "name": "NVIDIA H100 80GB HBM3"} for each in range(2)]}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of opcast's and a profile, both sound."""
    folder = tmp_path_factory.mktemp("whole")
    builder = TraceBuilder([("stack", "string", "torch"), ("chip", "string", "hopper")])
    at = [("is_cpu_op", "bool", False), ("stream", "int64", 7)]
    for id in range(1, 5):
        told = [*at, ("opcast_op", "string", json.dumps(GEMM))]
        builder.add(id, "gemm", start_us=10 * id, duration_us=5.5, data=[id - 1] if id > 1 else [], attributes=told,
                    inputs=['[[1, 2, 0, 16, 4, "cuda:0"]]', "[[4, 4]]", "['Tensor(float)']"])  # fmt: skip
    call = [*at, ("comm_type", "int64", CollectiveKind.ALL_REDUCE), ("comm_size", "int64", 64)]
    builder.add(5, "all_reduce", NodeKind.COMM_COLL, start_us=50, duration_us=9, data=[4], attributes=call)
    protobuf.write(folder / "run.0.et", builder.trace())
    (folder / "profile.json").write_text(json.dumps(profile_of(3)))
    return folder


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Replays run in this process, as under torchrun, and exceptions that nobody foresaw are kept."""
    met: list[BaseException] = []
    said = cli.unforeseen

    def noted(error: Exception) -> str:
        met.append(error)
        return said(error)

    monkeypatch.setattr(cli, "unforeseen", noted)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    return met


def damaged(random: Random, content: bytes) -> bytes:
    """Some bytes changed, cut or put in; in JSON some number replaced."""
    made = bytearray(content)
    if content[:1] == b"{" and random.random() < 0.7:
        places = [
            place for place, byte in enumerate(content) if chr(byte).isdigit() and not chr(content[place - 1]).isdigit()
        ]
        at = random.choice(places)
        end = at
        while chr(content[end]).isdigit():
            end += 1
        return content[:at] + random.choice(NUMBERS).encode() + content[end:]
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(made))
        made[at : at + random.choice((0, 1, 1, 1))] = bytes([random.randrange(256)])
    return bytes(made[: random.randrange(len(made))] if random.random() < 0.2 else made)


@pytest.mark.parametrize("verb", ASKED)
def test_no_damage_surprises_a_verb(
    verb: str, whole: Path, here: list[BaseException], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if verb == "replay":
        pytest.importorskip("torch")
    before, failures = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for trial in range(TRIALS if verb != "replay" else TRIALS // 4):
        random = Random(f"{SEED} {verb} {trial}")
        folder = tmp_path / str(trial)
        shutil.copytree(whole, folder)
        victim = folder / random.choice(("run.0.et", "profile.json"))
        if random.random() < 0.8:
            victim.write_bytes(damaged(random, victim.read_bytes()))
        named = {"run": folder / "run.0.et", "profile": folder / "profile.json", "out": folder / "out"}
        words = [word.format(**named) for word in ASKED[verb]]
        known = SETTINGS.get(verb.split()[0], ())
        if known and random.random() < 0.5:
            words.append(f"{random.choice(known)}={random.choice(ODD)}")
        here.clear()
        code = main(["trace", verb.split()[0], *words, "home=" + str(folder), "tracking=null"])
        err = capsys.readouterr().err
        wrong = "an exception" if here else "a traceback" if "Traceback" in err else ""
        wrong = wrong or (
            "no line" if code == 2 and "opcast: " not in err else "" if code in (0, 2) else f"code {code}"
        )
        if wrong:
            failures.append((trial, wrong, words, here[:1], err[-300:]))
    assert not failures
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2_000_000  # KiB: libraries are loaded, no damage asks for more


def test_buffers_that_no_machine_has_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    for rank in range(2):
        builder = TraceBuilder()
        told = [("is_cpu_op", "bool", False), ("comm_type", "int64", CollectiveKind.ALL_REDUCE),
                ("comm_size", "int64", 1 << 50)]  # fmt: skip
        builder.add(1, "all_reduce", NodeKind.COMM_COLL, attributes=told)
        protobuf.write(tmp_path / f"a.{rank}.et", builder.trace())
    assert main(["trace", "replay", f"path={tmp_path}", "target=cpu"]) == 2
    err = capsys.readouterr().err
    assert "collectives and messages need 4,194,304.0 GiB" in err
    assert err.count("\n") == 1


# --- measurements --------------------------------------------------------------------------------------


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def asked(*words: str) -> dict[str, Any]:
        assert main([*words, "format=json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return asked


def test_a_profile_becomes_rows_that_answers_name_as_such(
    answer: Callable[..., dict[str, Any]], whole: Path, tmp_path: Path
) -> None:
    store = f"store={tmp_path / 'store'}"
    found = answer("trace", "measure", f"path={whole / 'profile.json'}", store, "train=false")
    assert {(each["kind"], each["device"], each["rows"]) for each in found["by_kind_and_device"]} == {
        ("gemm", "h100_sxm", 1), ("all_reduce", "h100_sxm", 1)}  # fmt: skip
    again = answer("trace", "measure", f"path={whole / 'profile.json'}", store, "train=false")
    assert again["rows_written"] == 0  # what is there is not written twice
    gemm = answer("predict", "op=gemm", "op.m=4096", "op.n=4096", "op.k=4096", "device=h100_sxm", store)
    assert (gemm["engine"], gemm["predictor"]) == ("measured", "a profile of PyTorch")
    assert gemm["latency_us"] == pytest.approx(211.0)  # the median of 210, 211, 212
    ring = ["op=all_reduce", "op.size_bytes=2MiB", "op.ranks=2", "device=h100_sxm", "cluster=dgx_h100"]
    reduced = answer("predict", *ring, store)
    assert (reduced["engine"], reduced["predictor"]) == ("measured", "a profile of PyTorch")
    assert reduced["latency_us"] == pytest.approx(300.0)
    other = answer("predict", "op=gemm", "op.m=4096", "op.n=4096", "op.k=4088", "device=h100_sxm", store)
    assert other["engine"] != "measured"


def test_predictors_learn_from_a_profile(answer: Callable[..., dict[str, Any]], whole: Path, tmp_path: Path) -> None:
    """Products that take twice what physics says of an H100: so do answers for products between them, from then on."""
    profile = profile_of(1)
    launch, kernel = (next(e for e in profile["traceEvents"] if e["cat"] == cat) for cat in ("cuda_runtime", "kernel"))
    call = next(e for e in profile["traceEvents"] if e["cat"] == "cpu_op")
    events = []
    for id, (m, n) in enumerate(itertools.product((512, 1024, 2048, 4096, 8192), (1024, 2048, 3072, 4096, 6144, 8192))):
        at = {"ts": 2e4 * id}
        tensors = {"Input Dims": [[m, 4096], [4096, n]], "Input type": ["c10::BFloat16"] * 2}
        events.append({**call, **at, "args": {"External id": id, **tensors}})
        events.append({**launch, "ts": at["ts"] + 5, "args": {"correlation": id + 1}})
        took = 2 * (2.0 * m * n * 4096 / 800e6 + 4.0)
        events.append({**kernel, "ts": at["ts"] + 20, "dur": took, "args": {**kernel["args"], "correlation": id + 1}})
    (tmp_path / "products.json").write_text(json.dumps({**profile, "traceEvents": events}))
    places = f"store={tmp_path / 'store'}", f"predictors={tmp_path / 'predictors'}"
    made = answer("trace", "measure", f"path={tmp_path / 'products.json'}", *places)
    (card,) = made["trained"].values()
    assert card["test_median_ape"] < 10
    found = answer("predict", "op=gemm", "op.m=3000", "op.n=2560", "op.k=4096", "device=h100_sxm", *places)
    assert found["engine"] == "learned"
    assert found["latency_us"] == pytest.approx(2 * (2.0 * 3000 * 2560 * 4096 / 800e6 + 4.0), rel=0.15)
