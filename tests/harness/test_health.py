"""A GPU that falls ill, for one process or for all: what is kept, what is measured again, and when a campaign ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from opcast.datasets.ops import make_op
from opcast.datasets.schema import Measurement
from opcast.datasets.store import Store
from opcast.harness import supervisor as supervising
from opcast.harness.campaign import CampaignError, Summary, run
from opcast.harness.plan import CampaignPlan, Case, Settings
from opcast.harness.supervisor import Supervisor

from .stream_model import STICKY

pytest.importorskip("torch")

ON_GPU = Settings(device="cuda", threads=1, case_budget_s=0.002, ci_width=0.5, case_timeout_s=30.0, batch_size=2)
WORKER = str(Path(__file__).with_name("ill_worker.py"))
Campaign = Callable[..., Summary]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def campaign(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> Campaign:
    """Runs cases of the given backends, in their order, on the modelled GPU."""
    monkeypatch.setattr(supervising, "CHECK_AGAIN_S", 0.05)
    monkeypatch.setattr(supervising, "STARTS_BEFORE_GIVING_UP", 2)

    def go(*backends: str) -> Summary:
        cases = tuple(Case(make_op("gelu", rows=n + 1, cols=4, dtype="fp32"), each) for n, each in enumerate(backends))
        plan = CampaignPlan("ill", cases, (), ON_GPU)
        return run(plan, store, measurer=Supervisor(ON_GPU, worker=(WORKER, str(tmp_path))))

    return go


def found(store: Store) -> list[tuple[str, str, bool | None]]:
    """(backend, status, device healthy) of every row, in the order of the cases and then of time."""
    rows = store.read("gelu", status=None, newest=False).to_pylist() if store.kinds() else []
    ordered = sorted(rows, key=lambda row: (row["rows"], row["measured_at"]))
    return [(row["backend"], row["status"], row["device_healthy"]) for row in ordered]


def starts(tmp_path: Path) -> int:
    return len((tmp_path / "starts").read_text().splitlines())


def test_a_lost_context_costs_its_case_alone(campaign: Campaign, store: Store, tmp_path: Path) -> None:
    summary = campaign("good", "illegal", "good")
    assert found(store) == [("good", "ok", None), ("illegal", "error", True), ("good", "ok", None)]
    assert summary.restarts == 1
    assert starts(tmp_path) == 2
    assert campaign("good", "illegal", "good").statuses == {}, "the case is at fault: nobody measures it again"


def test_what_was_measured_before_the_error_came_is_kept(campaign: Campaign, store: Store, tmp_path: Path) -> None:
    summary = campaign("good", "last_breath", "good")
    assert found(store) == [("good", "ok", None), ("last_breath", "ok", True), ("good", "ok", None)]
    assert summary.statuses == {"ok": 3}
    assert summary.restarts == 1
    assert starts(tmp_path) == 2
    (row,) = [r for r in store.read("gelu").to_pylist() if r["backend"] == "last_breath"]
    assert row["latency_us"] == pytest.approx(12.0, rel=0.05)


def test_a_failed_capture_replaces_the_worker_but_is_no_illness(
    campaign: Campaign, store: Store, tmp_path: Path
) -> None:
    summary = campaign("waits", "good")
    assert found(store) == [("waits", "ok", None), ("good", "ok", None)]
    assert summary.restarts == 1
    timers = {row["backend"]: row["timer"] for row in store.read("gelu").to_pylist()}
    assert timers == {"waits": "cuda_event", "good": "cuda_graph"}


@pytest.mark.essential
def test_a_gpu_that_stays_ill_ends_the_campaign_and_loses_nothing(
    campaign: Campaign, store: Store, tmp_path: Path
) -> None:
    wanted = ("good", "falls_off", "good", "good")
    with pytest.raises(
        CampaignError, match=r"the GPU does not compute .*GPU is lost.*nvidia-smi --gpu-reset"
    ) as caught:
        campaign(*wanted)
    assert "\n" not in str(caught.value)
    assert found(store) == [("good", "ok", None), ("falls_off", "error", False)]
    with pytest.raises(CampaignError, match="the GPU does not compute"):
        campaign(*wanted)
    (tmp_path / "ill").rename(tmp_path / "mended")
    assert campaign(*wanted).statuses == {"ok": 3}
    assert found(store) == [
        ("good", "ok", None),
        ("falls_off", "error", False),
        ("falls_off", "ok", None),
        ("good", "ok", None),
        ("good", "ok", None),
    ]


def test_death_after_death_ends_the_campaign_and_writes_none_off(
    campaign: Campaign, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of two are written on the way: the rows of a streak of deaths are not among them."""
    monkeypatch.setattr("opcast.harness.campaign.MOST_DEATHS_IN_A_ROW", 3)
    with pytest.raises(CampaignError, match="3 cases in a row"):
        campaign("good", "exits", "last_breath", "exits", "good")
    assert found(store) == [("good", "ok", None), ("last_breath", "ok", True)]


# --- what the store makes of it ------------------------------------------------------------------------


def row(status: str, healthy: bool | None, cols: int) -> Measurement:
    op = make_op("gelu", rows=1, cols=cols)
    latency = 1.0 if status == "ok" else None
    return Measurement(
        op=op,
        device_id="dev",
        run_id="r",
        measured_at=datetime.now(UTC),
        status=status,
        latency_us=latency,
        device_healthy=healthy,
    )


def test_only_failures_of_an_ill_device_are_measured_again(store: Store) -> None:
    states = [
        (status, healthy)
        for status in ("ok", "oom", "unsupported", "timeout", "error")
        for healthy in (None, True, False)
    ]
    store.write([row(*state, cols) for cols, state in enumerate(states, 1)], "r")
    done = {states[op.cols - 1] for op, _, _ in store.done("dev", "r")}
    assert done == set(states) - {("timeout", False), ("error", False)}
    again = [row("ok", None, cols) for cols, state in enumerate(states, 1) if state not in done]
    store.write(again, "r")
    assert len(store.done("dev", "r")) == len(states)
    assert store.read("gelu", status=None, newest=False).num_rows == len(states) + 2, "no row was edited"


def test_a_case_that_finds_or_makes_a_device_ill_twice_is_left_alone(store: Store) -> None:
    store.write([row("error", False, 1)], "r")
    assert not store.done("dev", "r")
    store.write([row("timeout", False, 1)], "r")
    assert len(store.done("dev", "r")) == 1


# --- processes that do not go --------------------------------------------------------------------------


def test_closing_does_not_wait_for_what_the_driver_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in the driver outlives SIGKILL: here the signal does not arrive."""
    monkeypatch.setattr(supervising, "CLOSE_S", 0.1)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdin=subprocess.PIPE)
    with monkeypatch.context() as without_signals:
        without_signals.setattr(os, "killpg", lambda *_: None)
        held = Supervisor(ON_GPU)
        held._process = process
        held.close()
    assert held.left_behind == [process.pid]
    assert held._process is None
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_a_worker_that_closes_its_output_and_stays_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "CLOSE_S", 0.2)
    monkeypatch.setattr(supervising, "STARTS_BEFORE_GIVING_UP", 1)
    script = tmp_path / "stays.py"
    script.write_text("import os, sys, time; print('stuck', file=sys.stderr); os.close(1); time.sleep(600)")
    with pytest.raises(CampaignError, match=r"closed its output but did not end.*stuck"):
        Supervisor(ON_GPU, worker=(str(script),)).start()


# --- ranks of torchrun ---------------------------------------------------------------------------------


def test_rank_0_keeps_what_it_measured_and_then_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process holds the group: it cannot be replaced."""
    from opcast.harness import collectives
    from opcast.harness.measuring import IllDeviceError

    def ill(*_: object) -> None:
        raise IllDeviceError("4096 ones add up to 0")

    ranks = collectives.InProcess(SimpleNamespace(settings=ON_GPU))
    replies = iter([{"status": "ok", "latency_us": 9.0, "ill": STICKY, "worn": "a capture failed"}])
    monkeypatch.setattr(collectives, "outcome", lambda *_: next(replies))
    monkeypatch.setattr(collectives, "abilities", ill)
    case = Case(make_op("all_reduce", size_bytes=1024, ranks=2), "nccl")
    assert ranks.ask(case, lambda columns: None) == {"status": "ok", "latency_us": 9.0}
    with pytest.raises(CampaignError, match=r"illegal memory access.*run the same command again"):
        ranks.ask(case, lambda columns: None)
    with pytest.raises(CampaignError, match="add up to 0"):
        ranks.start()
