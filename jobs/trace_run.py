"""``opcast simulate`` of execution traces (``trace=DIR``), and the traces that a simulation writes (``chakra=DIR``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets.loading import choice, whole
from ..simulator.report.answer import InferenceReport, StepReport
from . import resolve
from .show import BadInputError, microseconds, print_json, say, table, wants_json

if TYPE_CHECKING:
    from ..datasets.clusters import Cluster
    from ..simulator.execution.analysis import PathShare, RankAccount
    from ..simulator.execution.idleness import IdleShare
    from ..simulator.execution.run import LinkTimes, SimulatedRun

DURATIONS = ("recorded", "network", "engine")
SHOWN = 8  # ranks in a table
LEAST = 4  # bytes of a collective that only makes ranks meet


def is_asked(config: Mapping[str, Any]) -> bool:
    """Whether ``trace`` names execution traces to run, and no timeline to write."""
    named = str(config["trace"] or "")
    return named.endswith((".et", ".et.gz")) or (bool(named) and Path(named).expanduser().is_dir())


def run(config: dict[str, Any]) -> int:
    """Simulate traces and print what they take; returns the exit code."""
    from ..simulator.execution.analysis import critical_path, path_shares, simulated_accounts
    from ..simulator.execution.idleness import idle_shares
    from ..simulator.execution.run import read_run, simulate_run

    choice(BadInputError, "durations", config["durations"], DURATIONS)
    window = whole(BadInputError, "window", config["window"], 0)
    found = read_run(Path(str(config["trace"])).expanduser())
    engine, cluster = None, None
    if config["durations"] != "recorded":
        target, cluster = resolve.device(config), resolve.cluster(config)
        if cluster is None and config["durations"] == "network":
            raise BadInputError("durations=network needs the cluster whose network it is: cluster=dgx_h100")
        engine = resolve.engine(config, target)
    links = on_links(config, cluster) if config["algorithm"] else None
    made = simulate_run(found, engine, cluster, str(config["policy"]), config["durations"] == "engine", window, links)
    if untimed := without_time(made):
        say(f"{untimed:,} collectives and messages have no time: durations=network cluster=… asks for it")
    accounts = simulated_accounts(made)
    path, idle = path_shares(made, critical_path(made)), idle_shares(made)
    if wants_json(config):
        print_json(answer(made, accounts, path, idle))
    else:
        show(made, accounts, path, str(config["trace"]))
        show_idle(idle)
    return 0


def on_links(config: Mapping[str, Any], cluster: Cluster | None) -> LinkTimes:
    """How long communication takes by the algorithm that is named, on the links of the cluster."""
    from ..simulator.execution.on_links import link_us

    if cluster is None:
        raise BadInputError(f"algorithm={config['algorithm']} needs links: durations=network cluster=dgx_h100")
    return partial(link_us, cluster=cluster, device=resolve.device(config), algorithm=str(config["algorithm"]))


def without_time(made: SimulatedRun) -> int:
    """Collectives and messages that carry bytes and take no time: the traces' maker left it to a simulator."""
    none = made.duration_us[: len(made.joint.calls)] == 0.0
    return sum(bool(each) and call.size_bytes > LEAST for each, call in zip(none, made.joint.calls, strict=True))


def asked_us(made: SimulatedRun) -> dict[str, float]:
    """Microseconds of all nodes by who says how long they take."""
    found: dict[str, float] = {}
    for name, us in zip(made.engine.tolist(), made.duration_us.tolist(), strict=True):
        found[name] = found.get(name, 0.0) + us
    return found


def answer(
    made: SimulatedRun, accounts: list[RankAccount], path: list[PathShare], idle: list[IdleShare]
) -> dict[str, Any]:
    """The JSON object."""
    total = made.executions.total_us
    spent = asked_us(made)
    whole = sum(spent.values()) or 1.0
    return {
        "step_time_s": total * 1e-6,
        "ranks": len(accounts),
        "nodes": sum(each.nodes for each in accounts),
        "provenance": {name: us / whole for name, us in spent.items()},
        "critical_path": [asdict(each) for each in path],
        "idle": [asdict(each) for each in idle],
        "by_rank": [asdict(each) for each in accounts],
    }


def show(made: SimulatedRun, accounts: list[RankAccount], path: list[PathShare], name: str) -> None:
    """The run as tables."""
    total = made.executions.total_us
    nodes = sum(each.nodes for each in accounts)
    rows: list[tuple[object, ...]] = [
        (each.rank, *(microseconds(us) for us in (each.total_us, each.compute_us, each.exposed_us, each.idle_us)))
        for each in accounts[:SHOWN]
    ]
    table(f"{name}: {microseconds(total)}, {len(accounts):,} ranks, {nodes:,} nodes",
          ("rank", "ends", "compute", "exposed communication", "idle"), rows)  # fmt: skip
    if len(accounts) > SHOWN:
        say(f"{len(accounts) - SHOWN:,} more ranks: format=json has all")
    shares = [(p.name, p.count, microseconds(p.total_us), f"{p.total_us / max(total, 1e-9):.1%}") for p in path]
    table("what the end waited for", ("class", "nodes", "time", "share"), shares)


def show_idle(idle: list[IdleShare]) -> None:
    """Why devices stand still, of all ranks together."""
    by_cause: dict[str, list[IdleShare]] = {}
    for each in idle:
        by_cause.setdefault(each.waited_for, []).append(each)
    rows = []
    for cause, shares in sorted(by_cause.items(), key=lambda item: -sum(share.total_us for share in item[1])):
        worst = max(shares, key=lambda share: share.longest_us)
        total, count = sum(share.total_us for share in shares), sum(share.count for share in shares)
        rows.append((cause, f"{count:,}", microseconds(total), microseconds(worst.longest_us),
                     f"node {worst.node} of rank {worst.rank}"))  # fmt: skip
    if rows:
        table("what idle devices waited for", ("class", "times", "time of all ranks", "longest", "before"), rows)


def write(report: StepReport | InferenceReport, folder: str) -> str:
    """Write the execution traces of a simulation; what was written, in words."""
    from ..simulator.execution.emit import emit

    place = Path(folder).expanduser()
    if place.exists() and not place.is_dir():
        raise BadInputError(f"chakra={folder} is a file; name a folder")
    assert report.state is not None
    files = emit(report.state, place)
    return f"{len(files):,} in {place}"
