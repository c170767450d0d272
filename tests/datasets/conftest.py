"""Measurements of a plausible device, for every test of the store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from opcast.datasets.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store that does not exist yet."""
    return Store(tmp_path / "store")


@pytest.fixture
def unprivileged() -> Iterator[None]:
    """File permissions hold even where the tests run as root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
