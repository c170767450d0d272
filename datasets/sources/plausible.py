"""Which foreign rows can be: known device and formats, a positive latency, and no faster than the hardware.

A wrong unit (milliseconds read as microseconds, elements as bytes) shows as a latency far below what peak rates
allow, or as a bandwidth above that of the link. Such rows are counted and kept out.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..columns import group_keys, matching, numbers
from ..device_names import cuda_device_id, unknown_name
from ..devices import DeviceError
from ..ops import KINDS
from ..row_checks import IMPOSSIBLE, Rows, beyond_link, least_us, unit_of
from ..schema import impossible_values, row_ops
from ..store import Store
from .tables import Rejected

SMALL = 2.0  # launches: what peak rates do in this time is an op that any kernel finishes at once
HOST_BOUND = 20.0  # launches: what such an op takes when a host dispatches it (kernels: at most 9, hosts: from 25)


def sift(
    store: Store, kind_name: str, table: pa.Table, where: str, nameable: bool = False
) -> tuple[pa.Table, list[Rejected]]:
    """The rows that can be, and what was wrong with the others; ``where`` names the file they are from.

    ``nameable``: whether a user may say which device the rows are from.
    """
    rejected: list[Rejected] = []
    while broken := list(impossible_values(kind_name, table)):
        wrong = np.zeros(len(table), dtype=bool)
        for reason, broken_rows in broken:
            new = broken_rows & ~wrong
            rejected.append(Rejected(reason, int(new.sum()), f"row {int(np.argmax(new))} of {where}"))
            wrong |= new
        table = table.filter(pa.array(~wrong))
    parts = []
    for device_id in sorted(pc.unique(table["device_id"]).to_pylist()):
        rows_of_device = matching(table, "device_id", device_id)
        try:
            rows = Rows(kind_name, device_id, rows_of_device, store.known_device(device_id))
        except DeviceError as error:
            reason = (nameable and _printed_name(rows_of_device)) or str(error)
            rejected.append(Rejected(reason, len(rows_of_device), where))
            continue
        wrong = np.zeros(len(rows_of_device), dtype=bool)
        for reason, broken_rows in _too_fast(rows):
            new = broken_rows & ~wrong
            example = f"{_described(rows, int(np.argmax(new)))}, {where}"
            rejected.append(Rejected(reason, int(new.sum()), example))
            wrong |= new
        plausible = Rows(kind_name, device_id, rows_of_device.filter(pa.array(~wrong)), rows.device)
        parts.append(_timed(plausible))
    return pa.concat_tables(parts) if parts else table.slice(0, 0), [one for one in rejected if one.rows]


def _printed_name(table: pa.Table) -> str:
    """What is wrong with the name that the device of some rows gave itself; "" where their id was not made of that."""
    names = [name for name in pc.unique(table["device_name"]).to_pylist() if name]
    same_device = len(names) == 1 and cuda_device_id(names[0]) == table["device_id"][0].as_py()
    return unknown_name(names[0]) if same_device else ""


def _too_fast(rows: Rows) -> Iterator[tuple[str, np.ndarray]]:
    """Reasons why rows cannot be that fast, and which (bool [n])."""
    device = rows.device
    if device is None or device.synchronous or not len(rows.table):
        return
    least = least_us(rows, device)
    if unit_of(rows.kind) != "host":
        least = np.maximum(least, device.launch_us)
    reason = f"{rows.kind}: latency below {IMPOSSIBLE} of what peak rates and a launch allow"
    yield reason, rows.ok & (rows.latency_us < IMPOSSIBLE * least)
    yield f"{rows.kind}: bandwidth above the link's peak", beyond_link(rows, device)


def _timed(rows: Rows) -> pa.Table:
    """The rows; those of a backend and format whose every small op takes as long as a host needs are timed eagerly."""
    device = rows.device
    if device is None or device.synchronous or unit_of(rows.kind) != "tensor" or KINDS[rows.kind].family == "moe":
        return rows.table
    names = ["backend", "dtype", *(["kv_dtype"] if "kv_dtype" in KINDS[rows.kind].names else [])]
    _, group = np.unique(group_keys(rows.table, names), return_inverse=True)
    small = (least_us(rows, device) < SMALL * device.launch_us) & rows.equal("timer", "imported")
    eager = np.zeros(int(group.max(initial=-1)) + 1, dtype=bool)
    for number in np.unique(group[small]):
        floor = np.percentile(rows.latency_us[small & (group == number)], 10)
        eager[number] = floor > HOST_BOUND * device.launch_us
    if not eager.any():
        return rows.table
    index = rows.table.schema.get_field_index("timer")
    timer = pc.if_else(pa.array(eager[group]), "eager", rows.table["timer"])
    return rows.table.set_column(index, rows.table.schema.field(index), timer)


def _described(rows: Rows, position: int) -> str:
    """The op of one row and its latency."""
    row = rows.table.slice(position, 1)
    return f"{row_ops(rows.kind, row)[0]} in {numbers(row['latency_us'])[0]:.3g} us on {rows.device_id}"
