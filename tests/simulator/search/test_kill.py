"""Searches that are killed go on from what they had kept, however small they are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

DRIVER = """
import sys
from pathlib import Path
from opcast.simulator.search import workers
from opcast.simulator.search.evaluate import Evaluator
workers.KEPT_EVERY_S = float(sys.argv[2])
slow = Evaluator.row
import time
def row(self, point):
    time.sleep(0.2)
    print("row", flush=True)
    return slow(self, point)
Evaluator.row = row
import opcast
space = {"tp": [1, 2], "pp": [1, 2], "micro_batch": [1, 2], "recompute": ["none", "full"]}
found = opcast.search(
    "tiny_llama_100m", space, cluster="dgx_h100", seq_len=256, global_batch=32, points=sys.argv[1], workers=1
)
print("best", found.best[0]["step_time_s"], found.evaluated, flush=True)
"""


WAYS_DRIVER = """
import sys, time
from pathlib import Path
from opcast.simulator.search import workers
from opcast.simulator.search.served import played, shortlist
from opcast.simulator.serving import serve
workers.KEPT_EVERY_S = 0.1
played.FEWEST_REQUESTS = played.MOST_REQUESTS = played.WHOLE_REQUESTS = 40
serve.worth_compiling = lambda outputs: False
look = shortlist.highest_rate
def highest_rate(*asked):
    time.sleep(0.2)
    print("played", flush=True)
    return look(*asked)
shortlist.highest_rate = highest_rate
import opcast
axes = {"tp": [1, 2], "batch": [4, 8, 16], "max_tokens": 2048, "pools": "together"}
found = opcast.search_serving(
    "tiny_llama_100m", axes, cluster="dgx_h100", input_len=64, output_len=8, slo={"ttft_ms": 50, "tpot_ms": 20},
    confirm=6, points=sys.argv[1],
)
print("best", found.best[0]["way"], found.best[0]["requests_per_s"], flush=True)
"""


def parts(folder: Path) -> list[Path]:
    """Parts that hold points which were looked at."""
    return sorted(folder.glob("part-*.parquet"))


@pytest.mark.slow
def test_a_small_search_that_is_killed_goes_on(tmp_path: Path) -> None:
    script, folder = tmp_path / "driver.py", tmp_path / "points"
    script.write_text(DRIVER)
    command = [sys.executable, str(script), str(folder), "0.3"]
    environment = {**os.environ, "OPCAST_HOME": str(tmp_path / "home")}
    one = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    deadline = time.monotonic() + 120
    while len(parts(folder)) < 2 and time.monotonic() < deadline and one.poll() is None:
        time.sleep(0.02)
    assert one.poll() is None, "the search ended before it was killed"
    one.send_signal(signal.SIGKILL)
    one.communicate()
    kept = sum(pq.read_metadata(part).num_rows for part in parts(folder))
    assert kept > 0
    again = subprocess.run(command, capture_output=True, env=environment, text=True, check=True).stdout.split("\n")
    *rows, best = [line for line in again if line]
    assert len(rows) + kept == int(best.split()[2])


@pytest.mark.slow
def test_a_search_for_a_way_to_serve_that_is_killed_goes_on(tmp_path: Path) -> None:
    script, points = tmp_path / "driver.py", tmp_path / "ways.parquet"
    script.write_text(WAYS_DRIVER)
    environment = {**os.environ, "OPCAST_HOME": str(tmp_path / "home")}
    command = [sys.executable, str(script)]

    def whole(file: Path) -> list[str]:
        run = subprocess.run([*command, str(file)], capture_output=True, env=environment, text=True, check=True)
        return [line for line in run.stdout.split("\n") if line]

    expected = whole(tmp_path / "other.parquet")
    one = subprocess.Popen([*command, str(points)], stdout=subprocess.PIPE, env=environment, text=True)
    kept = Path(f"{points}.played")
    while not kept.is_file() and one.poll() is None:
        time.sleep(0.02)
    assert one.poll() is None, "the search ended before it was killed"
    one.send_signal(signal.SIGKILL)
    one.communicate()
    assert kept.is_file()
    assert not points.exists()
    again = whole(points)
    assert again[-1] == expected[-1]  # the same answer
    assert len(again) < len(expected)  # with fewer runs
    assert points.is_file()
    assert not kept.exists()
