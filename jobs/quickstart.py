"""``opcast quickstart``: the main job end to end on this machine.

Profiles operators (none of the test model's own shapes among them), trains and registers predictors, simulates a
real model's training step, prefill and decode, runs those steps for real, and shows predicted beside measured.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets.counts import counted
from ..datasets.device_names import figures_of_file
from ..datasets.installing import install_command
from ..datasets.store import Store
from ..harness import accelerator
from ..harness.accelerator import Accelerator
from ..harness.formats import in_format
from ..harness.free_cores import on_free_cores
from ..harness.plan_order import FIRST_OF_KIND
from ..simulator.report.comparison import Comparison, StepComparison
from ..simulator.trace import Workload
from . import resolve
from .graphs import ops_of, predict_steps, trace_all
from .onboard import HERE
from .operator_match import compare_operators, step_times
from .profile import measure, plan_of
from .real_run import RealRunner, Turns
from .show import BadInputError, print_json, say, table, wants_json
from .train import fit_and_register, train_request

if TYPE_CHECKING:
    from ..harness.campaign import Summary
    from ..harness.plan import CampaignPlan

WORKLOADS = ("train", "prefill", "decode")
REST_S = 90.0  # tracing, training predictors, simulating, timing operators, the report
BUDGET_CASE_S = 0.5  # what a case takes about, where no deadline is set
FREE_CHOICE = {"model": "+model.path"}


def run(config: dict[str, Any]) -> int:
    """The whole job; returns the exit code."""
    started = time.perf_counter()
    as_json = wants_json(config)
    if config["models"] not in ("one", "all"):
        raise BadInputError(f"models={config['models']!r} does not exist; choose one or all")
    if config["device"].get("id") not in HERE:
        raise BadInputError(
            f"device={config['device'].get('id')}: opcast quickstart measures this machine; hardware=cuda or cpu"
        )
    if config["models"] == "all":
        from . import quickstart_all

        return quickstart_all.run(config, as_json)
    here = choose_hardware(str(config["hardware"]))
    if config["cores"] not in ("free", "all"):
        raise BadInputError(f"cores={config['cores']!r} does not exist; choose free or all")
    if config["cores"] == "all" or here.hardware != "cpu":
        return run_one(config, here, started, as_json)
    with on_free_cores() as (free, cores):
        if free < cores:
            say(
                f"other work keeps {cores - free} of {cores} cores busy; they are left out (cores=all takes them too), "
                "so ask about what is measured with device=local"
            )
        return run_one(config, here, started, as_json)


def run_one(config: dict[str, Any], here: Accelerator, started: float, as_json: bool) -> int:
    """The whole job with one model, on hardware that was chosen; returns the exit code."""
    precision = here.precision if config["precision"] == "auto" else config["precision"]
    workloads = {
        name: Workload(name, batch=config[name]["batch"], seq_len=config[name]["seq_len"]) for name in WORKLOADS
    }
    model = resolve.model(config)
    cache_dir, store = Path(config["graphs"]).expanduser(), Store(Path(config["store"]).expanduser())
    graphs = trace_all(model, traced_on(workloads, here.hardware), precision, cache_dir)
    campaign = in_format(config["campaign"], precision) if here.hardware != "cpu" else config["campaign"]
    settings = {"campaign": campaign, "settings": {"device": here.hardware, "formats": "planned"}}
    plan = plan_of({**config, **settings}, exclude=ops_of(graphs.values()))
    for line in announcement(here, plan, store, precision):
        say(line)
    runner = RealRunner(model, workloads, precision, here.hardware, plan.settings.threads)
    seconds: dict[str, list[float]] = {name: [] for name in WORKLOADS}

    def one_round() -> None:
        for name in WORKLOADS:
            seconds[name] += runner.seconds(name, int(config["repeats"][name]))

    rounds = Turns([one_round] * int(config["rounds"]))
    say(f"1/5  measuring {len(plan.cases)} operator shapes, none of them the test model's; real steps in between")
    if here.one_process:
        summary = measure(plan, store)
    with runner:
        if not here.one_process:
            summary = measure(plan, store, between=rounds.due)
        rounds.finish()
        if summary.outcome == "deadline":
            say(cut_short(summary))
        target = store.known_device(summary.device_id)
        say("2/5  training predictors")
        training = fit_and_register(store, target, train_request(config, target))
        say("3/5  simulating")
        reports = predict_steps(model, workloads, target, precision, resolve.engine(config, target), cache_dir)
        say("4/5  timing every operator of the real steps")
        operators = {name: runner.operators(name, config["operator_repeats"]) for name in WORKLOADS}
        environment = runner.environment_facts()
    comparison = Comparison(
        device=target.to_dict(),
        model=graphs["train"].name,
        parameters=graphs["train"].parameters,
        precision=precision,
        environment=environment,
        campaign=campaign_facts(summary),
        training=training,
        steps=[StepComparison.of(name, reports[name], seconds[name]) for name in WORKLOADS],
        ops=[op for name in WORKLOADS for op in compare_operators(name, reports[name], operators[name])],
    )
    say("5/5  writing the report")
    from ..simulator.html import quickstart, write

    report = write(quickstart.page(comparison), Path(str(config["report"])).expanduser())
    wall_time_s = time.perf_counter() - started
    if as_json:
        print_json(result(comparison, report, wall_time_s))
    else:
        show(comparison, report, wall_time_s)
    return 0


def choose_hardware(hardware: str) -> Accelerator:
    """What to measure on. BadInputError when it does not exist, or is a GPU that is not there or does not work.

    With ``auto`` a GPU that cannot be used is said in one line, and the CPU is taken.
    """
    if hardware not in ("auto", "cpu", "cuda"):
        raise BadInputError(f"hardware={hardware!r} does not exist; choose auto, cpu or cuda")
    if importlib.util.find_spec("torch") is None:
        raise BadInputError(f"quickstart needs torch and transformers: {install_command('hf,mlflow')}")
    if hardware == "cpu":
        return Accelerator("cpu")
    here = accelerator.ask()
    if hardware == "cuda" and here.hardware != "cuda":
        raise BadInputError(f"hardware=cuda: {here.trouble or 'torch sees no GPU here'}; or use hardware=cpu")
    if here.trouble:
        say(f"{here.trouble}; going on with the CPU")
    return here


def announcement(here: Accelerator, plan: CampaignPlan, store: Store, precision: str) -> list[str]:
    """What the job will take, before it starts: on what, how long, and what is known of the device."""
    device_id = here.device_id or resolve.this_machine()
    longest = plan.settings.deadline_s or BUDGET_CASE_S * len(plan.cases)
    has_figures = bool(figures_of_file(device_id)) or store.device(device_id) is not None
    lines = [
        f"on {here.name or 'the CPU'} ({device_id}) in {precision}: measuring takes up to {longest / 60:.0f} min, "
        f"the rest about {REST_S / 60:.0f} min; stop it at any time, the same command goes on from there"
    ]
    if not has_figures:
        kind = "the CPU's" if here.hardware == "cpu" else f"{device_id} has no file in conf/device, so the GPU's"
        lines.append(f"{kind} own figures (rates, memory, caches) are measured first, in under a minute")
    if here.one_process:
        lines.append("the GPU takes one process at a time: real steps run after the measuring instead of in between")
    return lines


def traced_on(workloads: Mapping[str, Workload], hardware: str) -> dict[str, Workload]:
    """The workloads with the attention that the simulated step has on this hardware."""
    attention = "sdpa" if hardware == "cpu" else "fused"
    return {name: replace(workload, attention=attention) for name, workload in workloads.items()}


def cut_short(summary: Summary) -> str:
    """What is said of a campaign that ran out of time."""
    return (
        f"     the time for measuring ran out after {summary.done} of {counted(summary.total, 'case')}, some of every "
        f"kind ({FIRST_OF_KIND} or all of them): answers are rougher; the same command again measures the rest"
    )


def campaign_facts(summary: Summary) -> dict[str, Any]:
    """What the report says of the campaign."""
    return {
        "run_id": summary.run_id,
        "outcome": summary.outcome,
        "cases": summary.total,
        "done": summary.done,
        "ok": summary.statuses.get("ok", 0),
        "failed": sum(count for status, count in summary.statuses.items() if status != "ok"),
        "wall_time_s": summary.elapsed_s,
        "drift": dict(summary.drift),
    }


def result(comparison: Comparison, report: Path, wall_time_s: float) -> dict[str, Any]:
    """The JSON answer."""
    return {
        "errors": comparison.errors(),
        "ops": comparison.op_errors(),
        "report": str(report),
        "wall_time_s": wall_time_s,
        "device": comparison.device["id"],
        "model": comparison.model,
        "steps": {
            step.workload: step.times_ms() | {"spread": step.spread, "runs": len(step.measured_runs_ms)}
            for step in comparison.steps
        },
        "families": {
            step.workload: {
                kind: {"predicted_ms": predicted, "measured_ms": measured, "calls": count}
                for kind, (predicted, measured, count) in comparison.family_totals(step.workload).items()
            }
            for step in comparison.steps
        },
        "training": {kind: dict(values) for kind, values in comparison.training.items()},
        "campaign": dict(comparison.campaign),
    }


def show(comparison: Comparison, report: Path, wall_time_s: float) -> None:
    """Two tables and where to look further."""
    rows = [
        (step.workload, *step_times(step, f" ±{step.spread:.0f} %"), f"{step.error:.1f} %") for step in comparison.steps
    ]
    title = f"{comparison.model} ({comparison.parameters / 1e6:.0f} M parameters, {comparison.precision})"
    table(f"{title} on {comparison.device['name']}", ("step", "predicted", "interval", "measured", "error"), rows)
    errors = comparison.op_errors()
    families = []
    totals = {step.workload: comparison.family_totals(step.workload) for step in comparison.steps}
    for kind in sorted(errors, key=lambda kind: -sum(t.get(kind, (0, 0, 0))[1] for t in totals.values())):
        cells = [
            f"{t[kind][0]:.2f} / {t[kind][1]:.2f}" if kind in t else "" for t in (totals[name] for name in WORKLOADS)
        ]
        families.append((kind, *cells, f"{errors[kind]:.0f} %"))
    heads = ("op family", *(f"{name}: predicted / measured ms" for name in WORKLOADS), "median error per call")
    table("", heads, families)
    say(f"report: {report}   ({wall_time_s:.0f} s in all)")
