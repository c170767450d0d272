"""Any table of timings, by a mapping file: where each column of the store comes from.

A mapping is YAML: ``kind``; ``columns``, from a column of the store to one of the table; ``constants``, the same for
all rows; ``where``, which rows are meant. See docs/importing.md for an example. A table that uses opcast's names needs
none (:mod:`.named_columns`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..devices import Device, device_of_file, is_file_name
from ..dtypes import BITS, canonical_dtype, itemsize
from ..loading import nearest
from ..ops import Dim, OpKind, kind
from ..reading import read_yaml
from ..schema import COLUMNS, schema_for
from . import named_columns
from .options import ImportOptions
from .tables import Rejected, RowBatch, SourceError
from .text_files import as_floats, floats, listed, moment, read_table, require, texts, written_at

VERSION = 1
OPTIONS = {
    "mapping": "YAML file that says which column is what",
    "device": "device of all rows, where the mapping gives no device_id",
}
MEANING = ("mapping", "device")
KEYS = ("kind", "columns", "constants", "where")
SPEC_KEYS = ("column", "file", "unit", "times", "values")
MICROSECONDS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
FLAGS = (("false", "False"), ("true", "True"))
NOT_MAPPED = ("run_id", "opcast_version")
MINE = "mine"  # the source of rows of one's own machine: no lab is between them and the answer


def files(path: Path | None, options: ImportOptions) -> list[Path]:
    """Tables at or below ``path``; SourceError where the mapping cannot be used."""
    if options.mapping:
        load_mapping(options)
    return listed(path, ("*.csv", "*.csv.gz", "*.parquet"), "the tables")


def read(file: Path, options: ImportOptions) -> Iterator[RowBatch]:
    """Rows of one table. SourceError where it lacks a column that the mapping names, or has no mapping."""
    table = read_table(file)
    if options.mapping:
        mapping = load_mapping(options)
        chosen = _chosen(table, mapping["where"], file)
        yield RowBatch(mapping["kind"], _mapped(mapping, chosen, file))
        return
    for batch in named_columns.rows_by_kind(table, file):
        if isinstance(batch, Rejected):
            yield RowBatch(rejected=(batch,))
            continue
        kind_name, chosen = batch
        mapping = {"kind": kind_name, "columns": named_columns.specs(kind_name, chosen), "constants": {}}
        if options.device_id and "device_id" not in mapping["columns"]:
            mapping["constants"]["device_id"] = options.device_id
        _check_names(kind(kind_name), {**mapping["columns"], **mapping["constants"]}, file)
        for columns in named_columns.told(kind_name, chosen, _mapped(mapping, chosen, file)):
            yield RowBatch(kind_name, columns)


def _mapped(mapping: Mapping[str, Any], table: pa.Table, file: Path) -> dict[str, Any]:
    """Columns of the store from those of a table, as a mapping says."""
    definition = kind(mapping["kind"])
    columns: dict[str, Any] = {"measured_at": written_at(file), "backend": "unknown"}
    columns |= {name: _constant(definition, name, value) for name, value in mapping["constants"].items()}
    specs = mapping["columns"]
    for name in sorted(specs, key=lambda name: name != "dtype"):  # others may count elements of it
        columns[name] = _column(definition, name, specs[name], table, columns, file)
    return columns


def load_mapping(options: ImportOptions) -> dict[str, Any]:
    """The checked mapping: ``kind``, ``columns``, ``constants``, ``where`` as dicts, and ``devices`` of the user's own.

    SourceError names an unknown key or column, or one that the kind needs and nothing gives.
    """
    path = Path(options.mapping or "").expanduser()
    values = read_yaml(path, SourceError, f"mapping {path}")
    if not isinstance(values, dict) or "kind" not in values:
        raise SourceError(f"mapping {path} needs the keys kind and columns")
    _known(values, KEYS, f"mapping {path}")
    sections = {name: values.get(name) or {} for name in KEYS[1:]}
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise SourceError(f"mapping {path}: {name} must be a list of name: value")
    specs = {name: _spec(name, spec, path) for name, spec in sections["columns"].items()}
    if options.device_id and "device_id" not in specs:
        sections["constants"] = {"device_id": options.device_id, **sections["constants"]}
    _check_names(kind(str(values["kind"])), {**specs, **sections["constants"]}, path)
    if sections["constants"].get("source", MINE) != MINE or "source" in specs:
        raise SourceError(f"mapping {path}: source can only be {MINE}, where the rows are of your own machine")
    devices_in_files = _name_devices(specs, sections["constants"], path)
    return {**sections, "columns": specs, "kind": str(values["kind"]), "devices": devices_in_files}


def devices(options: ImportOptions) -> list[Device]:
    """The devices that ``device=`` or ``device_id`` of the mapping give the figures of, as files."""
    typed = [options.device] if isinstance(options.device, Device) else []
    return [*typed, *(load_mapping(options)["devices"] if options.mapping else ())]


def _name_devices(specs: dict[str, dict[str, Any]], constants: dict[str, Any], mapping: Path) -> list[Device]:
    """The devices that a mapping names by files of their figures; from now on it names them by their ids."""
    values = specs.get("device_id", {}).get("values") or {}
    by_file = _files_of_devices([constants.get("device_id"), *values.values()], mapping)
    for section, name in [(constants, "device_id"), *((values, old) for old in values)]:
        if str(section.get(name)) in by_file:
            section[name] = by_file[str(section[name])].id
    return list(by_file.values())


def _files_of_devices(names: Iterable[Any], mapping: Path) -> dict[str, Device]:
    """The devices among some names that are files: they lie beside the mapping, or where the name leads from here."""
    by_file = {}
    for name in (str(text) for text in names if is_file_name(str(text))):
        beside = mapping.parent / name
        by_file[name] = device_of_file(beside if beside.is_file() else Path(name))
    return by_file


def _spec(name: str, spec: Any, path: Path) -> dict[str, Any]:
    """One entry of ``columns`` in its long form."""
    parts = dict(spec) if isinstance(spec, dict) else {"column": spec}
    where = f"mapping {path}, columns.{name}"
    _known(parts, SPEC_KEYS, where)
    if "column" in parts:
        parts["column"] = str(parts["column"])
    if not isinstance(parts.get("values") or {}, dict):
        raise SourceError(f"{where}: values must be a list of old: new")
    if ("column" in parts) == ("file" in parts):
        raise SourceError(f"{where} needs either column (of the table) or file (a pattern of its name)")
    if "file" in parts and _pattern(str(parts["file"]), where).groups != 1:
        raise SourceError(f"{where}: file={parts['file']!r} must be a pattern with one group")
    if name in ("measured_at", "throttled"):
        raise SourceError(f"{where} must be one of the constants")
    if name.endswith("_us") and parts.get("unit") not in MICROSECONDS:
        raise SourceError(f"{where} needs unit: one of {', '.join(MICROSECONDS)}")
    times = parts.get("times", 1)
    if times != "itemsize" and (isinstance(times, bool) or not isinstance(times, (int, float))):
        raise SourceError(f"{where}: times={times!r} is neither a number nor 'itemsize'")
    return parts


def _pattern(text: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise SourceError(f"{where}: file={text!r} is no regular expression: {error}") from None


def _check_names(definition: OpKind, columns: Mapping[str, Any], path: Path) -> None:
    allowed = [name for name in schema_for(definition.name).names if name not in NOT_MAPPED]
    _known(columns, allowed, f"mapping {path} of {definition.name}")
    needed = [dim.name for dim in definition.dims if dim.default is None]
    missing = [name for name in (*needed, "dtype", "device_id", "latency_us") if name not in columns]
    if missing:
        raise SourceError(f"mapping {path} gives no {', '.join(missing)}, which {definition.name} needs")


def _known(entries: Mapping[str, Any], allowed: Any, where: str) -> None:
    for name in entries:
        if name not in allowed:
            raise SourceError(f"{where} has an unknown {name!r}; {nearest(name, allowed, 'known:')}")


def _chosen(table: pa.Table, where: Mapping[str, Any], file: Path) -> pa.Table:
    """The rows whose columns have the wanted values."""
    require(table, where, file)
    rows = np.ones(len(table), dtype=bool)
    for name, values in where.items():
        allowed = {str(value) for value in (values if isinstance(values, list) else [values])}
        rows &= np.array([text in allowed for text in texts(table, name)], dtype=bool)
    return table if rows.all() else table.filter(pa.array(rows))


def _column(
    definition: OpKind, name: str, spec: Mapping[str, Any], table: pa.Table, others: Mapping[str, Any], file: Path
) -> Any:
    """One column of the store [n], from a column of the table or from the file's name."""
    if "column" in spec:
        require(table, [spec["column"]], file)
    dim = next((dim for dim in definition.dims if dim.name == name), None)
    if (dim is None or dim.choices or "values" in spec or "file" in spec) and not _numeric(name):
        cells = texts(table, spec["column"]) if "column" in spec else _from_name(spec, table, file)
        cells = np.array([_renamed(text, spec.get("values")) for text in cells], dtype=object)
        return _text(name, cells) if dim is None else _choices(dim, cells, others) * _factor(spec, others)
    cells = floats(table, spec["column"]) if "column" in spec else as_floats(_from_name(spec, table, file))
    return cells * _factor(spec, others)


def _numeric(name: str) -> bool:
    """Whether a column of results or conditions holds numbers."""
    return COLUMNS.get(name) in ("float64", "int64")


def _factor(spec: Mapping[str, Any], others: Mapping[str, Any]) -> Any:
    """What to multiply with: into microseconds, elements into bytes."""
    times = spec.get("times", 1)
    if times == "itemsize":
        dtypes = others.get("dtype", "")
        sizes = {name: itemsize(name) for name in BITS}
        times = (
            sizes.get(dtypes, np.nan) if isinstance(dtypes, str) else np.array([sizes.get(d, np.nan) for d in dtypes])
        )
    return times * MICROSECONDS.get(spec.get("unit", ""), 1.0)


def _from_name(spec: Mapping[str, Any], table: pa.Table, file: Path) -> np.ndarray:
    match = re.search(str(spec["file"]), file.name)
    if match is None:
        raise SourceError(f"the name of {file.name} does not match {spec['file']!r}")
    return np.full(len(table), match[1], dtype=object)


def _renamed(text: str, values: Mapping[Any, Any] | None) -> str:
    named = {str(old): str(new) for old, new in (values or {}).items()}
    return named.get(text, text)


def _text(name: str, cells: np.ndarray) -> np.ndarray:
    if name not in ("dtype", "out_dtype"):
        return cells
    return np.array([_dtype(text) for text in cells], dtype=object)


def _dtype(text: str) -> str:
    """The name of a format as opcast has it; one that is not known stays, and is rejected with its rows."""
    try:
        return canonical_dtype(text)
    except ValueError:
        return text


def _choices(dim: Dim, cells: np.ndarray, others: Mapping[str, Any]) -> np.ndarray:
    """A dim from text: the index of a choice, or the number; NaN where it is neither.

    A flag may be true or false; a format that is the row's own is ``same``.
    """
    codes = {choice: float(code) for code, choice in enumerate(dim.choices)}
    if dim.choices[:2] == ("no", "yes"):
        codes |= {text: float(yes) for yes, words in enumerate(FLAGS) for text in words}
    dtypes = np.broadcast_to(np.asarray(others.get("dtype", ""), dtype=object), len(cells))
    numbers = []
    for text, dtype in zip(cells, dtypes, strict=True):
        try:
            if text not in codes and "same" in codes and _dtype(text) == dtype:
                text = "same"
            numbers.append(codes[text] if text in codes else float(text))
        except ValueError:
            numbers.append(float("nan"))
    return np.array(numbers)


def _constant(definition: OpKind, name: str, value: Any) -> Any:
    """A constant as a batch takes it."""
    if name == "measured_at":
        return moment(value)
    if name in ("dtype", "out_dtype"):
        return _dtype(str(value))
    dim = next((dim for dim in definition.dims if dim.name == name), None)
    return dim.parse(definition.name, value) if dim is not None else value
