"""Parts of a campaign, their sessions and leases, and the status that a store tells."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.store import Store
from opcast.harness.campaign import Progress
from opcast.harness.ledger import CampaignError, claim
from opcast.harness.parts import CampaignPart, announce, campaign_id, cut, read_plan
from opcast.harness.plan import CampaignPlan, CampaignPlanError, build_plan
from opcast.harness.sessions import RUNNING, Heart, Session, TakenOverError, sessions
from opcast.harness.status import status

HERE = {"device_id": "cpu_x", "node": "node-here"}


def plan_of(gelu: int, reduce: int) -> CampaignPlan:
    sizes = {"low": 1, "high": 4096}
    cases: list[dict[str, Any]] = [
        {"kind": "gelu", "sample": gelu, "rows": sizes, "cols": sizes},
        {"kind": "reduce", "sample": reduce, "outer": sizes, "length": sizes},
    ]
    return build_plan({"name": "small", "dtype": "fp32", "cases": cases})


@settings(max_examples=25)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12))
def test_parts_are_the_whole_once_and_alike_in_size(gelu: int, reduce: int, count: int) -> None:
    plan = plan_of(gelu, reduce)
    parts = [cut(plan, CampaignPart(i, count)) for i in range(count)]
    cases = [case for part in parts for case in part.cases]
    assert sorted(cases) == sorted(plan.cases)
    lengths = [len(part.cases) for part in parts]
    assert max(lengths) - min(lengths) <= 1
    for kind in ("gelu", "reduce"):
        of_kind = [sum(case.op.kind == kind for case in part.cases) for part in parts]
        assert max(of_kind) - min(of_kind) <= 1
    if count > 1:
        assert len({part.canaries for part in parts}) == 1
        assert parts[0].canaries


@pytest.mark.parametrize("text", ["8/8", "3", "-1/4", "1/0", "a/b", "0/100000", ""])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(CampaignPlanError, match="as 3/8"):
        CampaignPart.parse(text)


def test_a_compressed_plan_is_read_and_a_damaged_one_is_a_line(tmp_path: Path) -> None:
    import gzip

    plan = plan_of(3, 3)
    path = tmp_path / "plan.json.gz"
    path.write_bytes(gzip.compress(plan.to_json().encode()))
    assert read_plan(path) == plan
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(CampaignPlanError, match="no plan"):
        read_plan(path)


def start(store: Path, machine: str, monkeypatch: pytest.MonkeyPatch, index: int = 0) -> Heart:
    monkeypatch.setattr("opcast.harness.sessions.machine_name", lambda: machine)
    return Heart.start(store, "small-1", "small-run", CampaignPart(index, 4), {**HERE, "node": f"node-{machine}"}, 1.0)


def nobody(_: float) -> None:
    raise AssertionError("waited")


def test_another_machine_at_the_same_part_is_waited_for_until_it_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(tmp_path, "a", monkeypatch)
    first.wait_for_others(nobody)
    assert first.session.outcome == RUNNING
    start(tmp_path, "c", monkeypatch, index=1).wait_for_others(nobody)  # another part
    second = start(tmp_path, "b", monkeypatch)
    waits = []

    def silent(seconds: float) -> None:
        waits.append(seconds)
        old = time.time() - first.session.lease_s - 1
        os.utime(first.path, (old, old))

    second.wait_for_others(silent)
    assert len(waits) == 1
    first.beaten_at = 0.0
    with pytest.raises(TakenOverError, match="node-b"):
        first.beat(Progress("small-run", 4, 1, 0, {}, "", 1.0, None))


def test_a_machine_that_goes_on_keeps_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start(tmp_path, "a", monkeypatch)
    first.wait_for_others(nobody)
    second = start(tmp_path, "b", monkeypatch)

    def goes_on(_: float) -> None:
        first.beaten_at = 0.0
        first.beat(Progress("small-run", 4, 1, 0, {}, "", 1.0, None))

    with pytest.raises(CampaignError, match="running on node-a"):
        second.wait_for_others(goes_on)


def test_a_clock_that_is_off_is_corrected_by_that_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    monkeypatch.setattr("opcast.harness.sessions.time.time", lambda: real() - 3600.0)
    heart = start(tmp_path, "a", monkeypatch)
    assert heart.session.clock_offset_s == pytest.approx(3600, abs=5)
    assert heart.now() == pytest.approx(real(), abs=5)


def test_a_disk_that_is_full_stops_no_beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heart = start(tmp_path, "a", monkeypatch)
    heart.wait_for_others(nobody)
    heart.beaten_at = 0.0

    def full(*_: object, **__: object) -> None:
        from opcast.datasets.files import StoreError

        raise StoreError("no space left on device")

    monkeypatch.setattr("opcast.harness.sessions.write_atomically", full)
    heart.beat(Progress("small-run", 4, 1, 0, {}, "", 1.0, None))
    heart.end("complete")


def test_parts_hold_the_record_together_and_the_whole_waits(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "small.json"
    with claim(path, {"node": "a"}, "0of4"), claim(path, {"node": "b"}, "1of4"):
        assert json.loads(path.read_text()) == {"node": "a"}
        with pytest.raises(CampaignError, match="is running"), claim(path, {}, "1of4"):
            pass
        with pytest.raises(CampaignError, match="is running"), claim(path, {}):
            pass
    with claim(path, {"node": "c"}):
        assert json.loads(path.read_text()) == {"node": "c"}


def write(store: Path, **values: Any) -> None:
    base = Session("", "", "0/4", "node-a", "m", "slurm 7_0", "cpu_x", None, 0.0, 0.0, 60.0)
    session = replace(base, **values)
    path = store / "sessions" / session.run_id / f"{session.part.replace('/', 'of')}-{session.started_at}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(session)))


def test_the_status_of_parts_comes_from_the_store_alone(tmp_path: Path) -> None:
    plan = plan_of(20, 20)
    store = Store(tmp_path)
    announce(tmp_path, plan, 4, "slurm")
    name, now = campaign_id(plan), time.time()
    told = {"campaign": name, "run_id": "small-run", "total": 10, "started_at": now - 100, "at": now}
    write(tmp_path, **told, part="0/4", done=5, measured=5, outcome="running", statuses={"ok": 4, "oom": 1})
    write(tmp_path, **{**told, "started_at": now - 300, "at": now - 200}, part="0/4", outcome="failed")
    write(tmp_path, **told, part="1/4", done=10, measured=10, outcome="complete")
    write(tmp_path, **told, part="2/4", done=2, measured=2, outcome="running")
    silent = next(path for path, each in sessions(tmp_path).items() if each.part == "2/4")
    os.utime(silent, (now - 500, now - 500))
    (tmp_path / "sessions" / "small-run" / "torn.json").write_text('{"campaign": "sm')
    found = status(store, now)[0]
    assert [part.state for part in found.parts] == ["running", "complete", "silent"]
    assert found.parts[0].starts == 2
    assert found.parts[0].busy_s == pytest.approx(200, abs=1)
    assert found.parts[0].left_s == pytest.approx(100, abs=2)
    assert found.not_started == 1
    assert found.device_s == pytest.approx(400, abs=2)
    assert found.left_s is not None
    assert found.left_s > 100
    assert not found.complete


def test_who_is_refused_does_not_end_the_one_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole campaign elsewhere has cases of every part, and is refused while one of them goes on."""
    part = start(tmp_path, "a", monkeypatch, index=2)
    part.wait_for_others(nobody)
    monkeypatch.setattr("opcast.harness.sessions.machine_name", lambda: "b")
    whole = Heart.start(tmp_path, "small-1", "small-run", CampaignPart(), HERE, 1.0)

    def goes_on(_: float) -> None:
        part.beaten_at = 0.0
        part.beat(Progress("small-run", 4, 1, 0, {}, "", 1.0, None))

    with pytest.raises(CampaignError, match="part 2/4 of campaign small-run is running on node-a"):
        whole.wait_for_others(goes_on)
    whole.end("failed", "refused")
    part.fence()


def test_without_locks_processes_of_one_machine_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = (tmp_path, "small-1", "small-run", CampaignPart(), HERE, 1.0)
    Heart.start(*told, locked=False).wait_for_others(nobody)
    Heart.start(*told, locked=True).wait_for_others(nobody)
    with pytest.raises(AssertionError, match="waited"):
        Heart.start(*told, locked=False).wait_for_others(nobody)
