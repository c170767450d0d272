"""``opcast data drift``: what has moved since it was measured, what to measure again, stale predictors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..datasets.columns import values
from ..datasets.counts import counted
from ..datasets.drift import Shift, StepMove, drift, releases, step_moves, versions
from ..datasets.schema import row_ops
from ..datasets.store import Store
from .planning import planned_steps, shares_of
from .show import BadInputError, print_json, say, table
from .writing import write_text


def run(store: Store, config: Mapping[str, Any], as_json: bool) -> int:
    """Compare with ``against=STORE``, or two ``releases=[OLD,NEW]``; exit code 1 where something has drifted."""
    margin, alpha = _share(config, "margin"), _share(config, "alpha")
    steps: list[StepMove] = []
    named = config.get("releases") or []
    if named:
        if not isinstance(named, list) or len(named) != 2:
            raise BadInputError(f"releases={named} must be two, as [vllm-0.14.0,vllm-0.24.0]")
        shifts, changed = releases(store, str(named[0]), str(named[1]), margin, alpha), {}
    else:
        fresh = _fresh(config)
        shifts = drift(store, fresh, margin, alpha)
        changed = changes(store, fresh, shifts)
        if planned_steps(config):
            steps = step_moves(store, fresh, shifts, shares_of(config), margin)
    if named and planned_steps(config):
        raise BadInputError("steps are told of two stores: give against=STORE in place of releases")
    if not shifts:
        raise BadInputError("both have no row of one op, device and backend: nothing can be compared")
    moved = [shift for shift in shifts if shift.verdict == "drifted"]
    stale = stale_predictors(Path(str(config["predictors"])).expanduser(), moved)
    if config.get("plan_out") and moved:
        _write_plan(store, moved, Path(str(config["plan_out"])).expanduser())
    if as_json:
        shift_rows = [asdict(shift) for shift in shifts]
        print_json(
            {
                "store": str(store.path),
                "shifts": shift_rows,
                "changed": changed,
                "stale": stale,
                "advice": advice(moved),
                "steps": [asdict(step) for step in steps],
            }
        )
    else:
        show(shifts, changed, stale)
        for step in steps:
            say(step_line(step))
    return 1 if moved else 0


def step_line(step: StepMove) -> str:
    """What the steps become, and how much of them that rests on."""
    return (
        f"the steps on {step.device}: {step.percent:+.1f} % ({step.low:+.1f} to {step.high:+.1f}); "
        f"{step.own:.0%} of the time of their kernels was measured in both stores, {step.by_kind:.0%} goes by kind"
    )


def _fresh(config: Mapping[str, Any]) -> Store:
    other = Path(str(config.get("against") or "")).expanduser()
    if not config.get("against") or not other.is_dir():
        raise BadInputError(f"against={config.get('against') or 'null'} must name the store of a fresh campaign")
    return Store(other)


def _share(config: Mapping[str, Any], name: str) -> float:
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise BadInputError(f"{name}={value!r} must be a share between 0 and 1")
    return float(value)


def changes(old: Store, fresh: Store, shifts: Sequence[Shift]) -> dict[str, str]:
    """Versions of driver and libraries that the fresh rows have and the known ones lack, by device."""
    differences = {}
    for device_id in sorted({shift.device for shift in shifts}):
        kinds = sorted({shift.kind for shift in shifts if shift.device == device_id})
        before, now = versions(old, kinds, device_id), versions(fresh, kinds, device_id)
        new = [
            f"{name} {', '.join(before.get(name, ['?']))} -> {', '.join(value)}"
            for name, value in now.items()
            if set(value) - set(before.get(name, []))
        ]
        if new:
            differences[device_id] = "; ".join(new)
    return differences


def advice(moved: Sequence[Shift]) -> list[str]:
    """What to do about drifted kinds, a line for each device."""
    lines = []
    for device_id in sorted({shift.device for shift in moved}):
        kinds = sorted({shift.kind for shift in moved if shift.device == device_id})
        lines.append(
            f"measure {', '.join(kinds)} on {device_id} again (plan_out=FILE writes the cases), "
            f"then: opcast train device={device_id} op=[{','.join(kinds)}]"
        )
    return lines


def stale_predictors(registry: Path, moved: Sequence[Shift]) -> list[str]:
    """Current predictors that learned rows which have drifted, by name and version."""
    from ..models.registry import Registry

    drifted = {(shift.kind, shift.device, shift.against or shift.backend) for shift in moved}
    entries = Registry(registry).list()
    return [
        f"{entry.kind}@{entry.device_id}@{entry.backend}@{entry.version}"
        for entry in entries
        if entry.current and (entry.kind, entry.device_id, entry.backend) in drifted
    ]


def _write_plan(store: Store, moved: Sequence[Shift], path: Path) -> None:
    """A campaign of every case that the store has of the drifted kinds."""
    from ..harness.plan import CampaignPlan, Case, Settings

    cases: dict[Case, None] = {}
    for shift in moved:
        rows = store.read(shift.kind, shift.device)
        keys = zip(row_ops(shift.kind, rows), values(rows["backend"]), values(rows["cache"]), strict=True)
        cases.update({Case(op, backend, cache): None for op, backend, cache in keys if backend == shift.backend})
    device = "cpu" if all(shift.device.startswith("cpu_") for shift in moved) else "cuda"
    plan = CampaignPlan("again", tuple(sorted(cases)), settings=Settings(device=device))
    write_text("plan_out", path, plan.to_json())
    say(f"{counted(len(cases), 'case')} written to {path}; run them with: python -m opcast.harness {path} {store.path}")


def show(shifts: Sequence[Shift], changed: Mapping[str, str], stale: Sequence[str]) -> None:
    """Tables for a person."""
    rows = [
        (
            shift.kind,
            shift.device,
            shift.backend,
            shift.rows,
            f"{shift.percent:+.1f}",
            f"{shift.low:+.1f} to {shift.high:+.1f}",
            shift.verdict,
        )
        for shift in sorted(shifts, key=lambda shift: (shift.verdict != "drifted", -abs(shift.percent)))
    ]
    table("moves of measurements", ("op", "device", "backend", "rows", "median %", "95 %", "verdict"), rows)
    for device_id, text in changed.items():
        say(f"{device_id} has changed: {text}")
    for name in stale:
        say(f"stale: {name}")
    for line in advice([shift for shift in shifts if shift.verdict == "drifted"]):
        say(line)
