"""``opcast trace generate``, and ``convert`` between traces and SimAI's workload files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..datasets.counts import counted
from ..datasets.traces import protobuf
from ..datasets.traces.groups import RankedTraces, groups_text, write_groups
from .show import BadInputError
from .trace_files import given, tell
from .writing import folder_at, write_text

WORKLOADS = (".txt", ".csv")


def folder(setting: str, path: Path) -> Path:
    """A folder to write to. BadInputError where a file stands, or one of its traces would be mixed with others."""
    if folder_at(setting, path).is_dir() and any(path.glob("*.et*")):
        raise BadInputError(f"{setting}={path} holds traces already; name a new folder")
    return path


def write_run(run: RankedTraces, target: Path, name: str) -> int:
    """Write the traces of a run as ``NAME.RANK.et`` beside ``comm_group.json``; how many nodes."""
    for rank, trace in run.traces.items():
        protobuf.write(target / f"{name}.{rank}.et", trace)
    write_groups(target, groups_text(run.members))
    return sum(map(len, run.traces.values()))


def generate(config: dict[str, Any]) -> int:
    """Draw synthetic traces; returns the exit code."""
    from ..simulator.execution.synthetic import generate as made
    from ..simulator.execution.synthetic import load_synthetic

    target = folder("output", given(config, "output", "the folder to write to"))
    synthetic = load_synthetic(config["generate"])
    nodes = write_run(made(synthetic), target, "synthetic")
    return show_written(config, target, nodes, synthetic.ranks)


def to_traces(config: dict[str, Any], path: Path, output: Path) -> int:
    """A workload file of SimAI as traces; returns the exit code."""
    from ..simulator.execution.simai import traces_of
    from ..simulator.formats.simai import read_workload
    from .workload_file import check_file

    run = traces_of(read_workload(check_file(read_workload, path, "path")))
    return show_written(config, output, write_run(run, folder("output", output), path.stem), len(run.traces))


def to_workload(config: dict[str, Any], path: Path, output: Path) -> int:
    """Traces as a workload file of SimAI; returns the exit code."""
    from ..simulator.execution.run import read_run
    from ..simulator.execution.simai import workload_of
    from ..simulator.formats.simai import write_workload

    run = read_run(path)
    write_text("output", output, write_workload(workload_of(run)))
    return show_written(config, output, sum(map(len, run.traces.values())), len(run.traces))


def show_written(config: dict[str, Any], target: Path, nodes: int, ranks: int) -> int:
    """Say what was written."""
    line = f"{target}: {counted(nodes, 'node')} of {counted(ranks, 'rank')}"
    return tell(config, {"output": str(target), "nodes": nodes, "ranks": ranks}, line)
