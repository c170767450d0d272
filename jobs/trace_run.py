"""``opcast simulate`` of execution traces (``trace=DIR``), and the traces that a simulation writes (``chakra=DIR``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets.counts import counted
from ..datasets.loading import choice, whole
from ..simulator.report.answer import InferenceReport, StepReport
from ..simulator.report.view import time_text
from . import resolve
from .show import BadInputError, print_json, say, table, wants_json
from .writing import folder_at

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
    recorded = read_run(Path(str(config["trace"])).expanduser())
    engine, cluster = None, None
    if config["durations"] != "recorded":
        target, cluster = resolve.device(config), resolve.cluster(config)
        if cluster is None and config["durations"] == "network":
            raise BadInputError("durations=network needs the cluster whose network it is: cluster=dgx_h100")
        engine = resolve.engine(config, target)
    links = on_links(config, cluster) if config["algorithm"] else None
    simulated = simulate_run(
        recorded, engine, cluster, str(config["policy"]), config["durations"] == "engine", window, links
    )
    if untimed := without_time(simulated):
        say(f"{untimed:,} collectives and messages have no time: durations=network cluster=… asks for it")
    accounts = simulated_accounts(simulated)
    path, idle = path_shares(simulated, critical_path(simulated)), idle_shares(simulated)
    if wants_json(config):
        print_json(answer(simulated, accounts, path, idle))
    else:
        show(simulated, accounts, path, str(config["trace"]))
        show_idle(idle)
    return 0


def on_links(config: Mapping[str, Any], cluster: Cluster | None) -> LinkTimes:
    """How long communication takes by the algorithm that is named, on the links of the cluster."""
    from ..simulator.execution.link_times import link_us

    if cluster is None:
        raise BadInputError(f"algorithm={config['algorithm']} needs links: durations=network cluster=dgx_h100")
    return partial(link_us, cluster=cluster, device=resolve.device(config), algorithm=str(config["algorithm"]))


def without_time(simulated: SimulatedRun) -> int:
    """Collectives and messages that carry bytes and take no time: the traces' maker left it to a simulator."""
    none = simulated.duration_us[: len(simulated.joint.calls)] == 0.0
    return sum(
        bool(is_missing) and call.size_bytes > LEAST
        for is_missing, call in zip(none, simulated.joint.calls, strict=True)
    )


def asked_us(simulated: SimulatedRun) -> dict[str, float]:
    """Microseconds of all nodes by who says how long they take."""
    engine_us: dict[str, float] = {}
    for name, us in zip(simulated.engine.tolist(), simulated.duration_us.tolist(), strict=True):
        engine_us[name] = engine_us.get(name, 0.0) + us
    return engine_us


def answer(
    simulated: SimulatedRun, accounts: list[RankAccount], path: list[PathShare], idle: list[IdleShare]
) -> dict[str, Any]:
    """The JSON object."""
    total = simulated.executions.total_us
    spent = asked_us(simulated)
    total_us = sum(spent.values()) or 1.0
    return {
        "step_time_s": total * 1e-6,
        "ranks": len(accounts),
        "nodes": sum(account.nodes for account in accounts),
        "provenance": {name: us / total_us for name, us in spent.items()},
        "critical_path": [asdict(share) for share in path],
        "idle": [asdict(share) for share in idle],
        "by_rank": [asdict(account) for account in accounts],
    }


def show(simulated: SimulatedRun, accounts: list[RankAccount], path: list[PathShare], name: str) -> None:
    """The run as tables."""
    total = simulated.executions.total_us
    nodes = sum(account.nodes for account in accounts)
    rows: list[tuple[object, ...]] = [
        (
            account.rank,
            *(time_text(us) for us in (account.total_us, account.compute_us, account.exposed_us, account.idle_us)),
        )
        for account in accounts[:SHOWN]
    ]
    table(f"{name}: {time_text(total)}, {counted(len(accounts), 'rank')}, {counted(nodes, 'node')}",
          ("rank", "ends", "compute", "exposed communication", "idle"), rows)  # fmt: skip
    if len(accounts) > SHOWN:
        say(f"{len(accounts) - SHOWN:,} more ranks: format=json has all")
    shares = [(p.name, p.count, time_text(p.total_us), f"{p.total_us / max(total, 1e-9):.1%}") for p in path]
    table("what the end waited for", ("class", "nodes", "time", "share"), shares)


def show_idle(idle: list[IdleShare]) -> None:
    """Why devices stand still, of all ranks together."""
    by_cause: dict[str, list[IdleShare]] = {}
    for idle_share in idle:
        by_cause.setdefault(idle_share.waited_for, []).append(idle_share)
    rows = []
    for cause, shares in sorted(by_cause.items(), key=lambda item: -sum(share.total_us for share in item[1])):
        worst = max(shares, key=lambda share: share.longest_us)
        total, count = sum(share.total_us for share in shares), sum(share.count for share in shares)
        rows.append((cause, f"{count:,}", time_text(total), time_text(worst.longest_us),
                     f"node {worst.node} of rank {worst.rank}"))  # fmt: skip
    if rows:
        table("what idle devices waited for", ("class", "times", "time of all ranks", "longest", "before"), rows)


def write(report: StepReport | InferenceReport, folder: str) -> str:
    """Write the execution traces of a simulation; what was written, in words."""
    from ..simulator.execution.emit import emit

    target = folder_at("chakra", folder)
    assert report.state is not None
    files = emit(report.state, target)
    return f"{len(files):,} in {target}"
