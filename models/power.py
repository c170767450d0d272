"""Watts of an op, its energy, and its latency under a power cap or at a lower clock.

A power model is a predictor whose quantity is watts: ln(measured / baseline) is learned with the features, candidates,
intervals and envelope of latency, over a baseline of idle power plus what busy compute and memory draw. It lies in
``<predictors>/power``.

Under a limit the clock of compute units falls until the op draws no more (:func:`held`): their energy a FLOP falls as
clock ^ (alpha - 1), compute time grows as 1 / clock, time in memory, links and launches does not. Matrix products draw
what :mod:`.clocks` says of the rate that they reached, which for a short burst is more than the limit. Where the lowest
clock still draws too much, the op is slowed as a whole until what it draws beyond idle fits: no answer states more
watts than the cap or the TDP. An answer under a cap that binds is outside the envelope.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..datasets.devices import Device
from ..datasets.dtypes import itemsize
from ..datasets.loading import finite
from ..datasets.ops import Op, attended_pairs, iterate_groups
from ..datasets.vocabulary import KINDS, OpColumns
from . import analytical, clocks
from .analytical.setting import fp32_pj, whole_rate
from .busy import Parts, parts
from .features import Frame, frame
from .predictor import Predictor
from .registry import Registry
from .threads import one_thread

if TYPE_CHECKING:
    import pyarrow as pa

    from .candidates import Options
    from .table import MeasurementTable

FOLDER = "power"
COMPUTE_SHARE, MEMORY_SHARE = 0.8, 0.5  # of the limit that a saturated unit adds
LOWEST_CLOCK = 0.15  # of the boost clock: what a driver still sets
HALVINGS = 40  # of the range in which a clock is sought
# Where nobody measured: sought together on all sources of NVIDIA's tables (tests/evidence/power.py, which leaves each
# source out as well), beside 100 pJ a byte (:data:`.clocks.MEMORY_PJ`).
# Of the limit: lanes, registers and caches of kernels other than plain products, whose loads and products few threads
# start (TMA, wgmma in CUDA's PTX ISA)
ACTIVE_SHARE = 0.2
# Of a query and a key: the score's way through registers, its exponential, its share of the sum
PAIR_PJ = 400.0
# Of the limit: what memory adds at most. Kernels that only stream draw 0.8 to 0.95 of the limit in all (H200, B200)
MOST_MEMORY_SHARE = 0.5
COLLECTIVE_BLOCKS = 32.0  # one a unit, that collectives take at most (NCCL_MAX_CTAS in NCCL's guide)
# Of the data sheet's rate: where products reach the limit, on chips that nobody timed for long. Judged on two chips
# (bf16 of H200 and B200)
LIMITING_RATE = 0.6
PRODUCTS = clocks.PRODUCTS
LEAST_CORE = 0.1  # of the limit: products whose matrix units draw less wait for memory, and no law of rates holds them
WITH_MATRICES = (*clocks.PRODUCTS, "attention", "linear_attention")  # families whose FLOPs are those of matrix units
WITHOUT_POWER = ("collective", "expert_parallel", "host")  # families whose time no clock of compute units decides
ROWS = 12_000  # that a power model learns from


class PowerError(ValueError):
    """A cap or clock that makes no sense, or a device whose power is unknown. The message says which."""


@dataclass(frozen=True)
class Limits:
    """The state of power that is asked about: a cap in W, a sustained clock in MHz; None = as measured."""

    cap_w: float | None = None
    clock_mhz: float | None = None

    def __post_init__(self) -> None:
        for field, name in (("cap_w", "power_cap_w"), ("clock_mhz", "sm_clock_mhz")):
            if (value := getattr(self, field)) is not None:
                if not finite(value) or value <= 0.0:
                    raise PowerError(f"{name}={value!r} must be a positive number")
                object.__setattr__(self, field, float(value))

    @property
    def asked(self) -> bool:
        return self.cap_w is not None or self.clock_mhz is not None

    def of(self, device: Device) -> Limits:
        """These on a device whose ``tdp_w`` may be a cap itself: one below its data sheet's."""
        caps = [self.cap_w, device.tdp_w if 0.0 < device.tdp_w < clocks.stock_limit_w(device) else None]
        return Limits(min((cap for cap in caps if cap is not None), default=None), self.clock_mhz)


def capped(device: Device, cap_w: float | None) -> Device:
    """The device under a cap; the very same without one, or where it lies above its limit. PowerError as Limits."""
    if cap_w is None:
        return device
    if device.tdp_w <= 0.0:
        raise PowerError(f"{device.name} has no tdp_w, so nothing is known of its power")
    Limits(cap_w)
    return dataclasses.replace(device, tdp_w=min(device.tdp_w, float(cap_w)))


def at_stock_limit(device: Device) -> Device:
    """The device with its data sheet's limit, whatever cap its ``tdp_w`` is."""
    limit_w = clocks.stock_limit_w(device)
    return device if device.tdp_w == limit_w else dataclasses.replace(device, tdp_w=limit_w)


@dataclass(frozen=True)
class EnergyCosts:
    """What activity costs where nobody measured: pJ of a byte, and of a pair of query and key; shares of the limit."""

    byte_pj: float = clocks.MEMORY_PJ
    pair_pj: float = PAIR_PJ
    active_share: float = ACTIVE_SHARE
    most_memory_share: float = MOST_MEMORY_SHARE


@dataclass(frozen=True)
class Activity:
    """What n ops keep busy: memory in GB/s, matrix units in watts at their rate, softmax in pairs a microsecond.

    ``units`` is the share of compute units whose lanes run: none of plain products.
    """

    gbps: np.ndarray
    core: np.ndarray
    pairs: np.ndarray | float
    units: float


@dataclass(frozen=True)
class Drawn:
    """Answers for n ops: watts, factor on latency, and whether the watts are like those of training."""

    power_w: np.ndarray
    slower: np.ndarray
    in_envelope: np.ndarray


def baseline_w(device: Device, busy: Parts) -> np.ndarray:
    """Watts by physics: idle, and what busy compute and memory add. PowerError for a device without ``tdp_w``."""
    if device.tdp_w <= 0:
        raise PowerError(f"{device.name} has no tdp_w, so nothing is known of its power")
    share = clocks.IDLE_SHARE + (COMPUTE_SHARE * busy.compute + MEMORY_SHARE * busy.memory) / busy.whole
    return np.asarray(device.tdp_w * np.minimum(share, 1.0))


@dataclass(frozen=True)
class Demand:
    """Watts of n ops at full clock: what they draw anyhow, what goes as fast as they do, what follows the clock too."""

    floor: np.ndarray
    moving: np.ndarray
    core: np.ndarray

    def where(self, chosen: np.ndarray) -> Demand:
        """Those of some ops; the others draw nothing."""
        return Demand(*(np.where(chosen, watts, 0.0) for watts in (self.floor, self.moving, self.core)))

    def at(self, clock: np.ndarray, busy: Parts, alpha: float) -> np.ndarray:
        """Watts at a relative clock: those of :attr:`moving` and :attr:`core` are energy over a longer time."""
        return np.asarray(self.floor + (self.moving + self.core * clock ** (alpha - 1.0)) / busy.slower(clock))


def demand_by_watts(device: Device, busy: Parts, power_w: np.ndarray) -> Demand:
    """Of ops that draw ``power_w`` [n] at full clock."""
    idle = np.minimum(clocks.idle_w(device), power_w)
    usual = np.maximum(baseline_w(device, busy) - idle, 1e-9)
    memory = MEMORY_SHARE * device.tdp_w * busy.memory / busy.whole
    moving = np.minimum(memory * np.minimum((power_w - idle) / usual, 1.0), power_w - idle)
    return Demand(idle, moving, power_w - idle - moving)


def demand_by_rate(
    device: Device, name: str, busy: Parts, latency_us: np.ndarray, added_bytes: np.ndarray | float = 0.0
) -> Demand:
    """Of matrix products that take so long at full clock, by what :mod:`.clocks` knows of their rate.

    ``name`` is that of the rate (:func:`.clocks.rate_name`). ``added_bytes`` are those of fp32 sums that products of
    narrower inputs add to.
    """
    core = clocks.core_w(device, name, busy.tflops(latency_us))
    moving = np.where(core > 0.0, clocks.adding_w(device, np.broadcast_to(added_bytes, core.shape), latency_us), 0.0)
    return Demand(np.full(len(core), clocks.floor_w(device)), moving, core)


def _added_bytes(ops: OpColumns) -> np.ndarray | float:
    """Bytes of fp32 results of products in fewer bits: gradients of weights, which the product adds to."""
    if ops.out_dtype != "fp32" or itemsize(ops.dtype) >= itemsize(ops.out_dtype):
        return 0.0
    return np.asarray(ops.cost.write_bytes, dtype=float)


def held(device: Device, busy: Parts, demands: Sequence[Demand], limits: Limits) -> tuple[np.ndarray, np.ndarray]:
    """Factor on latency and watts of n ops under limits, by the greatest of their demands at every clock.

    A cap above all demands changes nothing; a lower cap or clock is never faster, and no cap is exceeded.
    """

    def watts(clock: np.ndarray) -> np.ndarray:
        return np.maximum.reduce([demand.at(clock, busy, device.alpha) for demand in demands])

    top = 1.0 if limits.clock_mhz is None else float(np.clip(limits.clock_mhz / device.clock_mhz, LOWEST_CLOCK, 1.0))
    clock = np.full(len(busy.whole), top)
    cap = np.inf if limits.cap_w is None else limits.cap_w
    over = watts(clock) > cap
    if over.any():
        low, high = np.full(len(clock), LOWEST_CLOCK), clock
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            fits = watts(middle) <= cap
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        clock = np.where(over, low, clock)
    power_w, idle = watts(clock), np.minimum(clocks.idle_w(device), cap)
    longer = np.maximum((power_w - idle) / np.maximum(cap - idle, 1e-9), 1.0)
    slower = np.where(clock < 1.0, np.maximum(busy.slower(clock), 1.0), 1.0) * longer
    return slower, np.where(over, cap, power_w)


def answers(kind: str, device: Device, limits: Limits) -> bool:
    """Whether watts of a kind can be told of a device: under limits always, or PowerError says why not."""
    return KINDS[kind].family not in WITHOUT_POWER and (limits.asked or (device.tdp_w > 0 and not device.synchronous))


def drawn(model: Predictor | None, ops: OpColumns, device: Device, limits: Limits, latency_us: np.ndarray) -> Drawn:
    """Watts and slowdown of n ops that take ``latency_us`` at full clock; by :func:`estimated_w` without a ``model``.

    The estimate answers outside of a model's envelope, too: only large ops run for as long as the counter needs. A
    device whose ``tdp_w`` lies below its data sheet's is under that cap. PowerError for a device without ``tdp_w``, or
    a cap that it exceeds with nothing to do.
    """
    limits, usual = limits.of(device), at_stock_limit(device)
    if limits.cap_w is not None and limits.cap_w <= clocks.idle_w(usual):
        raise PowerError(
            f"a cap of {limits.cap_w:g} W is no more than {device.name} draws with nothing to do: ask for more than "
            f"{clocks.idle_w(usual):.0f} W"
        )
    busy = parts(ops, usual)
    watts = estimated_w(ops, usual, latency_us)
    inside = np.zeros(len(watts), dtype=bool)
    if model is not None:
        modelled, inside = modelled_w(model, busy, frame(ops, usual), usual)
        watts = np.where(inside, modelled, watts)
    if limits.cap_w is not None and _knows_its_cap(ops.kind, ops.dtype, device):
        return Drawn(np.minimum(watts, limits.cap_w), np.ones(len(watts)), np.zeros(len(watts), dtype=bool))
    rated: list[Demand] = []
    if is_held(ops.kind, ops.dtype, usual):
        law = demand_by_rate(usual, clocks.rate_name(ops.kind, ops.dtype), busy, latency_us, _added_bytes(ops))
        rated = [law.where(law.core > LEAST_CORE * usual.tdp_w)]
        at_rate = np.minimum(rated[0].at(np.ones(len(watts)), busy, usual.alpha), usual.tdp_w)
        watts = np.where(inside, watts, np.maximum(watts, at_rate))
    demands = [demand_by_watts(usual, busy, watts), *(rated if limits.cap_w is not None else ())]
    slower, power = held(usual, busy, demands, limits)
    power = np.where(inside, power, np.minimum(power, watts))
    return Drawn(power, slower, inside & (slower == 1.0) & (power == watts))


def modelled_w(model: Predictor, busy: Parts, ops: Frame, device: Device) -> tuple[np.ndarray, np.ndarray]:
    """Watts of n ops by a power model, no more than the limit, and whether they are like those of training."""
    watts = baseline_w(device, busy)
    prediction = model.predict_frame(Frame(ops.matrix, watts, watts), model.device_id == device.id)
    return np.minimum(prediction.latency_us, device.tdp_w), prediction.in_envelope


def is_held(kind: str, dtype: str, device: Device) -> bool:
    """Whether the rate of ops says what they draw: of products, and of attention that the device ran for long."""
    family = KINDS[kind].family
    anchored = family == "attention" and clocks.anchor(device, clocks.rate_name(kind, dtype)) is not None
    return family in PRODUCTS or anchored


def estimated_w(ops: OpColumns, device: Device, latency_us: np.ndarray) -> np.ndarray:
    """Watts of n ops that take ``latency_us``, where nobody measured them; no more than the limit."""
    return drawn_w(activity(ops, device, latency_us), device)


def drawn_w(busy: Activity, device: Device, costs: EnergyCosts | None = None) -> np.ndarray:
    """Watts of what n ops keep busy: idle power, units that run, bytes, products, softmax; no more than the limit."""
    costs, limit = costs or EnergyCosts(), clocks.stock_limit_w(device)
    moving = costs.byte_pj * 1e-3 * np.minimum(busy.gbps, device.memory_gbps)
    moving = np.minimum(moving, costs.most_memory_share * limit)
    running = costs.active_share * limit * busy.units
    watts = clocks.idle_w(device) + running + moving + busy.core + costs.pair_pj * 1e-6 * busy.pairs
    return np.asarray(np.minimum(watts, device.tdp_w))


def streaming_w(device: Device) -> float:
    """Watts of a kernel that keeps memory busy and computes nothing."""
    nothing = np.zeros(1)
    return float(drawn_w(Activity(nothing + device.memory_gbps, nothing, nothing, 1.0), device)[0])


def activity(ops: OpColumns, device: Device, latency_us: np.ndarray) -> Activity:
    """What n ops that take so long keep busy.

    Tiles of experts are computed whole, with the rows that pad the last one of each, and their tokens are gathered,
    written and summed in memory between the products (``analytical/moe.py``).
    """
    cost, took_us = ops.cost, np.maximum(latency_us, 1e-3)
    family = KINDS[ops.kind].family
    moved = np.broadcast_to(np.asarray(cost.bytes, dtype=float), took_us.shape)
    flops = np.broadcast_to(np.asarray(cost.flops, dtype=float), took_us.shape)
    if family == "moe" and device.supports(ops.dtype):
        chunks = [(us, law, setting) for us, _, law, _, setting in analytical.terms(ops, device)]
        flops = flops * np.concatenate([np.ones(len(us)) * law.hints.get("padding", 1.0) for us, law, _ in chunks])
        passes = [np.ones(len(us)) * law.memory * setting.memory_rate for us, law, setting in chunks]
        moved = np.maximum(moved, np.concatenate(passes))
    core = np.zeros(took_us.shape)
    if family in WITH_MATRICES and device.supports(ops.dtype):
        core = _core_w(at_stock_limit(device), ops.dtype, flops / took_us * 1e-6)
    few = min(COLLECTIVE_BLOCKS / device.compute_units, 1.0)
    units = 0.0 if family == "gemm" else few if family in WITHOUT_POWER else 1.0
    return Activity(moved / took_us * 1e-3, core, _pairs(ops) / took_us, units)


def _core_w(device: Device, dtype: str, tflops: np.ndarray) -> np.ndarray:
    if clocks.anchor(device, dtype) is not None:
        return clocks.core_w(device, dtype, tflops)
    room = max(device.tdp_w - clocks.floor_w(device), 0.0)
    return np.asarray(room * tflops / (LIMITING_RATE * whole_rate(device, dtype)))


def _pairs(ops: OpColumns) -> np.ndarray | float:
    """Queries times keys of all heads that n ops of attention score; 0 of other kinds."""
    dims = ops.columns
    if KINDS[ops.kind].family != "attention" or "v_head_dim" not in dims:
        return 0.0
    if "topk" in dims:
        pairs = dims["seq_q"] * np.minimum(dims["topk"], dims["seq_kv"])
    else:
        pairs = attended_pairs(dims["seq_q"], dims["seq_kv"], dims["causal"], dims.get("window", 0))
    heads = dims["heads_q"] if "heads_q" in dims else dims["heads"]
    return np.asarray(dims["batch"] * heads * pairs, dtype=float)


def _knows_its_cap(kind: str, dtype: str, device: Device) -> bool:
    """Whether the law of latency itself says what a lower ``tdp_w`` leaves of the clock."""
    product = dtype == "fp32" and KINDS[kind].family == "gemm" and fp32_pj(device) > 0.0
    return product and device.tdp_w < clocks.stock_limit_w(device)


def find(roots: Sequence[Path], kind: str, device_id: str, backend: str | None = None) -> Predictor | None:
    """The current power model of the first folder of predictors that has one."""
    for root in roots:
        if (root / FOLDER).is_dir():
            registry = Registry(root / FOLDER)
            chosen = registry.matching(kind, device_id, backend)
            entry = registry.find(kind, device_id, chosen) if chosen else None
            if entry is not None:
                return entry
    return None


def measured_w(ops: Sequence[Op], device: Device, roots: Sequence[Path], backend: str | None = None) -> np.ndarray:
    """Watts of ops by the power models of folders of predictors [n], no more than the cap; NaN outside of them all."""
    watts = np.full(len(ops), np.nan)
    if not device.tdp_w or not any((root / FOLDER).is_dir() for root in roots):
        return watts
    usual = at_stock_limit(device)
    for kind, dtype, out_dtype, at, columns in iterate_groups(list(ops)):
        model = None if KINDS[kind].family in WITHOUT_POWER else find(roots, kind, device.id, backend)
        if model is not None:
            group = OpColumns(kind, columns, dtype, out_dtype)
            modelled, inside = modelled_w(model, parts(group, usual), frame(group, usual), usual)
            within = np.clip(modelled, min(clocks.idle_w(device), device.tdp_w), device.tdp_w)
            watts[at] = np.where(inside, within, np.nan)
    return watts


# --- learning ------------------------------------------------------------------------------------------


class PowerStore(Protocol):
    """What training needs of a measurement store."""

    def kinds(self) -> Iterable[str]: ...

    def read(self, kind: str, device: str | None = None, /) -> pa.Table: ...

    def fingerprint(self, kind: str, device: str, /) -> str: ...


def power_tables(kind: str, rows: pa.Table, device: Device, fingerprint: str = "") -> list[MeasurementTable]:
    """Tables of the rows that carry watts, by backend, with watts in the place of latency."""
    from .table import tables

    if "power_w" not in rows.column_names:
        return []
    watts = rows.column("power_w").to_numpy(zero_copy_only=False).astype(np.float64)
    rows = rows.filter(np.nan_to_num(watts) > 0)
    if not rows.num_rows:
        return []
    rows = rows.drop_columns([name for name in ("clocks",) if name in rows.column_names])  # of times, not of watts
    index = rows.column_names.index("latency_us")
    return tables(kind, rows.set_column(index, "latency_us", rows.column("power_w")), device, fingerprint, eager=True)


@one_thread()
def fit(table: MeasurementTable, options: Options | None = None) -> Predictor:
    """The power model of a table of watts, evaluated on held-out groups. TrainingError for fewer than five rows."""
    from .candidates import Options
    from .evaluation import summarise
    from .learning import learn
    from .table import TrainingError

    if len(table) < 5:
        raise TrainingError(f"{table.kind} on {table.device.id} has {len(table)} rows with watts; 5 are needed")
    options = (options or Options()).for_kind(table.kind)
    if len(table) > ROWS:
        table = table.take(np.sort(np.random.default_rng(options.seed).permutation(len(table))[:ROWS]))
    ops, watts = table.frame(), _baselines(table)
    options = dataclasses.replace(options, weight_power=0.0)
    outcome = learn(table, Frame(ops.matrix, watts, watts), options)
    rows = outcome.folds.scored
    residual = outcome.residuals[outcome.chosen][rows]
    card = {
        "quantity": "power_w",
        "n": len(table),
        **{f"test_{name}": value for name, value in summarise(residual).items()},
        "baseline_median_ape": summarise(np.log(table.latency_us / watts))["median_ape"],
        "chosen": outcome.chosen,
        "split": outcome.folds.label,
        "fingerprint": table.fingerprint,
        "sources": dict(table.sources),
        "stated_coverage": options.coverage,
        "seed": options.seed,
    }
    learned = outcome.correction, outcome.intervals, outcome.envelope
    return Predictor(table.kind, table.device, table.backend, "0", *learned, card)


def train(
    store: PowerStore,
    device: Device,
    root: Path,
    kinds: Iterable[str] | None = None,
    options: Options | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """A power model of every kind and backend of a device whose rows carry watts, registered; cards by label."""
    registry, results = Registry(root / FOLDER), {}
    for kind in list(kinds) if kinds is not None else list(store.kinds()):
        for table in power_tables(kind, store.read(kind, device.id), device, store.fingerprint(kind, device.id)):
            if len(table) < 5:
                continue
            entry = registry.register(fit(table, options))
            results[f"{kind}@{entry.backend}"] = {**entry.card, "predictor": f"{entry.name}@{entry.version}"}
            if progress:
                progress(f"power of {entry.name}: median error {entry.card['test_median_ape']:.1f} % held out")
    return results


def _baselines(table: MeasurementTable) -> np.ndarray:
    watts = np.empty(len(table))
    for rows, ops in table.groups():
        watts[rows] = baseline_w(table.device, parts(ops, table.device))
    return watts
