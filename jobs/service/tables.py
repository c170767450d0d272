"""Many ops as columns: an Arrow stream in, an Arrow stream out, no object made of any row."""

from __future__ import annotations

import io
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ...datasets.ops import KINDS
from ...datasets.vocabulary import OpColumns
from ...models.forest import compile_walks
from ...models.power import Limits
from ...simulator.predict.columns import Predicted, check_format, predict_columns
from ...simulator.question.sources import Sources
from .. import shapes
from ..resolve import bench_of
from ..show import BadInputError
from .unpacking import UnpackedSize, unpacked_size

BODY = Path("body")  # what messages call the table
PART = 2**16  # rows that are answered and sent together
PARTS = 2  # answered at a time
LONGEST = 200  # bytes of a text
MOST_MESSAGES = 10_000  # batches and dictionaries of a stream
COLUMNS = frozenset(shapes.FORMATS) | {name for kind in KINDS.values() for name in kind.names}
TEXTS = (pa.types.is_string, pa.types.is_large_string)
NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_null)
LARGE = 2**17  # rows of a table from which compiled trees repay being loaded (models/forest.py)
OPTIONS = pa.ipc.IpcWriteOptions(unify_dictionaries=False)  # a part may have other texts than the one before


def read_stream(body: bytes, most: int, most_mib: int) -> pa.Table:
    """The table of an Arrow IPC stream; its columns are looked at first, then its size, and only then is it unpacked.

    BadInputError for what is none, is empty, holds what no op has, has more than ``most`` rows, or more than
    ``most_mib`` once unpacked.
    """
    try:
        with pa.ipc.open_stream(pa.BufferReader(body)) as reader:
            check_schema(reader.schema)
            check_size(unpacked_size(body), most, most_mib)
            batches = []
            for batch in reader:
                batch.validate(full=True)
                batches.append(batch)
            table = pa.Table.from_batches(batches, reader.schema)
    except (pa.ArrowException, OSError, MemoryError) as error:
        raise BadInputError(f"the body is no Arrow IPC stream: {' '.join(str(error).split())[:200]}") from None
    if not len(table):
        raise BadInputError("the table holds no rows")
    check_texts(table)
    return table


def check_schema(schema: pa.Schema) -> None:
    """BadInputError for columns that no op has, or that are neither numbers nor texts."""
    if len(set(schema.names)) < len(schema.names):
        raise BadInputError("the table has two columns of one name")
    for field in schema:
        if field.name not in COLUMNS:
            raise BadInputError(f"the table has a column {field.name[:60]!r}, which no op has; see GET /v1/ops")
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if not any(is_kind(kind) for is_kind in (TEXTS if kind is not field.type else (*NUMBERS, *TEXTS))):
            raise BadInputError(f"column {field.name} is {str(field.type)[:60]}: take whole numbers or texts")


def check_size(size: UnpackedSize, most: int, most_mib: int) -> None:
    """BadInputError for more rows, bytes or parts than are taken."""
    if size.rows > most:
        raise BadInputError(f"the table has more than {most:,} rows, the most that are answered at once")
    if size.size_bytes > most_mib * 2**20:
        raise BadInputError(f"the table has {size.size_bytes / 2**20:,.0f} MiB once unpacked, more than {most_mib:,}")
    if size.messages > MOST_MESSAGES:
        raise BadInputError(f"the table comes in {size.messages:,} parts: give it in at most {MOST_MESSAGES:,}")


def check_texts(table: pa.Table) -> None:
    """BadInputError for a text longer than any name: one that stands for many rows would fill the memory."""
    for name, column in zip(table.column_names, table.columns, strict=True):
        for chunk in column.chunks:
            texts = chunk.dictionary if pa.types.is_dictionary(chunk.type) else chunk
            if (
                any(is_text(texts.type) for is_text in TEXTS)
                and (pc.max(pc.binary_length(texts)).as_py() or 0) > LONGEST
            ):
                raise BadInputError(f"column {name} has a text of more than {LONGEST} bytes")


def answer_table(
    table: pa.Table, device: str, kind: str | None, cache: str, limits: Limits, sources: Sources
) -> Generator[bytes, None, None]:
    """The predictions of a table of ops, a row each in order, as an Arrow IPC stream in parts.

    Columns are those of ``opcast predict shapes=… output=…``, texts as dictionaries. ``kind`` is that
    of rows that name none. Raises OpError with the number of the first bad row, DeviceError, PowerError: here, before
    any part is asked for.
    """
    if cache not in ("warm", "cold"):
        raise BadInputError(f"cache={cache!r} does not exist; choose warm or cold")
    if kind is not None and kind not in KINDS:
        raise BadInputError(f"kind={kind!r} does not exist; see GET /v1/ops")
    bench = bench_of(sources)
    target = bench.device(device)
    engine = bench.engine(target)
    limits.of(target)
    chunks = [shapes.parse_table(table.slice(first, PART), BODY, first, kind) for first in range(0, len(table), PART)]
    for name, dtype in {(group.kind, group.dtype) for chunk in chunks for group in chunk.groups}:
        check_format(name, dtype, target)
    if len(table) >= LARGE:
        compile_walks()

    def ask(group: shapes.AlikeRows) -> Predicted:
        asked = OpColumns(group.kind, group.columns, group.dtype, group.out_dtype, cache)
        return predict_columns(asked, target, engine, bench.registries, limits, sources.backend)

    names = shapes.dim_names(sorted({str(k) for k in _kinds(table, kind)}))
    return written(chunks, lambda chunk: shapes.answer_table(chunk, ask, target.id, cache, names, encoded=True))


def written(
    chunks: Sequence[shapes.RowsChunk], answered: Callable[[shapes.RowsChunk], pa.Table]
) -> Generator[bytes, None, None]:
    """An Arrow IPC stream of the answers, in parts: one is written while the next ones are answered."""
    sink = Pieces()
    writer: pa.ipc.RecordBatchStreamWriter | None = None
    with ThreadPoolExecutor(PARTS) as pool:
        for piece in pool.map(answered, chunks):
            writer = writer or pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), piece.schema, options=OPTIONS)
            writer.write_table(piece)
            yield sink.taken()
    assert writer is not None
    writer.close()
    yield sink.taken()


class Pieces(io.RawIOBase):
    """A file that is taken away as it is written."""

    def __init__(self) -> None:
        self.pieces: list[Any] = []
        self.size = 0

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, data: Any) -> int:
        """Keep some bytes, without a copy."""
        self.pieces.append(data)
        self.size += len(data)
        return len(data)

    def tell(self) -> int:
        """Bytes that were written so far."""
        return self.size

    def taken(self) -> bytes:
        """What was written since the last time."""
        data, self.pieces = b"".join(self.pieces), []
        return data


def _kinds(table: pa.Table, default: str | None) -> set[str]:
    """The kinds that a table names, and the default."""
    named = set(table["kind"].unique().to_pylist()) if "kind" in table.column_names else set()
    return {name for name in named | {default} if name in KINDS}
