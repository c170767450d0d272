"""``opcast simulate``: one step of a model on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets.devices import Device
from ..datasets.loading import number, whole
from ..simulator.engines import FusedEngine
from ..simulator.question.network import LINK_FAULTS
from ..simulator.report import trust
from ..simulator.report.answer import InferenceReport, StepReport
from ..simulator.report.figures import figures, headline, layout, ops, time_table
from ..simulator.report.step import MissingMeasurement
from ..simulator.report.view import dims_text, time_text
from ..simulator.report.workload_file import FileReport
from . import resolve, trace_run, workload_file
from .composing import STEP_ADDED, STEP_CHOICE
from .links import show_links
from .show import BadInputError, print_json, say, show, table, wants_json, with_units

if TYPE_CHECKING:
    from ..simulator.html.page import Page

FREE_CHOICE = STEP_CHOICE
ADDED = (*LINK_FAULTS[1:], *STEP_ADDED, "precision.kv_dtype")  # checked where they are used


def words(arguments: Sequence[str]) -> list[str]:
    """``launch=FILE`` as the settings of the step that the file's command starts; what else is given goes before them.

    BadInputError where no cluster is named: a command does not say what its GPUs are. LaunchError for the file.
    """
    files, rest, names = apart(arguments)
    if not files:
        return rest
    from ..simulator.search.launch_reading import settings_of_launch

    models = [text.removeprefix("model=") for text in rest if text.startswith("model=")]
    settings = settings_of_launch(Path(files[-1]), models[-1] if models else "")
    if "cluster" not in names | settings.keys():
        raise BadInputError(f"launch={files[-1]} does not say what its GPUs are: add cluster=dgx_h100, or another")
    if "cluster" in names:  # the file's own cluster is another
        settings.pop("cluster", None)
    return [*(f"{name}={spelled(value)}" for name, value in settings.items() if name not in names), *rest]


def apart(arguments: Sequence[str]) -> tuple[list[str], list[str], set[str]]:
    """The files of ``launch=``, the other words, and the names of these."""
    files = [text.removeprefix("launch=") for text in arguments if text.startswith("launch=")]
    rest = [text for text in arguments if not text.startswith("launch=")]
    return files, rest, {text.partition("=")[0].lstrip("+") for text in rest}


def spelled(value: Any) -> str:
    """A value as the command line has it."""
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{each}" for name, each in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def run(config: dict[str, Any]) -> int:
    """Simulate and print the report; returns the exit code."""
    if config["workload"].get("kind") == "simai":
        return workload_file.run(config)
    if trace_run.is_asked(config):
        return trace_run.run(config)
    as_json = wants_json(config)
    for name in ("within_s", "price_per_gpu_hour"):
        if config[name] is not None:
            number(BadInputError, name, config[name])
    within_s = config["within_s"]
    whole(BadInputError, "expand", config["expand"], 1)
    request = resolve.request_of("simulate", config)
    if request.network.fidelity == "packet":
        say("ns-3 moves the packets of each parallel dimension: seconds, minutes for many devices")
    answered = resolve.bench(config).answered(request)
    report, target, engine = answered.report, answered.device, answered.engine
    assert not isinstance(report, FileReport)
    if config["strict"] is not None and config["strict"] is not False:
        trust.check_strict(report.trust, report.measure_next, strictness(config["strict"]))
    if config["report"]:
        from ..simulator.html import write

        say(f"report: {write(page_of(report, target, engine), Path(str(config['report'])))}")
    if config["trace"]:
        say(
            f"timeline: {write_timeline(report, Path(str(config['trace'])), config['expand'])} (https://ui.perfetto.dev)"
        )
    if config["simai"]:
        say(f"SimAI workload: {workload_file.write(report, str(config['simai']))}")
    if config["chakra"]:
        say(f"execution traces: {trace_run.write(report, str(config['chakra']))}")
    if as_json:
        print_json(answer(report, within_s))
    else:
        if not report.fits:
            show_memory(report, target)
        show_step(report, target, within_s)
        if config["detail"]:
            show_knowledge(report)
        show_links(report.network, "step", "step")
    return 0


def answer(report: StepReport | InferenceReport, within_s: float | None) -> dict[str, Any]:
    """The JSON object. Of a step that does not fit into memory (``fits`` false) the times are those if it did."""
    values = report.to_dict()
    if within_s is not None:
        values["p_within"] = report.probability_within(within_s)
    return values


def page_of(report: StepReport | InferenceReport, target: Device, engine: FusedEngine) -> Page:
    """The page of a step with its timeline, and with the pictures of a cluster where it ran on one."""
    from ..simulator.html import step
    from ..simulator.html.view import view
    from ..simulator.report.timeline import timeline

    if report.devices == 1 or isinstance(report, InferenceReport):
        report = replace(report, timeline=timeline(report.state) if report.state else ())
    return step.page(report, target, view(report, engine))


def write_timeline(report: StepReport | InferenceReport, path: Path, expand: int) -> Path:
    """The timeline as trace events; folded ranks are written out up to ``expand`` of each stage."""
    from ..simulator.formats.perfetto import write_trace
    from ..simulator.report.timeline import tracks

    assert report.state is not None
    return write_trace(path, *tracks(report.state), expand)


def strictness(value: Any) -> float:
    """The share of time that may lean on what was not measured; BadInputError for anything but true or a share."""
    if value is True:
        return trust.STRICT_UNMEASURED_SHARE
    if isinstance(value, (int, float)) and 0 <= value <= 1:
        return float(value)
    raise BadInputError(f"strict={value!r} must be true, or the share of time allowed, from 0 to 1")


def wanted(missing: MissingMeasurement) -> str:
    """An op whose measurement would help, with its share of the time."""
    return with_units(f"{missing.op['kind']} {dims_text(missing.op)} ({missing.share:.0%})")


def show_memory(report: StepReport | InferenceReport, target: Device) -> None:
    """What a step that does not fit would need, by class of tensor, and what would make it fit."""
    memory = report.memory
    rows: list[tuple[object, ...]] = [
        *layout(report),
        *((name, f"{gib:,.2f} GiB") for name, gib in (memory.by_class or memory.parts_gib).items()),
    ]
    rows += [("peak", f"{memory.peak_gib:,.2f} GiB"), (f"{target.name} has", f"{target.memory_gib:,.2f} GiB")]
    title = f"{report.model}: {report.workload} in {report.precision} DOES NOT FIT on {target.name} ({report.stack})"
    table(title, ("", ""), rows)
    if memory.where:
        say(f"fullest in {memory.where}")
    if memory.advice:
        say(memory.advice)
    say("it is timed all the same: what follows are its times if it did fit")


def show_step(report: StepReport | InferenceReport, target: Device, within_s: float | None = None) -> None:
    """The report as tables."""
    table(headline(report, target.name), ("", ""), figures(report, target.memory_gib, within_s))
    show(time_table(report))
    show(ops(report))
    if report.measure_next and report.trust.get("measured", 0.0) < 0.5:
        say(f"measuring these would help most: {'; '.join(map(wanted, report.measure_next[:3]))}")
    if report.unmapped:
        say(f"costed by bytes alone: {', '.join(report.unmapped)}")
    for note in report.notes:
        say(note)


def show_knowledge(report: StepReport | InferenceReport) -> None:
    """Which rows or predictors answered for each kind of op, and by which clause of the rule."""
    rows: list[tuple[object, ...]] = [
        (share.kind, time_text(knowledge.time_s * 1e6), knowledge.predictor, knowledge.clause, knowledge.source)
        for share in report.breakdown.by_op
        for knowledge in share.known_by
    ]
    table("which measurements answered", ("op", "time", "row or predictor", "because it is", "measured by"), rows)
