"""Schedules that vLLM's and SGLang's own schedulers made of small cases, kept so that all can compare with them.

``python -P tests/simulator/serving/recorded.py`` makes them anew where these engines are (``OPCAST_VLLM``,
``OPCAST_SGLANG``; docs/serving-engines.md).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REQUESTS = 40


def recorded(engine: str) -> dict[str, Any]:
    """``version`` of the engine, ``cases``, and its ``answers`` to them."""
    kept: dict[str, Any] = json.loads((HERE / f"{engine}_schedules.json").read_text())
    return kept


def small(case: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A case with its first requests alone."""
    lists = {name: case[name][:REQUESTS] for name in ("requests", "priorities") if name in case}
    return {**case, **changes, **lists}


def record(engine: str, version: str, cases: list[dict[str, Any]], command: list[str], path: str = "") -> None:
    """Play the cases and keep the schedules, one line an iteration: its tokens by request."""
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, input=json.dumps(cases), env=environment, capture_output=True, text=True, check=True)
    kept = {"version": version, "cases": cases, "answers": json.loads(done.stdout)}
    (HERE / f"{engine}_schedules.json").write_text(json.dumps(kept, separators=(",", ":")).replace("},", "},\n") + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parents[2]))
    from tests.simulator.serving import test_sglang, test_vllm

    if test_vllm.FOLDER:
        few = [small(test_vllm.random_case(seed, seed >= 4)) for seed in range(6)]
        record("vllm", "0.33.0", few, [sys.executable, str(test_vllm.ORACLE)], test_vllm.FOLDER)
    if test_sglang.FOLDER:
        few = [small(test_sglang.random_case(seed), tokens=800, ignore_eos=seed == 2) for seed in range(4)]
        record("sglang", "0.5.23", few, [sys.executable, str(test_sglang.ORACLE), test_sglang.FOLDER])
