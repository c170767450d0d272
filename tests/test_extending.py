"""docs/extending.md adds an op kind, device, engine, pass, schedule, policy, router: its blocks are run and undone."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from opcast.datasets import devices
from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.datasets.ops import KINDS, LAYOUT, Op, make_op
from opcast.harness.cases import BUILDERS, prepare
from opcast.harness.plan import build_plan
from opcast.jobs import cli
from opcast.models.features.frame import feature_names
from opcast.models.splits import recipe
from opcast.simulator.engines import FusedEngine
from opcast.simulator.engines.analytical import AnalyticalEngine
from opcast.simulator.graph import Graph
from opcast.simulator.html.colours import of_kind
from opcast.simulator.passes.order import apply_passes
from opcast.simulator.passes.rewriting.draft import Draft
from opcast.simulator.passes.rewriting.tokens import share_tokens
from opcast.simulator.question.orders import SCHEDULES
from opcast.simulator.question.plan import Parallel, Plan
from opcast.simulator.question.work import Work
from opcast.simulator.report.answer import StepReport
from opcast.simulator.simulate import alone, simulate
from opcast.simulator.trace import Workload, trace

PAGE = Path(__file__).resolve().parent.parent / "docs" / "extending.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(section: str, language: str) -> list[str]:
    """The blocks of one language in a section of the page, in order."""
    text = next(part for part in PAGE.read_text().split("\n## ") if part.startswith(section))
    return [body for named, body in BLOCK.findall(text) if named == language]


def commands(section: str) -> list[list[str]]:
    """The commands of a section, without the program's name."""
    return [shlex.split(line)[1:] for body in blocks(section, "bash") for line in body.splitlines()]


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder a reader works in; modules written there, and whatever they register, are gone afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    registries: tuple[dict[Any, Any], ...] = (KINDS, BUILDERS, SCHEDULES)
    before = [dict(registry) for registry in registries]
    modules = set(sys.modules)
    yield tmp_path
    for registry, kept in zip(registries, before, strict=True):
        registry.clear()
        registry.update(kept)
    for name in set(sys.modules) - modules:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def run(code: str) -> dict[str, Any]:
    """Run a block as a module of its own."""
    names: dict[str, Any] = {"__name__": "extending"}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


def answer(command: list[str], capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    """What a command answers as JSON; it must end well."""
    capsys.readouterr()
    code = cli.main([*command, *more, "format=json"])
    said = capsys.readouterr()
    assert code == 0, said.err
    found: dict[str, Any] = json.loads(said.out)
    return found


def kinds(report: dict[str, Any]) -> set[str]:
    """The kinds of op that a report times."""
    return {share["kind"] for share in report["breakdown"]["by_op"]}


def test_an_op_kind_takes_two_places(reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    define, measure, model = blocks("An op kind", "python")
    run(define)
    run(measure)
    (reader / "magnitude.py").write_text(model)
    norm = make_op("magnitude_norm", rows=8, cols=16, dtype="fp32")
    timed = prepare(norm, "torch", "cpu")
    with timed.context():
        assert timed.run().shape == (8, 16)
    planned = build_plan({"cases": [{"kind": "magnitude_norm", "rows": [64, 128], "cols": 512, "dtype": "fp32"}]})
    assert {(case.op.rows, case.backend) for case in planned.cases} == {(64, "torch"), (128, "torch")}
    assert recipe("magnitude_norm") == recipe("rms_norm")
    assert feature_names("magnitude_norm") == feature_names("rms_norm")
    assert of_kind("magnitude_norm_backward") == of_kind("rms_norm_backward")
    predict, simulate = commands("An op kind")
    predicted = answer(predict, capsys)
    like = answer([word.replace("magnitude_norm", "rms_norm") for word in predict], capsys, "engine.order=[analytical]")
    assert predicted["engine"] == "analytical"
    assert predicted["latency_us"] == pytest.approx(like["latency_us"], rel=0.01)
    report = answer(simulate, capsys)
    assert {"magnitude_norm", "magnitude_norm_backward"} <= kinds(report)
    assert "magnitude_norm" in (reader / "step.html").read_text()


def as_rms_norm(graph: Graph) -> Graph:
    """The graph with the page's norm exchanged for the shipped one, which moves as many bytes."""
    draft = Draft(graph)
    for _, item in draft.walk():
        op = item.node.op
        if op is not None and op.kind.startswith("magnitude_norm"):
            kind, dims = op.kind.replace("magnitude", "rms"), {"rows": op.rows, "cols": op.cols}
            item.change(op=make_op(kind, op.dtype, op.out_dtype, **dims))
    return draft.graph()


@pytest.fixture
def traced(reader: Path) -> Graph:
    """A training step of the page's model."""
    define, _, model = blocks("An op kind", "python")
    run(define)
    (reader / "magnitude.py").write_text(model)
    return trace("magnitude:Model", Workload("train", batch=2, seq_len=256), "bf16")


@pytest.mark.parametrize(
    "settings",
    [
        {"parallel": Parallel(tp=2)},
        {"parallel": Parallel(tp=2, sequence_parallel=True), "recompute": "full"},
        {"parallel": Parallel(zero_stage=3), "quantization": "fp8"},
        {"parallel": Parallel(), "offload": ("activations",), "recompute": "full:1"},
    ],
    ids=lambda settings: " ".join(f"{name}={value}" for name, value in settings.items())[:60],
)
def test_passes_treat_the_new_norm_as_a_norm(settings: dict[str, Any], traced: Graph) -> None:
    plan = Plan(cluster=load_cluster("dgx_h100"), **settings)
    assert sum(times for node, times in traced.weighted() if node.op and node.op.kind == "magnitude_norm") == 4
    made = apply_passes(traced, plan)
    assert as_rms_norm(made) == apply_passes(as_rms_norm(traced), plan)
    assert made != traced


def test_micro_batches_share_the_new_norm(traced: Graph) -> None:
    draft = Draft(traced)
    share_tokens(draft, 256, 2)
    rows = {item.node.op.rows for _, item in draft.walk() if item.node.op and item.node.op.kind == "magnitude_norm"}
    assert rows == {2 * 256 // 2}


def test_a_device_is_one_file(
    reader: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = reader / "conf"
    shutil.copytree(cli.CONFIG_DIRECTORY, conf)
    monkeypatch.setattr(cli, "CONFIG_DIRECTORY", conf)
    monkeypatch.setattr(devices, "DEVICE_DIRECTORY", conf / "device")
    (conf / "device" / "example_gpu.yaml").write_text(blocks("A device", "yaml")[0])
    assert "example_gpu" in devices.known_devices()
    found = answer(commands("A device")[0], capsys)
    assert found["device"] == "example_gpu"
    assert found["engine"] == "transfer"
    assert found["latency_us"] > 2 * 4096**3 / 800e6


def test_an_engine_answers_before_the_next(reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (reader / "spreadsheet.py").write_text(blocks("An engine", "python")[0])
    (command,) = commands("An engine")
    found = answer(command, capsys)
    assert (found["engine"], found["latency_us"], found["high_us"]) == ("spreadsheet", 231.0, 1.05 * 231.0)
    other = answer([word.replace("op.m=4096", "op.m=2048") for word in command], capsys)
    assert other["engine"] == "analytical"
    assert other["latency_us"] < 231.0


def test_what_makes_no_engine_is_one_line(reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (reader / "engineless.py").write_text("def made(device):\n    return 3\n")
    (*command, _) = commands("An engine")[0]
    assert cli.main([*command, "engine.order=[engineless:made]"]) == 2
    assert "returned int, not an object with a name and a method answer" in capsys.readouterr().err


def test_an_engine_serves_a_whole_step(traced: Graph) -> None:
    names, device = run(blocks("An engine", "python")[0]), load_device("h100_sxm")
    (head,) = {op for op in products(traced) if op.n == 1000 and op.layout == LAYOUT.choices.index("nt")}
    engine = FusedEngine([names["Spreadsheet"]({(head.m, head.n, head.k): 12345.0}), AnalyticalEngine(device)])
    work = Work("train", seq_len=256, micro_batch=2, global_batch=2)
    report = simulate("magnitude:Model", work, alone(device, "bf16"), device, engine)
    assert isinstance(report, StepReport)
    assert report.step_time_s > 12345e-6
    assert report.provenance["spreadsheet"] == pytest.approx(12345e-6 / report.step_time_s)


def test_a_pass_is_named_on_the_command_line(reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (reader / "halving.py").write_text(blocks("A pass", "python")[0])
    (command,) = commands("A pass")
    halved, whole = answer(command, capsys), answer(command[:-1], capsys)
    assert norm_time(halved) < 0.95 * norm_time(whole)


def test_a_schedule_is_one_function(reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(blocks("A schedule", "python")[0])
    (command,) = commands("A schedule")
    eager = answer(command, capsys)
    usual = answer([word.replace("eager-1f1b", "1f1b") for word in command], capsys)
    assert eager["memory"]["activations_gib"] > usual["memory"]["activations_gib"]
    assert eager["step_time_s"] == pytest.approx(usual["step_time_s"], rel=0.1)
    SCHEDULES.pop("eager-1f1b")
    assert cli.main(command) == 2
    assert "is not one of gpipe, 1f1b" in capsys.readouterr().err


def test_a_policy_is_one_file(reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("A policy of a serving scheduler", "python")
    assert len(code.splitlines()) <= 30
    (reader / "one_prompt.py").write_text(code)
    (command,) = commands("A policy of a serving scheduler")
    trace = reader / "trace.json"
    report = answer(command, capsys, f"trace={trace}")
    assert report["completed"] == 50
    assert most_prompt_tokens(trace) == 256
    answer([*command, "scheduler.chunk=100"], capsys, f"trace={trace}")
    assert most_prompt_tokens(trace) == 100


def most_prompt_tokens(trace: Path) -> int:
    """The most prompt tokens of an iteration of a timeline."""
    events = json.loads(trace.read_text())["traceEvents"]
    return max(int(each.get("args", {}).get("prefill_tokens", 0)) for each in events)


def test_a_router_is_one_function(reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("A router", "python")
    (reader / "sticky.py").write_text(code)
    (command,) = commands("A router")
    rows = reader / "requests.parquet"
    assert answer(command, capsys, f"requests={rows}")["completed"] == 50
    ranks = pq.read_table(rows)["rank"].to_pylist()
    assert set(ranks) == {0, 1}


def products(graph: Graph) -> list[Op]:
    """The matrix products of a graph."""
    return [node.op for node, _ in graph.weighted() if node.op is not None and node.op.kind == "gemm"]


def norm_time(report: dict[str, Any]) -> float:
    """Time of the norms in a report."""
    return sum(share["time_s"] for share in report["breakdown"]["by_op"] if "norm" in share["kind"])
