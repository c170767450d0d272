"""Traces that several tests look at: the reference generator's, and one of every arm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the reference generator writes for two ranks; skipped where it is not installed."""
    pytest.importorskip("chakra.schema.protobuf.et_def_pb2", reason="needs mlc-chakra")
    folder = tmp_path_factory.mktemp("generated")
    command = [sys.executable, "-P", "-m", "chakra.src.generator.generator", "--num_npus", "2"]
    subprocess.run(command, cwd=folder, check=True)
    return folder
