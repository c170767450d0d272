"""Execution traces from files and folders, whatever form they are in."""

from __future__ import annotations

import re
from pathlib import Path

from . import json_forms, protobuf
from .schema import TraceFileError
from .table import ExecutionTrace


def read_trace(path: Path) -> ExecutionTrace:
    """One rank's trace, binary or JSON, gzip or not. TraceFileError for what is none."""
    if path.is_dir():
        raise TraceFileError(f"{path} is a folder: name one trace in it")
    return json_forms.read_json(path) if is_json(path) else protobuf.read(path)


def is_json(path: Path) -> bool:
    """Whether a file is JSON: by its name, else by its first bytes."""
    plain = path.name.removesuffix(".gz")
    if plain.endswith((".et", ".json")):
        return plain.endswith(".json")
    with protobuf.open_unpacked(path) as file:
        start = protobuf.read_block(file, path, 64)
    return start.lstrip()[:1] == b"{" and start.isascii() and b'"' in start


def rank_files(path: Path) -> dict[int, Path]:
    """The traces of a folder by rank, ``NAME.RANK.et`` as ASTRA-sim has them; of one file, the rank in its name or 0.

    TraceFileError where there are none, or two of one rank.
    """
    if not path.is_dir():
        if not path.exists():
            raise TraceFileError(f"{path} does not exist")
        return {_rank(path) or 0: path}
    files: dict[int, Path] = {}
    for file in sorted(path.iterdir()):
        rank = _rank(file)
        if rank is None:
            continue
        if rank in files:
            raise TraceFileError(f"{files[rank]} and {file} are both of rank {rank}: keep one run in a folder")
        files[rank] = file
    if not files:
        raise TraceFileError(f"{path} holds no execution traces: files are called NAME.RANK.et")
    return dict(sorted(files.items()))


def _rank(path: Path) -> int | None:
    match = re.search(r"\.(\d{1,7})\.(et|json)(\.gz)?$", path.name)
    return int(match[1]) if match else None
