"""Traced graphs on disk: compact JSON, compressed, each under a name that everything it depends on went into.

Reading needs neither torch nor transformers; their versions are asked of the installed packages.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from uuid import uuid4

from ...datasets.ops import KINDS, Op
from ..graph import FORMAT, NO_CALLS, Block, Graph, HostCalls, Node, Tensor
from .aten import VERSION
from .models import Source, digest
from .workload import Workload

MAX_GRAPHS_IN_MEMORY = 32  # graphs of files that were read

PACKAGES = ("torch", "transformers")
ADDED_SETTINGS = ("lora_dropout", "lora_groups", "mtp_layers", "kbit", "images", "image_px")
"""Settings that graphs of before them do not have, off in these."""


def graph_name(source: Source, workload: Workload, precision: str) -> str:
    """The name of a graph: a hash of model, workload, precision, package versions and our own formats."""
    identity = {
        "model": [source.name, source.identity],
        "workload": {name: value for name, value in workload.to_dict().items() if value or name not in ADDED_SETTINGS},
        "precision": precision,
        "packages": [installed_version(name) for name in PACKAGES],
        "format": [FORMAT, VERSION, sorted((name, kind.names) for name, kind in KINDS.items())],
    }
    return digest(identity)[:32]


@lru_cache(maxsize=len(PACKAGES))
def installed_version(package: str) -> str:
    """Version of a package without importing it; "" when it is not there. A process asks once."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def load_graph(directory: Path, name: str) -> Graph | None:
    """The graph of that name, or None when there is none or its file cannot be read."""
    path = directory / f"{name}.json.gz"
    try:
        status = path.stat()
        return _read(path, status.st_mtime_ns, status.st_size)
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None


@lru_cache(maxsize=MAX_GRAPHS_IN_MEMORY)
def _read(path: Path, mtime_ns: int, size_bytes: int) -> Graph:
    """The graph of a file that was written then: read once, however often it is asked for."""
    with gzip.open(path, "rb") as file:
        return from_plain(json.loads(file.read()))


def save_graph(directory: Path, name: str, graph: Graph) -> Path:
    """Write a graph so that others see either all of it or nothing."""
    directory.mkdir(parents=True, exist_ok=True)
    content = gzip.compress(json.dumps(to_plain(graph), separators=(",", ":")).encode(), 6, mtime=0)
    temporary, path = directory / f".{name}-{uuid4().hex}", directory / f"{name}.json.gz"
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


# --- plain values ----------------------------------------------------------------------------------------


class _Table:
    """Values told apart once and named by number from then on."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, value: Any, row: Any) -> int:
        if value not in self._numbers:
            self._numbers[value] = len(self.rows)
            self.rows.append(row)
        return self._numbers[value]


def to_plain(graph: Graph) -> dict[str, Any]:
    """A graph as lists and numbers; ops and strings stand in tables of their own."""
    ops, texts, calls = _Table(), _Table(), _Table()

    def node(n: Node) -> list[Any]:
        op = -1 if n.op is None else ops.number(n.op, [n.op.kind, list(n.op.dims), n.op.dtype, n.op.out_dtype])
        names = [texts.number(text, text) for text in (n.source, n.path, n.phase)]
        host = [n.host.dispatch, n.host.views, n.host.modules, n.host.autograd]
        ids = [_pack_ids(group) for group in (n.reads, n.writes, n.frees)]
        return [op, *names, *ids, n.bytes_moved, calls.number(n.host, host)]

    blocks = [
        {
            "nodes": [node(n) for n in block.nodes],
            "repeat": block.repeat,
            "steps": [[t, step] for t, step in sorted(block.steps.items())],
            "stack": block.stack,
            "stride": block.stride,
            "uneven": [[*key, list(frees)] for key, frees in sorted(block.uneven.items())],
        }
        for block in graph.blocks
    ]
    return {
        "format": FORMAT,
        "name": graph.name,
        "parameters": graph.parameters,
        "model_flops": graph.model_flops,
        "notes": list(graph.notes),
        "tensors": [[t.size_bytes, t.dtype, t.role, t.count] for t in graph.tensors],
        "blocks": blocks,
        "ops": ops.rows,
        "texts": texts.rows,
        "calls": calls.rows,
    }


def from_plain(plain: dict[str, Any]) -> Graph:
    """The graph that :func:`to_plain` wrote; ValueError for another format."""
    if plain["format"] != FORMAT:
        raise ValueError(f"graph of format {plain['format']}, this opcast reads {FORMAT}")
    ops = [Op(kind, tuple(dims), dtype, out) for kind, dims, dtype, out in plain["ops"]]
    texts = plain["texts"]
    calls = [HostCalls(*row) if any(row) else NO_CALLS for row in plain["calls"]]

    def node(row: Sequence[Any]) -> Node:
        op, source, path, phase, *ids, moved, host = row
        reads, writes, frees = map(_unpack_ids, ids)
        names, begun = (texts[source], texts[path], texts[phase]), calls[host]
        return Node(None if op < 0 else ops[op], *names, reads, writes, moved, frees, begun)

    def block(fields: dict[str, Any]) -> Block:
        nodes = tuple(node(row) for row in fields["nodes"])
        uneven = {(which, position): tuple(frees) for which, position, frees in fields["uneven"]}
        steps = dict(fields["steps"])
        return Block(nodes, fields["repeat"], steps, fields["stack"], fields["stride"], uneven)

    blocks, tensors = tuple(map(block, plain["blocks"])), _tensors(plain["tensors"])
    return Graph(plain["name"], blocks, tensors, plain["parameters"], plain["model_flops"], tuple(plain["notes"]))


def _tensors(rows: Iterable[Sequence[Any]]) -> tuple[Tensor, ...]:
    tensors, first = [], 0
    for size_bytes, dtype, role, count in rows:
        tensors.append(Tensor(first, size_bytes, dtype, role, count))
        first += count
    return tuple(tensors)


def _pack_ids(ids: Sequence[int]) -> list[Any]:
    """Ids in order, with every run of consecutive ones as [first, count]."""
    packed: list[Any] = []
    for tensor in ids:
        last = packed[-1] if packed else None
        if isinstance(last, list) and tensor == last[0] + last[1]:
            last[1] += 1
        elif isinstance(last, int) and tensor == last + 1:
            packed[-1] = [last, 2]
        else:
            packed.append(tensor)
    return packed


def _unpack_ids(packed: Sequence[Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for item in packed:
        if isinstance(item, list):
            ids += range(item[0], item[0] + item[1])
        else:
            ids.append(item)
    return tuple(ids)
