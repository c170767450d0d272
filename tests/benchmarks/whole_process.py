"""Whole ``opcast`` processes, timed from start to answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time


def run(arguments: str, home: str) -> tuple[float, dict]:
    """Seconds of one whole process, and its answer."""
    command = [sys.executable, "-m", "opcast.jobs.cli", *arguments.split(), "format=json"]
    started = time.perf_counter()
    done = subprocess.run(command, env=os.environ | {"OPCAST_HOME": home}, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(done.stderr)
    return seconds, json.loads(done.stdout)
