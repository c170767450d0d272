"""``opcast simulate workload=simai``: a workload file of SimAI on a cluster, and writing one of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..datasets.counts import counted
from ..datasets.files import write_atomically
from ..datasets.reading import read_text
from ..simulator.formats.simai import FormatError, read_busbw, read_workload, write_workload
from ..simulator.question.network import needs_cluster
from ..simulator.question.requests import SimulateRequest, WorkloadFile
from ..simulator.report.answer import InferenceReport, StepReport
from ..simulator.report.view import time_text
from ..simulator.report.workload_file import FileReport
from . import resolve
from .links import show_links
from .show import BadInputError, print_json, table, wants_json

NOT_FOR_FILES = (
    "report",
    "trace",
    "simai",
    "within_s",
    "strict",
    "stragglers",
    "offload",
    "passes",
    "options",
)
SHOWN = 12


def run(config: Mapping[str, Any]) -> int:
    """Simulate the file and print the report; returns the exit code."""
    as_json = wants_json(dict(config))
    report = simulate_file(config)
    if as_json:
        print_json(report.to_dict())
    else:
        show(report)
    return 0


def simulate_file(config: Mapping[str, Any]) -> FileReport:
    """The report of the configuration's file. FormatError, BadInputError and RequestError for what it cannot be."""
    for name in NOT_FOR_FILES:
        if config.get(name):
            raise BadInputError(f"{name}={config[name]} is for steps of a model: leave it out of workload=simai")
    if not config.get("cluster"):
        raise needs_cluster("workload=simai")
    chosen = config["workload"]
    request = SimulateRequest(
        file=read(chosen.get("file"), chosen.get("busbw"), chosen.get("vpp")),
        device=resolve.device(config),
        cluster=resolve.cluster(config),
        network=resolve.network(config),
        sources=resolve.sources(config),
    )
    report = resolve.bench(config).simulate(request)
    assert isinstance(report, FileReport)
    return report


def read(path: Any, busbw: Any = None, vpp: Any = None) -> WorkloadFile:
    """A workload file with its bandwidths. BadInputError when one cannot be read, FormatError when it is none."""
    if not path or path == "???":
        raise BadInputError("workload=simai needs a file: workload.file=workload.txt")
    text = check_file(read_workload, path, "workload.file")
    rates = check_file(read_busbw, busbw, "workload.busbw") if busbw else ""
    return WorkloadFile(text, Path(str(path)).stem, rates, vpp)


def write(report: StepReport | InferenceReport, path: str | Path) -> Path:
    """The step's workload as SimAI reads it. FormatError for what it cannot say, or a path that cannot be written."""
    from ..simulator.report.simai import workload

    state = report.state
    if state is None or report.devices == 1 or not isinstance(report, StepReport):
        raise FormatError(f"simai={path} is for training steps on a cluster: take workload=train and cluster=…")
    text = write_workload(workload(state.steps[0]))
    return write_atomically(Path(path), lambda unfinished: unfinished.write_text(text, "utf-8"), FormatError, "simai=")


def check_file(parse: Callable[[str], object], path: Any, name: str) -> str:
    """The text of a file that ``parse`` can read. BadInputError when it cannot be read, FormatError for another."""
    text = read_text(Path(str(path)), BadInputError, f"{name}={path}")
    try:
        parse(text)
        return text
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None


def show(report: FileReport) -> None:
    """The report as tables."""
    parts = report.breakdown
    degrees = ", ".join(f"{name.upper()} {value}" for name, value in report.parallel.items() if value > 1)
    shares = [("compute", parts["compute_s"]), ("waiting for stages", parts["bubble_s"])]
    shares += [(f"exposed {group}", seconds) for group, seconds in parts["by_parallelism"].items()]
    rows: list[tuple[object, ...]] = [
        ("layout", f"{counted(report.devices, 'device')}: {degrees or 'one'}"),
        ("step time", time_text(report.step_time_s * 1e6)),
        ("interval", f"{time_text(report.low_s * 1e6)} to {time_text(report.high_s * 1e6)}"),
        *((name, f"{time_text(s * 1e6)}, {s / report.step_time_s:.1%}") for name, s in shares if s > 0),
    ]
    table(f"{report.workload} on {report.cluster} ({report.network['fidelity']})", ("", ""), rows)
    rows = [
        (c.collective, c.group, c.ranks, f"{c.size_bytes:,}", c.times, time_text(c.time_us),
         f"{c.busbw_gbps:.4g}", c.engine)
        for c in report.communications[:SHOWN]
    ]  # fmt: skip
    heads = ("collective", "group", "ranks", "bytes", "times", "each", "busbw GB/s", "answered by")
    table("collectives", heads, rows)
    show_links(report.network, "step", "step")
