"""Campaigns end to end: real cases in real child processes into a real store, and everything that can go wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from opcast.datasets.devices import Device
from opcast.datasets.ops import make_op
from opcast.datasets.store import Store
from opcast.harness.__main__ import main
from opcast.harness.campaign import CampaignError, Progress, Summary, canary_run_id, run, run_id
from opcast.harness.command import describe, duration, progress_line
from opcast.harness.environment import cpu_device_id
from opcast.harness.measuring import abilities, outcome
from opcast.harness.plan import CampaignPlan, Case, Settings, build_plan
from opcast.harness.plan_order import FIRST_OF_KIND
from opcast.harness.supervisor import Supervisor
from opcast.tests.harness import recorded as recorded_module
from opcast.tests.harness.recorded import Recorded

pytest.importorskip("torch")

MISBEHAVING = (str(Path(__file__).with_name("misbehaving_worker.py")),)
FAST = Settings(threads=1, case_budget_s=0.002, ci_width=0.5, case_timeout_s=30.0, batch_size=4)


def small_plan(count: int, canaries: int = 0, **settings: Any) -> CampaignPlan:
    """Cases of a millisecond or so."""
    spec = {
        "name": "small",
        "dtype": "fp32",
        "settings": {**vars(FAST), **settings},
        "cases": [
            {
                "kind": "gelu",
                "sample": count - count // 3,
                "rows": {"low": 1, "high": 64},
                "cols": {"low": 1, "high": 2048},
            },
            {
                "kind": "reduce",
                "sample": count // 3,
                "outer": {"low": 1, "high": 64},
                "length": {"low": 1, "high": 2048},
            },
        ],
        "canaries": [{"kind": "gelu", "rows": 5, "cols": c + 5, "dtype": "fp32"} for c in range(canaries)],
    }
    return build_plan(spec)


def figures_of_cpu(threads: int = 1) -> dict[str, Any]:
    """Made-up figures of this machine."""
    rates = dict.fromkeys(("vector_tflops", "memory_gib", "memory_gbps", "l2_mib", "l2_gbps", "clock_mhz"), 1.0)
    names = {"id": cpu_device_id(threads), "name": "test", "vendor": "cpu", "architecture": "test"}
    return {**names, **rates, "compute_units": 1, "tensor_tflops": {"fp32": 1.0}}


def known_cpu(store: Store, threads: int = 1) -> Store:
    """The store with figures for this machine, so that a campaign need not measure them first."""
    store.save_device(Device.from_dict(figures_of_cpu(threads)))
    return store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return known_cpu(Store(tmp_path / "store"))


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    """What a worker said of itself and of one case, for campaigns that need none of their own."""
    columns = outcome(Case(make_op("gelu", rows=2, cols=2, dtype="fp32")), FAST)
    assert columns["status"] == "ok"
    return {"environment": abilities(FAST, None), "columns": columns, "case_s": 0.001}


def rows(store: Store, status: str | None = None) -> Iterator[dict[str, Any]]:
    for kind in store.kinds():
        for row in store.read(kind, status=status, newest=False).to_pylist():
            yield {"kind": kind, **row}


def row_keys(store: Store, kinds: tuple[str, ...] = ("gelu", "reduce")) -> Counter[tuple[Any, ...]]:
    """How often each case has a row, canary rounds apart."""
    found: Counter[tuple[Any, ...]] = Counter()
    for row in rows(store):
        dims = tuple(value for name, value in row.items() if name in ("rows", "cols", "outer", "length", "inner"))
        found[row["kind"], dims, row["backend"], row["cache"], row["run_id"]] += 1
    return found


# --- the plain way -------------------------------------------------------------------------------------


@pytest.mark.essential
def test_a_campaign_measures_every_case_once(store: Store) -> None:
    plan = small_plan(24, canaries=2, canary_every=10)
    seen: list[Progress] = []
    summary = run(plan, store, seen.append)
    rounds = sum(bool(batch.round) for batch in plan.batches())
    assert summary.outcome == "complete"
    assert summary.total == summary.done == 24 + 2 * rounds
    assert summary.statuses == {"ok": summary.total}
    assert summary.remaining == summary.restarts == 0
    assert set(row_keys(store).values()) == {1}
    assert store.done(summary.device_id, summary.run_id) == {case.key for case in plan.cases}
    assert store.done(summary.device_id, canary_run_id(summary.run_id, 1)) == {case.key for case in plan.canaries}
    assert len(summary.drift) == 2
    assert [p.done + p.waiting for p in seen] == sorted(p.done + p.waiting for p in seen)
    assert seen[-1].done == summary.total
    assert seen[-1].waiting == 0
    row = next(iter(rows(store, "ok")))
    assert row["device_id"] == cpu_device_id(1)
    assert row["torch"]
    assert row["source"] == "harness"
    assert row["latency_us"] > 0
    assert (store.path / row["source_ref"]).is_file()


def test_a_second_run_measures_nothing(store: Store, record: dict[str, Any]) -> None:
    plan = small_plan(6)
    first, again = (run(plan, store, measurer=Recorded(**record)) for _ in range(2))
    assert again.run_id == first.run_id
    assert again.statuses == {}
    assert again.done == first.done == 6


def test_a_campaign_is_named_by_what_it_measures_and_in_what() -> None:
    plan = small_plan(6)
    environment = {"device_id": "cpu_x", "torch": "2.9", "node": "a"}
    name = run_id(plan, environment)
    assert name.startswith("small-")
    assert run_id(replace(plan, settings=replace(plan.settings, case_timeout_s=9.0, batch_size=2)), environment) == name
    assert run_id(plan, {**environment, "node": "b"}) == name
    assert run_id(plan, {**environment, "torch": "2.10"}) != name
    assert run_id(replace(plan, settings=replace(plan.settings, ci_width=0.4)), environment) != name
    assert run_id(replace(plan, cases=plan.cases[1:]), environment) != name


def test_the_record_of_a_campaign_tells_what_its_rows_do_not(store: Store, record: dict[str, Any]) -> None:
    plan = small_plan(3)
    summary = run(plan, store, measurer=Recorded(**record))
    record = json.loads((store.path / "runs" / f"{summary.run_id}.json").read_text())
    assert CampaignPlan.from_json(json.dumps(record["plan"])) == plan
    assert record["allocator"]["MALLOC_MMAP_MAX_"] == "0"
    assert record["environment"]["device_id"] == summary.device_id


def test_figures_of_the_processor_are_measured_once(tmp_path: Path, record: dict[str, Any]) -> None:
    store, probed = Store(tmp_path / "store"), []

    class Probed(Recorded):
        def probe(self) -> dict[str, Any]:
            probed.append(self.environment["device_id"])
            return figures_of_cpu()

    summaries = [run(small_plan(count), store, measurer=Probed(**record)) for count in (3, 6)]
    assert probed == [summaries[0].device_id]
    figures = store.device(probed[0])
    assert figures is not None
    assert figures.vendor == "cpu"


@pytest.mark.essential
def test_a_deadline_leaves_the_rest_for_the_next_run(store: Store, record: dict[str, Any]) -> None:
    plan = small_plan(40, deadline_s=0.05)
    summary = run(plan, store, measurer=Recorded(**{**record, "case_s": 0.01}))
    assert summary.outcome == "deadline"
    assert 0 < summary.done < 40
    assert summary.remaining == 40 - summary.done
    rest = run(replace(plan, settings=replace(plan.settings, deadline_s=0.0)), store, measurer=Recorded(**record))
    assert rest.outcome == "complete"
    assert sum(rest.statuses.values()) == 40 - summary.done
    assert set(row_keys(store).values()) == {1}


def test_a_campaign_without_time_measures_some_of_every_kind(store: Store, record: dict[str, Any]) -> None:
    plan = small_plan(60, canaries=1, deadline_s=1e-6)
    summary = run(plan, store, measurer=Recorded(**record))
    assert summary.outcome == "deadline"
    kinds = Counter(row["kind"] for row in rows(store) if row["run_id"] == summary.run_id)
    assert kinds == {"gelu": FIRST_OF_KIND, "reduce": FIRST_OF_KIND}
    again = run(plan, store, measurer=Recorded(**record))
    assert again.outcome == "deadline"
    assert again.done > summary.done, "every run gets further"


# --- cases that misbehave ------------------------------------------------------------------------------


def misbehave(store: Store, backends: list[str], **settings: Any) -> tuple[Summary, dict[str, dict[str, Any]]]:
    """A campaign of healthy cases with bad ones among them; its summary and the rows by backend."""
    healthy = [Case(make_op("reduce", outer=4, length=n, dtype="fp32")) for n in range(1, 6)]
    bad = [Case(make_op("gelu", rows=4, cols=4, dtype="fp32"), backend) for backend in backends]
    cases = [case for pair in zip(bad, healthy, strict=False) for case in pair] + healthy[len(bad) :]
    plan = CampaignPlan("bad", tuple(cases), (), replace(FAST, **settings))
    summary = run(plan, store, measurer=Supervisor(plan.settings, worker=MISBEHAVING))
    assert summary.done == summary.total == len(cases)
    assert sum(row["kind"] == "reduce" and row["status"] == "ok" for row in rows(store)) == len(healthy)
    return summary, {row["backend"]: row for row in rows(store) if row["kind"] == "gelu"}


@pytest.mark.essential
def test_crashes_become_rows_and_the_rest_goes_on(store: Store) -> None:
    summary, found = misbehave(store, ["abort", "segfault", "exit"])
    assert {row["status"] for row in found.values()} == {"error"}
    assert "SIGABRT" in found["abort"]["error"]
    assert "SIGSEGV" in found["segfault"]["error"]
    assert "exit code 7: the driver is gone" in found["exit"]["error"]
    assert summary.restarts == 3
    assert summary.statuses == {"error": 3, "ok": 5}


def test_a_hanging_case_is_killed_at_its_timeout(store: Store) -> None:
    summary, found = misbehave(store, ["hang"], case_timeout_s=3.0)
    assert found["hang"]["status"] == "timeout"
    assert "3 s" in found["hang"]["error"]
    assert summary.restarts == 1  # waiting for the case's own end would take an hour


def test_a_kernel_that_is_compiled_first_has_time_for_it(store: Store) -> None:
    """The call that compiles takes longer than any case may."""
    _, found = misbehave(store, ["triton:slow_to_compile"], case_timeout_s=6.0, compile_timeout_s=60.0)
    assert found["triton:slow_to_compile"]["status"] == "ok"


def test_a_kernel_whose_compiler_hangs_is_given_up(store: Store) -> None:
    _, found = misbehave(store, ["triton:never_compiled"], compile_timeout_s=2.0)
    assert found["triton:never_compiled"]["status"] == "timeout"
    assert "2 s" in found["triton:never_compiled"]["error"]


def test_failures_that_the_worker_survives(store: Store) -> None:
    summary, found = misbehave(store, ["greedy", "refused", "raises", "chatty"])
    assert {name: row["status"] for name, row in found.items()} == {
        "greedy": "oom",
        "refused": "unsupported",
        "raises": "error",
        "chatty": "ok",
    }
    assert found["refused"]["error"] == "no such kernel here"
    assert found["raises"]["error"].startswith("KeyError")
    assert found["chatty"]["latency_us"] > 0
    assert summary.restarts == 0


def test_a_worker_killed_for_want_of_memory(store: Store) -> None:
    _, found = misbehave(store, ["killed"])
    assert found["killed"]["status"] == "oom"
    assert "SIGKILL" in found["killed"]["error"]


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_case_beyond_the_memory_limit_is_oom(store: Store) -> None:
    large = Case(make_op("gelu", rows=1024, cols=1 << 17, dtype="fp32"))
    small = Case(make_op("gelu", rows=2, cols=2, dtype="fp32"))
    plan = CampaignPlan("memory", (large, small), (), replace(FAST, max_bytes=256 << 20))
    assert run(plan, store).statuses == {"oom": 1, "ok": 1}


def test_an_unknown_backend_is_unsupported() -> None:
    case = Case(make_op("gelu", rows=2, cols=2, dtype="fp32"), "cudnn9000")
    reply = outcome(case, FAST)
    assert reply["status"] == "unsupported"
    assert "cudnn9000" in reply["error"]


def test_endless_deaths_end_the_campaign(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opcast.harness.campaign.MOST_DEATHS_IN_A_ROW", 2)
    healthy = tuple(Case(make_op("reduce", outer=1, length=n, dtype="fp32")) for n in (1, 2))
    bad = tuple(Case(make_op("gelu", rows=n, cols=4, dtype="fp32"), "exit") for n in (1, 2, 3))
    plan = CampaignPlan("deaths", healthy + bad, (), FAST)
    with pytest.raises(CampaignError, match="2 cases in a row"):
        run(plan, store, measurer=Supervisor(plan.settings, worker=MISBEHAVING))
    assert [row["status"] for row in rows(store)] == ["ok", "ok"]


def test_a_worker_that_never_starts(store: Store, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import sys; sys.exit('no torch on this node')")
    with pytest.raises(CampaignError, match="no torch on this node"):
        run(small_plan(3), store, measurer=Supervisor(FAST, worker=(str(script),)))


def test_cuda_without_a_device_is_one_clear_line(store: Store) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(CampaignError, match="torch finds no CUDA device") as caught:
        run(small_plan(3, device="cuda"), store)
    assert "\n" not in str(caught.value)


def test_a_store_that_cannot_be_written(tmp_path: Path, record: dict[str, Any]) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "runs").write_text("in the way")
    with pytest.raises(CampaignError, match="cannot be written"):
        run(small_plan(3), known_cpu(Store(tmp_path / "store")), measurer=Recorded(**record))


def test_any_thread_may_run_a_campaign(store: Store) -> None:
    found: list[Summary] = []
    thread = threading.Thread(target=lambda: found.append(run(small_plan(3), store)))
    thread.start()
    thread.join()
    assert found[0].outcome == "complete"


# --- ends from outside ---------------------------------------------------------------------------------

DRIVER = """
import sys
from opcast.datasets.store import Store
from opcast.harness.campaign import run
from opcast.harness.plan import CampaignPlan
plan = CampaignPlan.from_json(open(sys.argv[1]).read())
summary = run(plan, Store(sys.argv[2]), lambda p: print(p.done, p.waiting, flush=True))
print(summary.outcome, flush=True)
"""


@pytest.fixture
def launch(tmp_path: Path, store: Store) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a campaign in a process of its own, which prints how far it is; with a worker or what was recorded."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    started: list[subprocess.Popen[str]] = []

    def start(plan: CampaignPlan, record: dict[str, Any] | None = None) -> subprocess.Popen[str]:
        (tmp_path / "plan.json").write_text(plan.to_json())
        command = [sys.executable, "-P", str(script), str(tmp_path / "plan.json"), str(store.path)]
        if record is not None:
            (tmp_path / "record.json").write_text(json.dumps(record))
            command[2] = str(recorded_module.__file__)
            command.append(str(tmp_path / "record.json"))
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def first_report(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline(), process.communicate()


def workers_of(parent: int) -> list[int]:
    """Processes that were started as workers of a campaign process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"opcast.harness.worker" in words and str(parent).encode() in words:
            found.append(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="kills and counts processes as Linux does")
def test_killed_ten_times_nothing_is_lost_and_nothing_is_measured_twice(
    store: Store, launch: Callable[..., subprocess.Popen[str]], record: dict[str, Any]
) -> None:
    plan = small_plan(400, canaries=2, canary_every=50)
    random = Random(7)
    kills = 0
    for _ in range(10):
        process = launch(plan, record)
        first_report(process)
        time.sleep(random.uniform(0.0, 0.1))
        process.kill()
        output, _ = process.communicate()
        kills += "complete" not in output
        reported = [int(line.split()[0]) for line in output.splitlines() if line[:1].isdigit()]
        assert sum(row_keys(store).values()) >= max(reported, default=0)
    assert kills >= 5, "the campaign ended before it was killed: the test proves too little"
    final = run(plan, store, measurer=Recorded(**{**record, "case_s": 0.0}))
    assert final.outcome == "complete"
    counts = row_keys(store)
    rounds = sum(bool(batch.round) for batch in plan.batches())
    assert set(counts.values()) == {1}
    assert len(counts) == final.total == 400 + 2 * rounds
    assert store.done(final.device_id, final.run_id) == {case.key for case in plan.cases}
    assert {row["status"] for row in rows(store)} == {"ok"}
    assert not list(store.path.rglob("*.tmp"))


@pytest.mark.skipif(sys.platform != "linux", reason="kills and counts processes as Linux does")
def test_a_worker_dies_with_its_campaign(launch: Callable[..., subprocess.Popen[str]]) -> None:
    process = launch(small_plan(3000))
    first_report(process)
    workers = workers_of(process.pid)
    assert len(workers) == 1
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 120
    while Path(f"/proc/{workers[0]}/cmdline").exists() and Path(f"/proc/{workers[0]}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "the worker outlived its campaign"
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="kills and counts processes as Linux does")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_campaign_with_its_rows_written(
    store: Store, launch: Callable[..., subprocess.Popen[str]], number: signal.Signals
) -> None:
    process = launch(small_plan(3000, batch_size=1000))
    first_report(process)
    assert process.stdout is not None
    while int(process.stdout.readline().split()[1]) < 5:
        pass
    process.send_signal(number)
    output, errors = process.communicate(timeout=300)
    assert output.splitlines()[-1] == "interrupted"
    assert not errors
    measured = sum(row_keys(store).values())
    assert measured >= 5
    assert process.returncode == 0


def test_two_processes_cannot_run_one_campaign(
    store: Store, launch: Callable[..., subprocess.Popen[str]], record: dict[str, Any]
) -> None:
    plan = small_plan(3000)
    first_report(launch(plan, record))
    with pytest.raises(CampaignError, match="is running in this store already"):
        run(plan, store, measurer=Recorded(**record))


# --- the command ---------------------------------------------------------------------------------------


def test_the_command_runs_a_plan_file(tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(small_plan(6).to_json())
    assert main([str(plan), str(store.path)]) == 0
    captured = capsys.readouterr()
    assert "6 of 6 cases in the store; measured now: 6 ok" in captured.err
    assert captured.out == ""
    assert main([str(plan), str(store.path), "--quiet"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", [None, "{", '{"format": 7}'])
def test_the_command_refuses_a_bad_plan_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    plan = tmp_path / "plan.json"
    if text is not None:
        plan.write_text(text)
    assert main([str(plan), str(tmp_path / "store")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert str(plan) in lines[0]
    assert not (tmp_path / "store").exists()


def test_the_command_runs_from_anywhere_without_yaml_or_pandas(tmp_path: Path, store: Store) -> None:
    (tmp_path / "datasets").mkdir()
    plan = tmp_path / "plan.json"
    plan.write_text(small_plan(3).to_json())
    code = """
import runpy, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in ("yaml", "pandas", "hydra", "rich", "mlflow", "scipy", "sklearn", "lightgbm"):
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Absent())
runpy.run_module("opcast.harness", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code, str(plan), str(store.path)], cwd=tmp_path, check=False)
    assert done.returncode == 0


def test_progress_is_one_line() -> None:
    progress = Progress("run", 200, 40, 10, {"ok": 48, "oom": 2}, "gemm[m=1]", 30.0, 3723.0)
    line = progress_line(progress)
    assert "50/200" in line
    assert "1:02:03 left" in line
    assert "2 oom" in line
    assert "gemm[m=1]" in line
    assert line.count("#") * 4 == 28
    assert duration(59.6) == "1:00"


def test_an_early_end_says_how_to_go_on() -> None:
    summary = Summary("r", "d", "interrupted", 10, 4, 4, {"ok": 3, "oom": 1}, 1, {"gemm": 0.034}, 60.0)
    text = describe(summary)
    assert "run the same command again for the other 6 cases" in text
    assert "3.4%" in text
    assert os.linesep not in text.splitlines()[0]
