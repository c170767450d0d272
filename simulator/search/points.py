"""The points of a search as Parquet: a folder of parts that a search which was ended goes on from.

Each part is written under another name first and then renamed. Parts carry the key of the request, so that a folder
holds the points of one search only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...datasets.files import write_atomically
from ..question.canonical import RequestError
from .question import SearchQuestion
from .space import AXES

KEY = b"opcast.search"
Identity = tuple[Any, ...]


def identity(point: Mapping[str, Any]) -> Identity:
    """What tells a point from others of its search: the values of all axes."""
    return tuple(point[name] for name in AXES)


class Folder:
    """A folder of a search's points (``path`` None: nothing is kept). RequestError for one that holds another's."""

    def __init__(self, path: Path | None, request: SearchQuestion) -> None:
        self.path = path
        self.key = request.key() if path else ""
        self.known: dict[Identity, dict[str, Any]] = {}
        self.count = 0
        if path is not None:
            self._read(path)

    def _read(self, path: Path) -> None:
        if path.exists() and not path.is_dir():
            raise RequestError(f"points={path} is a file, not a folder; name another")
        import pyarrow as pa
        import pyarrow.parquet as pq

        for file in sorted(path.glob("part-*.parquet")):
            try:
                table = pq.read_table(file)
            except (OSError, pa.ArrowInvalid):
                raise RequestError(
                    f"points={path}: {file.name} is no Parquet; remove it, or name another folder"
                ) from None
            if (table.schema.metadata or {}).get(KEY) != self.key.encode():
                raise RequestError(f"points={path} holds the points of another search; name another folder")
            self.known |= {identity(row): row for row in table.to_pylist()}
            self.count += 1

    def write(self, rows: Sequence[Mapping[str, Any]], name: str = "part") -> None:
        """One more part. RequestError where it cannot be written; what was written before stays."""
        if self.path is None or not rows:
            return
        file = self.path / (f"{name}-{self.count:05d}.parquet" if name == "part" else f"{name}.parquet")
        write_points(rows, file, {KEY: self.key.encode()})
        self.count += name == "part"


def write_points(rows: Sequence[Mapping[str, Any]], path: Path, about: Mapping[bytes, bytes] | None = None) -> None:
    """Points with their axes and figures as Parquet, one row each. RequestError where it cannot be written."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(name for row in rows for name in row))  # some rows have more than others
    table = pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
    table = table.replace_schema_metadata(about)
    write_atomically(path, lambda file: pq.write_table(table, file, compression="zstd"), RequestError, "points=")
