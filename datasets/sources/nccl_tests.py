"""What nccl-tests (and rccl-tests) prints: one or more runs in a file, out-of-place and in-place.

Who took part stands in the ``# Rank … on <host> device …`` lines, the collective in ``# Collective test starting``, in
the command line where a log shows it, in the file's name, or is given. Sizes are bytes and times microseconds already.
Out-of-place and in-place times of one size are repeats of one op.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..device_names import cuda_device_id, unknown_gpu
from ..devices import DeviceError, load_device
from ..dtypes import canonical_dtype
from ..loading import choice
from ..ops import LINKS
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
DTYPES = {"f8e4m3": "fp8", "f8e5m2": "fp8_e5m2", "uint32": "int32", "uint64": "int64"}
PREFIX = re.compile(r"^(?:\[\d+,\d+\]<\w+>:\s?|\s*\d+:\s(?=\s*[#\d]))")  # of mpirun --tag-output and srun --label
RANK = re.compile(r"#\s+Rank\s+(\d+)(?:\s+Group\s+(\d+))?\s+Pid\s+\d+ on\s+(\S+)\s+device\s+\d+\s+\[[^]]*\]\s*(.*\S)")
ROW = re.compile(r"^\s*(\d+)\s+(\d+)\s+([a-z]\w*)\s+(.*)$")
PROGRAM = re.compile(r"\b([a-z_]+?)_perf\b")
LIBRARY = re.compile(r"nccl-library=(\d+)|NCCL version (\d+\.\d+\.\d+)")


@dataclass
class ProgramRun:
    """One run of one program: who took part, and the lines of its table."""

    collective: str = ""
    ranks: list[tuple[str, str, str]] = field(default_factory=list)  # group, host, device name
    columns: list[str] = field(default_factory=list)
    nccl: str | None = None
    graph: bool = False
    lines: list[str] = field(default_factory=list)


def files(path: Path | None, options: ImportOptions) -> list[Path]:
    """Text files at or below ``path``."""
    if options.collective is not None:
        choice(SourceError, "collective", options.collective, tuple(COLLECTIVES))
    return listed(path, ("*.txt", "*.log", "*.out", "*.txt.gz", "*.log.gz"), "the output of nccl-tests")


def read(file: Path, options: ImportOptions) -> Iterator[RowBatch]:
    """Rows of every run in one file. SourceError for a text that is no output of nccl-tests."""
    found = runs(content(file).decode("utf-8", "replace"))
    if not found:
        raise SourceError(f"{file.name} holds no table of nccl-tests (a line of size, count, type, …, time, algbw)")
    for run in found:
        yield from _batches(run, file, options)


def runs(text: str) -> list[ProgramRun]:
    """The runs of a text, in order; those without a table are left out."""
    made, run = [], ProgramRun()
    for raw in text.splitlines():
        line = PREFIX.sub("", raw)
        if run.columns and (RANK.search(line) or "# nThread" in line or "Collective test starting" in line):
            made.append(run)
            run = ProgramRun(collective=run.collective, nccl=run.nccl)
        _note(run, line)
    return [run for run in [*made, run] if run.columns]


def _note(run: ProgramRun, line: str) -> None:
    """Put what one line tells into a run."""
    if (rank := RANK.search(line)) is not None:
        run.ranks.append((rank[2] or "0", rank[3], rank[4]))
    elif (library := LIBRARY.search(line)) is not None:
        run.nccl = _version(int(library[1])) if library[1] else library[2]
    elif (graph := re.search(r"# nThread.*\bgraph:\s*(\d+)", line)) is not None:
        run.graph = int(graph[1]) > 0
    elif line.startswith("#") and {"size", "type"} <= set(line.split()) and "algbw" in line:
        run.columns = line.replace("#wrong", "wrong").lstrip("# ").split()
    elif run.columns and ROW.match(line):
        run.lines.append(line)
    elif not run.columns and (program := PROGRAM.search(line)) is not None:
        run.collective = program[1]


def _version(number: int) -> str:
    """NCCL_VERSION_CODE as a version: 22703 is 2.27.3, 2804 is 2.8.4."""
    base = 10000 if number >= 10000 else 1000
    return f"{number // base}.{number % base // 100}.{number % 100}"


def _batches(run: ProgramRun, file: Path, options: ImportOptions) -> Iterator[RowBatch]:
    """The rows of one run, and those refused."""
    name = options.collective or run.collective or _named(file)
    if name not in COLLECTIVES:
        what = f"{name}_perf is no collective of opcast's" if name else "the collective is not told: say collective=…"
        yield RowBatch(rejected=(Rejected(what, len(run.lines), file.name),))
        return
    if "time" not in run.columns:
        yield RowBatch(rejected=(Rejected("the time is that of the CPU (-C)", len(run.lines), file.name),))
        return
    rows, refused = _rows(run, file)
    yield RowBatch(rejected=tuple(Rejected(why, count, f"{name} in {file.name}") for why, count in refused.items()))
    if rows:
        sizes, dtypes, times = zip(*rows, strict=True)
        shared = _conditions(run, file, options)
        yield RowBatch(
            COLLECTIVES[name],
            {"size_bytes": list(sizes), "dtype": list(dtypes), "latency_us": list(times), **shared},
        )


def _rows(run: ProgramRun, file: Path) -> tuple[list[tuple[int, str, float]], Counter[str]]:
    """(bytes, dtype, microseconds) of every timing that can be used, and why others cannot."""
    rows, refused = [], Counter[str]()
    for line in run.lines:
        match = ROW.match(line)
        size, dtype, timings = int(match[1]), _dtype(match[3]), _timings(match[4], run.columns)  # type: ignore[index]
        if len(timings) < 1 or dtype is None:
            refused["the line is cut off or has an unknown type"] += 1
            continue
        checked = [wrong != "N/A" for _, wrong in timings]
        for (time, wrong), was_checked in zip(timings, checked, strict=True):
            if wrong not in ("N/A", "0") and "wrong" in run.columns and float(wrong) != 0:
                refused["wrong results"] += 1
            elif not was_checked and any(checked):
                refused["in-place, where the collective has no in-place form"] += 1
            elif size == 0:
                refused["nothing was sent (size 0)"] += 1
            else:
                rows.append((size, dtype, float(time)))
    return rows, refused


def _timings(rest: str, columns: list[str]) -> list[tuple[str, str]]:
    """(time, wrong) out-of-place and in-place, of the fields after the type. Fields not filled in are blank."""
    fields = rest.split()
    before = columns.index("time") - columns.index("type") - 1
    width = columns[columns.index("time") + 1 :].index("time") + 1 if columns.count("time") > 1 else 4
    leading = min(before, len(fields) - width * columns.count("time"))
    fields = fields[max(leading, 0) :]
    parts = [fields[at : at + width] for at in (0, width) if len(fields) >= at + width]
    return [(part[0], part[3]) for part in parts if _is_number(part[0]) and (part[3] == "N/A" or _is_number(part[3]))]


def _conditions(run: ProgramRun, file: Path, options: ImportOptions) -> dict[str, Any]:
    """Group, link, device, library of one run. SourceError where the output does not tell."""
    groups = {group for group, _, _ in run.ranks}
    shapes = {tuple(sorted(Counter(h for g, h, _ in run.ranks if g == group).items())) for group in groups}
    counts = [sorted(count for _, count in shape) for shape in shapes]
    if not run.ranks:
        raise SourceError(f"{file.name} does not list its ranks (lines of '# Rank …'): keep the whole output")
    if any(one != counts[0] for one in counts) or counts[0][0] != counts[0][-1]:
        raise SourceError(f"{file.name} spreads its ranks unevenly over nodes, which no op describes")
    names = {name for _, _, name in run.ranks}
    if len(names) > 1:
        raise SourceError(f"{file.name} mixes devices: {', '.join(sorted(names))}")
    (name,) = names
    device_id = options.device or cuda_device_id(name)
    nodes, per_node = len(counts[0]), counts[0][0]
    library = "rccl" if "AMD" in name else "nccl"
    return {
        "ranks": nodes * per_node,
        "ranks_per_node": per_node,
        "link": options.link or _link(device_id, nodes, "" if options.device else name, file),
        "device_id": device_id,
        "device_name": name,
        "backend": f"{library}{'-' + run.nccl if run.nccl else ''}:{library}",
        "nccl": run.nccl,
        "timer": "cuda_graph" if run.graph else "imported",
        "measured_at": moment(when) if (when := options.measured_at) else written_at(file),
    }


def _link(device_id: str, nodes: int, name: str, file: Path) -> str:
    """The link between ranks; SourceError for a device that is not known, by the ``name`` that the log has for it."""
    if nodes > 1:
        return "ib"
    try:
        return "nvlink" if load_device(device_id).link_gbps > 0 else "pcie"
    except DeviceError as error:
        raise SourceError(unknown_gpu(name, file.name) if name else f"{error}; or say device=…") from None


def _named(file: Path) -> str:
    """The collective that a file's name tells, or nothing."""
    stem = re.sub(r"[^a-z]+", "_", file.name.lower())
    return next((name for name in COLLECTIVES if re.search(rf"(?:^|_){name}(?:_|$)", stem)), "")


def _dtype(name: str) -> str | None:
    try:
        return canonical_dtype(DTYPES.get(name, name))
    except ValueError:
        return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
