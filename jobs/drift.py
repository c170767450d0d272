"""``opcast data drift``: what has moved since it was measured, what to measure again, stale predictors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..datasets.drift import Shift, drift, releases, versions
from ..datasets.store import Store
from .show import BadInputError, print_json, say, table
from .writing import write_text


def run(store: Store, config: Mapping[str, Any], as_json: bool) -> int:
    """Compare with ``against=STORE``, or two ``releases=[OLD,NEW]``; exit code 1 where something has drifted."""
    margin, alpha = _share(config, "margin"), _share(config, "alpha")
    named = config.get("releases") or []
    if named:
        if not isinstance(named, list) or len(named) != 2:
            raise BadInputError(f"releases={named} must be two, as [vllm-0.14.0,vllm-0.24.0]")
        found, changed = releases(store, str(named[0]), str(named[1]), margin, alpha), {}
    else:
        fresh = _fresh(config)
        found = drift(store, fresh, margin, alpha)
        changed = changes(store, fresh, found)
    if not found:
        raise BadInputError("both have no row of one op, device and backend: nothing can be compared")
    moved = [each for each in found if each.verdict == "drifted"]
    stale = stale_predictors(Path(str(config["predictors"])).expanduser(), moved)
    if config.get("plan_out") and moved:
        _write_plan(store, moved, Path(str(config["plan_out"])).expanduser())
    if as_json:
        told = [asdict(each) for each in found]
        print_json(
            {"store": str(store.path), "shifts": told, "changed": changed, "stale": stale, "advice": advice(moved)}
        )
    else:
        show(found, changed, stale)
    return 1 if moved else 0


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


def changes(known: Store, fresh: Store, found: Sequence[Shift]) -> dict[str, str]:
    """Versions of driver and libraries that the fresh rows have and the known ones lack, by device."""
    told = {}
    for device_id in sorted({each.device for each in found}):
        kinds = sorted({each.kind for each in found if each.device == device_id})
        before, now = versions(known, kinds, device_id), versions(fresh, kinds, device_id)
        new = [
            f"{name} {', '.join(before.get(name, ['?']))} -> {', '.join(each)}"
            for name, each in now.items()
            if set(each) - set(before.get(name, []))
        ]
        if new:
            told[device_id] = "; ".join(new)
    return told


def advice(moved: Sequence[Shift]) -> list[str]:
    """What to do about drifted kinds, a line for each device."""
    lines = []
    for device_id in sorted({each.device for each in moved}):
        kinds = sorted({each.kind for each in moved if each.device == device_id})
        lines.append(
            f"measure {', '.join(kinds)} on {device_id} again (plan_out=FILE writes the cases), "
            f"then: opcast train device={device_id} op=[{','.join(kinds)}]"
        )
    return lines


def stale_predictors(registry: Path, moved: Sequence[Shift]) -> list[str]:
    """Current predictors that learned rows which have drifted, by name and version."""
    from ..models.registry import Registry

    drifted = {(each.kind, each.device, each.against or each.backend) for each in moved}
    entries = Registry(registry).list()
    return [
        f"{each.kind}@{each.device_id}@{each.backend}@{each.version}"
        for each in entries
        if each.current and (each.kind, each.device_id, each.backend) in drifted
    ]


def _write_plan(store: Store, moved: Sequence[Shift], path: Path) -> None:
    """A campaign of every case that the store has of the drifted kinds."""
    from ..datasets.columns import values
    from ..datasets.schema import row_ops
    from ..harness.plan import CampaignPlan, Case, Settings

    cases: dict[Case, None] = {}
    for each in moved:
        rows = store.read(each.kind, each.device)
        keys = zip(row_ops(each.kind, rows), values(rows["backend"]), values(rows["cache"]), strict=True)
        cases.update({Case(op, backend, cache): None for op, backend, cache in keys if backend == each.backend})
    device = "cpu" if all(each.device.startswith("cpu_") for each in moved) else "cuda"
    plan = CampaignPlan("again", tuple(sorted(cases)), settings=Settings(device=device))
    write_text("plan_out", path, plan.to_json())
    say(f"{len(cases)} cases written to {path}; run them with: python -m opcast.harness {path} {store.path}")


def show(found: Sequence[Shift], changed: Mapping[str, str], stale: Sequence[str]) -> None:
    """Tables for a person."""
    rows = [
        (
            each.kind,
            each.device,
            each.backend,
            each.rows,
            f"{each.percent:+.1f}",
            f"{each.low:+.1f} to {each.high:+.1f}",
            each.verdict,
        )
        for each in sorted(found, key=lambda each: (each.verdict != "drifted", -abs(each.percent)))
    ]
    table("moves of measurements", ("op", "device", "backend", "rows", "median %", "95 %", "verdict"), rows)
    for device_id, text in changed.items():
        say(f"{device_id} has changed: {text}")
    for name in stale:
        say(f"stale: {name}")
    for line in advice([each for each in found if each.verdict == "drifted"]):
        say(line)
