"""``opcast trace``: execution traces, one sub-command for each thing that is done with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets.loading import nearest, whole
from .show import BadInputError, microseconds, print_json, say, table, wants_json
from .trace_files import files_of, given, run_at, sighted

if TYPE_CHECKING:
    from ..datasets.traces.linking import LinkReport
    from ..simulator.execution.analysis import LateRank, RankAccount, SizeShare
    from ..simulator.execution.usage import Imbalance, TraceMemory

SUBJECT = "what"
SHOWN = 12  # rows of a table


def run(config: dict[str, Any]) -> int:
    """Do what was asked; returns the exit code."""
    wants_json(config)
    doing = DOING.get(str(config["what"]))
    if doing is None:
        raise BadInputError(f"`opcast trace` cannot {config['what']!r}; {nearest(config['what'], DOING, 'it can')}")
    return doing(config)


def check(config: dict[str, Any]) -> int:
    """Each problem of a trace or of a folder of traces as a line; exit code 2 when there are any."""
    from ..datasets.traces.checks import problems

    path = given(config, "path", "the trace, or a folder of NAME.RANK.et")
    found = problems(path)
    for line in found:
        say(f"opcast: {line}")
    if wants_json(config):
        print_json({"path": str(path), "problems": found, **({"error": found[0]} if found else {})})
    elif not found:
        say(f"{path}: nothing to complain about")
    return 2 if found else 0


def convert(config: dict[str, Any]) -> int:
    """A trace in another form."""
    from .trace_convert import run as converted

    return converted(config)


# --- profiles ------------------------------------------------------------------------------------------


def link(config: dict[str, Any]) -> int:
    """Profiles, with host traces where there are any, as execution traces in a folder."""
    from ..datasets.traces import protobuf
    from ..datasets.traces.groups import GROUPS_FILE
    from ..datasets.traces.linking import link_files

    path = given(config, "path", "the profiler's trace, or a folder with one of each rank")
    output = given(config, "output", "the folder to write to")
    if output.exists() and not output.is_dir():
        raise BadInputError(f"output={output} is a file; name a folder")
    hosts = files_of(Path(str(config["host"])).expanduser()) if config["host"] else []
    traces, reports, groups = link_files(files_of(path), hosts)
    for rank, trace in traces.items():
        protobuf.write(output / f"linked.{rank}.et", trace)
    known = {name: ranks for name, ranks in groups.items() if set(ranks) <= set(traces)}
    (output / GROUPS_FILE).write_text(json.dumps({name: list(ranks) for name, ranks in known.items()}) + "\n")
    if wants_json(config):
        print_json({"output": str(output), "ranks": {rank: asdict(each) for rank, each in reports.items()}})
        return 0
    rows = [linked_row(rank, report) for rank, report in list(reports.items())[:SHOWN]]
    heads = ("rank", "nodes", "kernels with a launch", "host events in the host trace", "edges", "gaps")
    table(f"{output}: {len(traces):,} ranks", heads, rows)
    for rank, each in reports.items():
        if each.note:
            say(f"rank {rank}: {each.note}")
    return 0


def linked_row(rank: int, report: LinkReport) -> tuple[object, ...]:
    """What was linked of a rank, as cells."""
    launched, matched = f"{report.launched:,} of {report.kernels:,}", f"{report.matched:,} of {report.operators:,}"
    edges = sum(report.edges.values())
    return rank, f"{report.nodes:,}", launched, matched, f"{edges:,}", microseconds(report.gap_us)


def analyse(config: dict[str, Any]) -> int:
    """What the ranks of a run did, as recorded; beside another run where one is named."""
    from ..simulator.execution import analysis, usage

    path = given(config, "path", "an execution trace or profile, or a folder of them")
    found = run_at(path)
    accounts = analysis.accounts(found)
    sizes = analysis.by_size(found)
    late = analysis.late_ranks(found) if len(found.traces) > 1 else []
    held, unequal = usage.memory(found), usage.imbalances(accounts)
    other = Path(str(config["other"])).expanduser() if config["other"] else None
    others = analysis.accounts(run_at(other)) if other else []
    compared = analysis.compared(accounts, others) if other else []
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
        show(path, accounts)
        show_communication(sizes, late)
        show_usage(held, unequal)
        if compared:
            rows = [(n, f"{c:,}", microseconds(us), f"{o:,}", microseconds(there)) for n, c, us, o, there in compared]
            table(f"beside {other}, means over ranks", ("class", "nodes", "time", "nodes there", "time there"), rows)
    return 0


def explain(config: dict[str, Any]) -> int:
    """Why a measured step takes longer than predicted, the largest cause first."""
    from ..simulator.execution import explaining

    predicted = run_at(given(config, "predicted", "the traces that `opcast simulate chakra=DIR` wrote"))
    path = given(config, "measured", "a profile or execution traces of the same step")
    measured = run_at(path)
    sighted(measured, path)
    steps = whole(BadInputError, "steps", config["steps"], 1)
    found = explaining.explain(
        predicted, measured, steps=steps, paths=(str(config["predicted"]), str(config["measured"]))
    )
    if wants_json(config):
        print_json({"gap_us": found.measured_us - found.predicted_us, **asdict(found)})
        return 0
    gap = found.measured_us - found.predicted_us
    rows = [(c.cause, c.what, microseconds(c.predicted_us), microseconds(c.measured_us), microseconds(c.difference_us))
            for c in found.causes[:SHOWN]]  # fmt: skip
    title = f"predicted {microseconds(found.predicted_us)}, measured {microseconds(found.measured_us)}"
    table(f"{title}: {microseconds(gap)} more", ("cause", "what", "predicted", "measured", "difference"), rows)
    for cause, advice in dict.fromkeys((c.cause, c.advice) for c in found.causes[:SHOWN]):
        say(f"{cause}: {advice}")
    return 0


def collect(config: dict[str, Any]) -> int:
    """Run a PyTorch program and record its host trace and profile."""
    from ..harness.collecting import run_program

    program = given(config, "path", "the Python program to run")
    output = given(config, "output", "the folder to write to")
    run_program(program, [str(each) for each in config["arguments"] or ()], output)
    if wants_json(config):
        print_json({"output": str(output)})
    else:
        say(f"recorded in {output}: opcast trace link path={output}/profile host={output}/host output=DIR")
    return 0


def replay(config: dict[str, Any]) -> int:
    """Do again what a trace did."""
    from .trace_replay import run as replayed

    return replayed(config)


def generate(config: dict[str, Any]) -> int:
    """Draw synthetic traces."""
    from .trace_make import generate as made

    return made(config)


def calibrate(config: dict[str, Any]) -> int:
    """A calibration of one's own run."""
    from .trace_calibrate import run as calibrated

    return calibrated(config)


def view(config: dict[str, Any]) -> int:
    """A graph or a timeline."""
    from .trace_view import view as viewed

    return viewed(config)


def reconstruct(config: dict[str, Any]) -> int:
    """The order of all nodes."""
    from .trace_view import reconstruct as made

    return made(config)


def measure(config: dict[str, Any]) -> int:
    """A profile's rows into the store."""
    from .trace_measure import run as measured

    return measured(config)


def show(path: Path, accounts: Sequence[RankAccount]) -> None:
    """The accounts as tables."""
    rows = []
    for each in accounts[:SHOWN]:
        parts = [microseconds(us) for us in (each.compute_us, each.exposed_us, each.idle_us)]
        rows.append((each.rank, microseconds(each.total_us), *(["not recorded"] * 3 if each.blind else parts)))
    table(f"{path}: {len(accounts):,} ranks", ("rank", "time", "compute", "exposed communication", "idle"), rows)
    if lacking := [(each.rank, each.note) for each in accounts if each.note]:
        table("what is missing", ("rank", "note"), lacking[:SHOWN])
    first = accounts[0]
    shares = [(s.name, f"{s.count:,}", microseconds(s.total_us), *(microseconds(us) for us in s.quantiles_us))
              for s in first.classes]  # fmt: skip
    mean, most = first.parents
    title = f"rank {first.rank} by class; a node waits for {mean:.2f} others on average, {most} at most"
    table(title, ("class", "nodes", "time", "10 %", "median", "90 %", "99 %"), shares)


def show_communication(sizes: Sequence[SizeShare], late: Sequence[LateRank]) -> None:
    """Communication by size, and who came last to it, as tables."""
    if sizes:
        largest = sorted(sizes, key=lambda each: -each.total_us)[:SHOWN]
        rows = [(s.name, f"{s.size_bytes:,}", f"{s.count:,}", microseconds(s.total_us)) for s in largest]
        table("communication by size, of all ranks", ("collective", "bytes up to", "calls", "time"), rows)
    if any(each.waited_us > 0 for each in late):
        came = [(e.rank, f"{e.calls:,}", microseconds(e.waited_us)) for e in late[:SHOWN]]
        table("stragglers", ("rank", "last to arrive", "the others waited"), came)


def show_usage(held: Sequence[TraceMemory], unequal: Sequence[Imbalance]) -> None:
    """Memory and imbalance as tables."""
    if held:
        peaks = [(m.rank, m.device, f"{m.storages:,}", f"{m.peak_bytes / 2**20:,.4g} MiB", m.peak_node)
                 for m in held[:SHOWN]]  # fmt: skip
        table("tensors", ("rank", "device", "storages", "peak", "at node"), peaks)
    if unequal:
        rows = [(i.name, microseconds(i.mean_us), microseconds(i.most_us), i.rank) for i in unequal[:SHOWN]]
        table("how unequal ranks are", ("class", "mean", "most", "rank"), rows)


DOING: dict[str, Callable[[dict[str, Any]], int]] = {
    "check": check,
    "convert": convert,
    "link": link,
    "analyse": analyse,
    "collect": collect,
    "explain": explain,
    "replay": replay,
    "generate": generate,
    "calibrate": calibrate,
    "view": view,
    "reconstruct": reconstruct,
    "measure": measure,
}
