"""Files of the measurement store: written whole or not at all, read with their damage named.

A file is written under a temporary name, flushed to disk and renamed, so that a reader, or a power cut, sees all of
it or nothing. Parquet pages carry checksums, so that a flipped bit is an error and no latency.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from .schema import SchemaError, check_file_schema, conform, stored_columns

if TYPE_CHECKING:
    import pyarrow as pa

TEMPORARY = ".tmp"
THREADED_ROWS = 50_000  # below, starting threads takes longer than reading


class StoreError(ValueError):
    """A store that cannot be read or written. The message names the file and the way out."""


def write_atomically(
    target: Path, write: Callable[[Path], object], error: type[ValueError] = StoreError, what: str = ""
) -> Path:
    """Have ``write`` fill a temporary file beside ``target``, then put it in its place.

    ``error`` when it cannot; ``what`` says before the path what was to be written. A device such as ``/dev/null`` is
    written to as it is: another file in its place would break the machine.
    """
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}{TEMPORARY}")
    try:
        if target.is_char_device() or target.is_fifo():
            write(target)
            return target
        directories = _make_directory(target.parent)
        try:
            write(temporary)
            _sync(temporary)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        for directory in {target.parent, *directories}:
            _sync(directory)
    except OSError as failed:
        reason = failed.strerror or failed
        raise error(f"cannot write {what}{target}: {reason}; free or choose a place that can be written") from None
    return target


def write_packed(
    target: Path, write: Callable[[IO[bytes]], object], error: type[ValueError] = StoreError, what: str = ""
) -> Path:
    """The same for what is written as bytes: by gzip where the name ends in ``.gz``, whatever the time it is."""

    def fill(unfinished: Path) -> None:
        with open(unfinished, "wb") as file:
            packs = target.name.endswith(".gz")
            pack: Any = gzip.GzipFile("", "wb", 4, file, mtime=0) if packs else contextlib.nullcontext(file)
            with pack as packed:
                write(packed)

    return write_atomically(target, fill, error, what)


def write_parquet(table: pa.Table, target: Path) -> Path:
    """Write a table atomically, compressed and with page checksums."""
    import pyarrow.parquet as pq

    return write_atomically(
        target, lambda path: pq.write_table(table, path, compression="zstd", write_page_checksum=True)
    )


def read_parquet(path: Path, kind_name: str, columns: Iterable[str] | None = None) -> pa.Table:
    """Rows of one file, all columns of the kind or some of them, in today's schema.

    StoreError when the file is damaged, foreign, of another kind, or written by a newer opcast.
    """
    with _opened(path) as file:
        problem = check_file_schema(file.schema_arrow)
        if problem != kind_name:
            raise SchemaError(f"holds {problem} rows but lies under op={kind_name}: move it to op={problem}")
        names = stored_columns(kind_name, file.schema_arrow, columns)
        return conform(kind_name, file.read(columns=names, use_threads=file.metadata.num_rows > THREADED_ROWS), columns)


def file_schema(path: Path) -> pa.Schema:
    """The Arrow schema of one file. StoreError when it is damaged."""
    with _opened(path) as file:
        return file.schema_arrow


def listed_anew(directory: Path) -> None:
    """Have the next listing of a directory show what other machines have written into it.

    A client of NFS keeps a listing for up to a minute; it lets go of it when this machine changes the directory.
    Nothing happens where that cannot be done: no such directory, or one that cannot be written.
    """
    mark = directory / f".{uuid.uuid4().hex[:8]}{TEMPORARY}"
    with contextlib.suppress(OSError):
        mark.touch(exist_ok=False)
        mark.unlink()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file while changing what stands beside it; where the file system cannot lock, go without."""
    try:
        import fcntl

        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except ImportError:
        yield
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}; choose a place that can be written") from None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[pa.parquet.ParquetFile]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except SchemaError as error:
        raise StoreError(f"{path} {error}") from None
    except (pa.ArrowException, OSError, MemoryError, UnicodeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
        raise StoreError(f"{path} is damaged ({reason}): move it out of the store and measure again") from None


def _make_directory(path: Path) -> set[Path]:
    """Make a directory; returns the existing ones whose entries changed by that."""
    changed = set()
    for directory in (path, *path.parents):
        if directory.is_dir():
            break
        changed.add(directory.parent)
    path.mkdir(parents=True, exist_ok=True)
    return changed


def _sync(path: Path) -> None:
    """Flush a file, or a directory's entries where the system can, to disk."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
