"""Verbs that write: on a full disk, or killed in between, an old file stays whole and no other is left in its place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

STEP = "model=tiny_llama_100m device=h100_sxm workload.seq_len=64"
FAR = "model=tiny_llama_100m cluster=dgx_h100 workload.seq_len=64 workload.global_batch=64"
SPACE = "space.tp=[1,2] space.pp=1 space.cp=1 space.micro_batch=1 space.recompute=none workers=1"
LAW = "law={base_us:5000,decode_us:20,prefill_token_us:60} kv.blocks=1000 traffic.requests=200"
SHAPES = "op=gemm shapes={files}/shapes.csv device=h100_sxm"
CASES = {  # a verb's words, the last of which says where it writes
    "predict output": f"predict {SHAPES} output={{files}}/a.parquet",
    "simulate trace": f"simulate {STEP} trace={{files}}/a.json.gz",
    "simulate simai": f"simulate {FAR} simai={{files}}/a",
    "search launch": f"search {FAR} {SPACE} framework=megatron-bridge launch={{files}}/a",
    "plan picture": f"plan {FAR} tokens=1e9 lives=20 picture={{files}}/a.svg",
    "serving report": f"serving {LAW} report={{files}}/a",
    "serving requests": f"serving {LAW} requests={{files}}/a.parquet",
}
DRIVER = """
import os, signal, sys
from opcast.datasets import files
from opcast.jobs import cli
def full(*_):
    raise OSError(28, os.strerror(28))
def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)
files._sync = {"full": full, "killed": kill}[sys.argv[1]]  # after the file's bytes, before it takes its place
sys.exit(cli.main(sys.argv[2:]))
"""


def ends(way: str, name: str, folder: Path) -> tuple[int, str, list[str], str]:
    """The exit code, what the target holds, what else lies beside it, and what was said."""
    (folder / "shapes.csv").write_text("m,n,k\n64,128,256\n")
    words = CASES[name].replace("{files}", str(folder)).split()
    target = Path(words[-1].partition("=")[2])
    target.write_text("old")
    environment = {**os.environ, "OPCAST_HOME": str(folder / "home")}
    command = [sys.executable, "-P", "-c", DRIVER, way, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    left = [path.name for path in folder.iterdir() if path.name not in ("home", "shapes.csv", target.name)]
    return done.returncode, target.read_text(errors="replace"), left, done.stderr[-500:]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_on_a_full_disk_one_line_says_so_and_the_old_file_stays(name: str, tmp_path: Path) -> None:
    code, held, left, said = ends("full", name, tmp_path)
    assert (code, held, left) == (2, "old", []), said
    assert "No space left on device" in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_who_is_killed_while_writing_leaves_the_old_file_whole(name: str, tmp_path: Path) -> None:
    code, held, left, said = ends("killed", name, tmp_path)
    assert (code, held) == (-9, "old"), said
    assert all(other.startswith(".") for other in left)
