"""Garbage is looked for seldom in the command's own process, and as before in that of who calls it."""

from __future__ import annotations

import gc
import subprocess
import sys

from opcast.datasets.collecting import THRESHOLDS

PROGRAM = """
import atexit, gc, sys
atexit.register(lambda: print(gc.get_freeze_count() > 0))  # first in, last out
from opcast.jobs.cli import main
before = gc.get_threshold()
main(["--version"])
called = gc.get_threshold()
sys.argv = ["opcast", "--version"]
main()
print(before == called, gc.get_threshold())
"""


def test_the_command_collects_seldom_and_a_caller_as_before() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == [f"True {THRESHOLDS}", "True"]  # and looks for none as it ends
    assert gc.get_threshold() == THRESHOLDS  # of these tests, too
