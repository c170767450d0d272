"""What nccl-tests (and rccl-tests) measured: the text it prints or the JSON of ``-J``, one or more runs in a file.

:mod:`.nccl_output` reads both. A run is taken only if it tells one story: its ranks are numbered as those of one
program, and what it prints of bandwidth is that of its sizes, times and ranks. Sizes are bytes and times microseconds
already. Out-of-place and in-place times of one size are repeats of one op.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..device_names import cuda_device_id, unknown_name
from ..devices import DeviceError
from ..dtypes import canonical_dtype
from ..loading import choice
from ..ops import LINKS, bus_factor
from .nccl_output import Line, NcclTiming, ProgramRun, Rank, missing_rank, runs
from .options import ImportOptions
from .tables import Rejected, RowBatch, SourceError
from .text_files import content, listed, moment, written_at

VERSION = 1
OPTIONS = {
    "collective": "all_reduce, all_gather, …, where the output does not tell",
    "link": f"{', '.join(LINKS)}: slowest link crossed; else nvlink or pcie inside a node, ib between nodes",
    "device": "device, where its name in the output is not known",
    "measured_at": "date of the runs (2025-01-31), else that of the file",
}
MEANING = ("collective", "link", "device", "measured_at")
COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "send_recv",
    "send_recv": "send_recv",
}
WITHOUT_MPI = "Build nccl-tests with MPI support (make MPI=1), and start it by mpirun or srun"
DTYPES = {"f8e4m3": "fp8", "f8e5m2": "fp8_e5m2", "uint32": "int32", "uint64": "int64"}


def files(path: Path | None, options: ImportOptions) -> list[Path]:
    """Texts and JSON files at or below ``path``."""
    if options.collective is not None:
        choice(SourceError, "collective", options.collective, tuple(COLLECTIVES))
    endings = ("*.txt", "*.log", "*.out", "*.json")
    return listed(path, (*endings, *(f"{ending}.gz" for ending in endings)), "the output of nccl-tests")


def read(file: Path, options: ImportOptions) -> Iterator[RowBatch]:
    """Rows of every run in one file. SourceError for what is no output of nccl-tests."""
    program_runs = runs(content(file).decode("utf-8", "replace"))
    if not program_runs:
        raise SourceError(f"{file.name} holds no table of nccl-tests (a line of size, count, type, …, time, algbw)")
    for run in program_runs:
        try:
            yield from _batches(run, file, options)
        except SourceError as error:
            yield RowBatch(rejected=(Rejected(str(error), max(len(run.lines), 1), file.name),))


def _batches(run: ProgramRun, file: Path, options: ImportOptions) -> Iterator[RowBatch]:
    """The rows of one run, and those refused. SourceError where none of them can be used."""
    name = options.collective or run.collective or _named(file)
    if name not in COLLECTIVES:
        raise SourceError(
            f"{name}_perf is no collective of opcast's" if name else "the collective is not told: say collective=…"
        )
    if run.of_cpu:
        raise SourceError("the time is that of the CPU (-C)")
    shared = _conditions(run, options)
    rows, refused = _rows(run.lines, COLLECTIVES[name], shared["ranks"])
    yield RowBatch(rejected=tuple(Rejected(why, count, f"{name} in {file.name}") for why, count in refused.items()))
    if rows:
        sizes, dtypes, times = zip(*rows, strict=True)
        when = options.measured_at or run.started
        shared["measured_at"] = moment(when) if when else written_at(file)
        yield RowBatch(
            COLLECTIVES[name],
            {"size_bytes": list(sizes), "dtype": list(dtypes), "latency_us": list(times), **shared},
        )


def _rows(lines: list[Line], kind: str, ranks: int) -> tuple[list[tuple[int, str, float]], Counter[str]]:
    """(bytes, dtype, microseconds) of every timing that can be used, and why others cannot."""
    rows, refused = [], Counter[str]()
    for line in lines:
        dtype = _dtype(line.type)
        if not line.timings or dtype is None:
            refused["the line is cut off or has an unknown type"] += 1
            continue
        checked = any(timing.wrong != "N/A" for timing in line.timings)
        for timing in line.timings:
            if why := _refusal(timing, line.size_bytes, checked, kind, ranks):
                refused[why] += 1
            else:
                rows.append((line.size_bytes, dtype, float(timing.time)))
    return rows, refused


def _refusal(timing: NcclTiming, size_bytes: int, checked: bool, kind: str, ranks: int) -> str:
    """Why one timing cannot be used; "" where it can. ``checked``: whether results of its size were looked at."""
    if timing.wrong != "N/A" and float(timing.wrong) != 0:
        return "wrong results"
    if timing.wrong == "N/A" and checked:
        return "in-place, where the collective has no in-place form"
    if size_bytes == 0:
        return "nothing was sent (size 0)"
    if not timing.agrees(size_bytes):
        return "the printed algbw is not the size over the time"
    if not timing.bus_agrees(float(bus_factor(kind, ranks))):
        if float(timing.busbw) == 0:
            return f"busbw is 0 beside {ranks} ranks: each process ran alone. {WITHOUT_MPI}"
        return f"the printed busbw is not that of {ranks} ranks (algbw times {float(bus_factor(kind, ranks)):.4g})"
    return ""


def _conditions(run: ProgramRun, options: ImportOptions) -> dict[str, Any]:
    """Group, link, device, library of one run. SourceError where the output does not tell."""
    nodes, per_node = _spread(run.ranks)
    if nodes * per_node == 1:
        raise SourceError("one rank exchanges nothing: no collective")
    names = {rank.device for rank in run.ranks}
    if len(names) > 1:
        raise SourceError(f"it mixes devices: {', '.join(sorted(names))}")
    (name,) = names
    device_id = options.device_id or cuda_device_id(name)
    library = "rccl" if "AMD" in name else "nccl"
    return {
        "ranks": nodes * per_node,
        "ranks_per_node": per_node,
        "link": options.link or _link(device_id, name, nodes, options),
        "device_id": device_id,
        "device_name": name,
        "backend": f"{library}{'-' + run.nccl if run.nccl else ''}:{library}",
        "nccl": run.nccl,
        "timer": "cuda_graph" if run.graph else "imported",
    }


def _spread(ranks: list[Rank]) -> tuple[int, int]:
    """How many nodes a group has, and ranks on each. SourceError for ranks that are not those of one program."""
    if not ranks:
        raise SourceError("it does not list its ranks (lines of '# Rank …'): keep the whole output")
    number, times = Counter((rank.group, rank.number) for rank in ranks).most_common(1)[0]
    if times > 1:
        raise SourceError(f"rank {number[1]} is listed {times} times: each process ran alone. {WITHOUT_MPI}")
    if (missing := missing_rank(ranks)) is not None:
        raise SourceError(f"rank {missing} is not listed: keep the whole output")
    shapes = [Counter(rank.host for rank in ranks if rank.group == group) for group in {rank.group for rank in ranks}]
    counts = [sorted(shape.values()) for shape in shapes]
    if any(one != counts[0] for one in counts) or counts[0][0] != counts[0][-1]:
        raise SourceError("it spreads its ranks unevenly over nodes, which no op describes")
    return len(counts[0]), counts[0][0]


def _link(device_id: str, name: str, nodes: int, options: ImportOptions) -> str:
    if nodes > 1:
        return "ib"
    try:
        return "nvlink" if options.figures(device_id).link_gbps > 0 else "pcie"
    except DeviceError:
        raise SourceError(unknown_name(name)) from None


def _named(file: Path) -> str:
    """The collective that a file's name tells, or nothing."""
    stem = re.sub(r"[^a-z]+", "_", file.name.lower())
    return next((name for name in COLLECTIVES if re.search(rf"(?:^|_){name}(?:_|$)", stem)), "")


def _dtype(name: str) -> str | None:
    try:
        return canonical_dtype(DTYPES.get(name, name))
    except ValueError:
        return None
