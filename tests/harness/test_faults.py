"""Disks, clocks, locks and listings that fail a campaign: nothing that was measured is lost, nothing is there twice."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from opcast.datasets.files import StoreError
from opcast.datasets.store import Store
from opcast.harness.campaign import run
from opcast.harness.environment import cpu_device_id
from opcast.harness.ledger import CampaignError
from opcast.harness.parts import announce
from opcast.harness.plan import CampaignPlan
from opcast.harness.status import status
from opcast.jobs.cli import main

from . import recorded, without_locks
from .recorded import Recorded
from .test_campaign import known_cpu, row_keys, rows, small_plan

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mounts and signals as Linux has them")
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
RECORD: dict[str, Any] = {
    "environment": {"device_id": cpu_device_id(1), "node": "node-a", "opcast_version": "test"},
    "columns": {"status": "ok", "latency_us": 2.0, "timer": "cpu_clock", "iterations": 3},
}


def measure(plan: CampaignPlan, store: Store, **settings: Any) -> str:
    """The outcome of a run here."""
    return run(plan, store, measurer=Recorded(**RECORD), **settings).outcome


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return known_cpu(Store(tmp_path / "store"))


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path, store: Store) -> Iterator[Start]:
    """Starts a campaign in a process of its own, which prints how far it is; 10 ms a case."""
    started: list[subprocess.Popen[str]] = []

    def go(plan: CampaignPlan, *part: str, script: Any = recorded, **environment: str) -> subprocess.Popen[str]:
        (tmp_path / "plan.json").write_text(plan.to_json())
        (tmp_path / "record.json").write_text(json.dumps({**RECORD, "case_s": 0.01}))
        paths = [tmp_path / "plan.json", store.path, tmp_path / "record.json"]
        command = [sys.executable, "-P", script.__file__, *map(str, paths), *part]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, text=True, env={**os.environ, **environment}, **pipes))
        return started[-1]

    yield go
    for process in started:
        process.kill()
        process.communicate()


def under_way(process: subprocess.Popen[str]) -> None:
    """Until it has rows on disk."""
    assert process.stdout is not None
    for line in process.stdout:
        if int(line.split()[0]) > 0:
            return
    raise AssertionError(process.communicate())


# --- disks ---------------------------------------------------------------------------------------------


def mount(*words: object) -> bool:
    return subprocess.run(["mount", *map(str, words)], capture_output=True, check=False).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB of this test's own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not mount("-t", "tmpfs", "-o", "size=256k", "tmpfs", folder):
        pytest.skip("a file system of a test's own needs the right to mount it")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_ends_a_campaign_which_goes_on_when_there_is_room(disk: Path) -> None:
    store, plan = known_cpu(Store(disk / "store")), small_plan(200)
    with pytest.raises(StoreError, match="No space left on device; free or choose") as caught:
        measure(plan, store)
    assert "\n" not in str(caught.value)
    written = row_keys(store)
    assert 0 < len(written) < 200
    assert set(written.values()) == {1}
    assert mount("-o", "remount,size=16m", disk)
    assert measure(plan, store) == "complete"
    assert row_keys(store).keys() > written.keys()
    assert sorted(row_keys(store).values()) == [1] * 200
    assert not list(disk.rglob("*.tmp"))


def test_a_store_that_turns_read_only_is_one_line_and_can_be_read(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, plan = known_cpu(Store(disk / "store")), small_plan(12)
    announce(store.path, plan, 1)
    measure(plan, store)
    assert mount("-o", "remount,ro", disk)
    with pytest.raises(CampaignError, match=r"the store cannot be written: .* Read-only file system") as caught:
        measure(small_plan(16), store)
    assert "\n" not in str(caught.value)
    assert sorted(row_keys(store).values()) == [1] * 12
    for verb in (["profile", "status"], ["data"]):
        assert main([*verb, f"store={store.path}"]) == 0
    capsys.readouterr()
    assert main(["profile", "campaign.budget_s=1", "+settings.device=cpu", f"store={store.path}"]) == 2
    assert "Read-only file system" in capsys.readouterr().err


def test_half_a_file_is_named_and_only_its_rows_are_measured_again(store: Store) -> None:
    plan = small_plan(24)
    measure(plan, store)
    torn = store.files("gelu")[0]
    torn.write_bytes(torn.read_bytes()[:-500])
    left = torn.with_name(f".{torn.name}.0badcafe.tmp")
    left.write_bytes(torn.read_bytes())
    with pytest.raises(StoreError, match=f"{torn.name} is damaged .*: move it out of the store") as caught:
        measure(plan, store)
    assert "\n" not in str(caught.value)
    torn.unlink()
    lost = 24 - len(row_keys(store))
    assert lost > 0
    summary = run(plan, store, measurer=Recorded(**RECORD))
    assert (summary.outcome, summary.measured) == ("complete", lost)
    assert sorted(row_keys(store).values()) == [1] * 24
    assert not left.exists()


# --- locks, and processes that were taken for dead -------------------------------------------------------


def test_without_locks_the_second_campaign_of_one_id_is_refused_and_the_first_goes_on(
    store: Store, start: Start
) -> None:
    plan = small_plan(400)
    first = start(plan, script=without_locks)
    under_way(first)
    second = start(plan, script=without_locks)
    _, errors = second.communicate(timeout=60)
    assert "CampaignError" in errors
    assert "is running on node-a" in errors
    output, errors = first.communicate(timeout=60)
    assert output.splitlines()[-1] == "complete", errors
    assert sorted(row_keys(store).values()) == [1] * 400


def test_a_process_that_was_replaced_while_it_was_stopped_writes_no_row(
    store: Store, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = small_plan(100)
    stopped = start(plan, script=without_locks)
    under_way(stopped)
    stopped.send_signal(signal.SIGSTOP)
    (session,) = store.path.glob("sessions/*/*.json")
    os.utime(session, (0, 0))  # as if it had been silent for long
    monkeypatch.setattr(fcntl, "flock", without_locks.no_locks)
    assert measure(plan, store) == "complete"
    stopped.send_signal(signal.SIGCONT)
    _, errors = stopped.communicate(timeout=60)
    assert "TakenOverError" in errors
    assert sorted(row_keys(store).values()) == [1] * 100


# --- what other machines see -----------------------------------------------------------------------------


class StaleListings:
    """A client of NFS: folders list as they did when it was made, until it makes or removes a file in them itself."""

    def __init__(self, folder: Path) -> None:
        self.seen = {str(path): set(os.listdir(path)) for path in (folder, *folder.rglob("*")) if path.is_dir()}
        self.scandir = os.scandir

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """See through it from here on."""
        for name in ("open", "replace", "unlink"):
            patch.setattr(os, name, self.changing(getattr(os, name)))
        patch.setattr(os, "scandir", self.listing)
        patch.setattr(os, "listdir", lambda path=".": [each.name for each in self.listing(path)])

    def changing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **named: Any) -> Any:
            done = real(path, *rest, **named)
            if real.__name__ != "open" or (rest and rest[0] & os.O_CREAT):
                self.seen.pop(str(Path(path).absolute().parent), None)
            return done

        return call

    def listing(self, path: Any = ".") -> Any:
        return _Entries(path, self)


class _Entries:
    """What ``os.scandir`` returns: entries, in a block or out of one."""

    def __init__(self, path: Any, client: StaleListings) -> None:
        known = client.seen.get(str(Path(path).absolute()))
        with client.scandir(path) as entries:
            self.entries = [each for each in entries if known is None or each.name in known]

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        return iter(self.entries)

    def __enter__(self) -> list[os.DirEntry[str]]:
        return self.entries

    def __exit__(self, *_: object) -> None: ...


def some_of(plan: CampaignPlan, store: Store, count: int) -> None:
    """Run it until so many cases are on disk, then break it off."""

    def stop(progress: Any) -> None:
        if progress.done >= count:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan, store, stop, measurer=Recorded(**RECORD))


def test_rows_that_another_machine_wrote_just_now_are_seen(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small_plan(48)
    some_of(plan, store, 8)
    early = len(row_keys(store))
    client = StaleListings(store.path)
    some_of(plan, store, 24)
    late = len(row_keys(store))
    client.install(monkeypatch)
    assert len(row_keys(store)) == early < late, "the listings are old"
    summary = run(plan, store, measurer=Recorded(**RECORD))
    assert (summary.outcome, summary.measured) == ("complete", 48 - late)
    assert sorted(row_keys(store).values()) == [1] * 48


# --- clocks ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(FAKETIME is None, reason="another clock for one process: apt-get install faketime")
def test_nodes_whose_clocks_differ_write_rows_of_one_time(store: Store, start: Start) -> None:
    plan = small_plan(24)
    announce(store.path, plan, 2)
    shifted = {"LD_PRELOAD": str(FAKETIME), "FAKETIME": "-1h", "NO_FAKE_STAT": "1"}
    began = datetime.now(UTC)
    processes = [start(plan, "0/2", **shifted), start(plan, "1/2")]
    for process in processes:
        output, errors = process.communicate(timeout=60)
        assert output.splitlines()[-1] == "complete", errors
    moments = [row["measured_at"] for row in rows(store)]
    slack = timedelta(seconds=5)
    assert began - slack < min(moments) <= max(moments) < datetime.now(UTC) + slack
    found = status(store)[0]
    assert found.complete
    assert [round(part.clock_offset_s / 600) for part in found.parts] == [6, 0]
    assert found.device_s < 60
