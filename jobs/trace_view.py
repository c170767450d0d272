"""``opcast trace view`` and ``reconstruct``: graphs, timelines and the order of a trace's nodes."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from ..datasets.counts import counted
from ..simulator.report.view import time_text
from .show import BadInputError, print_json, say, table, wants_json
from .trace_files import given, run_at, tell
from .trace_replay import node_range
from .writing import write, write_text

GRAPHS = (".dot", ".graphml")
TIMELINES = (".json", ".json.gz")
SHOWN = 20


def view(config: dict[str, Any]) -> int:
    """A graph (``.dot``, ``.graphml``), a timeline for Perfetto (``.json.gz``), or a folder of timelines for HTA."""
    from ..simulator.execution import views
    from ..simulator.formats.kineto import write_kineto
    from ..simulator.formats.perfetto import write_trace

    path = given(config, "path", "an execution trace or profile, or a folder of them")
    output = given(config, "output", "what to write: .dot, .graphml, .json.gz, or a folder")
    run = run_at(path)
    if output.suffix in GRAPHS:
        rank = min(run.traces)
        trace = run.traces[rank]
        graph = views.window_graph(trace, run.label(rank), node_range(config["nodes"]))
        text = views.dot(trace, graph) if output.suffix == ".dot" else views.graphml(trace, graph)
        write_text("output", output, text)
        summary = f"{len(graph.rows):,} nodes and {len(graph.edges):,} edges of rank {rank}"
    elif output.name.endswith(TIMELINES):
        write_trace(output, views.tracks(run))
        summary = f"{counted(len(run.traces), 'rank')}, for https://ui.perfetto.dev"
    elif output.suffix or output.is_file():
        raise BadInputError(f"output={output} must end in {', '.join((*GRAPHS, *TIMELINES))}, or be a folder")
    else:
        for rank, trace in run.traces.items():
            spans, total_us = views.kernels(trace)
            write_kineto(output / f"rank{rank}.json.gz", rank, len(run.traces), spans, total_us)
        summary = f"{counted(len(run.traces), 'rank')}, for HolisticTraceAnalysis"
    return tell(config, {"output": str(output), "shown": summary}, f"{output}: {summary}")


def reconstruct(config: dict[str, Any]) -> int:
    """The order in which all nodes run, with the times that a simulation gives them; as CSV where output is named."""
    from ..simulator.execution.run import simulate_run
    from ..simulator.execution.views import ScheduledNode, schedule

    path = given(config, "path", "an execution trace or profile, or a folder of them")
    simulated = simulate_run(run_at(path), policy=str(config["policy"]))
    if config["output"]:
        import csv

        def fill(temporary: Path) -> None:
            with open(temporary, "w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(ScheduledNode._fields)
                writer.writerows(schedule(simulated))

        say(f"order: {write('output', Path(str(config['output'])).expanduser(), fill)}")
    first = [entry._asdict() for entry in islice(schedule(simulated), SHOWN)]
    total = simulated.executions.total_us
    if wants_json(config):
        print_json({"total_us": total, "nodes": sum(map(len, simulated.run.traces.values())), "first": first})
    else:
        rows = [(entry["node"], entry["rank"], entry["name"][:60], entry["sort"], time_text(entry["ready_us"]),
                 time_text(entry["start_us"]), time_text(entry["end_us"])) for entry in first]  # fmt: skip
        table(f"{path}: {time_text(total)}, the first nodes",
              ("node", "rank", "name", "class", "ready", "starts", "ends"), rows)  # fmt: skip
    return 0
