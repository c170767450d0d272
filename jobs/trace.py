"""``opcast trace``: execution traces, one sub-command for each thing that is done with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets.counts import counted
from ..datasets.loading import nearest, whole
from ..simulator.report.view import time_text
from .show import BadInputError, print_json, say, show, table, wants_json
from .trace_files import files_of, given, run_at, sighted, tell
from .writing import folder_at

if TYPE_CHECKING:
    from ..datasets.traces.linking import LinkReport
    from ..simulator.execution.analysis import RankAccount

SUBJECT = "what"
SHOWN = 12  # rows of a table
SUBCOMMANDS = {
    "check": "trace.check",
    "convert": "trace_convert.run",
    "link": "trace.link",
    "analyse": "trace.analyse",
    "collect": "trace.collect",
    "explain": "trace.explain",
    "replay": "trace_replay.run",
    "generate": "trace_make.generate",
    "calibrate": "trace_calibrate.run",
    "view": "trace_view.view",
    "reconstruct": "trace_view.reconstruct",
    "measure": "trace_measure.run",
}
"""Module and function of each."""


def run(config: dict[str, Any]) -> int:
    """Do what was asked; returns the exit code."""
    wants_json(config)
    what = str(config["what"])
    if what not in SUBCOMMANDS:
        raise BadInputError(f"`opcast trace` cannot {config['what']!r}; {nearest(what, SUBCOMMANDS, 'it can')}")
    module, function = SUBCOMMANDS[what].split(".")
    return getattr(import_module(f".{module}", __package__), function)(config)


def check(config: dict[str, Any]) -> int:
    """Each problem of a trace or of a folder of traces as a line; exit code 2 when there are any."""
    from ..datasets.traces.checks import find_problems

    path = given(config, "path", "the trace, or a folder of NAME.RANK.et")
    problems_found = find_problems(path)
    if wants_json(config):
        for line in problems_found:
            say(f"opcast: {line}")
        print_json(
            {"path": str(path), "problems": problems_found, **({"error": problems_found[0]} if problems_found else {})}
        )
        return 2 if problems_found else 0
    for line in problems_found:
        print(line)
    problems = (
        f"{len(problems_found):,} problem{'s' if problems_found[1:] else ''}"
        if problems_found
        else "nothing to complain about"
    )
    print(f"{path}: {problems}")
    if problems_found:  # for who reads the errors alone
        say(f"opcast: {path}: {problems}")
    return 2 if problems_found else 0


# --- profiles ------------------------------------------------------------------------------------------


def link(config: dict[str, Any]) -> int:
    """Profiles, with host traces where there are any, as execution traces in a folder."""
    from ..datasets.traces import protobuf
    from ..datasets.traces.groups import groups_text, write_groups
    from ..datasets.traces.linking import link_files

    path = given(config, "path", "the profiler's trace, or a folder with one of each rank")
    output = folder_at("output", given(config, "output", "the folder to write to"))
    hosts = files_of(Path(str(config["host"])).expanduser()) if config["host"] else []
    traces, reports, groups = link_files(files_of(path), hosts)
    for rank, trace in traces.items():
        protobuf.write(output / f"linked.{rank}.et", trace)
    known = {name: ranks for name, ranks in groups.items() if set(ranks) <= set(traces)}
    write_groups(output, groups_text(known))
    if wants_json(config):
        print_json({"output": str(output), "ranks": {rank: asdict(each) for rank, each in reports.items()}})
        return 0
    rows = [linked_row(rank, report) for rank, report in list(reports.items())[:SHOWN]]
    heads = ("rank", "nodes", "kernels with a launch", "host events in the host trace", "edges", "gaps")
    table(f"{output}: {counted(len(traces), 'rank')}", heads, rows)
    for rank, each in reports.items():
        if each.note:
            say(f"rank {rank}: {each.note}")
    return 0


def linked_row(rank: int, report: LinkReport) -> tuple[object, ...]:
    """What was linked of a rank, as cells."""
    launched, matched = f"{report.launched:,} of {report.kernels:,}", f"{report.matched:,} of {report.operators:,}"
    edges = sum(report.edges.values())
    return rank, f"{report.nodes:,}", launched, matched, f"{edges:,}", time_text(report.gap_us)


def analyse(config: dict[str, Any]) -> int:
    """What the ranks of a run did, as recorded; beside another run where one is named."""
    from ..simulator.execution import analysis, tables, usage

    path = given(config, "path", "an execution trace or profile, or a folder of them")
    found = run_at(path)
    accounts = analysis.recorded_accounts(found)
    sizes = analysis.communication_by_size(found)
    late = analysis.late_ranks(found) if len(found.traces) > 1 else []
    held, unequal = usage.trace_memory(found), usage.imbalances(accounts)
    other = Path(str(config["other"])).expanduser() if config["other"] else None
    others = analysis.recorded_accounts(run_at(other)) if other else []
    compared = analysis.compare_classes(accounts, others) if other else []
    if config["report"]:
        from ..simulator.html.page import write
        from ..simulator.html.traces import page

        file = Path(str(config["report"])).expanduser()
        name = other.name if other else ""
        made = page(path.name, accounts, sizes, late, compared, name, held, unequal, others)
        say(f"report: {write(made, file)}")
    if wants_json(config):
        keys = ("class", "count", "total_us", "other_count", "other_total_us")
        parts = {"by_rank": accounts, "by_size": sizes, "late": late, "memory": held, "imbalance": unequal}
        answer: dict[str, Any] = {name: [asdict(each) for each in part] for name, part in parts.items()}  # type: ignore[attr-defined]
        side = {"compared": [dict(zip(keys, row, strict=True)) for row in compared],
                "other_by_rank": [asdict(each) for each in others], "cdf_shares": analysis.CDF_SHARES}  # fmt: skip
        print_json({**answer, **side})
    else:
        show_accounts(path, accounts)
        largest = sorted(sizes, key=lambda each: -each.total_us)[:SHOWN]
        show(tables.size_table(largest))
        show(tables.late_table(late[:SHOWN] if any(each.waited_us > 0 for each in late) else ()))
        show(tables.memory_table(held[:SHOWN]))
        show(tables.imbalance_table(unequal[:SHOWN]))
        show(tables.compared_table(compared, other))
    return 0


def explain(config: dict[str, Any]) -> int:
    """Why a measured step takes longer than predicted, the largest cause first."""
    from ..simulator.execution import explanation

    predicted = run_at(given(config, "predicted", "the traces that `opcast simulate chakra=DIR` wrote"))
    path = given(config, "measured", "a profile or execution traces of the same step")
    measured = run_at(path)
    sighted(measured, path)
    steps = whole(BadInputError, "steps", config["steps"], 1)
    gap_causes = explanation.explain(
        predicted, measured, steps=steps, paths=(str(config["predicted"]), str(config["measured"]))
    )
    if wants_json(config):
        print_json({"gap_us": gap_causes.measured_us - gap_causes.predicted_us, **asdict(gap_causes)})
        return 0
    gap = gap_causes.measured_us - gap_causes.predicted_us
    rows = [(c.cause, c.what, time_text(c.predicted_us), time_text(c.measured_us), time_text(c.difference_us))
            for c in gap_causes.causes[:SHOWN]]  # fmt: skip
    title = f"predicted {time_text(gap_causes.predicted_us)}, measured {time_text(gap_causes.measured_us)}"
    table(f"{title}: {time_text(gap)} more", ("cause", "what", "predicted", "measured", "difference"), rows)
    for cause, advice in dict.fromkeys((c.cause, c.advice) for c in gap_causes.causes[:SHOWN]):
        say(f"{cause}: {advice}")
    return 0


def collect(config: dict[str, Any]) -> int:
    """Run a PyTorch program and record its host trace and profile."""
    from ..harness.collecting import run_program

    program = given(config, "path", "the Python program to run")
    output = given(config, "output", "the folder to write to")
    run_program(program, [str(each) for each in config["arguments"] or ()], output)
    line = f"recorded in {output}: opcast trace link path={output}/profile host={output}/host output=DIR"
    return tell(config, {"output": str(output)}, line)


def show_accounts(path: Path, accounts: Sequence[RankAccount]) -> None:
    """The accounts as tables."""
    rows = []
    for each in accounts[:SHOWN]:
        parts = [time_text(us) for us in (each.compute_us, each.exposed_us, each.idle_us)]
        rows.append((each.rank, time_text(each.total_us), *(["not recorded"] * 3 if each.blind else parts)))
    table(
        f"{path}: {counted(len(accounts), 'rank')}", ("rank", "time", "compute", "exposed communication", "idle"), rows
    )
    if lacking := [(each.rank, each.note) for each in accounts if each.note]:
        table("what is missing", ("rank", "note"), lacking[:SHOWN])
    from ..simulator.execution import tables

    first = accounts[0]
    mean, most = first.parents
    title = f"rank {first.rank} by class; a node waits for {mean:.2f} others on average, {most} at most"
    show(tables.class_table(first, title), empty=True)
