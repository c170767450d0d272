"""``opcast profile``: plan a campaign and run it into a store. A killed campaign, started again, finishes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets.ops import Op
from ..datasets.store import Store
from .show import BadInputError, microseconds, print_json, say, table, wants_json
from .writing import write_text

if TYPE_CHECKING:
    from ..harness.campaign import Progress, Summary
    from ..harness.plan import CampaignPlan

FREE_CHOICE = {"model": "+model.path"}


def run(config: dict[str, Any]) -> int:
    """Run the campaign, or with ``plan_out=FILE`` only write its plan; returns the exit code."""
    as_json = wants_json(config)
    plan = plan_of(config, extra=model_ops(config))
    if plan.settings.device == "cuda" and not config["plan_out"]:
        plan = fitted(plan, config)
    if config["plan_out"]:
        path = Path(str(config["plan_out"])).expanduser()
        write_text("plan_out", path, plan.to_json())
        if as_json:
            print_json({"plan": str(path), "cases": len(plan.cases)})
        say(f"{len(plan.cases)} cases written to {path}; run them with: python -m opcast.harness {path} STORE")
        return 0
    store = Store(Path(config["store"]).expanduser())
    summary = measure(plan, store)
    if as_json:
        from dataclasses import asdict

        print_json({**asdict(summary), "remaining": summary.remaining, "store": str(store.path)})
    else:
        show(summary, store)
    return 0 if summary.outcome != "interrupted" else 130


def fitted(plan: CampaignPlan, config: dict[str, Any]) -> CampaignPlan:
    """The plan in a format that the GPU at hand has; BadInputError, before anything is measured, when it is ill."""
    from ..harness import accelerator
    from ..harness.formats import in_format

    here = accelerator.ask()
    if here.hardware != "cuda":
        raise BadInputError(f"{here.trouble or 'torch sees no GPU here'}; +settings.device=cpu measures the CPU")
    if here.precision == "bf16" or "bf16" not in {case.op.dtype for case in plan.cases}:
        return plan
    say(f"{here.name} has no fast bf16: {here.precision} is measured in its place")
    return plan_of({**config, "campaign": in_format(config["campaign"], here.precision)}, extra=model_ops(config))


def plan_of(config: dict[str, Any], extra: Iterable[Op] = (), exclude: Iterable[Op] = ()) -> CampaignPlan:
    """The plan of ``campaign=…`` with ``settings.…`` laid over it. Raises PlanError and OpError."""
    from ..harness.plan import build_plan

    spec = dict(config["campaign"])
    if not isinstance(spec.get("settings") or {}, Mapping):
        raise BadInputError(f"campaign.settings={spec['settings']} must be settings, as campaign.settings.device=cpu")
    spec["settings"] = {**(spec.get("settings") or {}), **(config.get("settings") or {})}
    if ops := [op.to_dict() for op in extra]:
        spec["ops"] = [*spec.get("ops", []), *ops]
    if left_out := [op.to_dict() for op in exclude]:
        spec["exclude"] = [*spec.get("exclude", []), *left_out]
    return build_plan(spec)


def model_ops(config: dict[str, Any]) -> list[Op]:
    """For ``campaign=model``: every op that the model's workloads run."""
    wanted = config["campaign"].get("name")
    if wanted != "model":
        return []
    from ..simulator.trace import Workload, trace
    from . import resolve

    found: dict[Op, None] = {}
    for values in config["workloads"]:
        graph = trace(
            resolve.model(config), Workload(**values), config["precision"]["dtype"], Path(config["graphs"]).expanduser()
        )
        found.update(dict.fromkeys(node.op for node, _ in graph.weighted() if node.op is not None))
    return list(found)


def measure(plan: CampaignPlan, store: Store, between: Callable[[float], None] | None = None) -> Summary:
    """Run a plan with a progress bar on a terminal; ``between`` is called with the share done, between cases."""
    from ..harness import campaign

    with progress_bar(plan.name) as update:

        def report(progress: Progress) -> None:
            update(progress)
            if between is not None:
                between((progress.done + progress.waiting) / max(progress.total, 1))

        return campaign.run(plan, store, report)


def progress_bar(name: str) -> Any:
    """A context whose value takes a Progress: a bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        return nullcontext(lambda progress: None)
    return ProgressBar(name)


class ProgressBar:
    """A progress bar with the time left and the case measured last."""

    def __init__(self, name: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
        self.bar = Progress(*columns, TextColumn("[dim]{task.fields[case]}"), console=Console(stderr=True))
        self.task = self.bar.add_task(name, total=None, left="", case="")

    def __enter__(self) -> Callable[[Progress], None]:
        self.bar.start()
        return self.update

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def update(self, progress: Progress) -> None:
        """Show how far the campaign is."""
        left = "" if progress.eta_s is None else f"{progress.eta_s:.0f} s left"
        done = progress.done + progress.waiting
        self.bar.update(self.task, total=progress.total, completed=done, left=left, case=progress.case[:60])


def show(summary: Summary, store: Store) -> None:
    """The campaign's outcome for a person."""
    counts = (
        ", ".join(f"{count} {status}" for status, count in sorted(summary.statuses.items())) or "nothing left to do"
    )
    rows = [
        ("campaign", summary.run_id),
        ("outcome", summary.outcome + (f", {summary.remaining} cases left: run it again" if summary.remaining else "")),
        ("in the store", f"{summary.done} of {summary.total} cases"),
        ("measured now", f"{counts} in {microseconds(summary.elapsed_s * 1e6)}"),
        ("store", store.path),
    ]
    if summary.drift:
        worst = max(summary.drift, key=lambda name: summary.drift[name])
        rows.append(("drift", f"{summary.drift[worst]:.1%} at most between rounds ({worst})"))
    table(f"profiled {summary.device_id}", ("", ""), rows)
