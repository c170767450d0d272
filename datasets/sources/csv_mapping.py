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
        part = _chosen(table, mapping["where"], file)
        yield RowBatch(mapping["kind"], _mapped(mapping, part, file))
        return
    for each in named_columns.rows_by_kind(table, file):
        if isinstance(each, Rejected):
            yield RowBatch(rejected=(each,))
            continue
        kind_name, part = each
        mapping = {"kind": kind_name, "columns": named_columns.specs(kind_name, part), "constants": {}}
        if options.device_id and "device_id" not in mapping["columns"]:
            mapping["constants"]["device_id"] = options.device_id
        _check_names(kind(kind_name), {**mapping["columns"], **mapping["constants"]}, file)
        for columns in named_columns.told(kind_name, part, _mapped(mapping, part, file)):
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
    own = _name_devices(specs, sections["constants"], path)
    return {**sections, "columns": specs, "kind": str(values["kind"]), "devices": own}


def devices(options: ImportOptions) -> list[Device]:
    """The devices that ``device=`` or ``device_id`` of the mapping give the figures of, as files."""
    given = [options.device] if isinstance(options.device, Device) else []
    return [*given, *(load_mapping(options)["devices"] if options.mapping else ())]


def _name_devices(specs: dict[str, dict[str, Any]], constants: dict[str, Any], mapping: Path) -> list[Device]:
    """The devices that a mapping names by files of their figures; from now on it names them by their ids."""
    values = specs.get("device_id", {}).get("values") or {}
    own = _files_of_devices([constants.get("device_id"), *values.values()], mapping)
    for section, name in [(constants, "device_id"), *((values, old) for old in values)]:
        if str(section.get(name)) in own:
            section[name] = own[str(section[name])].id
    return list(own.values())


def _files_of_devices(names: Iterable[Any], mapping: Path) -> dict[str, Device]:
    """The devices among some names that are files: they lie beside the mapping, or where the name leads from here."""
    found = {}
    for name in (str(each) for each in names if is_file_name(str(each))):
        beside = mapping.parent / name
        found[name] = device_of_file(beside if beside.is_file() else Path(name))
    return found


def _spec(name: str, spec: Any, path: Path) -> dict[str, Any]:
    """One entry of ``columns`` in its long form."""
    made = dict(spec) if isinstance(spec, dict) else {"column": spec}
    where = f"mapping {path}, columns.{name}"
    _known(made, SPEC_KEYS, where)
    if "column" in made:
        made["column"] = str(made["column"])
    if not isinstance(made.get("values") or {}, dict):
        raise SourceError(f"{where}: values must be a list of old: new")
    if ("column" in made) == ("file" in made):
        raise SourceError(f"{where} needs either column (of the table) or file (a pattern of its name)")
    if "file" in made and _pattern(str(made["file"]), where).groups != 1:
        raise SourceError(f"{where}: file={made['file']!r} must be a pattern with one group")
    if name in ("measured_at", "throttled"):
        raise SourceError(f"{where} must be one of the constants")
    if name.endswith("_us") and made.get("unit") not in MICROSECONDS:
        raise SourceError(f"{where} needs unit: one of {', '.join(MICROSECONDS)}")
    times = made.get("times", 1)
    if times != "itemsize" and (isinstance(times, bool) or not isinstance(times, (int, float))):
        raise SourceError(f"{where}: times={times!r} is neither a number nor 'itemsize'")
    return made


def _pattern(text: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise SourceError(f"{where}: file={text!r} is no regular expression: {error}") from None


def _check_names(definition: OpKind, given: Mapping[str, Any], path: Path) -> None:
    allowed = [name for name in schema_for(definition.name).names if name not in NOT_MAPPED]
    _known(given, allowed, f"mapping {path} of {definition.name}")
    needed = [dim.name for dim in definition.dims if dim.default is None]
    missing = [name for name in (*needed, "dtype", "device_id", "latency_us") if name not in given]
    if missing:
        raise SourceError(f"mapping {path} gives no {', '.join(missing)}, which {definition.name} needs")


def _known(given: Mapping[str, Any], allowed: Any, where: str) -> None:
    for name in given:
        if name not in allowed:
            raise SourceError(f"{where} has an unknown {name!r}; {nearest(name, allowed, 'known:')}")


def _chosen(table: pa.Table, where: Mapping[str, Any], file: Path) -> pa.Table:
    """The rows whose columns have the wanted values."""
    require(table, where, file)
    rows = np.ones(len(table), dtype=bool)
    for name, wanted in where.items():
        allowed = {str(value) for value in (wanted if isinstance(wanted, list) else [wanted])}
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
        found = texts(table, spec["column"]) if "column" in spec else _from_name(spec, table, file)
        found = np.array([_renamed(text, spec.get("values")) for text in found], dtype=object)
        return _text(name, found) if dim is None else _choices(dim, found, others) * _factor(spec, others)
    found = floats(table, spec["column"]) if "column" in spec else as_floats(_from_name(spec, table, file))
    return found * _factor(spec, others)


def _numeric(name: str) -> bool:
    """Whether a column of results or conditions holds numbers."""
    return COLUMNS.get(name) in ("float64", "int64")


def _factor(spec: Mapping[str, Any], others: Mapping[str, Any]) -> Any:
    """What to multiply with: into microseconds, elements into bytes."""
    times = spec.get("times", 1)
    if times == "itemsize":
        dtypes = others.get("dtype", "")
        known = {name: itemsize(name) for name in BITS}
        times = (
            known.get(dtypes, np.nan) if isinstance(dtypes, str) else np.array([known.get(d, np.nan) for d in dtypes])
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


def _text(name: str, found: np.ndarray) -> np.ndarray:
    if name not in ("dtype", "out_dtype"):
        return found
    return np.array([_dtype(text) for text in found], dtype=object)


def _dtype(text: str) -> str:
    """The name of a format as opcast has it; one that is not known stays, and is rejected with its rows."""
    try:
        return canonical_dtype(text)
    except ValueError:
        return text


def _choices(dim: Dim, found: np.ndarray, others: Mapping[str, Any]) -> np.ndarray:
    """A dim from text: the index of a choice, or the number; NaN where it is neither.

    A flag may be true or false; a format that is the row's own is ``same``.
    """
    known = {choice: float(place) for place, choice in enumerate(dim.choices)}
    if dim.choices[:2] == ("no", "yes"):
        known |= {text: float(yes) for yes, words in enumerate(FLAGS) for text in words}
    own = np.broadcast_to(np.asarray(others.get("dtype", ""), dtype=object), len(found))
    made = []
    for text, dtype in zip(found, own, strict=True):
        try:
            if text not in known and "same" in known and _dtype(text) == dtype:
                text = "same"
            made.append(known[text] if text in known else float(text))
        except ValueError:
            made.append(float("nan"))
    return np.array(made)


def _constant(definition: OpKind, name: str, value: Any) -> Any:
    """A constant as a batch takes it."""
    if name == "measured_at":
        return moment(value)
    if name in ("dtype", "out_dtype"):
        return _dtype(str(value))
    dim = next((dim for dim in definition.dims if dim.name == name), None)
    return dim.parse(definition.name, value) if dim is not None else value
