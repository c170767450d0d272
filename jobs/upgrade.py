"""``opcast upgrade``: what a new release may move in a step, as a table or JSON, and the campaign that settles it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets.counts import counted
from ..datasets.devices import Device
from ..datasets.drift import FEWEST
from ..datasets.ops import KINDS, Op, OpError, make_op
from ..simulator.engines.chain import caller_of
from ..simulator.question.unread import refuse_unread
from ..simulator.upgrade.answer import UpgradeReport, headline, table
from . import resolve
from .composing import STEP_ADDED, STEP_CHOICE
from .show import print_json, say, show_answer, wants_json
from .writing import places, write_text

if TYPE_CHECKING:
    from ..datasets.launches import Caller

FREE_CHOICE = STEP_CHOICE
ADDED = ("faults", "fault_draw", *STEP_ADDED, "precision.kv_dtype", "settings.")
TIMES = (2.0, 0.5, 4.0, 0.25, 8.0, 0.125, 16.0)  # sizes around an op, where a kind has too few for a verdict
SIZES = ("m", "tokens", "rows", "numel", "size_bytes", "outer", "batch")  # dims that a step may well have otherwise


def run(config: dict[str, Any]) -> int:
    """Answer, and write the campaign where one is asked for; returns the exit code."""
    as_json = wants_json(config)
    files = places(config, "plan_out", "picture")
    if not config["plan_out"]:
        of_campaign = {f"settings.{name}": value for name, value in (config["settings"] or {}).items()}
        refuse_unread(of_campaign, "without plan_out=FILE")
    bench, request = resolve.bench(config), resolve.request_of("upgrade", config)
    report: UpgradeReport = bench.upgrade(request)
    if config["plan_out"]:
        write_campaign(config, report, request, bench.device(request.step.device, request.step.cluster))
    if "picture" in files:
        from ..simulator.upgrade.picture import draw_upgrade

        say(f"picture: {write_text('picture', files['picture'], draw_upgrade(report))}")
    if as_json:
        print_json(report.to_dict())
        return 0
    show_answer(headline(report), [table(report)], report.notes)
    return 0


def write_campaign(config: Mapping[str, Any], report: UpgradeReport, request: Any, device: Device) -> None:
    """The ops of a report as a campaign that ends after its minutes."""
    from .profile import plan_of

    caller = caller_of(request.step.stack, device)
    ops = [make_op(values["kind"], **{k: v for k, v in values.items() if k != "kind"}) for values in report.measure]
    cases = [case for op in (*ops, *around(ops)) if (case := case_of(op, device, caller)) is not None]
    settings = {
        "device": "cpu" if device.synchronous else "cuda",
        "deadline_s": 60.0 * request.minutes,
        **(config.get("settings") or {}),
    }
    plan = plan_of({**config, "settings": settings}, extra=cases)
    path = Path(str(config["plan_out"])).expanduser()
    write_text("plan_out", path, plan.to_json())
    say(f"{counted(len(plan.cases), 'case')} written to {path}; run them with: python -m opcast.harness {path} STORE")


def case_of(op: Op, device: Device, caller: Caller) -> dict[str, Any] | None:
    """An op on the kernel that the step's stack launches, or the nearest that can be measured; None for neither."""
    from ..harness.coverage import to_measure, ways

    way = next(iter(to_measure(ways(op, device, caller))), None)
    if way is None:
        return None
    state = {"cache": "warm"} if KINDS[op.kind].collective else {}
    return {**way.op.to_dict(), "backend": way.backend, **state}


def around(ops: Sequence[Op]) -> Iterator[Op]:
    """Ops of other sizes, of kinds that have too few for a verdict (:data:`..datasets.drift.FEWEST`)."""
    by_kind: dict[str, list[Op]] = {}
    for op in ops:
        by_kind.setdefault(op.kind, []).append(op)
    for kind, ops_of_kind in by_kind.items():
        missing = FEWEST // (1 if KINDS[kind].collective else 2) - len(ops_of_kind)
        names = [dim.name for dim in KINDS[kind].dims]
        name = next((name for name in SIZES if name in names), None)
        if name is None or missing <= 0:
            continue
        sizes = dict.fromkeys(other for times in TIMES for op in ops_of_kind for other in resized(op, name, times))
        yield from [other for other in sizes if other not in ops_of_kind][:missing]


def resized(op: Op, name: str, times: float) -> Iterator[Op]:
    """The op with one dim so many times as large; nothing where there is none such."""
    size = getattr(op, name) * times
    if size >= 1.0 and size == int(size):
        try:
            yield op.replace(**{name: int(size)})
        except OpError:
            return
