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
from ..device_names import cuda_device_id, unknown_gpu
from ..devices import DeviceError
from ..ops import KINDS, bus_factor
from ..row_checks import IMPOSSIBLE, Rows, least_us, link_rate, unit_of
from ..schema import impossible_values, row_ops
from ..store import Store
from .tables import Rejected

SMALL = 2.0  # launches: what peak rates do in this time is an op that any kernel finishes at once
HOST_BOUND = 20.0  # launches: what such an op takes when a host dispatches it (kernels: at most 9, hosts: from 25)
OVER_PEAK = 1.1  # of a link's rate: what rounding of sizes and of data sheets explains


def sift(store: Store, kind_name: str, table: pa.Table, where: str) -> tuple[pa.Table, list[Rejected]]:
    """The rows that can be, and what was wrong with the others; ``where`` names the file they are from."""
    rejected: list[Rejected] = []
    while broken := list(impossible_values(kind_name, table)):
        wrong = np.zeros(len(table), dtype=bool)
        for reason, found in broken:
            new = found & ~wrong
            rejected.append(Rejected(reason, int(new.sum()), f"row {int(np.argmax(new))} of {where}"))
            wrong |= new
        table = table.filter(pa.array(~wrong))
    parts = []
    for device_id in sorted(pc.unique(table["device_id"]).to_pylist()):
        part = matching(table, "device_id", device_id)
        try:
            rows = Rows(kind_name, device_id, part, store.known_device(device_id))
        except DeviceError as error:
            rejected.append(Rejected(_unknown(part, device_id) or str(error), len(part), where))
            continue
        wrong = np.zeros(len(part), dtype=bool)
        for reason, found in _too_fast(rows):
            new = found & ~wrong
            example = f"{_described(rows, int(np.argmax(new)))}, {where}"
            rejected.append(Rejected(reason, int(new.sum()), example))
            wrong |= new
        kept = Rows(kind_name, device_id, part.filter(pa.array(~wrong)), rows.device)
        parts.append(_timed(kept))
    return pa.concat_tables(parts) if parts else table.slice(0, 0), [one for one in rejected if one.rows]


def _unknown(part: pa.Table, device_id: str) -> str:
    """What to do about rows of an unknown GPU, by the name that their file has for it; empty where it has none."""
    names = pc.unique(part["device_name"]).to_pylist() if "device_name" in part.column_names else []
    printed = next((each for each in names if each and cuda_device_id(each) == device_id), "")
    return unknown_gpu(printed, "the file") if printed else ""


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
    if KINDS[rows.kind].family == "collective":
        moved = rows.numbers("size_bytes") * np.minimum(bus_factor(rows.kind, rows.numbers("ranks")), 1.0)
        rate = moved / rows.latency_us
        yield f"{rows.kind}: bandwidth above the link's peak", rows.ok & (rate > OVER_PEAK * link_rate(rows, device))


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
    place = rows.table.schema.get_field_index("timer")
    timer = pc.if_else(pa.array(eager[group]), "eager", rows.table["timer"])
    return rows.table.set_column(place, rows.table.schema.field(place), timer)


def _described(rows: Rows, position: int) -> str:
    """The op of one row and its latency."""
    row = rows.table.slice(position, 1)
    return f"{row_ops(rows.kind, row)[0]} in {numbers(row['latency_us'])[0]:.3g} us on {rows.device_id}"
