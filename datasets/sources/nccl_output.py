"""The output of nccl-tests (and rccl-tests) as runs: the text it prints, and the JSON that its ``-J`` writes.

Text: who took part stands in the ``# Rank … on <host> device …`` lines, the collective in ``# Collective test
starting`` or in the command line where a log shows it. JSON (src/util.cu): ``config.devices`` holds one entry a
process, its first rank, so the others of the process are counted from ``nthreads`` and ``ngpus``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from typing import Any

from .tables import SourceError

PREFIX = re.compile(r"^(?:\[\d+,\d+\]<\w+>:\s?|\s*\d+:\s(?=\s*[#\d]))")  # of mpirun --tag-output and srun --label
RANK = re.compile(r"#\s+Rank\s+(\d+)(?:\s+Group\s+(\d+))?\s+Pid\s+\d+ on\s+(\S+)\s+device\s+\d+\s+\[[^]]*\]\s*(.*\S)")
ROW = re.compile(r"^\s*(\d+)\s+(\d+)\s+([a-z]\w*)\s+(.*)$")
PROGRAM = re.compile(r"\b([a-z_]+?)_perf\b")
LIBRARY = re.compile(r"nccl-library=(\d+)|NCCL version (\d+\.\d+\.\d+)")
DIGITS = 0.01  # by which figures that agree may differ beyond the rounding of what is printed


@dataclass(frozen=True)
class Rank:
    """One rank: its communicator, its number over all, the host and the name of its device."""

    group: str
    number: int
    host: str
    device: str


@dataclass(frozen=True)
class NcclTiming:
    """One timing as printed: microseconds, GB/s, and the wrong elements (``N/A`` where nothing was checked)."""

    time: str
    algbw: str
    busbw: str
    wrong: str

    def agrees(self, size_bytes: int) -> bool:
        """Whether algbw is size over time, within what was rounded."""
        time, algbw = float(self.time), float(self.algbw)
        expected = size_bytes / 1e3 / time if time else float("inf")
        slack = DIGITS + _half_digit(self.time) / time if time else 0.0
        return abs(algbw - expected) <= slack * expected + _half_digit(self.algbw)

    def bus_agrees(self, factor: float) -> bool:
        """Whether busbw is algbw times a collective's factor, within what was rounded."""
        expected = factor * float(self.algbw)
        slack = DIGITS * expected + factor * _half_digit(self.algbw) + _half_digit(self.busbw)
        return abs(float(self.busbw) - expected) <= slack


@dataclass(frozen=True)
class Line:
    """One size: its bytes, the type's name and its timings, out-of-place first; none where the line is cut off."""

    size_bytes: int
    type: str
    timings: tuple[NcclTiming, ...] = ()


@dataclass
class ProgramRun:
    """One run of one program: who took part, and its table."""

    collective: str = ""
    ranks: list[Rank] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    nccl: str | None = None
    graph: bool = False
    started: str | None = None
    lines: list[Line] = field(default_factory=list)

    @property
    def of_cpu(self) -> bool:
        """Whether times are those of the CPU (``-C``)."""
        return "time" not in self.columns


def runs(text: str) -> list[ProgramRun]:
    """The runs of a text or of a JSON, in order; those without a table are left out. SourceError for a damaged JSON."""
    if text.lstrip().startswith("{"):
        return [_run_of_json(text)]
    finished, run = [], ProgramRun()
    for raw in text.splitlines():
        line = PREFIX.sub("", raw)
        if run.columns and (RANK.search(line) or "# nThread" in line or "Collective test starting" in line):
            finished.append(run)
            run = ProgramRun(collective=run.collective, nccl=run.nccl)
        _note(run, line)
    return [run for run in [*finished, run] if run.columns]


def _note(run: ProgramRun, line: str) -> None:
    """Put what one line tells into a run."""
    if (rank := RANK.search(line)) is not None:
        run.ranks.append(Rank(rank[2] or "0", int(rank[1]), rank[3], rank[4]))
    elif (library := LIBRARY.search(line)) is not None:
        run.nccl = _version(int(library[1])) if library[1] else library[2]
    elif (graph := re.search(r"# nThread.*\bgraph:\s*(\d+)", line)) is not None:
        run.graph = int(graph[1]) > 0
    elif line.startswith("#") and {"size", "type"} <= set(line.split()) and "algbw" in line:
        run.columns = line.replace("#wrong", "wrong").lstrip("# ").split()
    elif run.columns and (row := ROW.match(line)):
        run.lines.append(Line(int(row[1]), row[3], () if run.of_cpu else tuple(_timings(row[4], run.columns))))
    elif not run.columns and (program := PROGRAM.search(line)) is not None:
        run.collective = program[1]


def _timings(text: str, columns: list[str]) -> Iterator[NcclTiming]:
    """Out-of-place and in-place, of the fields after the type. Fields not filled in are blank."""
    fields = text.split()
    before = columns.index("time") - columns.index("type") - 1
    width = columns[columns.index("time") + 1 :].index("time") + 1 if columns.count("time") > 1 else 4
    leading = min(before, len(fields) - width * columns.count("time"))
    fields = fields[max(leading, 0) :]
    for at in (0, width):
        timing = fields[at : at + 4]
        if len(fields) >= at + width and all(map(_is_number, timing[:3])) and _is_number(timing[3].replace("N/A", "0")):
            time, algbw, busbw, wrong = timing
            yield NcclTiming(time, algbw, busbw, wrong if "wrong" in columns or wrong == "N/A" else "0")


# --- JSON ----------------------------------------------------------------------------------------------


def _run_of_json(text: str) -> ProgramRun:
    """The run that ``-J`` wrote down. SourceError where it is cut off, or no report of nccl-tests."""
    try:
        report = json.loads(text, parse_float=str)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"it is no whole JSON ({str(error)[:80]}): the run has to end before it is read") from None
    config, results = report.get("config"), report.get("results")
    if not isinstance(config, dict) or not isinstance(results, list):
        raise SourceError("it is no JSON of nccl-tests (-J FILE), which has config and results")
    lines = [_line_of_json(result) for result in results if isinstance(result, dict)]
    of_cpu = any("cpu_time" in part for result in results if isinstance(result, dict) for part in _parts(result))
    program = PROGRAM.search(str((report.get("args") or [""])[0]))
    version = report.get("nccl_version")
    return ProgramRun(
        collective=program[1] if program else "",
        ranks=list(_ranks_of_json(config)),
        columns=["size", "type", "cpu_time" if of_cpu else "time", "algbw", "busbw", "wrong"],
        nccl=_version(version) if isinstance(version, int) else None,
        graph=_count(config, "graph", 0) > 0,
        started=report.get("start_time"),
        lines=lines,
    )


def _line_of_json(values: Mapping[str, Any]) -> Line:
    timings = tuple(timing for values_in_place in _parts(values) for timing in _timing_of_json(values_in_place))
    size = values.get("size")
    return Line(size, str(values.get("type")), timings) if isinstance(size, int) else Line(0, "")


def _parts(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The timings of one size as the file has them."""
    return [part for key in ("out_of_place", "in_place") if isinstance(part := values.get(key), dict)]


def _timing_of_json(values: Mapping[str, Any]) -> Iterator[NcclTiming]:
    wrong = "N/A" if values.get("nwrong") is None else str(values["nwrong"])
    time, algbw, busbw = (str(values.get(name)) for name in ("time", "alg_bw", "bus_bw"))
    timing = NcclTiming(time, algbw, busbw, wrong)
    if all(map(_is_number, (timing.time, timing.algbw, timing.busbw, wrong.replace("N/A", "0")))):
        yield timing


def _ranks_of_json(config: Mapping[str, Any]) -> Iterator[Rank]:
    """Every rank. Where a process has several, the file lists its first alone."""
    listed = [device for device in config.get("devices") or () if isinstance(device, dict)]
    first = [
        Rank(
            str(device.get("group", 0)),
            _count(device, "rank", 0),
            str(device.get("hostname")),
            str(device.get("device_info")).strip(),
        )
        for device in listed
    ]
    of_process = _count(config, "nthreads", 1) * _count(config, "ngpus", 1)
    alone = all(rank.number % of_process == 0 for rank in first)
    for rank in first:
        for more in range(of_process if alone else 1):
            yield replace(rank, number=rank.number + more)


def _count(values: Mapping[str, Any], name: str, usual: int) -> int:
    """A whole number that a report may leave out. SourceError for what is none."""
    value = values.get(name, usual)
    if not isinstance(value, int) or not 0 <= value < 2**20:
        raise SourceError(f"{name}={value!r} is no number that nccl-tests writes")
    return value


# --- what holds for both -------------------------------------------------------------------------------


def missing_rank(ranks: Sequence[Rank]) -> int | None:
    """The first number that a list of ranks lacks; None for a whole list."""
    numbers = {rank.number for rank in ranks}
    return next((number for number in range(max(numbers, default=0)) if number not in numbers), None)


def _version(number: int) -> str:
    """NCCL_VERSION_CODE as a version: 22703 is 2.27.3, 2804 is 2.8.4."""
    base = 10000 if number >= 10000 else 1000
    return f"{number // base}.{number % base // 100}.{number % 100}"


def _half_digit(text: str) -> float:
    """Half a unit of the last digit that a printed number has."""
    exponent = Decimal(text).as_tuple().exponent
    return 0.5 * 10.0**exponent if isinstance(exponent, int) else 0.0


def _is_number(text: str) -> bool:
    try:
        return Decimal(text).is_finite()
    except InvalidOperation:
        return False
