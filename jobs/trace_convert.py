"""``opcast trace convert``: traces in another form, checked and without dependencies that others imply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets.counts import counted
from ..datasets.loading import flag
from ..datasets.traces.dependencies import sorted_dependencies
from ..datasets.traces.schema import TraceFileError
from . import trace_make
from .show import BadInputError
from .trace_files import given, tell

if TYPE_CHECKING:
    from ..datasets.traces.groups import RankedTraces

FORMS = (".et", ".et.gz", ".json")


def run(config: dict[str, Any]) -> int:
    """One trace to a file, a folder of them to a folder; SimAI's workload files to traces, and traces to such."""
    path = given(config, "path", "the trace to convert, or a folder of NAME.RANK.et")
    output = given(config, "output", "what to write: .et, .et.gz, .json, .txt for SimAI, or of a folder a folder")
    if path.name.endswith(trace_make.WORKLOADS):
        return trace_make.to_traces(config, path, output)
    if output.name.endswith(trace_make.WORKLOADS):
        return trace_make.to_workload(config, path, output)
    if not path.is_dir() and not output.name.endswith(FORMS):
        raise BadInputError(f"output={output} must end in {', '.join(FORMS)} or .txt")
    if path.is_dir() and output.name.endswith(FORMS):
        raise BadInputError(f"path={path} is a folder: name a folder as output, or one trace of it as path")
    run_traces, left_out = convert_run(config, path)
    write(run_traces, path, output)
    nodes = sum(map(len, run_traces.traces.values()))
    plain = {"path": str(path), "output": str(output), "ranks": len(run_traces.traces), "nodes": nodes}
    more = f", without {left_out:,} dependencies that others imply" if left_out else ""
    return tell(config, {**plain, "implied": left_out}, f"{output}: {counted(nodes, 'node')}{more}")


def convert_run(config: Mapping[str, Any], path: Path) -> tuple[RankedTraces, int]:
    """The traces to write, and how many dependencies were left out. TraceFileError names the node that is wrong."""
    from ..datasets.traces.checks import check_ranks, check_structure
    from ..datasets.traces.pruning import prune
    from ..simulator.execution.run import read_run

    run_traces = read_run(path)
    if flag(BadInputError, "validate", config["validate"]):
        wrong = [
            line
            for rank, trace in run_traces.traces.items()
            for line in check_structure(trace, run_traces.label(rank), control=False)
        ]
        if wrong := wrong or check_ranks(run_traces):
            more = f" (and {len(wrong) - 1:,} more: `opcast trace check path={path}`)" if wrong[1:] else ""
            raise TraceFileError(f"{wrong[0]}{more}; validate=false converts it as it is")
    if not flag(BadInputError, "prune", config["prune"]):
        return run_traces, 0
    traces, count = {}, 0
    for rank, trace in run_traces.traces.items():
        traces[rank], left_out = prune(trace, *sorted_dependencies(trace, run_traces.label(rank)))
        count += left_out
    return replace(run_traces, traces=traces), count


def write(run_traces: RankedTraces, path: Path, output: Path) -> None:
    """Write one trace to a file, or a run to a folder."""
    from ..datasets.traces import json_forms, protobuf
    from ..datasets.traces.group_names import with_numbered_groups

    if path.is_dir():
        trace_make.write_run(with_numbered_groups(run_traces), trace_make.folder("output", output), path.name or "run")
        return
    trace = next(iter(run_traces.traces.values()))
    if output.name.endswith(".json"):
        json_forms.write_json(output, trace)
    else:
        protobuf.write(output, trace)
