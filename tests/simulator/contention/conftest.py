"""One folder of graphs for all tests of contention: they step the same model."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny model's graphs are kept."""
    return tmp_path_factory.mktemp("graphs")
