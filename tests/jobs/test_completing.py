"""Completion: what may follow a word, and that real shells show it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from opcast.jobs.cli import VERBS, main
from opcast.jobs.completing import SCRIPTS, following


@pytest.mark.parametrize(
    ("line", "has", "lacks"),
    [
        ("opcast ", list(VERBS), []),
        ("opcast sea", ["search"], ["serving"]),
        ("opcast simulate model=llama3_1_", ["model=llama3_1_8b", "model=llama3_1_70b"], ["model=llama3_8b"]),
        ("opcast simulate workload=decode workload.b", ["workload.batch="], ["workload.global_batch="]),
        ("opcast predict op=att", ["op=attention_prefill"], ["op=gemm"]),
        ("opcast predict op=gemm op.", ["op.m=", "op.layout="], ["op.heads="]),
        ("opcast predict cache=", ["cache=warm", "cache=cold"], []),
        ("opcast simulate parallel.schedule=", ["parallel.schedule=1f1b", "parallel.schedule=dualpipe"], []),
        ("opcast predict format=", ["format=text", "format=json"], []),
        ("opcast list ", ["devices", "models", "what="], ["model="]),
        ("opcast predict --mul", ["--multirun"], ["--help"]),
        ("opcast serving --help=l", ["--help=lora"], ["--help=tiers"]),
        ("opcast search ser", ["serving"], []),
        ("opcast search serving slo", ["slo."], ["zero_stage="]),
        ("opcast simulate ", ["model=", "workload.", "report="], ["hydra.", "campaign="]),
    ],
)
def test_what_may_follow(line: str, has: list[str], lacks: list[str]):
    found = following(line)
    assert set(has) <= set(found)
    assert not set(lacks) & set(found)


@pytest.mark.parametrize(
    "line", ["opcast nothing ", "opcast predict op=nothing op.", "opcast simulate model=zzz", "", "'"]
)
def test_where_nothing_fits_there_is_nothing(line: str):
    assert following(line) in ([], list(VERBS))


@pytest.mark.parametrize("shell", SCRIPTS)
def test_each_shell_has_a_script(shell: str, capsys: pytest.CaptureFixture[str]):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(("word", "told"), [("tcsh", "'tcsh'"), ("shell=[1]", "[1]")])
def test_an_unknown_shell_is_named(word: str, told: str, capsys: pytest.CaptureFixture[str]):
    assert main(["completion", word]) == 2
    assert f"bash, zsh, fish, not {told}" in capsys.readouterr().err


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash here")
@pytest.mark.parametrize(
    ("line", "replies"),
    [("opcast compl", "completion"), ("opcast list dev", "devices"), ("opcast predict device=l40", "l40 l40s")],
)
def test_bash_shows_it(line: str, replies: str, tmp_path: Path):
    script = SCRIPTS["bash"] + f'COMP_LINE="{line}" COMP_POINT={len(line)}; _opcast; echo "${{COMPREPLY[@]}}"'
    (tmp_path / "opcast").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m opcast.jobs.cli "$@"\n')
    (tmp_path / "opcast").chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert done.stdout.strip() == replies, done.stderr
