"""Doubtful rows of a store: the rules that :mod:`.quality` applies to all rows of one kind on one device.

Each rule is a function from :class:`Rows` to findings; adding one means adding it to :data:`RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .columns import codes, group_keys, numbers
from .devices import RATE_OF, Device
from .link_limits import between_nodes, crossing_bytes, fabric_gbps
from .ops import KINDS, LINKS, bus_factor, cost_columns
from .schema import ENVIRONMENT, row_ops

IMPOSSIBLE = 0.3  # of the time that a device's peak rates allow: no rounding of a data sheet explains less
OVER_PEAK = 1.1  # of a link's rate: what rounding of sizes and of data sheets explains
OUTLIER = 2.0  # times faster or slower than rows of similar cost
OUTLIER_SCALES = 6.0  # and so many robust standard deviations of theirs
NEIGHBOURS = 8
REACH = 4.0  # how far a neighbour may be, in doublings of cost
DISAGREE = 1.5  # ratio of repeats of one op in one environment
DRIFT = 0.10  # of a canary from its median over a campaign
SLOW_LINK = 0.2  # of a link's rate at best
LARGE_BYTES = 64 * 2**20  # where latency no longer matters
BROKEN = 0.05  # share of errors and timeouts that is worth a look
CONDITIONS = ("dtype", "out_dtype", "backend", "cache", *ENVIRONMENT)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: how bad (error, warning, note), where, what, and what to do about it."""

    severity: str
    where: str
    what: str
    do: str


@dataclass(frozen=True)
class Rows:
    """All readable rows of one kind on one device, as columns."""

    kind: str
    device_id: str
    table: pa.Table
    device: Device | None

    @property
    def where(self) -> str:
        return f"{self.kind} on {self.device_id}"

    def numbers(self, name: str) -> np.ndarray:
        """A column of numbers or truth values; what is missing is NaN, zero or False."""
        return numbers(self.table[name])

    def equal(self, name: str, text: str) -> np.ndarray:
        """Where a text column has one value."""
        places, texts = codes(self.table[name])
        return places == texts.index(text) if text in texts else np.zeros(len(places), dtype=bool)

    @cached_property
    def ok(self) -> np.ndarray:
        return self.equal("status", "ok")

    @cached_property
    def latency_us(self) -> np.ndarray:
        return self.numbers("latency_us")

    @cached_property
    def steady(self) -> np.ndarray:
        """Rows worth comparing: ok, and not at throttled clocks."""
        return self.ok & ~self.numbers("throttled")

    def key(self, *more: str) -> np.ndarray:
        """One number a row, equal where op, backend, cache, environment (and more columns) are."""
        return group_keys(self.table, [*KINDS[self.kind].names, *CONDITIONS, *more])

    @cached_property
    def costs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """FLOPs, bytes read, bytes written of every row."""
        return row_costs(self.kind, self.table)

    def describe(self, position: int) -> str:
        """The op of one row, its latency and its run."""
        row = self.table.slice(int(position), 1)
        run_id, latency = row["run_id"][0].as_py(), row["latency_us"][0].as_py()
        return f"{row_ops(self.kind, row)[0]}, {latency:.3g} us, run {run_id}"


def _duplicates(rows: Rows) -> Iterator[Finding]:
    """Ok rows of one run with the same op, backend, cache, environment and origin."""
    positions = np.flatnonzero(rows.ok)
    key = rows.key("run_id", "source_ref")[positions]
    unique, counts = np.unique(key, return_counts=True)
    extra = len(key) - len(unique)
    if extra:
        first = positions[np.flatnonzero(key == unique[np.argmax(counts)])[0]]
        what = f"{extra} rows repeat an op of the same run ({rows.describe(first)}, {counts.max()} times)"
        do = "nothing for reading, which takes the newest; see whether a file was copied or an import ran twice"
        yield Finding("warning", rows.where, what, do)


def _throttled(rows: Rows) -> Iterator[Finding]:
    slow = rows.ok & rows.numbers("throttled")
    if slow.any():
        what = f"{slow.sum()} of {rows.ok.sum()} rows were measured at throttled clocks"
        what += f", first {rows.describe(_first(slow))}"
        do = "see to cooling and power, then measure them again in a campaign of another name: the newest row is read"
        yield Finding("warning", rows.where, what, do)


def _failures(rows: Rows) -> Iterator[Finding]:
    """Too many errors and timeouts, or nothing that ran at all."""
    broken = rows.equal("status", "error") | rows.equal("status", "timeout")
    share = broken.mean()
    if share > BROKEN:
        message = rows.table["error"][_first(broken)].as_py() or "no message"
        what = f"{broken.sum()} of {len(broken)} rows are errors or timeouts, first: {message}"
        yield Finding("warning", rows.where, what, "mend the cause and run the campaign under another name")
    elif not rows.ok.any():
        status = rows.table["status"][0].as_py()
        message = rows.table["error"][0].as_py() or "no message"
        what = f"none of {len(rows.ok)} rows is ok, first {status}: {message}"
        yield Finding("note", rows.where, what, "nothing to train on: choose smaller shapes or another backend")


def _impossible(rows: Rows) -> Iterator[Finding]:
    """Rows faster than a data sheet's peak rates allow, whatever the cache holds."""
    if rows.device is None or rows.device.synchronous:
        return
    least = least_us(rows, rows.device)
    ratio = np.where(rows.ok & ~beyond_link(rows, rows.device), least / rows.latency_us, 0.0)
    if ratio.max() > 1.0 / IMPOSSIBLE:
        worst = int(np.argmax(ratio))
        what = (
            f"{(ratio > 1.0 / IMPOSSIBLE).sum()} rows are faster than the hardware can be; worst {rows.describe(worst)}"
        )
        do = f"at peak rates it takes {least[worst]:.3g} us: check what was timed, and move the run's files away"
        yield Finding("error", rows.where, what, do)


def beyond_link(rows: Rows, device: Device) -> np.ndarray:
    """Bool [n]: collectives that move bytes faster than their link can."""
    if device.synchronous or KINDS[rows.kind].family != "collective":
        return np.zeros(len(rows.table), dtype=bool)
    return rows.ok & (_link_use(rows, device) > OVER_PEAK)


def _link_use(rows: Rows, device: Device) -> np.ndarray:
    """Of the rate of its link, what each collective uses at least; 0 where the link's is not known."""
    inside = rows.numbers("size_bytes") * np.minimum(bus_factor(rows.kind, rows.numbers("ranks")), 1.0)
    moved = np.where(between_nodes(rows.numbers("link")), _crossing(rows), inside)
    return np.asarray(moved / rows.latency_us / link_rate(rows, device))


def _crossing(rows: Rows) -> np.ndarray:
    """Bytes that must leave or enter a node, of each row."""
    return crossing_bytes(rows.kind, rows.costs[1], {name: rows.numbers(name) for name in KINDS[rows.kind].names})


def _beyond_links(rows: Rows) -> Iterator[Finding]:
    """Collectives faster than their link, for one of processes that ran each for itself."""
    if rows.device is None or not (beyond := beyond_link(rows, rows.device)).any():
        return
    use = np.where(beyond, _link_use(rows, rows.device), 0.0)
    worst = int(np.argmax(use))
    what = f"{beyond.sum()} rows move bytes faster than their link; worst {rows.describe(worst)}: {use[worst]:.3g} x"
    do = "see whether its processes knew of each other, which link and how many ranks it had; move the run's files away"
    yield Finding("error", rows.where, what, do)


def exceeded(rows: Rows) -> Iterator[tuple[str, int, float]]:
    """Where rows are too fast for a device's measured figures: kind, number of rows, largest ratio."""
    if rows.device is not None and rows.device.synchronous:
        ratio = np.where(rows.ok, least_us(rows, rows.device) / rows.latency_us, 0.0)
        if ratio.max() > 1.0 / IMPOSSIBLE:
            yield rows.kind, int((ratio > 1.0 / IMPOSSIBLE).sum()), float(ratio.max())


def slow_links(rows: Rows) -> Iterator[Finding]:
    """Large collectives that reach a small part of their link: hosts without peer-to-peer copies, for one."""
    if rows.device is None or KINDS[rows.kind].family != "collective":
        return
    moved = rows.numbers("size_bytes") * bus_factor(rows.kind, rows.numbers("ranks"))
    share = moved / rows.latency_us / link_rate(rows, rows.device)
    large = (
        rows.ok
        & ~between_nodes(rows.numbers("link"))
        & (rows.numbers("size_bytes") >= LARGE_BYTES)
        & (moved > 0)
        & np.isfinite(share)
        & (share > 0)
    )
    slow: list[tuple[float, int, str]] = []
    key = group_keys(rows.table, ["backend", "ranks", "link"])
    for one in np.unique(key[large]):
        best = int(np.argmax(np.where(large & (key == one), share, 0.0)))
        if share[best] < SLOW_LINK:
            slow.append((share[best], int(rows.numbers("ranks")[best]), rows.table["backend"][best].as_py()))
    if slow:
        share_of, ranks, backend = min(slow)
        groups = ", ".join(f"{count}" for count in sorted({count for _, count, _ in slow}))
        what = f"groups of {groups} ranks reach less than {SLOW_LINK:.0%} of the link; worst {backend} with {ranks}"
        do = "tell whether that host lacks peer-to-peer copies; leave these rows out for hosts that have them"
        yield Finding("warning", rows.where, f"{what}: {share_of:.1%}", do)


def least_us(rows: Rows, device: Device) -> np.ndarray:
    """Time of every row at the device's peak rates; data comes from the last-level cache where it can.

    A CPU has faster caches below the last one, whose rates are not known: what fits is taken to be free.
    """
    flops, bytes_read, write = rows.costs
    if unit_of(rows.kind) == "network":
        return np.where(between_nodes(rows.numbers("link")), _crossing(rows), bytes_read) / link_rate(rows, device)
    fits = bytes_read + write < 2.0 * device.l2_mib * 2**20
    cache_rate = np.inf if device.synchronous else max(device.l2_gbps, device.memory_gbps) * 1e3
    cached = np.where(fits, cache_rate, device.memory_gbps * 1e3)
    sources = np.where(rows.equal("cache", "warm"), cached, device.memory_gbps * 1e3)
    compute = np.zeros_like(flops)
    for dtype, _, positions in _dtype_groups(rows.table):
        compute[positions] = flops[positions] / _peak(rows.kind, device, dtype)
    return np.maximum(bytes_read / sources + write / cached, compute)


@lru_cache
def unit_of(kind_name: str) -> str:
    """The execution unit that bounds a kind: tensor, vector, network or host."""
    return cost_columns(kind_name, {dim.name: np.array([dim.low]) for dim in KINDS[kind_name].dims}, "bf16").unit


def _peak(kind_name: str, device: Device, dtype: str) -> float:
    """FLOPs a microsecond on the fastest units that may run a dtype; infinite where unknown."""
    rates = [device.vector_tflops]
    if unit_of(kind_name) == "tensor":
        rates = [device.tensor_tflops.get(name, 0.0) for name in RATE_OF.get(dtype, (dtype,))]
    return max(rates) * 1e6 or np.inf


def link_rate(rows: Rows, device: Device) -> np.ndarray:
    """Bytes a microsecond over the slowest link of each row; infinite where the device does not say.

    Of NVLink and PCIe those of one rank, of a fabric those of all ranks of a node at most.
    """
    rates = {"nvlink": device.link_gbps, "pcie": device.pcie_gbps}
    link = rows.numbers("link")
    of_rank = np.array([rates.get(name, 0.0) * 1e3 or np.inf for name in LINKS])[link]
    return np.where(between_nodes(link), fabric_gbps(device, rows.numbers("ranks_per_node")) * 1e3, of_rank)


def _outliers(rows: Rows) -> Iterator[Finding]:
    """Rows far from the median efficiency of their neighbours in FLOPs, bytes and longest dim."""
    positions = np.flatnonzero(rows.steady)
    if len(positions) <= NEIGHBOURS:
        return
    off = _local_residual(rows, positions)
    if not np.isfinite(off).any():
        return
    far = np.abs(off) > np.log(OUTLIER)
    if far.any():
        worst = int(np.argmax(np.where(far, np.abs(off), 0.0)))
        ratio, word = np.exp(abs(off[worst])), "slower" if off[worst] > 0 else "faster"
        what = (
            f"{far.sum()} rows lie far off similar ones; worst {rows.describe(positions[worst])}: {ratio:.1f} x {word}"
        )
        do = "measure these ops again in a campaign of another name: the newest row is read"
        yield Finding("warning", rows.where, what, do)


def _local_residual(rows: Rows, positions: np.ndarray) -> np.ndarray:
    """Log of latency over what neighbours of the same context suggest; 0 where within their spread, NaN without them.

    Efficiency varies slowly with FLOPs, bytes and the longest dim, so the median of the nearest rows is a local fit.
    """
    from scipy.spatial import cKDTree

    points = _points(rows, positions)
    order = np.lexsort(points[:, ::-1].round().T)  # near queries in turn share what the processor's caches hold
    points, efficiency = points[order], _log_efficiency(rows, positions[order])
    distance, nearest = cKDTree(points).query(points, NEIGHBOURS + 1, eps=0.5, distance_upper_bound=REACH)
    reachable = np.isfinite(distance).all(axis=1)
    around = efficiency[np.where(reachable[:, None], nearest, 0)[:, 1:]]
    middle = np.median(around, axis=1)
    spread = 1.4826 * np.median(np.abs(around - middle[:, None]), axis=1)
    off = efficiency - middle
    usual = 1.4826 * np.median(np.abs(off[reachable])) if reachable.any() else 0.0
    within = np.abs(off) <= OUTLIER_SCALES * np.maximum(spread, usual)
    residual = np.empty(len(positions))
    residual[order] = np.where(reachable, np.where(within, 0.0, off), np.nan)
    return residual


def _points(rows: Rows, positions: np.ndarray) -> np.ndarray:
    """Context, and logs of FLOPs, bytes read, bytes written and the longest dim: what neighbours are near in.

    Rows of another context (choices, dtypes, backend, cache, environment) lie out of reach.
    """
    dims = KINDS[rows.kind].dims
    longest = np.max([rows.numbers(dim.name) for dim in dims if not dim.choices], axis=0)
    context = group_keys(rows.table, [*(dim.name for dim in dims if dim.choices), *CONDITIONS])[positions]
    apart = np.unique(context, return_inverse=True)[1] * 1e3
    return np.column_stack([apart, *(np.log2(size[positions] + 1.0) for size in (*rows.costs, longest))])


def _log_efficiency(rows: Rows, positions: np.ndarray) -> np.ndarray:
    """Log of latency over a roofline whose rates and floor are those that the rows themselves reach."""
    latency = rows.latency_us[positions]
    flops, moved = rows.costs[0][positions], (rows.costs[1] + rows.costs[2])[positions]
    law = np.full(len(latency), np.percentile(latency, 1.0))
    law += np.maximum(*(size / max(np.percentile(size / latency, 98.0), 1e-30) for size in (flops, moved)))
    return np.log(latency / law)


def _repeats(rows: Rows) -> Iterator[Finding]:
    """Ok rows of one op in one environment that disagree, canaries aside."""
    positions = np.flatnonzero(rows.steady & ~_canary(rows))
    if not len(positions):
        return
    off, ratio = _from_median(rows.key()[positions], rows.latency_us[positions])
    if ratio.max() > DISAGREE:
        worst = int(np.argmax(np.where(ratio == ratio.max(), np.abs(np.log(off)), 0.0)))
        what = f"repeats of one op disagree by {ratio.max():.2f} x; worst {rows.describe(positions[worst])}"
        yield Finding("warning", rows.where, what, "find out what changed between the runs, then measure it once more")


def _drift(rows: Rows) -> Iterator[Finding]:
    """Canaries of a campaign that moved: the machine was not steady while it ran."""
    positions = np.flatnonzero(rows.ok & _canary(rows))
    if not len(positions):
        return
    campaigns = np.array([_campaign(run_id) for run_id in rows.table["run_id"].take(positions).to_pylist()])
    _, campaign = np.unique(campaigns, return_inverse=True)
    _, op = np.unique(rows.key()[positions], return_inverse=True)
    off = np.abs(_from_median(op * len(positions) + campaign, rows.latency_us[positions])[0] - 1.0)
    for name in np.unique(campaigns[off > DRIFT]):
        worst = int(np.argmax(np.where(campaigns == name, off, 0.0)))
        what = f"canaries of campaign {name} drift by up to {off[worst]:.0%}; worst {rows.describe(positions[worst])}"
        do = "measure when the machine is idle and cool: rows of this campaign are no better than that"
        yield Finding("warning", rows.where, what, do)


def _canary(rows: Rows) -> np.ndarray:
    return pc.match_substring_regex(rows.table["run_id"], r"^canary\d+_").to_numpy()


def _campaign(run_id: str) -> str:
    """The campaign that a round of canaries belongs to: ``canary003_quick-ab12`` is of ``quick-ab12``."""
    return run_id.partition("_")[2]


def _from_median(key: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each value among those with the same key: ratio to their median, and of their largest to their smallest."""
    order = np.lexsort((values, key))
    ordered = values[order]
    starts = np.flatnonzero(np.r_[True, key[order][1:] != key[order][:-1]])
    counts = np.diff(np.r_[starts, len(key)])
    middle = (ordered[starts + (counts - 1) // 2] + ordered[starts + counts // 2]) / 2.0
    off, apart = np.empty(len(key)), np.empty(len(key))
    off[order] = ordered / np.repeat(middle, counts)
    apart[order] = np.repeat(ordered[starts + counts - 1] / ordered[starts], counts)
    return off, apart


def _first(mask: np.ndarray) -> int:
    return int(np.flatnonzero(mask)[0])


RULES: tuple[Callable[[Rows], Iterator[Finding]], ...] = (
    _duplicates,
    _throttled,
    _failures,
    _impossible,
    _beyond_links,
    _outliers,
    _repeats,
    _drift,
    slow_links,
)


def row_costs(kind_name: str, table: pa.Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    costs = np.zeros((3, len(table)))
    columns = {name: table[name].to_numpy() for name in KINDS[kind_name].names}
    for dtype, out_dtype, rows in _dtype_groups(table):
        cost = cost_columns(kind_name, {name: column[rows] for name, column in columns.items()}, dtype, out_dtype)
        costs[:, rows] = np.stack(
            [np.broadcast_to(x, len(rows)) for x in (cost.flops, cost.read_bytes, cost.write_bytes)]
        )
    return costs[0], costs[1], costs[2]


def _dtype_groups(table: pa.Table) -> Iterator[tuple[str, str, np.ndarray]]:
    groups = table.select(["dtype", "out_dtype"]).append_column("row", pa.array(np.arange(len(table))))
    for group in groups.group_by(["dtype", "out_dtype"]).aggregate([("row", "list")]).to_pylist():
        yield group["dtype"], group["out_dtype"], np.array(group["row_list"])
