"""The script of the first run on a GPU, with the CPU as the device: its steps, what it packs, and that it goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from opcast.datasets import quality
from opcast.datasets.sources.importing import import_into
from opcast.datasets.store import Store
from opcast.tests.at_hand import figures_at_hand


def first_run(root: Path, folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(root / "jobs" / "first_gpu_run.sh"), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder.parent,
        env={**os.environ, "SMALL": "1", "HARDWARE": "cpu", "PYTHON": sys.executable, **settings},
    )


def done_before(folder: Path, *steps: str) -> None:
    (folder / "done").mkdir(parents=True)
    for step in steps:
        (folder / "done" / step).touch()


@pytest.mark.slow
def test_it_measures_twice_compares_and_packs_and_goes_on(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    done_before(folder, "tests", "quickstart")  # which have tests of their own, and take the longest
    for name in ("store_1", "store_2"):
        Store(folder / name).save_device(figures_at_hand())
    found = first_run(root, folder)
    assert found.returncode == 0, found.stderr
    kinds = {each["kind"]: each for each in json.loads((folder / "repeatability.json").read_text())["kinds"]}
    assert {"gemm", "copy"} <= set(kinds)
    assert kinds["gemm"]["rows"] >= 12
    assert json.loads((folder / "collectives.json").read_text())["statuses"] == {"ok": 2}
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        names = archive.getnames()
    told = (
        "machine.txt",
        "packages.txt",
        "repeatability.json",
        "store_1.json",
        "again.log",
        "failures.json",
        "check.json",
        "collectives.json",
    )
    assert {f"attached/{name}" for name in told} <= set(names)
    assert any(name.startswith("rows/gemm/") for name in names)
    taken = Store(tmp_path / "taken")
    assert import_into(taken, "bundle", tmp_path / "out.tar.gz").rows_written >= 12
    assert not [each for each in quality.check(taken) if each.severity == "error"]
    again = first_run(root, folder)
    assert again.returncode == 0
    assert "campaign: done before" in again.stderr
    assert "again: done before" in again.stderr


SRUN = """#!/bin/bash
# Slurm's srun on one machine: so many tasks on each of two nodes, each told its place.
[[ $1 == --ntasks-per-node=* && $2 == --gpu-bind=none ]] || exit 64
each=${1#*=}; shift 2
export SLURM_NTASKS=$((2 * each))
for ((task = 0; task < SLURM_NTASKS; task++)); do SLURM_PROCID=$task "$@" & tasks+=($!); done
for task in "${tasks[@]}"; do wait "$task" || exit 1; done
"""


@pytest.mark.slow
def test_under_slurm_the_nodes_of_a_job_measure_what_lies_between_them(root: Path, tmp_path: Path) -> None:
    """The step's own plan, command and ranks; only srun and scontrol are stood in for."""
    folder, commands = tmp_path / "out", tmp_path / "bin"
    done_before(folder, "provenance", "tests", "campaign", "again", "collectives", "quickstart", "check")
    Store(folder / "store_1").save_device(figures_at_hand())
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", '#!/bin/sh\nexec echo "127.0.0.1"\n')):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    slurm = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]", "RANKS_PER_NODE": "1"}
    found = first_run(root, folder, PATH=f"{commands}:{os.environ['PATH']}", **slurm)
    assert found.returncode == 0, found.stderr
    assert "nodes: done in" in found.stderr
    store = Store(folder / "store_1")
    rows = [row for device in store.devices("all_reduce") for row in store.read("all_reduce", device).to_pylist()]
    assert {(row["ranks"], row["size_bytes"]) for row in rows} == {(2, 1024), (2, 65536)}
    taken = Store(tmp_path / "taken")
    assert import_into(taken, "bundle", tmp_path / "out.tar.gz").rows_written == 2


def test_a_step_that_fails_is_said_with_its_log_and_its_exit_code(root: Path, tmp_path: Path) -> None:
    found = first_run(root, tmp_path / "out", PYTHON="/bin/false")
    assert found.returncode == 1
    last = found.stderr.strip().splitlines()[-1]
    assert last.startswith("first run: provenance: FAILED")
    assert last.endswith("provenance.log: /bin/false cannot run opcast")


def test_steps_run_in_the_order_that_a_gpu_is_owed(root: Path) -> None:
    text = (root / "jobs" / "first_gpu_run.sh").read_text()
    steps = [line.split()[1] for line in text.splitlines() if line.lstrip().startswith("step ")]
    assert steps == [
        "setup",
        "provenance",
        "tests",
        "campaign",
        "again",
        "collectives",
        "collectives",
        "nodes",
        "quickstart",
        "check",
    ]
    # Files that need more than a bare machine has are not read: one that cannot be imported would end them all.
    assert r'grep -rl --include="test_*.py" "mark\.gpu" tests' in text
    assert 'pytest -m gpu -q -p no:cacheprovider "${alone[@]}" "${files[@]}"' in text
