"""``opcast trace replay``: what a trace did, done again on this machine, beside what was recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from ..datasets.collective_ops import bus_factor
from ..datasets.counts import counted
from ..datasets.dtypes import BITS
from ..datasets.loading import choice, nearest, whole
from ..datasets.traces.calls import TraceCall, rank_calls
from ..simulator.report.view import time_text
from .show import BadInputError, print_json, say, table, wants_json
from .trace_files import given

MODES = ("full", "compute", "communication")
TENSORS = ("eager", "lazy")
DEVICES = ("cpu", "cuda")
BACKENDS = ("gloo", "nccl")
SHOWN = 12


@dataclass(frozen=True)
class ReplayedCollective:
    """Collectives of one kind, size and group size over all ranks: microseconds and bus bandwidths (GB/s), means.

    A collective takes as long as the shortest of its ranks says: the others waited for the last one.
    """

    collective: str
    dtype: str
    size_bytes: int
    ranks: int
    count: int
    recorded_us: float
    replayed_us: float
    recorded_busbw_gbps: float
    busbw_gbps: float


@dataclass(frozen=True)
class ReplayedOp:
    """Calls of one name on a rank: how many, and their microseconds in all."""

    name: str
    count: int
    recorded_us: float
    replayed_us: float


def run(config: dict[str, Any]) -> int:
    """Replay and print; returns the exit code."""
    from ..harness.environment import default_device, torchrun_rank
    from ..harness.replaying import ReplaySettings, replay
    from ..simulator.execution.run import read_run

    path = given(config, "path", "the traces to replay")
    choice(BadInputError, "mode", config["mode"], MODES)
    choice(BadInputError, "tensors", config["tensors"], TENSORS)
    device = str(config["target"] or default_device())
    choice(BadInputError, "target", device, DEVICES)
    against = _against(config["against"], device)
    calls = select_calls(rank_calls(read_run(path)), str(config["mode"]), node_range(config["nodes"]))
    spread = on_ranks(calls, config["ranks"])
    settings = ReplaySettings(
        device=device, lazy=config["tensors"] == "lazy", warmup=whole(BadInputError, "warmup", config["warmup"], 0),
        iterations=whole(BadInputError, "iterations", config["iterations"], 1), against=against,
        profile=str(Path(str(config["profile"])).expanduser().resolve()) if config["profile"] else "",
    )  # fmt: skip
    reports = replay(spread, settings)
    torchrun_place = torchrun_rank()
    if torchrun_place is not None and torchrun_place[0] > 0:
        return 0
    report = summary(reports)
    if wants_json(config):
        print_json(report)
    else:
        show(report, path)
    return 0


def node_range(node_text: Any) -> tuple[int, int] | None:
    """``[first, last]`` node ids."""
    if node_text is None:
        return None
    if not isinstance(node_text, (list, tuple)) or len(node_text) != 2:
        raise BadInputError(f"nodes={node_text} must be two ids, the first and the last node: nodes=[10,200]")
    first, last = (whole(BadInputError, "nodes", number, 0) for number in node_text)
    if first > last:
        raise BadInputError(f"nodes={list(node_text)}: the first is behind the last")
    return first, last


def _against(against_text: Any, device: str) -> tuple[str, str] | None:
    """``backend``, ``dtype`` or ``backend:dtype``."""
    if not against_text:
        return None
    parts = str(against_text).split(":")
    backend = next((part for part in parts if part in BACKENDS), "")
    dtype = next((part for part in parts if part in BITS), "")
    wrong = [part for part in parts if part not in (backend, dtype)]
    if wrong or len(parts) > 2 or (backend == "nccl" and device == "cpu"):
        what = nearest(wrong[0], (*BACKENDS, *BITS), "it knows") if wrong else "nccl needs target=cuda"
        raise BadInputError(f"against={against_text} is no back end, dtype or backend:dtype; {what}")
    return backend, dtype


def select_calls(
    calls_by_rank: Mapping[int, Sequence[TraceCall]], mode: str, nodes: tuple[int, int] | None
) -> dict[int, list[TraceCall]]:  # fmt: skip
    """The calls that are replayed. BadInputError where none are left."""

    def kept(call: TraceCall) -> bool:
        if nodes and not nodes[0] <= call.node <= nodes[1]:
            return False
        return mode == "full" or call.communicates == (mode == "communication")

    chosen = {rank: [call for call in calls if kept(call)] for rank, calls in calls_by_rank.items()}
    if not any(chosen.values()):
        raise BadInputError(f"nothing to replay: no call of mode={mode} in these nodes")
    return chosen


def on_ranks(calls_by_rank: Mapping[int, Sequence[TraceCall]], ranks_text: Any) -> dict[int, list[TraceCall]]:
    """The calls of as many ranks as wanted (default: those of the traces, renumbered from 0).

    A rank without a trace does what the first one does. Groups keep the ranks that are there; a group of all ranks is
    all of the replay. Messages between a rank that is there and one that is not are left out by their group.
    """
    recorded_ranks = sorted(calls_by_rank)
    count = len(recorded_ranks) if ranks_text is None else whole(BadInputError, "ranks", ranks_text, 1)
    sources = [recorded_ranks[index] if index < len(recorded_ranks) else recorded_ranks[0] for index in range(count)]
    numbers = {rank: index for index, rank in enumerate(recorded_ranks[:count])}
    everyone = tuple(range(count))

    def moved(call: TraceCall, new_rank: int) -> TraceCall:
        if not call.communicates:
            return call
        if call.collective == "message":
            peer = numbers.get(call.peer, new_rank)
            return replace(call, ranks=(new_rank, peer) if peer != new_rank else (new_rank,), peer=peer)
        ranks = tuple(numbers[rank] for rank in call.ranks if rank in numbers)
        whole_run = set(call.ranks) == set(recorded_ranks) or (len(recorded_ranks) == 1 and count > 1)
        return replace(call, ranks=everyone if whole_run else ranks if new_rank in ranks else (new_rank,))

    return {
        new_rank: [moved(call, new_rank) for call in calls_by_rank[source]] for new_rank, source in enumerate(sources)
    }


# --- results -------------------------------------------------------------------------------------------


def summary(reports: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON object: wall time, operators of the first rank, collectives of all, what was left out."""
    first = next(iter(reports.values()))
    by_op: dict[str, list[Mapping[str, Any]]] = {}
    for call in first["calls"]:
        if "why" not in call and "collective" not in call:
            by_op.setdefault(call["name"], []).append(call)
    ops = [ReplayedOp(name, len(replays), sum(c["recorded_us"] for c in replays), sum(c["us"] for c in replays))
           for name, replays in by_op.items()]  # fmt: skip
    reasons = Counter((call["name"], call["why"]) for call in first["calls"] if "why" in call)
    return {
        "ranks": len(reports),
        "wall_us": max(report["wall_us"] for report in reports.values()),
        "replayed": sum("why" not in call for call in first["calls"]),
        "operators": [vars(replayed_op) for replayed_op in sorted(ops, key=lambda op: -op.replayed_us)],
        "collectives": [vars(collective) for collective in collectives(reports)],
        "accuracy": first.get("accuracy", []),
        "left_out": [{"name": name, "why": why, "count": count} for (name, why), count in reasons.most_common()],
    }


def collectives(reports: Mapping[int, Mapping[str, Any]]) -> list[ReplayedCollective]:
    """Collectives by kind, size and group: the k-th of each group over its ranks is one call."""
    met: dict[tuple[tuple[int, ...], int], list[Mapping[str, Any]]] = {}
    for report in reports.values():
        counts: Counter[tuple[int, ...]] = Counter()
        for call in report["calls"]:
            if "kind" in call:
                ranks = tuple(call["ranks"])
                met.setdefault((ranks, counts[ranks]), []).append(call)
                counts[ranks] += 1
    rows: dict[tuple[str, str, int, int], list[tuple[float, float]]] = {}
    for (ranks, _), durations in met.items():
        key = (durations[0]["kind"], durations[0]["dtype"], durations[0]["buffer_bytes"], len(ranks))
        rows.setdefault(key, []).append((min(c["recorded_us"] for c in durations), min(c["us"] for c in durations)))
    averaged = []
    for (kind, dtype, size, width), times in rows.items():
        recorded, replayed = sum(t[0] for t in times) / len(times), median(t[1] for t in times)
        moved = float(bus_factor(kind, width)) * size / 1e3
        rates = [moved / us if us else 0.0 for us in (recorded, replayed)]
        averaged.append(ReplayedCollective(kind, dtype, size, width, len(times), recorded, replayed, *rates))
    return sorted(averaged, key=lambda row: -row.count * row.replayed_us)


def show(report: Mapping[str, Any], path: Path) -> None:
    """The report as tables."""
    title = (
        f"{path}: {report['replayed']:,} calls on {counted(report['ranks'], 'rank')} in {time_text(report['wall_us'])}"
    )
    rows = [(o["name"], f"{o['count']:,}", time_text(o["recorded_us"]) if o["recorded_us"] else "",
             time_text(o["replayed_us"])) for o in report["operators"][:SHOWN]]  # fmt: skip
    table(title, ("rank 0", "calls", "recorded", "replayed"), rows)
    if report["collectives"]:
        collective_rows = [(c["collective"], c["dtype"], f"{c['size_bytes']:,}", c["ranks"], c["count"],
                  time_text(c["recorded_us"]) if c["recorded_us"] else "", time_text(c["replayed_us"]),
                  f"{c['recorded_busbw_gbps']:.3g}" if c["recorded_us"] else "", f"{c['busbw_gbps']:.3g}")
                 for c in report["collectives"][:SHOWN]]  # fmt: skip
        heads = ("collective", "dtype", "bytes", "ranks", "calls", "recorded", "replayed", "busbw recorded", "GB/s now")
        table("collectives", heads, collective_rows)
    if report["accuracy"]:
        accuracy_rows = [(a["kind"], f"{a['size_bytes']:,}", a["ranks"], a["dtype"], a["other_dtype"],
                 f"{a['max_error']:.2e}" if "max_error" in a else a["why"]) for a in report["accuracy"]]  # fmt: skip
        table("accuracy: largest error over largest number", ("collective", "bytes", "ranks", "one", "other", "error"),
              accuracy_rows)  # fmt: skip
    for reason in report["left_out"][:SHOWN]:
        say(f"left out: {reason['count']} x {reason['name']}: {reason['why']}")
