"""What every test may use: the folder of public reference measurements, and skips that say what is missing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def reference_folder() -> Path:
    """The public reference measurements (``data/`` and ``truth/``): $OPCAST_REFERENCE, else beside the checkout."""
    return Path(os.environ.get("OPCAST_REFERENCE") or ROOT.parent / "shared")


@pytest.fixture(scope="session")
def reference_data() -> Path:
    """Folder of the public reference measurements; the test is skipped where they are not at hand."""
    folder = reference_folder()
    if not (folder / "data").is_dir():
        pytest.skip(f"no reference measurements: {folder} has no data/ (set OPCAST_REFERENCE)")
    return folder


@pytest.fixture(scope="session")
def root() -> Path:
    """Root of the checkout."""
    return ROOT


@pytest.fixture(scope="session", autouse=True)
def private_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store and predictors of the tests' own, in child processes too: the user's are neither read nor written."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPCAST_HOME", str(home))
        yield home


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip ``gpu`` and ``reference`` tests where what they need is missing."""
    if item.get_closest_marker("gpu") is not None and not has_cuda():
        pytest.skip("needs an NVIDIA GPU and a CUDA torch")
    if item.get_closest_marker("reference") is not None and not (reference_folder() / "data").is_dir():
        pytest.skip("needs the public reference measurements (set OPCAST_REFERENCE)")


def has_cuda() -> bool:
    """Whether torch sees an NVIDIA GPU."""
    import torch

    return torch.cuda.is_available()
