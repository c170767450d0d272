"""``opcast predict shapes=FILE``: tables of ops, read and answered in chunks of columns, so that memory stays flat."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import csv as arrow_csv

from ..datasets.columns import codes, number_array, numbers
from ..datasets.dtypes import canonical_dtype
from ..datasets.ops import KINDS, Op, OpError, kind, make_op
from ..datasets.reading import read_json
from ..models.analytical import BOUNDS
from ..simulator.network.query import TransferError, parse_size
from ..simulator.predict.columns import Predicted
from .show import BadInputError
from .writing import write

READ = (".csv", ".parquet", ".json", ".jsonl")
CHUNK = 2**18  # rows at a time: enough that compiled trees repay being loaded (models/forest.py)
CSV_BLOCK = 16 * 2**20
FORMATS = ("kind", "dtype", "out_dtype")
CODE = np.int16  # of texts that are sent as dictionaries: one for all parts of a table
ANSWERS = tuple(field.name for field in dataclasses.fields(Predicted))
UNITS = ("size_bytes",)  # dims that may have a unit, as 1GiB


@dataclass(frozen=True)
class AlikeRows:
    """The rows of a chunk that are of one kind and format: their places in it, and a column for each dim."""

    kind: str
    dtype: str
    out_dtype: str
    places: np.ndarray
    columns: dict[str, np.ndarray]

    def ops(self) -> list[Op]:
        """The rows as ops."""
        rows = zip(*(self.columns[name].tolist() for name in KINDS[self.kind].names), strict=True)
        return [Op(self.kind, row, self.dtype, self.out_dtype) for row in rows]


@dataclass(frozen=True)
class RowsChunk:
    """So many rows of a table, cut into groups."""

    rows: int
    groups: tuple[AlikeRows, ...]


def chunks(path: Path, default: str | None) -> Iterator[RowsChunk]:
    """The rows of a table in order; ``default`` is the kind where the table has no column ``kind``.

    BadInputError for a file that cannot be read or is empty, OpError with the number of the first bad row.
    """
    rows_before = 0
    for table in tables(path):
        if len(table):
            yield parse_table(table, path, rows_before, default)
            rows_before += len(table)
    if not rows_before:
        raise BadInputError(f"shapes={path} holds no rows")


def tables(path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """A table in parts, texts of a CSV as they stand there; only some columns where they are named."""
    if path.suffix not in READ:
        raise BadInputError(f"shapes={path}: unknown format {path.suffix!r}; give .csv, .parquet, .json or .jsonl")
    readers: dict[str, Callable[..., Iterator[pa.Table]]] = {
        ".csv": _csv, ".parquet": _parquet, ".json": _json, ".jsonl": _lines
    }  # fmt: skip
    try:
        yield from readers[path.suffix](path, columns)
    except (OSError, ValueError, KeyError, RecursionError, NotImplementedError) as error:  # Arrow's among them
        if type(error).__module__.startswith("opcast"):
            raise
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
        raise BadInputError(f"shapes={path} cannot be read: {reason}") from None


def _csv(path: Path, columns: Sequence[str] | None) -> Iterator[pa.Table]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        names = next(csv.reader(file), [])
    if len(set(names)) < len(names):
        raise BadInputError(f"shapes={path} has two columns of one name: {', '.join(names)}")
    if not names or not set(columns or names) <= set(names):
        return
    options = arrow_csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()),
        include_columns=list(columns) if columns else [],
        strings_can_be_null=True,
        null_values=["", "NA", "NaN", "nan", "null", "None"],
    )
    read = arrow_csv.ReadOptions(block_size=CSV_BLOCK)
    with arrow_csv.open_csv(path, read_options=read, convert_options=options) as reader:
        for batch in reader:
            yield from _cut(pa.Table.from_batches([batch]))


def _parquet(path: Path, columns: Sequence[str] | None) -> Iterator[pa.Table]:
    with pq.ParquetFile(path) as file:
        if not set(columns or ()) <= set(file.schema_arrow.names):
            return
        for batch in file.iter_batches(CHUNK, columns=list(columns) if columns else None):
            yield pa.Table.from_batches([batch])


def _json(path: Path, columns: Sequence[str] | None) -> Iterator[pa.Table]:
    document = read_json(path, BadInputError, f"shapes={path}")
    if isinstance(document, dict) and all(
        isinstance(value, dict) for value in document.values()
    ):  # a column each, as pandas
        rows = list(dict.fromkeys(row for column in document.values() for row in column))
        document = [{name: column.get(row) for name, column in document.items()} for row in rows]
    if not isinstance(document, list):
        raise BadInputError(f'shapes={path} must hold a list of rows, as [{{"m": 64, …}}]')
    for first in range(0, len(document), CHUNK):
        yield _from_rows(document[first : first + CHUNK], first, path, columns)


def _lines(path: Path, columns: Sequence[str] | None) -> Iterator[pa.Table]:
    rows: list[Any] = []
    done = 0
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            rows.append(read_json(line, BadInputError, f"shapes={path} line {number}"))
            if len(rows) == CHUNK:
                yield _from_rows(rows, done, path, columns)
                done, rows = done + len(rows), []
    yield _from_rows(rows, done, path, columns)


def _from_rows(rows: list[Any], first: int, path: Path, columns: Sequence[str] | None) -> pa.Table:
    """Rows of JSON as text columns, which are read as those of a CSV are."""
    for number, row in enumerate(rows, start=first + 1):
        if not isinstance(row, dict):
            raise BadInputError(f"shapes={path} row {number} must be a mapping of dims, not {str(row)[:40]}")
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if columns is None or name in columns]

    def text(value: Any) -> str | None:
        if value is None or value != value:  # NaN
            return None
        return str(value).lower() if isinstance(value, bool) else str(value)

    return pa.table({name: pa.array([text(row.get(name)) for row in rows], pa.string()) for name in names})


def _cut(table: pa.Table) -> Iterator[pa.Table]:
    for first in range(0, len(table), CHUNK):
        yield table.slice(first, CHUNK)


# --- from text to dims ------------------------------------------------------------------------------------


def parse_table(table: pa.Table, path: Path, first: int, default: str | None) -> RowsChunk:
    """The rows of a table in groups. OpError names the first bad row, ``first`` rows standing before the table."""
    bad: set[int] = set()
    formats = [_format(table, name, default, bad) for name in FORMATS]
    keys = np.stack([column for column, _ in formats])
    groups = []
    same_keys = keys.shape[1] > 0 and bool((keys == keys[:, :1]).all())
    for key in [keys[:, 0]] if same_keys else np.unique(keys, axis=1).T:
        places = np.arange(len(table)) if same_keys else np.flatnonzero((keys == key[:, None]).all(axis=0))
        kind_name, dtype, out = (None if at < 0 else texts[at] for at, (_, texts) in zip(key, formats, strict=True))
        if kind_name not in KINDS or (bad and not bad.isdisjoint(places.tolist())):
            bad.add(int(places[0]))
            continue
        group_table = table if same_keys else table.take(number_array(places))
        columns = _dims(group_table, kind_name, places, bad)
        dtype = dtype or "bf16"
        groups.append(AlikeRows(kind_name, dtype, out or KINDS[kind_name].usual_output(dtype), places, columns))
    if bad:
        row = min(bad)
        _refuse({name: table[name][row].as_py() for name in table.column_names}, path, first + row + 1, default)
    return RowsChunk(len(table), tuple(groups))


def _format(table: pa.Table, name: str, default: str | None, bad: set[int]) -> tuple[np.ndarray, list[str]]:
    """Codes of a column of kinds or formats [n], and what they mean; -1 where nothing stands."""
    if name not in table.column_names:
        kinds = [default] if name == "kind" and default else []
        return np.full(len(table), 0 if kinds else -1), kinds
    indices, texts = codes(_as_text(table[name]))
    if name == "kind":
        return np.where(indices < 0, len(texts) if default else -1, indices), [*texts, *([default] if default else [])]
    formats = []
    for code, text in enumerate(texts):
        try:
            formats.append(canonical_dtype(text))
        except ValueError:
            formats.append(text)
            bad.update(np.flatnonzero(indices == code)[:1].tolist())
    return indices, formats


def _dims(group_table: pa.Table, kind_name: str, places: np.ndarray, bad: set[int]) -> dict[str, np.ndarray]:
    """The dims of rows of one kind as int64 columns; rows with what cannot be go into ``bad``."""
    columns = {}
    for dim in KINDS[kind_name].dims:
        if dim.name not in group_table.column_names:
            columns[dim.name] = np.full(len(group_table), -1 if dim.default is None else dim.default, dtype=np.int64)
            wrong = np.full(len(group_table), dim.default is None)
        else:
            columns[dim.name], wrong = _column(group_table[dim.name], kind_name, dim)
        bad.update(places[np.flatnonzero(wrong)[:1]].tolist())
    for name in group_table.column_names:
        if name not in columns and name not in FORMATS:
            filled = np.flatnonzero(numbers(group_table[name].is_valid()))
            bad.update(places[filled[:1]].tolist())
    return columns


def _column(column: pa.ChunkedArray, kind_name: str, dim: Any) -> tuple[np.ndarray, np.ndarray]:
    """A dim's values [n], and where they cannot be."""
    missing = numbers(column.is_null())
    if pa.types.is_floating(column.type):
        missing = missing | numbers(pc.is_nan(column).fill_null(True))
    try:
        values = numbers(column.cast(pa.int64())) if not pa.types.is_boolean(column.type) else None
    except pa.ArrowInvalid:
        values = None
    if values is not None:
        high = len(dim.choices) - 1 if dim.choices else 2**62 - 1
        wrong = ~missing & ((values < dim.low) | (values > high))
    else:
        indices, texts = codes(_as_text(column))
        read = [_value(text, kind_name, dim) for text in texts]
        dim_numbers = np.array([0 if number is None else number for number in read] + [0], dtype=np.int64)
        values = dim_numbers[indices]
        wrong = ~missing & np.array([number is None for number in read] + [False])[indices]
    usual = 0 if dim.default is None else dim.default
    return np.where(missing, usual, values), wrong | (missing if dim.default is None else False)


def _value(text: str, kind_name: str, dim: Any) -> int | None:
    """A dim from a text; None for what it cannot be."""
    try:
        parsed: int = dim.parse(kind_name, _plain(dim.name, text))
    except (OpError, TransferError):
        return None
    return parsed


def _plain(name: str, value: Any) -> Any:
    """A value of a table as :func:`make_op` takes it."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return parse_size(text) if name in UNITS else text


def _as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    text = column if pa.types.is_string(column.type) else column.cast(pa.string())
    return pc.utf8_trim_whitespace(text)


def _refuse(row: Mapping[str, Any], path: Path, number: int, default: str | None) -> None:
    """Raise OpError for a bad row, in the words that the op alone would be refused with."""
    values = {name: value for name, value in row.items() if value is not None and value == value}
    name = values.pop("kind", default)
    try:
        if name is None:
            raise OpError("no kind: add a column `kind` or op=…")
        formats = {name_: str(values.pop(name_)).strip() for name_ in ("dtype", "out_dtype") if name_ in values}
        kind(str(name).strip())
        make_op(
            str(name).strip(), **formats, **{dim_name: _plain(dim_name, value) for dim_name, value in values.items()}
        )
    except (OpError, TransferError) as error:
        raise OpError(f"{path} row {number}: {error}") from None
    raise OpError(f"{path} row {number} cannot be read: {row}")


# --- what comes out ---------------------------------------------------------------------------------------


def kinds_in(path: Path, default: str | None) -> list[str]:
    """The kinds of a table in the order in which they appear, so that its answers can be written chunk by chunk."""
    kinds: dict[str, None] = {}
    try:
        for table in tables(path, ("kind",)):
            if "kind" in table.column_names:
                kinds |= dict.fromkeys(text.strip() for text in codes(table["kind"])[1])
    except BadInputError:
        pass  # a table without that column, or one that cannot be read, which reading it for good will say
    return [*kinds, *([default] if default and default not in kinds else [])] or ([default] if default else [])


def answer_table(
    chunk: RowsChunk,
    ask: Callable[[AlikeRows], Predicted],
    device: str,
    cache: str,
    names: Sequence[str],
    encoded: bool = False,
) -> pa.Table:
    """A chunk's rows with their predictions, as one table of ``names`` (dims) and the answer's columns.

    ``encoded`` texts are dictionaries and a byte or two for each row, which not all kinds of files can hold.
    """
    answers = [(group, ask(group)) for group in chunk.groups]

    def joined(values: Callable[[AlikeRows, Predicted], np.ndarray]) -> np.ndarray:
        if len(answers) == 1:
            return values(*answers[0])
        joined_values = np.full(chunk.rows, None, dtype=object)
        for group, answer in answers:
            joined_values[group.places] = values(group, answer)
        return joined_values

    def text(value: Callable[[AlikeRows], str]) -> pa.Array:
        if len(answers) == 1:
            return repeated_text(value(answers[0][0]), chunk.rows, encoded)
        strings = joined(lambda group, _: np.full(len(group.places), value(group), dtype=object))
        return texts(strings, encoded)

    columns: dict[str, pa.Array] = {"kind": text(lambda group: group.kind)}
    for name in names:
        columns[name] = _dim_column(chunk, name, encoded)
    columns["dtype"], columns["out_dtype"] = text(lambda g: g.dtype), text(lambda g: g.out_dtype)
    columns["device"] = repeated_text(device, chunk.rows, encoded)
    for name in ANSWERS:
        answer_column = joined(partial(_field, name))
        first = getattr(answers[0][1], name)
        if name == "bound":
            column = pa.DictionaryArray.from_arrays(pa.array(answer_column.astype(CODE)), pa.array(BOUNDS, pa.string()))
            columns[name] = column if encoded else column.cast(pa.string())
        elif first.dtype.kind in "OU":
            columns[name] = texts(answer_column, encoded)
        elif first.dtype.kind == "b":
            columns[name] = pa.array(answer_column.astype(bool), pa.bool_())
        else:
            columns[name] = pa.array(answer_column.astype(np.float64), pa.float64(), from_pandas=True)
        if name == "bound":
            columns["cache"] = repeated_text(cache, chunk.rows, encoded)
    return pa.table(columns)


def repeated_text(text: str, rows: int, encoded: bool) -> pa.Array:
    """The same text for every row."""
    if not encoded:
        return pa.repeat(text, rows)
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, dtype=CODE)), pa.array([text], pa.string()))


def texts(values: np.ndarray, encoded: bool) -> pa.Array:
    """Objects [n], each a text or None, as a column."""
    if len(values) and isinstance(values[0], str) and (values.strides == (0,) or bool((values == values[0]).all())):
        return repeated_text(values[0], len(values), encoded)
    column = pa.array(values, pa.string())
    if not encoded:
        return column
    encoded_column = column.dictionary_encode()
    return pa.DictionaryArray.from_arrays(
        encoded_column.indices.cast(pa.from_numpy_dtype(CODE)), encoded_column.dictionary
    )


def _field(name: str, _: AlikeRows, answer: Predicted) -> np.ndarray:
    return getattr(answer, name)


def _dim_column(chunk: RowsChunk, name: str, encoded: bool) -> pa.Array:
    """A dim of all rows: null where a row's kind has none of that name, choices by name."""
    having = [group for group in chunk.groups if name in group.columns]
    chosen = any(dim.choices for kind in KINDS.values() for dim in kind.dims if dim.name == name)
    if len(having) == 1 and len(having[0].places) == chunk.rows:
        dims = pa.array(having[0].columns[name], pa.int64())
        if not chosen:
            return dims
        choices = _dim(having[0].kind, name).choices
        if choices:
            column = pa.DictionaryArray.from_arrays(
                dims.cast(pa.from_numpy_dtype(CODE)), pa.array(choices, pa.string())
            )
            return column if encoded else column.cast(pa.string())
    dim_values = np.full(chunk.rows, None, dtype=object)
    for group in having:
        dim = _dim(group.kind, name)
        values = group.columns[name]
        dim_values[group.places] = np.array(dim.choices, dtype=object)[values] if dim.choices else values
    return texts(dim_values, encoded) if chosen else pa.array(dim_values.tolist(), pa.int64())


def _dim(kind_name: str, name: str) -> Any:
    definition = KINDS[kind_name]
    return definition.dims[definition.names.index(name)]


def write_tables(path: Path, parts: Iterator[pa.Table]) -> int:
    """Write tables of one schema to ``output=path``, as its name says; returns the rows. Whole or not at all."""
    writers: dict[str, Callable[[Path, Iterator[pa.Table]], None]] = {
        ".csv": _to_csv,
        ".parquet": _to_parquet,
        ".json": _to_json,
        ".jsonl": partial(_to_json, lines=True),
    }
    if path.suffix not in writers:
        raise BadInputError(f"output={path}: unknown format {path.suffix!r}; name a .csv, .parquet, .json or .jsonl")
    rows = 0

    def counted() -> Iterator[pa.Table]:
        nonlocal rows
        for piece in parts:
            rows += len(piece)
            yield piece

    write("output", path, lambda temporary: writers[path.suffix](temporary, counted()))
    return rows


def _to_csv(path: Path, parts: Iterator[pa.Table]) -> None:
    options = arrow_csv.WriteOptions(include_header=False, quoting_style="needed")
    writer = None
    with pa.OSFile(str(path), "wb") as file:
        try:
            for piece in parts:
                if writer is None:
                    file.write((",".join(piece.column_names) + "\n").encode())
                    writer = arrow_csv.CSVWriter(file, piece.schema, write_options=options)
                writer.write_table(piece)
        finally:
            if writer is not None:
                writer.close()


def _to_parquet(path: Path, parts: Iterator[pa.Table]) -> None:
    writer = None
    try:
        for piece in parts:
            writer = writer or pq.ParquetWriter(path, piece.schema)
            writer.write_table(piece)
    finally:
        if writer is not None:
            writer.close()


def _to_json(path: Path, parts: Iterator[pa.Table], lines: bool = False) -> None:
    with path.open("w", encoding="utf-8") as file:
        between = "" if lines else "["
        for piece in parts:
            for row in piece.to_pylist():
                file.write(between + json.dumps(row, ensure_ascii=False) + ("\n" if lines else ""))
                between = "" if lines else ",\n"
        file.write("" if lines else "]\n")


def dim_names(kinds: Sequence[str]) -> list[str]:
    """The dims of some kinds, each once, in their order."""
    return list(dict.fromkeys(name for kind_name in kinds if kind_name in KINDS for name in KINDS[kind_name].names))
