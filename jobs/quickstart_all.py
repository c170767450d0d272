"""``opcast quickstart models=all``: small models of several kinds, and two processes, predicted and run for real.

What is measured holds none of the models' shapes. Their steps are run in between. What comes of it are two tables of
results, as ``opcast validate`` reads them, and this machine's figures.
"""

from __future__ import annotations

import csv
import json
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets.clusters import Cluster
from ..datasets.devices import Device
from ..datasets.reading import read_yaml
from ..datasets.store import Store
from ..simulator.question.plan import Parallel, Plan, load_stack
from ..simulator.question.work import Work
from ..simulator.report.comparison import StepComparison
from ..simulator.simulate import simulate
from ..simulator.trace import Workload
from . import resolve
from .graphs import ops_of, predict_steps, trace_all
from .operator_match import step_times
from .profile import measure, plan_of
from .real_cluster import run_ranks
from .real_run import RealRunError, RealRunner, Turns
from .show import CONFIG_DIRECTORY, BadInputError, print_json, say, table
from .train import fit_and_register, train_request

if TYPE_CHECKING:
    from ..harness.plan import CampaignPlan

SUITE = CONFIG_DIRECTORY / "quickstart_models.yaml"
REST_S = 240.0  # tracing, real steps of all models, training predictors twice, ranks that start
PRECISION = "fp32"
RANKS = 2
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class RealStep(StepComparison):
    """One step of one model, on one process or on ranks."""

    model: str
    layout: str  # of the ranks; empty for one process
    seq_len: int
    device: str

    @property
    def kind(self) -> str:
        """What kind of step it is, of ranks by their layout."""
        return self.layout or self.workload


def run(config: dict[str, Any], as_json: bool) -> int:
    """The whole job; returns the exit code. BadInputError for a GPU: the models are sized for a CPU."""
    if config["hardware"] == "cuda":
        raise BadInputError("models=all runs on the CPU; leave hardware=cuda out")
    started = time.perf_counter()
    suite: dict[str, Any] = read_yaml(SUITE, BadInputError, SUITE.name)
    models: dict[str, dict[str, Any]] = {name: {"name": name, **values} for name, values in suite["models"].items()}
    workloads = {name: Workload(**values) for name, values in suite["workloads"].items()}
    graphs, store = Path(config["graphs"]).expanduser(), Store(Path(config["store"]).expanduser())
    left_out = ops_of_all([*models.values(), resolve.model(config)], workloads, graphs)
    plan = campaign_of_all(config, suite, left_out)
    halves, sums = plans_of_ranks(config, suite, left_out)
    limits = (plan.settings.deadline_s, halves[0].settings.deadline_s, sums.settings.case_budget_s * len(sums.cases))
    say(
        f"on the CPU ({resolve.this_machine()}) in {PRECISION}: {len(models)} models and {RANKS} processes over gloo "
        f"take up to {(sum(limits) + REST_S) / 60:.0f} min; stop at any time, the same command goes on from there"
    )
    runs: dict[tuple[str, str], list[float]] = defaultdict(list)
    with RealRunner({}, {}, PRECISION, "cpu", plan.settings.threads) as runner:
        say(f"1/4  measuring {len(plan.cases)} operator shapes, none of them the models'; their real steps in between")
        model_runs = [
            partial(run_model, runner, name, models[name], workloads, suite["repeats"], runs) for name in models
        ]
        turns = Turns(model_runs * int(suite["rounds"]))
        summary = measure(plan, store, between=turns.due)
        turns.finish()
        environment = runner.environment_facts()
    say("2/4  training predictors and simulating")
    target = store.known_device(summary.device_id)
    fit_and_register(store, target, train_request(config, target))
    steps = simulate_models(config, models, workloads, target, runs)
    missed: dict[str, str] = {}
    keep = partial(write_tables, Path(str(config["truth"])).expanduser(), models=models, environment=environment)
    written = keep(steps, devices=(target,))
    say(f"3/4  measuring what {RANKS} processes of one thread do beside each other, and their collectives")
    beside = measure_ranks(halves, sums, store)
    fit_and_register(store, beside, train_request(config, beside))
    say(f"4/4  running {RANKS} processes for real")
    for step in run_cluster(config, suite["cluster"], models, beside, missed):
        steps.append(step)
        written = keep(steps, devices=(target, beside))
    answer = result(steps, written, missed, time.perf_counter() - started)
    if as_json:
        print_json(answer)
    else:
        show(steps, written, answer["wall_time_s"])
    return 1 if missed else 0


# --- what is measured ----------------------------------------------------------------------------------


def ops_of_all(models: Iterable[Any], workloads: Mapping[str, Workload], graphs: Path) -> set[Any]:
    """Every distinct op of all models' steps."""
    return {op for model in models for op in ops_of(trace_all(model, workloads, PRECISION, graphs).values())}


def campaign_of_all(
    config: Mapping[str, Any], suite: Mapping[str, Any], left_out: Iterable[Any], **settings: Any
) -> CampaignPlan:
    """The quickstart's campaign with the kinds that these models need beside those of its own."""
    spec = dict(config["campaign"])
    share_total = sum(float(entry.get("share", 0)) for entry in spec["cases"])
    more = sum(float(entry["share"]) for entry in suite["cases"])
    budget_s = settings.pop("budget_s", None) or float(spec["budget_s"]) * (1 + more / share_total)
    spec |= {"cases": [*spec["cases"], *suite["cases"]], "budget_s": budget_s}
    return plan_of({**config, "campaign": spec, "settings": {"device": "cpu", **settings}}, exclude=left_out)


def plans_of_ranks(
    config: Mapping[str, Any], suite: Mapping[str, Any], left_out: Iterable[Any]
) -> tuple[list[CampaignPlan], CampaignPlan]:
    """What one thread runs in parts, one for each rank, and the collectives between the ranks."""
    one = {"threads": 1, "pin": False}
    full_plan = campaign_of_all(config, suite, left_out, budget_s=float(config["campaign"]["budget_s"]), **one)
    limit = full_plan.settings.deadline_s / RANKS
    parts = [
        replace(
            full_plan,
            cases=full_plan.cases[rank::RANKS],
            canaries=(),
            settings=replace(full_plan.settings, deadline_s=limit),
        )
        for rank in range(RANKS)
    ]
    sizes = {"log2": [64, 1 << 28, 23]}
    cases = [{"kind": kind, "size_bytes": sizes, "ranks": RANKS} for kind in COLLECTIVES]
    spec = {"name": "ranks", "cases": cases, "dtype": PRECISION, "cache": "warm"}
    settings = {"device": "cpu", "threads": 1, "seed": 5, "ci_width": 0.05, "case_budget_s": 0.3}
    return parts, plan_of({**config, "campaign": spec, "settings": settings})


def measure_ranks(parts: Sequence[CampaignPlan], collectives: CampaignPlan, store: Store) -> Device:
    """One thread's operators, by as many processes at once as there are ranks; then the collectives between them.

    Ranks compute at the same time and share caches and memory, so what one thread takes is measured beside another.
    """
    from ..harness import campaign

    failed: list[BaseException] = []

    def part(plan: CampaignPlan) -> None:
        try:
            campaign.run(plan, store)
        except BaseException as error:
            failed.append(error)

    others = [threading.Thread(target=part, args=(plan,), daemon=True) for plan in parts]
    for other in others:
        other.start()
    for other in others:
        other.join()
    if failed:
        raise failed[0]
    return store.known_device(measure(collectives, store).device_id)


# --- real steps and simulated ones ---------------------------------------------------------------------


def run_model(
    runner: RealRunner,
    name: str,
    values: Mapping[str, Any],
    workloads: Mapping[str, Workload],
    repeats: Mapping[str, int],
    runs: dict[tuple[str, str], list[float]],
) -> None:
    """Adds seconds of a model's real steps to ``runs``, by model and workload. The process holds no model before it."""
    runner.load(dict(values), workloads)
    for workload in workloads:
        runs[name, workload] += runner.seconds(workload, int(repeats[workload]))


def simulate_models(
    config: Mapping[str, Any],
    models: Mapping[str, Any],
    workloads: Mapping[str, Workload],
    target: Device,
    runs: Mapping[tuple[str, str], list[float]],
) -> list[RealStep]:
    """Every model's steps predicted, beside their runs."""
    engine, graphs = resolve.engine(config, target), Path(config["graphs"]).expanduser()
    return [
        RealStep.of(name, report, runs[model, name], model, "", workloads[name].seq_len, target.id)
        for model, values in models.items()
        for name, report in predict_steps(values, workloads, target, PRECISION, engine, graphs).items()
    ]


def cluster_of(device: Device) -> Cluster:
    """Processes on this machine."""
    return Cluster(
        f"{device.id}_gloo", device.name, device.id, devices_per_node=RANKS, nics_per_node=1, link="loopback"
    )


def run_cluster(
    config: Mapping[str, Any],
    spec: Mapping[str, Any],
    models: Mapping[str, Any],
    device: Device,
    missed: dict[str, str],
) -> Iterator[RealStep]:
    """The training steps of all layouts, predicted and run; ``missed`` gets why one could not be run."""
    cluster, graphs = cluster_of(device), Path(config["graphs"]).expanduser()
    engine = resolve.bench(config).engine(device, cluster)
    for model in spec["models"]:
        for layout, degrees in spec["layouts"].items():
            plan = Plan(Parallel(**degrees), cluster, load_stack("torch_gloo"), precision=PRECISION)
            batch = int(degrees.get("dp", 1))
            work = Work("train", seq_len=int(spec["seq_len"]), micro_batch=1, global_batch=batch)
            report = simulate(models[model], work, plan, device, engine, graphs)
            try:
                seconds = run_ranks(models[model], layout, work.seq_len, int(spec["repeats"]), RANKS)
            except RealRunError as error:
                missed[f"{model}-train-{layout}"] = str(error)
                say(f"     {model}, {layout}: {error}; going on without it")
                continue
            yield RealStep.of("train", report, seconds, model, layout, work.seq_len, device.id)


# --- what is left behind -------------------------------------------------------------------------------


def write_tables(
    folder: Path,
    steps: Sequence[RealStep],
    models: Mapping[str, Any],
    devices: Sequence[Device],
    environment: Mapping[str, Any],
) -> list[Path]:
    """One table of training steps and one of inference, with the figures of the devices they ran on."""
    folder.mkdir(parents=True, exist_ok=True)
    versions = {key: environment[key] for key in ("opcast_version", "torch", "threads") if environment.get(key)}
    source = f"opcast quickstart models=all, {datetime.now(UTC):%Y-%m-%d}, " + json.dumps(versions, sort_keys=True)
    written = []
    for name, chosen in (
        ("steps_train.csv", [step for step in steps if step.workload == "train"]),
        ("steps_infer.csv", [step for step in steps if step.workload != "train"]),
    ):
        rows = [table_row(step, models[step.model], source) for step in chosen]
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        written.append(folder / name)
    figures = Store(folder)
    written += [figures.save_device(device) for device in devices]
    return written


def table_row(step: RealStep, config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A step as a line of a table of results: what was run, every run's time, and what was predicted then."""
    ranks, (low, high) = RANKS if step.layout else 1, (min(step.measured_runs_ms), max(step.measured_runs_ms))
    row: dict[str, Any] = {
        "source": source,
        "row_id": "-".join(filter(None, (step.model, step.workload, step.layout))),
        "kind": f"quickstart_{step.workload}",
        "model": step.model,
        "config": json.dumps({key: value for key, value in config.items() if key != "name"}, sort_keys=True),
        "gpu": step.device,
        "num_gpus": ranks,
        "precision": PRECISION,
        "tp": RANKS if step.layout == "tp" else 1,
        "pp": 1,
        "stack": "torch_gloo" if step.layout else "torch",
    }
    predicted = {"predicted_ms": step.predicted_ms, "predicted_low_ms": step.low_ms, "predicted_high_ms": step.high_ms}
    spread = {"runs": len(step.measured_runs_ms), "fastest_ms": low, "slowest_ms": high}
    columns: dict[str, Any]
    if step.workload == "train":
        batch = ranks if step.layout in ("dp", "fsdp") else 1
        columns = {"zero_stage": 3 if step.layout == "fsdp" else 0, "seq_len_tokens": step.seq_len, "sp": "false"}
        columns |= {"mbs_seqs": 1, "gbs_seqs": batch, "recompute": "none", "step_time_s": step.measured_ms / 1e3}
    else:
        decodes = step.workload == "decode"
        columns = {"batch_size": 1, "input_len_tokens": step.seq_len, "output_len_tokens": 2 if decodes else 1}
        columns |= {"kv_cache": "dynamic", "ttft_ms": "" if decodes else step.measured_ms}
        columns |= {"itl_ms": step.measured_ms if decodes else ""}
    return row | columns | spread | predicted


def result(
    steps: Sequence[RealStep], written: Sequence[Path], missed: Mapping[str, str], wall_time_s: float
) -> dict[str, Any]:
    """The JSON answer; ``missed`` says why a step could not be run."""
    of_kind = {kind: [step for step in steps if step.kind == kind] for kind in dict.fromkeys(s.kind for s in steps)}
    return {
        "steps": [
            {
                **{name: getattr(step, name) for name in ("model", "workload", "layout")},
                **step.times_ms(),
                "error": step.error,
            }
            for step in steps
        ],
        "median_error": {kind: statistics.median(step.error for step in group) for kind, group in of_kind.items()},
        "inside": {kind: float(statistics.mean(step.inside for step in group)) for kind, group in of_kind.items()},
        "written": [str(path) for path in written],
        "missed": dict(missed),
        "wall_time_s": wall_time_s,
    }


def show(steps: Sequence[RealStep], written: Sequence[Path], wall_time_s: float) -> None:
    """A line for every step."""
    rows = [
        (step.model, step.kind, *step_times(step), f"{step.error:.1f} %{'' if step.inside else ', outside'}")
        for step in steps
    ]
    table(
        f"steps in {PRECISION} on this machine", ("model", "step", "predicted", "interval", "measured", "error"), rows
    )
    say(f"tables: {', '.join(map(str, written[:2]))}   ({wall_time_s:.0f} s in all)")
