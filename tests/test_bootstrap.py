"""The set-up script: what it refuses, what it keeps, and that nothing later can replace torch."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = ("--dist", "loadfile", "--no-loadscope-reorder")
FAKE_TORCH = """\
__version__ = "2.9.1+cu128"
class version:
    cuda = "12.8"
"""
SET_UP = """\
import importlib.util, sys
spec = importlib.util.spec_from_file_location("bootstrap", sys.argv[1])
bootstrap = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bootstrap)
bootstrap.create_venv()
bootstrap.hold(bootstrap.install_torch(gpu=True))
"""


def call(command: list[object], **settings: object) -> subprocess.CompletedProcess[str]:
    """Run a command and keep what it says."""
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, **settings)  # type: ignore[call-overload]


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """A checkout, in a folder with a blank in its name, of which only the set-up script and project file are there."""
    folder = tmp_path / "a checkout"
    (folder / "jobs").mkdir(parents=True)
    shutil.copy(root / "jobs" / "bootstrap.py", folder / "jobs")
    shutil.copy(root / "pyproject.toml", folder)
    return folder


@pytest.mark.parametrize("arguments", [[], ["frobnicate"]])
def test_a_wrong_verb_is_one_line_and_exit_2(checkout: Path, arguments: list[str]) -> None:
    result = call([sys.executable, checkout / "jobs" / "bootstrap.py", *arguments])
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert "quickstart or test" in result.stderr


def test_an_old_python_is_told_what_to_do(checkout: Path) -> None:
    old = (
        "import sys, runpy; sys.version_info = (3, 10, 4, 'final', 0); runpy.run_path(sys.argv[1], run_name='__main__')"
    )
    result = call([sys.executable, "-c", old, checkout / "jobs" / "bootstrap.py", "test"])
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "needs 3.11 or later" in result.stderr


def test_the_script_parses_on_pythons_it_refuses(root: Path) -> None:
    import ast

    ast.parse((root / "jobs" / "bootstrap.py").read_text(), feature_version=(3, 6))


def test_a_missing_venv_module_is_told_with_the_way_out(checkout: Path) -> None:
    bare = (
        "import sys, runpy, importlib.util as u; find = u.find_spec;"
        "u.find_spec = lambda name, *a: None if name == 'ensurepip' else find(name, *a);"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    result = call([sys.executable, "-c", bare, checkout / "jobs" / "bootstrap.py", "quickstart"])
    assert result.returncode == 2
    assert "apt install python3-venv" in result.stderr.splitlines()[-1]


def test_an_up_to_date_environment_is_used_at_once(checkout: Path) -> None:
    commands = checkout / ".venv" / "bin"
    commands.mkdir(parents=True)
    (commands / "python").symlink_to(sys.executable)
    (commands / "opcast").write_text('#!/bin/sh\necho "$@"\nexit 7\n')
    (commands / "opcast").chmod(0o755)
    digest = call(
        [sys.executable, "-c", "import bootstrap; print(bootstrap.fingerprint())"],
        env={**os.environ, "PYTHONPATH": str(checkout / "jobs")},
    ).stdout.strip()
    (checkout / ".venv" / "bootstrap.json").write_text(json.dumps({"fingerprint": digest, "verbs": ["quickstart"]}))
    result = call([sys.executable, checkout / "jobs" / "bootstrap.py", "quickstart", "format=json"])
    assert (result.stdout, result.stderr, result.returncode) == ("quickstart format=json\n", "", 7)


@pytest.mark.parametrize(
    ("given", "processors", "expected"),
    [
        (["fast", "tests/models"], 2, ["-m", "not slow", "-n", "2", *SHARED, "tests/models"]),
        (["tests/models", "-x"], 64, ["-n", "4", *SHARED, "tests/models", "-x"]),
        (["fast"], 1, ["-m", "not slow"]),
        (["fast", "--pdb"], 8, ["-m", "not slow", "--pdb"]),
        (["--times", "tests/slow.txt"], 8, ["--times", "tests/slow.txt"]),
    ],
)
def test_the_fast_lane_and_the_processors(
    root: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], processors: int, expected: list[str]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)), raising=False)
    assert runpy.run_path(str(root / "jobs" / "bootstrap.py"))["chosen"](given) == expected


def test_the_cuda_torch_of_the_caller_is_kept_and_held(checkout: Path, tmp_path: Path) -> None:
    host = tmp_path / "host"
    call([sys.executable, "-m", "venv", "--without-pip", host], check=True)
    packages = next(host.glob("lib/python*/site-packages"))
    (packages / "torch").mkdir()
    (packages / "torch" / "__init__.py").write_text(FAKE_TORCH)
    (packages / "torch-2.9.1+cu128.dist-info").mkdir()
    (packages / "torch-2.9.1+cu128.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.9.1+cu128\n"
    )
    result = call([host / "bin" / "python", "-c", SET_UP, checkout / "jobs" / "bootstrap.py"])
    assert result.returncode == 0, result.stderr
    assert "keeping torch 2.9.1+cu128" in result.stderr

    python = checkout / ".venv" / "bin" / "python"
    assert call([python, "-c", "import torch; print(torch.version.cuda)"]).stdout.strip() == "12.8"
    install = [python, "-m", "pip", "install", "--dry-run", "--no-index"]
    satisfied = call([*install, "torch>=2.6"], cwd=tmp_path)
    assert satisfied.returncode == 0, satisfied.stderr
    assert "already satisfied" in satisfied.stdout
    upgrade = call([*install, "torch>=2.10"], cwd=tmp_path)
    assert upgrade.returncode != 0
    assert "torch==2.9.1+cu128" in upgrade.stdout + upgrade.stderr
