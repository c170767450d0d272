"""``opcast predict shapes=FILE``: the predictions of a table, as a file, as JSON or as a table on the terminal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..datasets.counts import counted
from ..datasets.devices import Device
from ..datasets.ops import KINDS, Op, make_op
from ..datasets.vocabulary import OpColumns
from ..simulator.predict.columns import Predicted, predict_columns
from ..simulator.report.answer import OpPrediction
from ..simulator.report.view import time_text
from . import resolve, shapes
from .show import BadInputError, print_json, say, table, with_units

ONE_BY_ONE = Callable[[list[Op], Device, Mapping[str, Any]], list[OpPrediction]]
OF_LINKS = ("algorithm", "algbw_gbps", "busbw_gbps", "stretch")  # of ``network``, in tables
OF_ONE = ("report", "picture", "group")  # settings of a single op
LISTED = 1000  # rows on a terminal


def run(config: Mapping[str, Any], as_json: bool, predicted: ONE_BY_ONE) -> int:
    """Print or write the predictions of a table; ``predicted`` answers those of a cluster, op by op."""
    default = kind_of(config)
    path = Path(str(config["shapes"])).expanduser()
    target = resolve.device(config)
    on_links = bool(config.get("cluster"))
    parts = shapes.chunks(path, default)
    first = next(parts)  # what cannot be read or predicted shows before a file is begun
    parts = itertools.chain([first], parts)
    if on_links:
        found = [each for part in parts for each in predicted(ops_of(part), target, config)]
        answers: Iterator[pa.Table] = iter([as_table([flattened(each) for each in found])])
        rows: Iterable[dict[str, Any]] = (each.to_dict() for each in found)
    else:
        answers = tables(parts, path, default, target, config)
        rows = (nested(row) for answer in answers for row in answer.to_pylist())
    if config["output"]:
        output = Path(str(config["output"])).expanduser()
        count = shapes.write_tables(output, answers)
        if as_json:
            print_json({"output": str(output), "rows": count})
        say(f"{counted(count, 'prediction')} written to {output}")
    elif as_json:
        print_json({"predictions": list(rows)})
    else:
        show(rows)
    return 0


def kind_of(config: Mapping[str, Any]) -> str | None:
    """The kind of rows that name none. BadInputError for what else was said of a single op."""
    for name in OF_ONE:
        if config[name]:
            raise BadInputError(f"{name}={config[name]} is for one op: leave it out of shapes=…")
    chosen = config.get("op")
    if not chosen:
        return None
    usual: dict[str, Any] = {dim.name: dim.default for dim in KINDS[chosen["kind"]].dims}
    usual |= {"kind": chosen["kind"], "dtype": "bf16", "out_dtype": None}
    for name, value in chosen.items():
        if value != "???" and value != usual.get(name):
            raise BadInputError(f"op.{name}={value} is for one op: with shapes=… a column {name} says it for each row")
    return str(chosen["kind"])


def tables(
    parts: Iterator[shapes.RowsChunk], path: Path, default: str | None, target: Device, config: Mapping[str, Any]
) -> Iterator[pa.Table]:
    """The answers of a table's chunks, as tables of the same columns."""
    engine, registries, limits = resolve.engine(config, target), resolve.registries(config), resolve.limits(config)

    def ask(group: shapes.AlikeRows) -> Predicted:
        asked = OpColumns(group.kind, group.columns, group.dtype, group.out_dtype, config["cache"])
        return predict_columns(asked, target, engine, registries, limits, config.get("backend"))

    names = shapes.dim_names(shapes.kinds_in(path, default))
    for part in parts:
        yield shapes.answer_table(part, ask, target.id, config["cache"], names)


def ops_of(part: shapes.RowsChunk) -> list[Op]:
    """The rows of a chunk as ops, in their order."""
    made: dict[int, Op] = {}
    for group in part.groups:
        made |= dict(zip(group.places.tolist(), group.ops(), strict=True))
    return [made[place] for place in range(part.rows)]


def flattened(found: OpPrediction) -> dict[str, Any]:
    """A prediction as one row: of what its links did only figures."""
    row = {key: value for key, value in found.to_dict().items() if key not in ("op", "network")}
    return {**found.op, **row, **{name: found.network[name] for name in OF_LINKS if name in found.network}}


def as_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows as a table with the columns of all of them."""
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: [row.get(name) for row in rows] for name in names})


def nested(row: dict[str, Any]) -> dict[str, Any]:
    """A row of answers as the JSON of a single prediction has it: what the op is stands under ``op``."""
    names = ("kind", *KINDS[row["kind"]].names, "dtype", "out_dtype")
    left_out = {"kind", "dtype", "out_dtype", *(dim.name for kind in KINDS.values() for dim in kind.dims)}
    about = {name: row[name] for name in names}
    return {"op": about, **{name: row[name] for name in row if name not in left_out}, "network": {}}


def show(rows: Iterable[Mapping[str, Any]]) -> None:
    """The first rows as a table, and how many more there are."""
    lines: list[tuple[object, ...]] = []
    left = 0
    for row in rows:
        if len(lines) == LISTED:
            left += 1
            continue
        op = make_op(row["op"]["kind"], **{name: value for name, value in row["op"].items() if name != "kind"})
        times = (time_text(row[name]) for name in ("latency_us", "low_us", "high_us"))
        lines.append((with_units(str(op)), *times, row["engine"], row["bound"]))
    table("", ("op", "latency", "low", "high", "engine", "bound"), lines)
    if left:
        say(f"and {left:,} more: output=FILE writes all of them")
