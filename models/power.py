"""Watts of an op, its energy, and its latency under a power cap or at a lower clock.

A power model is a predictor whose quantity is watts: ln(measured / baseline) is learned with the features, candidates,
intervals and envelope of latency, over a baseline of idle power plus what busy compute and memory draw. It lies in
``<predictors>/power``.

Below the clock that was measured, dynamic power of the compute units falls as f V(f)^2, here f^ALPHA; compute time
grows as 1/f, time in memory, links and launches does not. Where the lowest clock still draws more than a cap allows,
the op is slowed as a whole until what it draws beyond idle fits: no answer states more watts than the cap or the TDP.
Public tables carry watts at one cap only, so ALPHA is an assumption, and an answer under a cap that binds is outside
the envelope.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..datasets.devices import Device
from ..datasets.loading import finite
from . import analytical
from .features import Frame, frame
from .predictor import Predictor
from .registry import Registry

if TYPE_CHECKING:
    import pyarrow as pa

    from .candidates import Options
    from .table import MeasurementTable

FOLDER = "power"
IDLE_SHARE = 0.2  # of the limit, clocks up and nothing to do: H200 126 of 700 W, B200 241 of 1000 W (aiconfigurator)
COMPUTE_SHARE, MEMORY_SHARE = 0.8, 0.5  # of the limit that a saturated unit adds
ALPHA = 2.5  # assumed: 1 at the lowest voltage, 3 where voltage follows frequency (Mei et al., arXiv 1610.01784)
LOWEST_CLOCK = 0.15  # of the boost clock: what a driver still sets
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


@dataclass(frozen=True)
class Parts:
    """What n ops do with their time, in us: compute follows the clock; memory overlaps it; ``rest`` adds up."""

    compute: np.ndarray
    memory: np.ndarray
    rest: np.ndarray

    def slower(self, clock: np.ndarray | float) -> np.ndarray:
        """Latency over latency at full clock, for a relative ``clock`` in (0, 1]: never below 1."""
        whole = self.rest + np.maximum(self.compute, self.memory)
        return np.asarray((self.rest + np.maximum(self.compute / clock, self.memory)) / np.maximum(whole, 1e-9))

    def compute_part(self) -> np.ndarray:
        """Share of dynamic power that follows the clock, by what compute and memory add at full use."""
        compute, memory = COMPUTE_SHARE * self.compute, MEMORY_SHARE * self.memory
        return np.asarray(compute / np.maximum(compute + memory, 1e-9))


@dataclass(frozen=True)
class Drawn:
    """Answers for n ops: watts, factor on latency, and whether the watts are like those of training."""

    power_w: np.ndarray
    slower: np.ndarray
    in_envelope: np.ndarray


def parts(
    kind: str, columns: Mapping[str, np.ndarray], dtype: str, out_dtype: str, device: Device, cache: str
) -> Parts:
    """The analytical law's terms as power sees them."""
    made = []
    for latency, _, law, _, _ in analytical.terms(kind, columns, dtype, out_dtype, device, cache):
        rows = [np.broadcast_to(np.asarray(each, dtype=float), latency.shape) for each in (law.compute, law.memory)]
        made.append((*rows, np.maximum(latency - np.maximum(*rows), 0.0)))
    return Parts(*(np.concatenate(each) for each in zip(*made, strict=True)))


def baseline_w(device: Device, busy: Parts) -> np.ndarray:
    """Watts by physics: idle, and what busy compute and memory add. PowerError for a device without ``tdp_w``."""
    if device.tdp_w <= 0:
        raise PowerError(f"{device.name} has no tdp_w, so nothing is known of its power")
    whole = np.maximum(busy.rest + np.maximum(busy.compute, busy.memory), 1e-9)
    share = IDLE_SHARE + (COMPUTE_SHARE * busy.compute + MEMORY_SHARE * busy.memory) / whole
    return np.asarray(device.tdp_w * np.minimum(share, 1.0))


def limited(device: Device, busy: Parts, power_w: np.ndarray, limits: Limits) -> tuple[np.ndarray, np.ndarray]:
    """Factor on latency and watts of ops that draw ``power_w`` [n] at full clock, under limits.

    A cap above what is drawn changes nothing; a lower cap or clock is never faster, and no cap is exceeded.
    """
    idle = np.minimum(IDLE_SHARE * device.tdp_w, power_w)
    follows = (power_w - idle) * busy.compute_part()
    stays = power_w - follows
    clock = np.ones(len(power_w))
    if limits.clock_mhz is not None:
        clock = np.minimum(clock, limits.clock_mhz / device.clock_mhz)
    if limits.cap_w is not None:
        room = np.maximum(limits.cap_w - stays, 0.0) / np.maximum(follows, 1e-9)
        clock = np.where(power_w > limits.cap_w, np.minimum(clock, room ** (1.0 / ALPHA)), clock)
    clock = np.maximum(clock, LOWEST_CLOCK)
    drawn = np.where(clock < 1.0, stays + follows * clock**ALPHA, power_w)
    slower = np.where(clock < 1.0, np.maximum(busy.slower(clock), 1.0), 1.0)
    if limits.cap_w is not None:
        longer = np.maximum((drawn - idle) / np.maximum(limits.cap_w - idle, 1e-9), 1.0)
        slower, drawn = slower * longer, np.where(drawn > limits.cap_w, limits.cap_w, drawn)
    return slower, drawn


def drawn(
    model: Predictor | None,
    kind: str,
    columns: Mapping[str, np.ndarray],
    dtype: str,
    out_dtype: str,
    device: Device,
    cache: str,
    limits: Limits,
) -> Drawn:
    """Watts and slowdown of n ops; by the baseline alone, outside any envelope, where there is no ``model``.

    PowerError for a device without ``tdp_w``, or a cap that it exceeds with nothing to do.
    """
    if limits.cap_w is not None and limits.cap_w <= IDLE_SHARE * device.tdp_w:
        raise PowerError(
            f"a cap of {limits.cap_w:g} W is no more than {device.name} draws with nothing to do: ask for more than "
            f"{IDLE_SHARE * device.tdp_w:.0f} W"
        )
    busy = parts(kind, columns, dtype, out_dtype, device, cache)
    watts = baseline_w(device, busy)
    inside = np.zeros(len(watts), dtype=bool)
    if model is not None:
        ops = frame(kind, columns, dtype, out_dtype, device, cache)
        found = model.predict_frame(Frame(ops.matrix, watts, watts), model.device_id == device.id)
        watts, inside = np.minimum(found.latency_us, device.tdp_w), found.in_envelope
    slower, power = limited(device, busy, watts, limits)
    return Drawn(power, slower, inside & (slower == 1.0) & (power == watts))


def find(roots: Sequence[Path], kind: str, device_id: str, backend: str | None = None) -> Predictor | None:
    """The current power model of the first folder of predictors that has one."""
    for root in roots:
        if (root / FOLDER).is_dir():
            registry = Registry(root / FOLDER)
            chosen = registry.matching(kind, device_id, backend)
            found = registry.find(kind, device_id, chosen) if chosen else None
            if found is not None:
                return found
    return None


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
    place = rows.column_names.index("latency_us")
    return tables(kind, rows.set_column(place, "latency_us", rows.column("power_w")), device, fingerprint, eager=True)


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
    made = learn(table, Frame(ops.matrix, watts, watts), options)
    rows = made.folds.scored
    residual = made.residuals[made.chosen][rows]
    card = {
        "quantity": "power_w",
        "n": len(table),
        **{f"test_{name}": value for name, value in summarise(residual).items()},
        "baseline_median_ape": summarise(np.log(table.latency_us / watts))["median_ape"],
        "chosen": made.chosen,
        "split": made.folds.label,
        "fingerprint": table.fingerprint,
        "sources": dict(table.sources),
        "stated_coverage": options.coverage,
        "seed": options.seed,
    }
    learned = made.correction, made.intervals, made.envelope
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
            made = registry.register(fit(table, options))
            results[f"{kind}@{made.backend}"] = {**made.card, "predictor": f"{made.name}@{made.version}"}
            if progress:
                progress(f"power of {made.name}: median error {made.card['test_median_ape']:.1f} % held out")
    return results


def _baselines(table: MeasurementTable) -> np.ndarray:
    watts = np.empty(len(table))
    unique, codes = table.states()
    for index, (dtype, out_dtype, cache) in enumerate(unique):
        rows = np.flatnonzero(codes == index)
        columns = {name: values[rows].astype(np.float64) for name, values in table.columns.items()}
        busy = parts(table.kind, columns, str(dtype), str(out_dtype), table.device, str(cache))
        watts[rows] = baseline_w(table.device, busy)
    return watts
