"""A campaign in parts on a real Slurm and a real Ray: whatever is killed, each case has one row in the end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from opcast.datasets.devices import Device
from opcast.datasets.store import Store
from opcast.harness.campaign import run
from opcast.harness.environment import cpu_device_id
from opcast.harness.parts import announce, campaign_id
from opcast.harness.plan import CampaignPlan, build_plan
from opcast.harness.sessions import RUNNING, sessions
from opcast.harness.status import status
from opcast.jobs.launching.places import Ray, Slurm

pytest.importorskip("torch")

PARTS = 8
SMALL: dict[str, Any] = {"cpus": 1, "memory_gib": 0.5}  # the nodes of this Slurm have a processor and 1000 MB
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


def plan_of(cases: int, case_budget_s: float = 0.2) -> CampaignPlan:
    sizes = {"rows": {"low": 1, "high": 64}, "cols": {"low": 1, "high": 2048}}
    settings = {"threads": 1, "pin": False, "case_budget_s": case_budget_s, "ci_width": 0.001, "batch_size": 2}
    spec = {
        "name": "spread",
        "dtype": "fp32",
        "settings": {**settings, "canary_every": 100},
        "cases": [{"kind": "gelu", "sample": cases, **sizes}],
        "canaries": [{"kind": "gelu", "rows": 5, "cols": 7, "dtype": "fp32"}],
    }
    return build_plan(spec)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with figures of this machine, so that no part measures them first."""
    return figures_in(Store(tmp_path / "store"))


def figures_in(made: Store) -> Store:
    """The store with figures of this machine."""
    figures = {"compute_units": 1, "clock_mhz": 1.0, "vector_tflops": 1.0, "memory_gib": 1.0, "memory_gbps": 1.0}
    names = {"id": cpu_device_id(1), "name": "test", "vendor": "cpu", "architecture": "test"}
    made.save_device(
        Device.from_dict({**names, **figures, "tensor_tflops": {"fp32": 1.0}, "l2_mib": 1.0, "l2_gbps": 1.0})
    )
    return made


def counts(store: Store, canaries: bool = False) -> Counter[tuple[int, int, str]]:
    """Rows of each case, or of the canaries."""
    table = store.read("gelu", status=None, newest=False, columns=["rows", "cols", "cache", "run_id"])
    rows = [row for row in table.to_pylist() if row["run_id"].startswith("canary") == canaries]
    return Counter((row["rows"], row["cols"], row["cache"]) for row in rows)


def undisturbed(cases: int, folder: Path) -> Counter[tuple[int, int, str]]:
    """Rows of each case of the same campaign in one process that nobody kills."""
    plan = plan_of(cases, 0.01)
    store = Store(folder)
    for path in (folder.parent / "store" / "devices").glob("*.json"):
        store.save_device(Device(**json.loads(path.read_text())))
    assert run(plan, store).outcome == "complete"
    return counts(store)


def disturb(slurm: Any, task: str, way: str) -> bool:
    """End a running task so that Slurm starts it again; False when it was through already."""
    if way == "preempted":
        return tried(slurm, "scontrol", "requeue", task)
    if way == "out of time":
        command = ["scancel", "--signal=USR2", task]  # tries again and again, although the signal comes through at once
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, env=slurm.environment, capture_output=True, timeout=2, check=False)
        return True
    node = slurm.command("squeue", "--noheader", "--jobs", task, "--format", "%N").strip()
    died = bool(node) and tried(slurm, "scontrol", "update", f"NodeName={node}", "State=down", "Reason=test")
    return died and tried(slurm, "scontrol", "update", f"NodeName={node}", "State=resume")


def tried(slurm: Any, *words: str) -> bool:
    """Whether a command of Slurm took effect."""
    return subprocess.run(words, env=slurm.environment, capture_output=True, check=False).returncode == 0


def wait_for(slurm: Any, array: str) -> None:
    """Until no task of an array is queued or runs."""
    slurm.wait(lambda: not set(slurm.states(array).values()) - ENDED, "the end of the parts", 240)


def test_slurm_runs_an_array_on_all_its_nodes(slurm: Any, tmp_path: Path) -> None:
    script = f"echo $SLURMD_NODENAME >> {tmp_path}/$SLURM_ARRAY_TASK_ID; sleep 1"
    words = ["--parsable", "--requeue", "--output=/dev/null", "--array=0-3", f"--wrap={script}"]
    job = slurm.command("sbatch", *words).strip()
    slurm.wait(lambda: not set(slurm.states(job).values()) - ENDED, "the end of the array")
    assert {(tmp_path / str(i)).read_text().strip() for i in range(4)} == set(slurm.nodes)


@pytest.mark.slow
def test_an_array_with_parts_killed_and_requeued_equals_an_undisturbed_run(
    slurm: Any, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opcast.jobs.launching.slurm import submit

    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    plan = plan_of(PARTS * 12)
    announce(store.path, plan, PARTS, "slurm")
    assert [each.not_started for each in status(store)] == [PARTS]
    jobs = submit(Slurm(parts=PARTS, time_min=10, **SMALL), store.path, campaign_id(plan))
    array = jobs[0].job_id.split("_")[0]
    ways = ["node died", "preempted", "out of time"]
    hit: set[str] = set()
    deadline = time.monotonic() + 400
    while set((states := slurm.states(array)).values()) - ENDED:
        assert time.monotonic() < deadline, slurm.log()
        begun = [each for each in sessions(store.path).values() if each.outcome == RUNNING]
        at_work = {each.job.split()[-1] for each in begun if each.done < each.total - 2}
        running = [task for task in sorted(at_work) if states.get(task) == "RUNNING" and task not in hit]
        for task in [each for each in hit if states.get(each) == "PENDING"]:
            tried(slurm, "scontrol", "update", f"JobId={task}", "StartTime=now")  # not two minutes later
        if ways and running and disturb(slurm, running[0], ways[0]):
            ways.pop(0)
            hit.add(running[0])
        time.sleep(0.3)
    found = status(store)[0]
    assert found.complete, (found, slurm.log())
    assert len(hit) == 3, slurm.log()
    assert counts(store) == undisturbed(len(plan.cases), tmp_path / "undisturbed")
    assert set(counts(store).values()) == {1}
    assert len(found.parts) == PARTS
    assert sum(part.starts for part in found.parts) >= PARTS + 2
    assert {part.job.split("_")[0] for part in found.parts} == {f"slurm {array}"}
    assert len({part.node for part in found.parts}) > 1
    assert found.device_s > 0
    assert not list(store.path.glob("op=*/device=*/.*.tmp"))


def mounted(*words: object) -> bool:
    return subprocess.run(["mount", *map(str, words)], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
def test_an_array_whose_disk_fills_turns_read_only_and_loses_half_a_file_goes_on_when_it_is_asked_again(
    slurm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opcast.jobs.launching.slurm import submit

    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    disk = tmp_path / "disk"
    disk.mkdir()
    if not mounted("-t", "tmpfs", "-o", "size=16m", "tmpfs", disk):
        pytest.skip("a file system of a test's own needs the right to mount it")
    try:
        store, plan = figures_in(Store(disk / "store")), plan_of(24, 0.01)
        announce(store.path, plan, 2, "slurm")
        place = Slurm(parts=2, time_min=10, logs=str(tmp_path / "logs"), **SMALL)

        def asked_again() -> str:
            """What the parts of a new array wrote to stderr before they ended."""
            array = submit(place, store.path, campaign_id(plan))[0].job_id.split("_")[0]
            wait_for(slurm, array)
            return "".join(path.read_text() for path in (tmp_path / "logs").glob(f"{array}_*.err"))

        filler = disk / "filler"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        os.truncate(filler, filler.stat().st_size - 32 * 1024)  # room for a session, a lease and a few rows
        assert "No space left on device" in asked_again()
        filler.unlink()
        assert mounted("-o", "remount,ro", disk)
        assert "Read-only file system" in asked_again()
        assert mounted("-o", "remount,rw", disk)
        kept = counts(store)
        assert set(kept.values()) <= {1}
        assert len(kept) < 24
        asked_again()
        assert status(store)[0].complete, slurm.log()
        torn = max(store.files("gelu"), key=lambda path: path.stat().st_size)
        torn.write_bytes(torn.read_bytes()[:-500])
        assert f"{torn.name} is damaged" in asked_again()
        torn.unlink()
        assert len(counts(store)) < 24
        asked_again()
        assert counts(store) == Counter(dict.fromkeys(counts(store), 1))
        assert len(counts(store)) == 24
        assert kept.keys() <= counts(store).keys()
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.slow
def test_parts_run_through_the_runtime_of_their_container(
    slurm: Any, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the place of Apptainer stands a script that notes what it is asked and runs it outside of any container."""
    from opcast.jobs.launching.slurm import submit

    programs = tmp_path / "bin"
    programs.mkdir()
    runtime = programs / "apptainer"
    runtime.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nshift 4\nexec "$@"\n')
    runtime.chmod(0o755)
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    plan = plan_of(4, 0.01)
    announce(store.path, plan, 2, "slurm")
    place = Slurm(
        parts=2,
        time_min=10,
        container="o.sif",
        runtime="apptainer",
        mounts=str(tmp_path),
        python=sys.executable,
        **SMALL,
    )
    array = submit(place, store.path, campaign_id(plan))[0].job_id.split("_")[0]
    wait_for(slurm, array)
    assert status(store)[0].complete, slurm.log()
    assert set(counts(store).values()) == {1}
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 2
    assert all(each.startswith(f"exec --bind {tmp_path} o.sif {sys.executable} -u -m submitit") for each in asked)


def test_slurm_grants_the_processors_and_memory_that_a_part_needs(
    slurm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not its default of one core and next to no memory; a cluster without so much says what was asked."""
    from opcast.jobs.launching.slurm import submit
    from opcast.jobs.show import BadInputError

    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    job = submit(Slurm(parts=1, time_min=1, **SMALL), tmp_path, "none-1")[0].job_id
    told = slurm.command("scontrol", "show", "job", job)
    slurm.command("scancel", job)
    assert "CPUs/Task=1" in told
    assert "MinMemoryNode=512M" in told
    whole = submit(Slurm(parts=1, time_min=1, exclusive=True, cpus=1), tmp_path, "none-1")[0].job_id
    assert "MinMemoryNode=0" in slurm.command("scontrol", "show", "job", whole)
    slurm.command("scancel", whole)
    with pytest.raises(BadInputError, match=r"where\.cpus=4"):
        submit(Slurm(parts=1, time_min=1), tmp_path, "none-1")


@pytest.mark.slow
def test_a_campaign_on_ray_survives_a_killed_worker(ray_cluster: Any, store: Store, tmp_path: Path) -> None:
    import signal
    import threading

    from opcast.jobs.launching.ray_tasks import run_parts

    plan = plan_of(4 * 12)
    announce(store.path, plan, 4, "ray")
    killed: list[int] = []

    def kill_one() -> None:
        while not killed:
            for path in (store.path / "sessions").glob("*/*.json"):
                pid = _holder(path)
                if pid and counts(store):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
                    return
            time.sleep(0.2)

    thread = threading.Thread(target=kill_one, daemon=True)
    thread.start()
    done = dict(run_parts(Ray(parts=4), store.path, campaign_id(plan)))
    thread.join(5)
    assert killed
    assert set(done) == {f"{i}/4" for i in range(4)}
    assert counts(store) == undisturbed(len(plan.cases), tmp_path / "undisturbed")
    assert set(counts(store).values()) == {1}
    assert status(store)[0].complete


def _holder(session: Path) -> int:
    """A process that runs a part: one of Ray's workers that has a worker of the harness as its child."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            words = (path.parent / "cmdline").read_bytes()
            above = Path(f"/proc/{parent}/cmdline").read_bytes()
        except OSError:
            continue
        if b"opcast.harness.worker" in words and b"ray::" in above and str(session.parent.name)[:6]:
            return parent
    return 0
