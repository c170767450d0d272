"""Verbs that write: on a full disk, a read-only one, or killed in between, an old file stays whole and none is half.

A full disk is a small file system of its own where one may be mounted (root on Linux), else the system's words at the
moment when a file is flushed. Who is killed is a fork of this process, at that moment too.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

from opcast.datasets import files
from opcast.datasets.ops import make_op
from opcast.datasets.schema import Measurement
from opcast.datasets.store import Store
from opcast.jobs.cli import main

STEP = "model=tiny_llama_100m device=h100_sxm workload.seq_len=64"
FAR = "model=tiny_llama_100m cluster=dgx_h100 workload.seq_len=64 workload.global_batch=64"
SPACE = "space.tp=[1,2] space.pp=1 space.cp=1 space.micro_batch=1 space.recompute=none workers=1"
LAW = "law={base_us:5000,decode_us:20,prefill_token_us:60} kv.blocks=1000 traffic.requests=20"
RL = "model=tiny_llama_100m cluster=dgx_h100 workload.seq_len=128 method=sft prompts=8 lives=20 batches=1"
RING = "op=all_reduce op.size_bytes=1MiB op.ranks=4 cluster=dgx_h100 network=flow"
JOB = f"{FAR} steps=100 step_time_s=0.1 checkpoint.size_gb=1 lives=20"
STORES = "store={files}/store predictors={files}/predictors"
CASES = {  # a verb's words, the last of which says where it writes: {disk} is the disk that is ill
    "predict output": "predict op=gemm shapes={files}/shapes.csv device=h100_sxm output={disk}/a.parquet",
    "predict report": f"predict {RING} report={{disk}}/a",
    "predict picture": f"predict {RING} picture={{disk}}/a.svg",
    "simulate trace": f"simulate {STEP} trace={{disk}}/a.json.gz",
    "simulate report": f"simulate {STEP} report={{disk}}/a.html",
    "simulate simai": f"simulate {FAR} simai={{disk}}/a",
    "simulate chakra": f"simulate {STEP} chakra={{disk}}/traces",
    "search launch": f"search {FAR} {SPACE} framework=megatron-bridge launch={{disk}}/a",
    "search report": f"search {FAR} {SPACE} report={{disk}}/a.html",
    "search points": f"search {FAR} {SPACE} points={{disk}}/points",
    "plan picture": f"plan {JOB} picture={{disk}}/a.svg",
    "plan report": f"plan {JOB} report={{disk}}/a.html",
    "posttrain picture": f"posttrain {RL} picture={{disk}}/a.svg",
    "upgrade plan_out": f"upgrade {STEP} plan_out={{disk}}/a.json",
    "serving report": f"serving {LAW} report={{disk}}/a",
    "serving requests": f"serving {LAW} requests={{disk}}/a.parquet",
    "serving trace": f"serving {LAW} trace={{disk}}/a.json.gz",
    "serving chakra": f"serving {LAW} chakra={{disk}}/traces",
    "profile plan_out": "profile +settings.device=cpu plan_out={disk}/a.json",
    "import": "import source=csv path={files}/rows.csv mapping={files}/map.yaml store={disk}/store",
    "train": "train device=h100_sxm op=gelu tracking=null store={files}/store predictors={disk}/predictors",
    "data bundle": f"data bundle {STORES} site=here license=MIT output={{disk}}/a.tar.gz",
    "data gain": f"data gain {STORES} report={{disk}}/a.html",
    "data drift": f"data drift {STORES} against={{files}}/slower plan_out={{disk}}/a.json",
    "trace convert": "trace convert path={files}/traces/opcast.0.et output={disk}/a.json",
    "new": "new device mine like=h100_sxm to={disk}/a.yaml",
}  # fmt: skip
FOLDERS = ("traces", "points", "store", "predictors")  # what some of them write is a folder
MOVED = ("data drift",)  # ends with 1, as something has drifted
SMALL = "size=128k"
MAP = (
    "kind: gemm\ncolumns: {m: m, n: n, k: k, latency_us: {column: us, unit: us}}\n"
    "constants: {dtype: bf16, device_id: h100_sxm, backend: torch, measured_at: 2025-01-31, license: MIT}\n"
)


def measured(folder: Path, times: float) -> None:
    """A store of activations."""
    rows = [
        Measurement(
            op=make_op("gelu", rows=2 ** (4 + i % 10), cols=128 * (1 + i // 10), dtype="bf16"),
            status="ok",
            measured_at=datetime.now(UTC),
            latency_us=times * (9.0 + i * 1e-2),
            device_id="h100_sxm",
            backend="torch",
            source="harness",
            run_id="full-1",
        )
        for i in range(60)
    ]
    Store(folder).write(rows, "full-1")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the verbs read."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "shapes.csv").write_text("m,n,k\n64,128,256\n")
    (folder / "rows.csv").write_text("m,n,k,us\n64,128,256,5\n")
    (folder / "map.yaml").write_text(MAP)
    measured(folder / "store", 1.0)
    measured(folder / "slower", 2.0)
    assert main(["simulate", *STEP.split(), f"chakra={folder / 'traces'}"]) == 0
    return folder


def words_of(name: str, inputs: Path, disk: Path) -> tuple[list[str], Path]:
    """The words of a case, and where it writes."""
    words = CASES[name].replace("{files}", str(inputs)).replace("{disk}", str(disk)).split()
    return words, Path(words[-1].partition("=")[2])


def mounted(folder: Path, options: str) -> bool:
    """Whether a file system of its own lies in a folder now."""
    return subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True).returncode == 0


@contextmanager
def full(disk: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A disk without room for another file."""

    def said(_: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if sys.platform != "linux" or os.geteuid() != 0 or not mounted(disk, SMALL):
        put_old(target)
        monkeypatch.setattr(files, "_sync", said)
        yield
        return
    try:
        put_old(target)
        with open(disk / "filling", "wb", buffering=0) as filling, suppress(OSError):
            while filling.write(b"0" * 4096):
                pass
        yield
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@contextmanager
def read_only(disk: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A disk that cannot be written, or a folder that its user may not write."""
    if os.geteuid() != 0:
        put_old(target)
        disk.chmod(stat.S_IRUSR | stat.S_IXUSR)
        yield
        disk.chmod(stat.S_IRWXU)
        return
    if sys.platform != "linux" or not mounted(disk, SMALL):
        pytest.skip("root may write everywhere, and no file system of its own can be mounted here")
    try:
        put_old(target)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def put_old(target: Path) -> None:
    """A file that was there before, where the verb writes a file over it."""
    if target.name not in FOLDERS and target.suffix != ".yaml":
        target.write_text("old")


ILL = {"full": (full, "No space left on device"), "read-only": (read_only, "Read-only file system|Permission denied")}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("illness", ILL)
def test_of_a_disk_that_takes_nothing_one_line_says_so(
    illness: str,
    name: str,
    inputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    ill, reason = ILL[illness]
    words, target = words_of(name, inputs, disk)
    with ill(disk, target, monkeypatch):
        capsys.readouterr()
        code = main(words)
        said = capsys.readouterr().err.strip().splitlines()
        assert code == 2, said
        assert re.search(reason, said[-1])
        assert sum(line.startswith("opcast: ") for line in said) == 1
        assert not any("Traceback" in line for line in said)
        assert not target.is_file() or target.read_text() == "old"
        whole = [path for path in disk.rglob("*") if path.is_file() and path not in (target, disk / "filling")]
        assert not [path for path in whole if path.name.endswith(files.TEMPORARY)]
        assert not [path for path in whole if not path.stat().st_size and path.suffix != ".lock"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="who is killed is a fork of this process")
@pytest.mark.parametrize("name", CASES)
def test_who_is_killed_while_writing_leaves_the_old_file_whole_and_goes_on(
    name: str, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, target = words_of(name, inputs, tmp_path)
    put_old(target)
    child = os.fork()
    if not child:
        files._sync = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # after a file's bytes, before it takes its place
        main(words)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert not target.is_file() or target.read_text() == "old"
    left = [path for path in tmp_path.iterdir() if path != target]  # a folder that was asked for holds whole files
    assert all(path.name.startswith(".") for path in left), left
    assert main(words) == (1 if name in MOVED else 0), capsys.readouterr().err
    assert target.is_dir() or target.read_bytes() not in (b"old", b"")


def test_a_device_is_written_to_and_stays_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Another file in the place of /dev/null would break the machine."""
    for device, code, said in (("/dev/null", 0, ""), ("/dev/full", 2, "No space left on device")):
        if not Path(device).is_char_device():
            pytest.skip(f"this system has no {device}")
        assert main(["plan", *JOB.split(), f"report={device}"]) == code
        assert said in capsys.readouterr().err
        assert Path(device).is_char_device()
