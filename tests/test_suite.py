"""The suite itself: the list of slow tests names tests that are there, and the fast lane leaves hardly a module out."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parent
# What these check takes long by nature: the whole job, many random questions, all tables of the public measurements,
# a server or a cluster of another program that has to start.
SLOW_ONLY = {
    "evidence/test_shipped_calibration.py",
    "jobs/cluster/test_sweep.py",
    "jobs/service/test_fuzzed_calls.py",
    "jobs/test_fuzz.py",
    "jobs/test_mlflow_server.py",
    "jobs/test_quickstart.py",
    "models/test_accuracy_ops.py",
    "models/test_reference.py",
    "models/test_serve_predictors.py",
    "models/test_threads.py",
    "simulator/execution/test_injected.py",
    "simulator/network/test_astra.py",
    "simulator/search/test_kill.py",
    "simulator/serving/test_blocks.py",
    "simulator/test_own_campaign.py",
}


def listed() -> list[str]:
    """The tests of ``slow.txt``."""
    return [line.split()[1] for line in (TESTS / "slow.txt").read_text().splitlines()]


@cache
def functions(path: Path) -> set[str]:
    """Names of the test functions of a file."""
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_slow_tests_are_there() -> None:
    lost = [name for name in listed() if name.split("::")[1] not in functions(TESTS / name.split("::")[0])]
    assert not lost, "take them off tests/slow.txt"


def test_modules_keep_a_test_in_the_fast_lane() -> None:
    for path in sorted(TESTS.rglob("test_*.py")):
        name = path.relative_to(TESTS).as_posix()
        left = functions(path) - {each.split("::")[1] for each in listed() if each.startswith(f"{name}::")}
        stays = any(text in path.read_text() for text in ("mark.essential", "import ENCODERS, architectures"))
        assert left or name in SLOW_ONLY or stays, f"the fast lane runs nothing of {name}"
