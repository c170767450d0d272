"""Every real trace of the reference data: read, linked where it is a profile, converted, simulated; its totals beside
those of the profiler.

    python tests/benchmarks/real_traces.py [FOLDER] [--json]

Totals are the time in which each stream computes, and in which it communicates: simulated as recorded, and as the
profiler's events have it. Exit code 1 where a file cannot be done, or a total is more than 2 % off.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from opcast.datasets.traces import protobuf
from opcast.datasets.traces.checks import check_structure
from opcast.datasets.traces.classes import CLASSES, class_codes, is_network
from opcast.datasets.traces.dependencies import sorted_dependencies
from opcast.datasets.traces.groups import RankedTraces
from opcast.datasets.traces.json_forms import is_profile
from opcast.datasets.traces.linking import link_profile
from opcast.datasets.traces.matching import match_host
from opcast.datasets.traces.profiles import Profile, is_collective, read_profile
from opcast.datasets.traces.pruning import prune
from opcast.datasets.traces.reading import read_trace
from opcast.datasets.traces.schema import TraceFileError
from opcast.datasets.traces.table import ExecutionTrace
from opcast.simulator.execution.analysis import covered_us
from opcast.simulator.execution.run import SimulatedRun, simulate_run

REFERENCE = Path(os.environ.get("OPCAST_REFERENCE") or Path(__file__).resolve().parents[3] / "shared")
BOUND = 0.02
PAIRS = {"hta/benchmark_simple_add_trace.json.gz": "hta/benchmark_simple_add_et.json.gz",
         "param/linear_kineto.json.gz": "param/linear_et.json.gz",
         "hta/nccl_data.json.gz": "param/resnet_1gpu_et.1.0.3-chakra.0.0.4.json.gz",
         "param/dlrm_kineto.tar.gz": "param/dlrm_pytorch_et.tar.gz"}  # fmt: skip


@dataclass(frozen=True)
class FileResult:
    """What became of one file: nodes, dependencies that others imply, and simulated over recorded totals."""

    file: str
    what: str
    nodes: int = 0
    matched: str = ""
    implied: int = 0
    compute_us: float = 0.0
    compute_off: float = 0.0
    communication_us: float = 0.0
    communication_off: float = 0.0
    seconds: float = 0.0
    problem: str = ""


def members(path: Path, folder: Path) -> list[Path]:
    """The traces of a file: itself, or what an archive holds."""
    if not path.name.endswith((".tar.gz", ".tgz")):
        return [path]
    place = folder / path.name
    with tarfile.open(path) as packed:
        packed.extractall(place, filter="data")
    found = [each for each in sorted(place.rglob("*")) if each.name.endswith((".json", ".et", ".json.gz"))]
    return [each for each in found if not each.name.startswith(".")]


def recorded(profile: Profile, network: bool) -> float:
    """Time in which streams compute, or communicate, as the profiler has it; each stream by itself."""
    lanes: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for event in profile.device:
        if is_collective(event) == network:
            key = str(event["args"].get("device")), str(event["args"].get("stream"))
            lanes.setdefault(key, []).append((float(event["ts"]), float(event["ts"]) + float(event["dur"])))
    return sum(covered_us(*np.array(spans).T) for spans in lanes.values())


def simulated(made: SimulatedRun, trace: ExecutionTrace, network: bool) -> float:
    """The same of the simulated run."""
    codes = class_codes(trace)
    mine = is_network(codes) if network else ~is_network(codes)
    on_device = ~np.isin(codes, [CLASSES.index("host"), CLASSES.index("gap"), CLASSES.index("metadata")])
    node = made.joint.node[0]
    start, end = made.executions.start_us[node], made.executions.end_us[node]
    streams = trace.column("stream", -1, "int64")
    rows = mine & on_device & (streams >= 0)
    return sum(covered_us(start[rows & (streams == each)], end[rows & (streams == each)])
               for each in np.unique(streams[rows]))  # fmt: skip


def result(path: Path, name: str, host: Path | None, folder: Path) -> FileResult:
    """What becomes of one trace."""
    began = time.process_time()
    compute = communication = (0.0, 0.0)
    matched = ""
    if path.name.endswith((".json", ".json.gz")) and is_profile(path):
        profile = read_profile(path)
        pair = match_host(profile.host, read_trace(host), host) if host else None
        trace, report = link_profile(profile, pair)
        matched = f"{report.matched:,} of {report.operators:,}" if host else ""
        what = "profile" + (" and host trace" if host else "")
        made = simulate_run(RankedTraces({0: trace}))
        compute, communication = (
            (recorded(profile, network), simulated(made, trace, network)) for network in (False, True)
        )
    else:
        trace, what = read_trace(path), "execution trace"
        simulate_run(RankedTraces({0: trace}))
    wrong = check_structure(trace, name, control=False)
    fewer, implied = prune(trace, *sorted_dependencies(trace, name))
    again = protobuf.read(protobuf.write(folder / "out.et", fewer))
    assert again.ids.tolist() == trace.ids.tolist()
    assert again.exact_us.tolist() == trace.exact_us.tolist()
    off = [after / before - 1 if before else 0.0 for before, after in (compute, communication)]
    return FileResult(name, what, len(trace), matched, implied, compute[0], off[0], communication[0], off[1],
                      time.process_time() - began, wrong[0] if wrong else "")  # fmt: skip


def results(root: Path) -> Iterator[FileResult]:
    """All files of a folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hosts = {
            key: members(root / value, folder / "hosts") for key, value in PAIRS.items() if (root / value).exists()
        }
        for path in sorted(root.glob("*/*")):
            key = str(path.relative_to(root))
            for place, each in enumerate(members(path, folder)):
                shown = key if each == path else f"{key}: {each.name}"
                pairs = hosts.get(key)
                try:
                    yield result(each, shown, pairs[place] if pairs else None, folder)
                except (TraceFileError, AssertionError) as error:
                    yield FileResult(shown, "", problem=str(error)[:200] or type(error).__name__)


def main(arguments: Sequence[str]) -> int:
    """Print all; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=str(REFERENCE / "data" / "traces"))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    found = []
    for each in results(Path(given.folder)):
        found.append(each)
        if not given.json:
            print(f"{each.file:75s} {each.what:23s} {each.nodes:8,} nodes {each.implied:6,} implied  "
                  f"compute {each.compute_us:12,.1f} us {each.compute_off:+.3%}  communication "
                  f"{each.communication_us:12,.1f} us {each.communication_off:+.3%}  {each.matched}{each.problem}",
                  flush=True)  # fmt: skip
    if given.json:
        print(json.dumps([asdict(each) for each in found]))
    bad = [each for each in found if each.problem or max(abs(each.compute_off), abs(each.communication_off)) > BOUND]
    print(f"{len(found):,} traces, {len(bad):,} of them not within {BOUND:.0%}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
