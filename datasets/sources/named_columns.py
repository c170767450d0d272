"""Tables whose columns have the names that opcast has for them: they need no mapping file.

``kind`` names the op of each row, ``device_id`` or ``chip`` its device; dims, formats, ``backend`` and ``latency_us``
(microseconds) stand under their own names. So are the collected tables of ROCm's aiter, LLMServingSim and InferSim.
What else they say is read, too: ``source`` names whose timings they are, ``timing`` how they were taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..devices import device_id_of
from ..ops import KINDS
from ..schema import schema_for
from .tables import Rejected, SourceError
from .text_files import texts

OTHER_NAMES = {"device_id": "chip", "license": "licence", "source_ref": "source_file"}
NOT_READ = ("run_id", "opcast_version", "measured_at", "throttled", "source")
# Arguments that take turns lie in no cache while they are many, and partly in it while they are few: neither state.
BETWEEN = "rotated"
STATES = ("cold", "warm")
APART = re.compile(r":state_\w+$")  # of a backend: what is a dim of the op


def named(table: pa.Table) -> bool:
    """Whether a table says in opcast's words what it holds."""
    return {"kind", "dtype", "latency_us"} <= set(table.column_names)


def rows_by_kind(table: pa.Table, file: Path) -> Iterator[tuple[str, pa.Table] | Rejected]:
    """The rows of each kind; those of no kind as refused."""
    if not named(table):
        raise SourceError(
            f"{file.name} needs mapping=FILE, which says what each column is (without one: columns kind, dtype, "
            "latency_us, device_id and the dims)"
        )
    kinds = texts(table, "kind")
    for name in sorted(set(kinds)):
        rows = table.filter(pa.array(kinds == name))
        if name in KINDS:
            yield name, rows
        else:
            yield Rejected(f"no op kind {name!r}" if name else "no op kind", len(rows), file.name)


def specs(kind_name: str, table: pa.Table) -> dict[str, dict[str, Any]]:
    """Which column of a table is which of the store, as a mapping has it; columns without any value are left out."""
    by_name = {}
    for name in schema_for(kind_name).names:
        column = name if name in table.column_names else OTHER_NAMES.get(name, "")
        if name not in NOT_READ and column in table.column_names and table[column].null_count < len(table):
            by_name[name] = {"column": column, **({"unit": "us"} if name.endswith("_us") else {})}
    if "device_id" in by_name:
        chips = pc.unique(table[by_name["device_id"]["column"]]).to_pylist()
        by_name["device_id"]["values"] = {str(chip): device_id_of(str(chip)) for chip in chips}
    return by_name


def told(kind_name: str, table: pa.Table, columns: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Columns with what else a table says: whose rows they are, and in which states of the cache they answer.

    Rows timed between both states stand for both. Products of a batch are kernels of their own: a backend apart.
    """
    if "source" in table.column_names:
        columns["source"] = np.array([text.rpartition("/")[2].lower() for text in texts(table, "source")], dtype=object)
    if isinstance(backends := columns.get("backend"), np.ndarray):
        dims = "state_format" in KINDS[kind_name].names
        batched = np.asarray(columns["batch"] if kind_name == "gemm" and "batch" in columns else 1) > 1
        named = [
            APART.sub(":tuned", text) if dims else f"{text}:batched" if many else text
            for text, many in zip(backends, np.broadcast_to(batched, len(backends)), strict=True)
        ]
        columns["backend"] = np.array(named, dtype=object)
    between = "timing" in table.column_names and all(BETWEEN in text for text in texts(table, "timing"))
    for state in STATES if between and "cache" not in columns else [None]:
        yield columns if state is None else {**columns, "cache": state}
