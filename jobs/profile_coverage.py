"""``opcast profile coverage``: what of a step can be measured on its hardware, by which case, and in which time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets.counts import counted
from ..datasets.devices import Device
from ..datasets.kernels import package_of
from ..datasets.launches import Caller
from ..datasets.ops import KINDS, Op
from ..datasets.reading import read_yaml
from ..datasets.store import Store
from ..harness.coverage import MeasuringWay, seconds, to_measure, ways
from ..harness.plan import Settings
from ..simulator.engines.answers import ask
from ..simulator.engines.chain import caller_of
from . import resolve
from .show import CONFIG_DIRECTORY, BadInputError, print_json, say, table, wants_json
from .simulate import ADDED, FREE_CHOICE

if TYPE_CHECKING:
    from ..simulator.engines import Engine
    from ..simulator.report.needs import Need

__all__ = ["ADDED", "FREE_CHOICE", "run"]

MEASURED, MEASURABLE, NOT = "measured", "measurable", "not measurable"
SHOWN = 40  # rows of the table


@dataclass(frozen=True)
class Coverage:
    """An op of a step: its share of the time, and whether its rows are there or who can make them.

    ``backends`` are those that can, the stack's first; ``why`` the words of those that cannot, where none can.
    """

    op: Op
    share: float
    us: float
    status: str
    backends: tuple[str, ...]
    packages: tuple[str, ...]
    why: str
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        lists = {"backends": list(self.backends), "packages": list(self.packages)}
        return {**asdict(self), "op": self.op.to_dict(), **lists}


def run(config: dict[str, Any]) -> int:
    """Print what can be measured of the step; returns the exit code."""
    as_json = wants_json(config)
    least = config["least_share"]
    if isinstance(least, bool) or not isinstance(least, (int, float)) or not 0 <= least < 1:
        raise BadInputError(f"least_share={least!r} must be a share of the step, from 0 to below 1")
    kind = config["workload"].get("kind")
    if kind == "simai":
        raise BadInputError("workload=simai is a file, not a step of a model: take train, prefill, decode or generate")
    from ..simulator.report.needs import needs

    request = resolve.request_of("simulate", config)
    answered: Any = resolve.bench(config).answered(request)

    state, store = answered.report.state, Store(Path(str(config["store"])).expanduser())
    caller = caller_of(state.plan.stack, answered.device)
    covered_ops = coverage(needs(state), answered.device, answered.engine, store, caller)
    if as_json:
        print_json(coverage_values(covered_ops, answered.device.id, caller.framework))
    else:
        show(covered_ops, answered.device.name, caller.framework, float(least))
    return 0


def coverage(needed: Iterable[Need], device: Device, engine: Engine, store: Store, caller: Caller) -> list[Coverage]:
    """Each op of a step, those with most time first."""
    listed = [need for need in needed if KINDS[need.op.kind].family != "host"]
    total_us, once = sum(need.us for need in listed) or 1.0, ask(engine, [need.op for need in listed]).latency_us
    return [
        _covered(need.op, need.us, need.us / total_us, float(us), device, store, caller)
        for need, us in zip(listed, once, strict=True)
    ]


def _covered(op: Op, us: float, share: float, once_us: float, device: Device, store: Store, caller: Caller) -> Coverage:
    measured = measured_by(op, device.id, store)
    candidates = ways(op, device, caller)
    able = [way for way in candidates if way.runs]
    status = MEASURED if measured else MEASURABLE if able else NOT
    backends = measured or tuple(way.backend for way in able)
    packages = tuple(dict.fromkeys(filter(None, map(package_of, backends))))
    why = "" if able or measured else _words(candidates)
    caches = 1 if KINDS[op.kind].collective else 2
    chosen = () if measured else to_measure(candidates)
    cost_s = sum(seconds(once_us, way.bytes, _settings(), caches) for way in chosen)
    return Coverage(op, share, us, status, backends, packages, why, cost_s)


@lru_cache
def _settings() -> Settings:
    """The protocol of ``campaign=model``, which measures the ops of a step."""
    values = read_yaml(CONFIG_DIRECTORY / "campaign" / "model.yaml", BadInputError, "campaign=model")["settings"]
    return Settings(case_budget_s=float(values["case_budget_s"]["cuda"]))


def measured_by(op: Op, device_id: str, store: Store) -> tuple[str, ...]:
    """The backends of which the store has rows of this very op on the device."""
    backends: dict[str, None] = {}
    for cache in ("cold", "warm"):
        rows = store.lookup(op.kind, device_id, cache).get((*op.dims, op.dtype, op.out_dtype), ())
        backends.update(dict.fromkeys(row.backend for row in rows))
    return tuple(backends)


def _words(candidates: Iterable[MeasuringWay]) -> str:
    """What each backend says, the same words once."""
    ways_by_package: dict[str, list[str]] = {}
    for way in candidates:
        ways_by_package.setdefault(way.refusal, []).append(way.backend)
    return (
        "; ".join(f"{', '.join(names)}: {why}" for why, names in ways_by_package.items())
        or "no backend knows this kind"
    )


def shares(covered_ops: Iterable[Coverage]) -> dict[str, float]:
    """The share of the step's time by status."""
    totals = dict.fromkeys((MEASURED, MEASURABLE, NOT), 0.0)
    for op_coverage in covered_ops:
        totals[op_coverage.status] += op_coverage.share
    return totals


def coverage_values(covered_ops: list[Coverage], device_id: str, stack: str) -> dict[str, Any]:
    """The JSON object."""
    totals = shares(covered_ops)
    return {
        "device": device_id,
        "stack": stack,
        "shares": {name.replace(" ", "_"): share for name, share in totals.items()},
        "seconds": sum(op_coverage.seconds for op_coverage in covered_ops),
        "install": installs(covered_ops),
        "ops": [op_coverage.to_dict() for op_coverage in covered_ops],
    }


def installs(covered_ops: Iterable[Coverage]) -> dict[str, str]:
    """The packages of the backends that come first, and how to get each."""
    from ..harness.cases.packages import EXTRAS

    first = (package_of(op_coverage.backends[0]) for op_coverage in covered_ops if op_coverage.status == MEASURABLE)
    return {name: EXTRAS[name] for name in dict.fromkeys(filter(None, first)) if name in EXTRAS}


def show(covered_ops: list[Coverage], device: str, stack: str, least: float) -> None:
    """The table, what it adds up to and which packages it takes."""
    rows = [
        (
            f"{op_coverage.share:.1%}",
            str(op_coverage.op),
            op_coverage.status,
            _how(op_coverage),
            f"{op_coverage.seconds:.1f} s" if op_coverage.seconds else "",
        )
        for op_coverage in covered_ops
        if op_coverage.share >= least
    ]
    heads = ("share", "op", "", "by", "takes")
    table(f"{stack} on {device}", heads, rows[:SHOWN])
    below = [op_coverage for op_coverage in covered_ops if op_coverage.share < least]
    if below:
        say(f"and {counted(len(below), 'op')} below {least:.1%} each, {sum(op.share for op in below):.1%} together")
    totals, remaining_s = shares(covered_ops), sum(op_coverage.seconds for op_coverage in covered_ops)
    say(
        f"measured {totals[MEASURED]:.1%}, measurable {totals[MEASURABLE]:.1%}, not measurable {totals[NOT]:.1%} "
        f"of the step; what lacks takes about {remaining_s / 60:.1f} min, beside what packages compile"
    )
    for name, words in installs(covered_ops).items():
        say(f"needs {name}: {words}")


def _how(op_coverage: Coverage) -> str:
    if op_coverage.status == NOT:
        return op_coverage.why
    more = len(op_coverage.backends) - 2
    return ", ".join(op_coverage.backends[:2]) + (f" and {more} more" if more > 0 else "")
