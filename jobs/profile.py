"""``opcast profile``: plan a campaign, run it into a store here or on a cluster. A killed one, run again, finishes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets.counts import counted
from ..datasets.devices import Device
from ..datasets.near import meant
from ..datasets.ops import Op
from ..datasets.store import Store
from ..harness.parts import CampaignPart, announce, announcements, campaign_id
from ..harness.plan import build_plan
from ..simulator.report.view import time_text, written
from .launching.places import Here, Kubernetes, Place, Ray, Slurm, place_of
from .show import BadInputError, print_json, say, table, wants_json
from .writing import write_text

if TYPE_CHECKING:
    from ..harness.campaign import Progress, Summary
    from ..harness.plan import CampaignPlan

FREE_CHOICE = {"model": "+model.path"}
SUBJECT = "what"


def run(config: dict[str, Any]) -> int:
    """Run the campaign, start it elsewhere (``where=…``), write its plan (``plan_out=FILE``) or say how far it is."""
    as_json = wants_json(config)
    if config["what"] not in ("run", "status", "topology"):
        near = meant(config["what"], ("coverage", "status", "topology"))
        raise BadInputError(
            f"`opcast profile` takes nothing, `coverage`, `status` or `topology`, not {config['what']!r}{near}"
        )
    if config["what"] == "topology":
        return topology(config, as_json)
    if config["what"] == "status":
        from . import campaign_status

        return campaign_status.run(config)
    target = place_of(config["where"])
    if config["part"] and target.name != "here":
        raise BadInputError(f"part={config['part']} is a part that runs here: leave out where={target.name}")
    if config["campaign"].get("name") == "active":
        return run_active(config, as_json)
    config = with_node_device(config, target)
    plan = plan_of(config, extra=model_ops(config))
    if plan.settings.device == "cuda" and not config["plan_out"] and target.name == "here":
        check_gpu(plan)
    if config["plan_out"]:
        path = Path(str(config["plan_out"])).expanduser()
        write_text("plan_out", path, plan.to_json())
        if as_json:
            print_json({"plan": str(path), "cases": len(plan.cases)})
        written = counted(len(plan.cases), "case")
        say(f"{written} written to {path}; run them with: python -m opcast.harness {path} STORE")
        return 0
    store = Store(Path(config["store"]).expanduser())
    if not isinstance(target, Here):
        return elsewhere(target, plan, store, as_json)
    campaign_part = CampaignPart.parse(str(config["part"])) if config["part"] else CampaignPart(0, target.parts)
    announce(store.path, plan, campaign_part.count)
    summary = measure(plan, store, part=campaign_part)
    if as_json:
        print_json({**asdict(summary), "remaining": summary.remaining, "store": str(store.path)})
    else:
        show(summary, store)
    return 0 if summary.outcome != "interrupted" else 130


def run_active(config: dict[str, Any], as_json: bool) -> int:
    """Rounds of measuring what makes ``steps`` wrong; prints error against budget. Returns the exit code."""
    from . import active
    from .planning import computing_ops, shares_of

    budget = active.budget_of(config)
    if not config["steps"]:  # before anything is measured
        raise BadInputError(active.NO_STEPS)
    base, store = plan_of(config), Store(Path(config["store"]).expanduser())
    device = measured_device(store, base)
    shares = computing_ops(shares_of(config))
    results, why = active.run(base, shares, store, device, budget, lambda plan: measure(plan, store))
    if as_json:
        print_json({"device": device.id, "rounds": [asdict(result) for result in results], "ended": why})
        return 0
    rows = []
    for points, result in zip(itertools.accumulate(result.points for result in results), results, strict=True):
        errors = result.expected_error, result.found_error, result.expected_after
        rows.append((points, f"{result.spent_s:.0f}", *(written(error, "share") for error in errors)))
    heads = ("points", "seconds", "error expected", "error found", "expected then")
    table(f"active campaign on {device.name}: {why}", heads, rows)
    return 0


def measured_device(store: Store, plan: CampaignPlan) -> Device:
    """The device that a plan measures here; its figures are measured first where the store has none."""
    from . import resolve

    device_id = store.machine(resolve.this_node())
    if device_id is None or (plan.settings.device == "cpu") != device_id.startswith("cpu_"):
        first = replace(plan, cases=plan.cases[:1], canaries=())
        return store.known_device(measure(first, store).device_id)
    return store.known_device(device_id)


def elsewhere(target: Place, plan: CampaignPlan, store: Store, as_json: bool) -> int:
    """Start the parts of a plan on a cluster, and say how to follow them; returns the exit code."""
    campaign, path = campaign_id(plan), store.path.absolute()
    report: dict[str, Any] = {"campaign": campaign, "parts": target.parts, "where": target.name, "store": str(path)}
    if isinstance(target, Kubernetes):
        report["manifest"] = str(write_manifests(target, plan, campaign))
        say(f"{counted(target.parts, 'part')} of {campaign} in {target.manifest}: kubectl apply -f {target.manifest}")
    else:
        new = campaign not in announcements(path)
        record = announce(path, plan, target.parts, target.name)
        try:
            if isinstance(target, Slurm):
                report |= on_slurm(target, path, campaign)
            elif isinstance(target, Ray):
                report |= on_ray(target, path, campaign)
        except BadInputError:
            if new:  # nobody will run it, so that nobody should wait for it
                record.unlink(missing_ok=True)
            raise
    if as_json:
        print_json(report)
    return 0


def write_manifests(target: Kubernetes, plan: CampaignPlan, campaign: str) -> Path:
    """The manifests of a campaign's Job as one YAML file."""
    import yaml

    from .launching.kubernetes import manifests

    path = Path(target.manifest).expanduser()
    write_text("where.manifest", path, yaml.safe_dump_all(manifests(target, plan, campaign), sort_keys=False))
    return path


def on_slurm(target: Slurm, store: Path, campaign: str) -> dict[str, Any]:
    """Queue the parts; with ``wait`` until all are through."""
    from .launching.slurm import submit

    jobs = submit(target, store, campaign)
    array = jobs[0].job_id.split("_")[0]
    say(f"{counted(len(jobs), 'part')} of {campaign} queued as Slurm's {array}: opcast profile status")
    if target.wait:
        for job in jobs:
            job.wait()
    return {"jobs": [job.job_id for job in jobs]}


def on_ray(target: Ray, store: Path, campaign: str) -> dict[str, Any]:
    """Run the parts; their summaries."""
    from .launching.ray_tasks import run_parts

    done = {}
    for name, summary in run_parts(target, store, campaign):
        done[name] = summary
        say(f"part {name}: {summary['done']} of {counted(summary['total'], 'case')} in the store")
    return {"summaries": done}


def topology(config: dict[str, Any], as_json: bool) -> int:
    """What joins the GPUs of this node, as a cluster's file for ``opcast simulate cluster=FILE``."""
    import yaml

    from ..harness.environment import gpu_device_id
    from ..harness.topology import cluster, nics, read

    node = read()
    values = cluster(node, nics(), gpu_device_id())
    text = yaml.safe_dump(values, sort_keys=False)
    if config["output"]:
        write_text("output", Path(str(config["output"])).expanduser(), text)
        say(f"{values['name']}: opcast simulate cluster={config['output']} cluster.nodes=2 …")
    if as_json:
        print_json(values)
    elif not config["output"]:
        print(text, end="")
    return 0


def check_gpu(plan: CampaignPlan) -> None:
    """BadInputError, before anything is measured, when the GPU at hand is ill. Says so where it has no fast bf16."""
    from ..harness import accelerator
    from ..harness.formats import WRITTEN_FOR

    here = accelerator.ask()
    if here.hardware != "cuda":
        raise BadInputError(f"{here.trouble or 'torch sees no GPU here'}; +settings.device=cpu measures the CPU")
    planned = {case.op.dtype for case in plan.cases}
    if here.precision != WRITTEN_FOR and WRITTEN_FOR in planned and plan.settings.formats == "auto":
        say(f"{here.name} has no fast bf16: {here.precision} is measured in its place")


def with_node_device(config: dict[str, Any], target: Place) -> dict[str, Any]:
    """The settings with the device of the nodes that will measure, where ``auto`` would mean that of this machine.

    BadInputError where nothing says what it is.
    """
    spec = config["campaign"].get("settings")
    settings = {**(spec if isinstance(spec, Mapping) else {}), **(config.get("settings") or {})}
    if settings.get("device") == "cuda" and isinstance(target, (Ray, Kubernetes)) and not target.gpus:
        raise BadInputError(f"where={target.name} gives a part no GPU to measure: where.gpus=1")
    if settings.get("device") != "auto":
        return config
    device = target_device(target, bool(config["plan_out"]))
    return config if device == "auto" else {**config, "settings": {**(config.get("settings") or {}), "device": device}}


def target_device(target: Place, only_written: bool) -> str:
    """``cuda`` or ``cpu`` for a campaign that runs elsewhere, ``auto`` for one that runs here. BadInputError."""
    if not isinstance(target, Here):
        if target.gpus is None:
            raise BadInputError(
                f"where={target.name}: what its nodes measure is not known here: ask for a GPU (where.gpus=1), "
                "or name the device (+settings.device=cuda, or cpu)"
            )
        return "cuda" if target.gpus else "cpu"
    if not only_written:
        return "auto"
    from ..harness.environment import default_device

    if default_device() == "cpu":
        raise BadInputError(
            "plan_out: there is no GPU here, so name the device that the plan is for: +settings.device=cuda, or cpu"
        )
    return "cuda"


def plan_of(
    config: dict[str, Any], extra: Iterable[Op | Mapping[str, Any]] = (), exclude: Iterable[Op] = ()
) -> CampaignPlan:
    """The plan of ``campaign=…`` with ``settings.…`` laid over it. Raises PlanError and OpError."""
    spec = dict(config["campaign"])
    if not isinstance(spec.get("settings") or {}, Mapping):
        raise BadInputError(f"campaign.settings={spec['settings']} must be settings, as campaign.settings.device=cpu")
    spec["settings"] = {**(spec.get("settings") or {}), **(config.get("settings") or {})}
    if ops := [op.to_dict() if isinstance(op, Op) else dict(op) for op in extra]:
        spec["ops"] = [*spec.get("ops", []), *ops]
    if left_out := [op.to_dict() for op in exclude]:
        spec["exclude"] = [*spec.get("exclude", []), *left_out]
    return build_plan(spec)


def model_ops(config: dict[str, Any]) -> list[Op] | list[dict[str, Any]]:
    """For ``campaign=model``: every op of the ``steps``, or of the model's workloads where there are none.

    Ops of steps come with the kernels that the step's stack runs.
    """
    campaign_name = config["campaign"].get("name")
    if campaign_name != "model":
        return []
    if config["steps"]:
        from .planning import cases_of, shares_of

        shares_of(config)  # says what is wrong with a step
        return cases_of(config)
    from ..simulator.trace import Workload, trace
    from . import resolve

    ops: dict[Op, None] = {}
    for values in config["workloads"]:
        graph = trace(
            resolve.model(config), Workload(**values), config["precision"]["dtype"], Path(config["graphs"]).expanduser()
        )
        ops.update(dict.fromkeys(node.op for node, _ in graph.weighted() if node.op is not None))
    return list(ops)


def measure(
    plan: CampaignPlan, store: Store, between: Callable[[float], None] | None = None, part: CampaignPart | None = None
) -> Summary:
    """Run a plan (a part of it) with a progress bar on a terminal; ``between`` is called with the share done."""
    from ..harness import campaign

    with progress_bar(plan.name) as update:

        def report(progress: Progress) -> None:
            update(progress)
            if between is not None:
                between((progress.done + progress.waiting) / max(progress.total, 1))

        return campaign.run(plan, store, report, part=part or CampaignPart())


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
        time_left = "" if progress.eta_s is None else f"{progress.eta_s:.0f} s left"
        done = progress.done + progress.waiting
        self.bar.update(self.task, total=progress.total, completed=done, left=time_left, case=progress.case[:60])


def show(summary: Summary, store: Store) -> None:
    """The campaign's outcome for a person."""
    counts = (
        ", ".join(f"{count} {status}" for status, count in sorted(summary.statuses.items())) or "nothing left to do"
    )
    left = f", {counted(summary.remaining, 'case')} left: run it again" if summary.remaining else ""
    rows = [
        ("campaign", summary.run_id),
        ("outcome", summary.outcome + left),
        ("in the store", f"{summary.done} of {counted(summary.total, 'case')}"),
        ("measured now", f"{counts} in {time_text(summary.elapsed_s * 1e6)}"),
        ("store", store.path),
    ]
    if summary.drift:
        worst = max(summary.drift, key=lambda name: summary.drift[name])
        rows.append(("drift", f"{summary.drift[worst]:.1%} at most between rounds ({worst})"))
    table(f"profiled {summary.device_id}", ("", ""), rows)
