"""``opcast profile coverage``: what of a step can be measured on its hardware, by which case, and in which time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets.devices import Device
from ..datasets.kernels import package_of
from ..datasets.ops import KINDS, Op
from ..datasets.store import Store
from ..harness.coverage import MeasuringWay, seconds, to_measure, ways
from ..harness.plan import Settings
from . import resolve
from .show import BadInputError, print_json, say, table, wants_json
from .simulate import ADDED, FREE_CHOICE

if TYPE_CHECKING:
    from ..simulator.engines import Engine
    from ..simulator.report.needs import Need

__all__ = ["ADDED", "FREE_CHOICE", "run"]

MEASURED, MEASURABLE, NOT = "measured", "measurable", "not measurable"
REST: Mapping[str, Any] = {  # of `opcast simulate`, settings that say nothing of what a step asks for
    "stragglers": [],
    "price_per_gpu_hour": None,
    "power_cap_w": None,
    "network": "auto",
}
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

    request = resolve.simulate_request({**REST, **config})
    answered: Any = resolve.bench(config).answered(request)

    stack = str((config.get("stack") or {}).get("id") or "")
    store = Store(Path(str(config["store"])).expanduser())
    found = coverage(needs(answered.report.state), answered.device, answered.engine, store, stack)
    if as_json:
        print_json(described(found, answered.device.id, stack))
    else:
        show(found, answered.device.name, stack, float(least))
    return 0


def coverage(needed: Iterable[Need], device: Device, engine: Engine, store: Store, stack: str) -> list[Coverage]:
    """Each op of a step, those with most time first."""
    from ..simulator.engines.answers import ask

    listed = [need for need in needed if KINDS[need.op.kind].family != "host"]
    whole, once = sum(need.us for need in listed) or 1.0, ask(engine, [need.op for need in listed]).latency_us
    return [
        _covered(need.op, need.us, need.us / whole, float(us), device, store, stack)
        for need, us in zip(listed, once, strict=True)
    ]


def _covered(op: Op, us: float, share: float, once_us: float, device: Device, store: Store, stack: str) -> Coverage:
    known = measured_by(op, device.id, store)
    found = ways(op, device, stack)
    able = [way for way in found if way.runs]
    status = MEASURED if known else MEASURABLE if able else NOT
    backends = known or tuple(way.backend for way in able)
    packages = tuple(dict.fromkeys(filter(None, map(package_of, backends))))
    why = "" if able or known else _words(found)
    caches = 1 if KINDS[op.kind].collective else 2
    chosen = () if known else to_measure(found)
    cost_s = sum(seconds(once_us, way.bytes, _settings(), caches) for way in chosen)
    return Coverage(op, share, us, status, backends, packages, why, cost_s)


@lru_cache
def _settings() -> Settings:
    """The protocol of ``campaign=model``, which measures the ops of a step."""
    from ..datasets.reading import read_yaml
    from .show import CONFIG_DIRECTORY

    values = read_yaml(CONFIG_DIRECTORY / "campaign" / "model.yaml", BadInputError, "campaign=model")["settings"]
    return Settings(case_budget_s=float(values["case_budget_s"]["cuda"]))


def measured_by(op: Op, device_id: str, store: Store) -> tuple[str, ...]:
    """The backends of which the store has rows of this very op on the device."""
    found: dict[str, None] = {}
    for cache in ("cold", "warm"):
        rows = store.lookup(op.kind, device_id, cache).get((*op.dims, op.dtype, op.out_dtype), ())
        found.update(dict.fromkeys(row.backend for row in rows))
    return tuple(found)


def _words(found: Iterable[MeasuringWay]) -> str:
    """What each backend says, the same words once."""
    said: dict[str, list[str]] = {}
    for way in found:
        said.setdefault(way.refusal, []).append(way.backend)
    return "; ".join(f"{', '.join(names)}: {why}" for why, names in said.items()) or "no backend knows this kind"


def shares(found: Iterable[Coverage]) -> dict[str, float]:
    """The share of the step's time by status."""
    totals = dict.fromkeys((MEASURED, MEASURABLE, NOT), 0.0)
    for each in found:
        totals[each.status] += each.share
    return totals


def described(found: list[Coverage], device_id: str, stack: str) -> dict[str, Any]:
    """The JSON object."""
    totals = shares(found)
    return {
        "device": device_id,
        "stack": stack,
        "shares": {name.replace(" ", "_"): share for name, share in totals.items()},
        "seconds": sum(each.seconds for each in found),
        "install": installs(found),
        "ops": [each.to_dict() for each in found],
    }


def installs(found: Iterable[Coverage]) -> dict[str, str]:
    """The packages of the backends that come first, and how to get each."""
    from ..harness.cases.packages import EXTRAS

    first = (package_of(each.backends[0]) for each in found if each.status == MEASURABLE)
    return {name: EXTRAS[name] for name in dict.fromkeys(filter(None, first)) if name in EXTRAS}


def show(found: list[Coverage], device: str, stack: str, least: float) -> None:
    """The table, what it adds up to and which packages it takes."""
    rows = [
        (f"{each.share:.1%}", str(each.op), each.status, _how(each), f"{each.seconds:.1f} s" if each.seconds else "")
        for each in found
        if each.share >= least
    ]
    heads = ("share", "op", "", "by", "takes")
    table(f"{stack or 'a step'} on {device}", heads, rows[:SHOWN])
    left = [each for each in found if each.share < least]
    if left:
        say(f"and {len(left)} ops below {least:.1%} each, {sum(each.share for each in left):.1%} together")
    totals, rest = shares(found), sum(each.seconds for each in found)
    say(
        f"measured {totals[MEASURED]:.1%}, measurable {totals[MEASURABLE]:.1%}, not measurable {totals[NOT]:.1%} "
        f"of the step; what lacks takes about {rest / 60:.1f} min, beside what packages compile"
    )
    for name, words in installs(found).items():
        say(f"needs {name}: {words}")


def _how(each: Coverage) -> str:
    if each.status == NOT:
        return each.why
    more = len(each.backends) - 2
    return ", ".join(each.backends[:2]) + (f" and {more} more" if more > 0 else "")
