"""Files of answers, written whole or not at all: under a temporary name first, then renamed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..datasets.files import StoreError, write_atomically
from .show import BadInputError


def write(setting: str, path: Path, fill: Callable[[Path], object]) -> Path:
    """Have ``fill`` write a file that then becomes ``path``. BadInputError, naming the setting, when it cannot be.

    Nothing is left under either name where the disk is full, the folder is missing or ``path`` is a folder.
    """
    check_place(setting, path)
    try:
        return write_atomically(path, fill)
    except StoreError as error:
        raise BadInputError(f"{setting}={path}: {error}") from None


def places(config: Mapping[str, Any], *names: str) -> dict[str, Path]:
    """Files that are asked for, by setting. BadInputError, naming the setting, where no file can be."""
    paths = {name: Path(str(config[name])) for name in names if config[name]}
    for name, path in paths.items():
        check_place(name, path)
    return paths


def check_place(setting: str, path: Path) -> None:
    """BadInputError, naming the setting, where no file can be: to be asked before long work."""
    if not path.parent.is_dir():
        raise BadInputError(f"{setting}={path} cannot be written: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise BadInputError(f"{setting}={path} is a folder; name a file in it")


def folder_at(setting: str, value: Any) -> Path:
    """A folder to write to, there or not. BadInputError, naming the setting, where a file stands."""
    path = Path(str(value)).expanduser()
    if path.exists() and not path.is_dir():
        raise BadInputError(f"{setting}={value} is a file; name a folder")
    return path


def write_text(setting: str, path: Path, text: str) -> Path:
    """Write a text; see :func:`write`."""
    return write(setting, path, lambda temporary: temporary.write_text(text, "utf-8"))
