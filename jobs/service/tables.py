"""Many ops as columns: an Arrow stream in, an Arrow stream out, no object made of any row."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa

from ...datasets.ops import KINDS
from ...models.power import Limits
from ...simulator.predict.columns import Predicted, predict_columns
from ...simulator.question.sources import Sources
from ...simulator.workbench import workbench
from .. import shapes
from ..resolve import this_machine
from ..show import BadInputError

BODY = Path("body")  # what messages call the table
PARTS = 2  # answered at a time
OPTIONS = pa.ipc.IpcWriteOptions(unify_dictionaries=False)  # a part may have other texts than the one before


def read_stream(body: bytes, most: int) -> pa.Table:
    """The table of an Arrow IPC stream. BadInputError for what is none, is empty or has more than ``most`` rows."""
    try:
        with pa.ipc.open_stream(pa.BufferReader(body)) as reader:
            batches, rows = [], 0
            for batch in reader:
                rows += batch.num_rows
                if rows > most:
                    raise BadInputError(f"the table has more than {most:,} rows, the most that are answered at once")
                batch.validate(full=True)
                batches.append(batch)
            table = pa.Table.from_batches(batches, reader.schema)
    except (pa.ArrowException, OSError, MemoryError) as error:
        raise BadInputError(f"the body is no Arrow IPC stream: {' '.join(str(error).split())[:200]}") from None
    if not len(table):
        raise BadInputError("the table holds no rows")
    if len(set(table.column_names)) < len(table.column_names):
        raise BadInputError("the table has two columns of one name")
    return table


def answer_table(table: pa.Table, device: str, kind: str | None, cache: str, limits: Limits, sources: Sources) -> bytes:
    """The predictions of a table of ops, a row each in order, as an Arrow IPC stream.

    Columns are those of ``opcast predict shapes=… output=…``, texts as dictionaries. ``kind`` is that
    of rows that name none. Raises OpError with the number of the first bad row, DeviceError, PowerError.
    """
    if cache not in ("warm", "cold"):
        raise BadInputError(f"cache={cache!r} does not exist; choose warm or cold")
    if kind is not None and kind not in KINDS:
        raise BadInputError(f"kind={kind!r} does not exist; see GET /v1/ops")
    bench = workbench(sources, this_machine)
    target = bench.device(device)
    engine = bench.engine(target)

    def ask(group: shapes.AlikeRows) -> Predicted:
        about = (group.kind, group.columns, group.dtype, group.out_dtype, target, engine, cache)
        return predict_columns(*about, bench.registries, limits, sources.backend)

    names = shapes.dim_names(sorted({str(k) for k in _kinds(table, kind)}))

    def part(first: int) -> pa.Table:
        rows = shapes.parsed(table.slice(first, shapes.CHUNK), BODY, first, kind)
        return shapes.answered(rows, ask, target.id, cache, names, encoded=True)

    sink = pa.BufferOutputStream()
    writer: pa.ipc.RecordBatchStreamWriter | None = None
    with ThreadPoolExecutor(PARTS) as pool:  # a part is written while the next one is answered
        for made in pool.map(part, range(0, len(table), shapes.CHUNK)):
            writer = writer or pa.ipc.new_stream(sink, made.schema, options=OPTIONS)
            writer.write_table(made)
    assert writer is not None
    writer.close()
    found: bytes = sink.getvalue().to_pybytes()
    return found


def _kinds(table: pa.Table, default: str | None) -> set[str]:
    """The kinds that a table names, and the default."""
    named = set(table["kind"].unique().to_pylist()) if "kind" in table.column_names else set()
    return {each for each in named | {default} if each in KINDS}
