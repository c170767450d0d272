"""A search over ways to serve, from its request to its answer.

Replicas are made once for each layout and engine; batches, chunks, policies and ratios of pools are then closed forms
over their tables. What has no KV memory for its batch is left out before it is timed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ....datasets.clusters import Cluster
from ....datasets.own_errors import refusal
from ...question.canonical import RequestError
from ...serving.kv import KvError
from ...serving.policies import policy_of
from ..answer import Counted, Search, answer
from ..expressions import Columns, Expression
from ..outcome import OK, Row, SearchOutcome, after_rules, fitting_together
from ..points import write_points
from ..rank import ranked
from ..result import SearchReport
from ..space import Facts, combinations, facts_of
from ..spread import Crew, Progress
from ..workers import spread
from .decoding import ALIKE, DecodeReports
from .estimate import LoadCurves, ServedWay, apart, completed, held_tokens, loaded, loads
from .explain import around, changes, reason, settings
from .kept import PlayedWays
from .played import confirmed, find
from .replicas import LayoutReplica, Replicas, replica_of, usual_rules
from .request import LAYOUT, OF_POINT, OF_PREFILL, ReplicaLayout, ServedSearchRequest
from .shortlist import OF_PLAYED, Shortlist, kind_of, plays

if TYPE_CHECKING:
    from ...engines.bench import Bench

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CHUNKS = (2048, 8192)
MOST_POINTS = 500_000
MANY = 8  # layouts from which processes are worth their start
SHARES = 4  # parts of the work that each process takes, one after the other


@dataclass(frozen=True)
class ServedSearchSetup:
    """A request made ready: what its names stand for, layouts that fit together, and values of the other axes."""

    request: ServedSearchRequest
    clusters: Mapping[str, Cluster]
    axes: Mapping[str, tuple[Any, ...]]
    layouts: tuple[ReplicaLayout, ...]
    left_out: Mapping[str, int]
    combinations: int
    facts: Facts

    def devices(self, layout: ReplicaLayout) -> int:
        """All GPUs of the cluster that a layout is of."""
        return self.clusters[layout.cluster].devices_per_node * layout.nodes


def set_up(request: ServedSearchRequest) -> ServedSearchSetup:
    """The request made ready. RequestError for axes of which nothing fits together."""
    clusters, space = request.clusters(), request.space
    step = request.step
    facts = facts_of(step.model, request.input_len, 1)
    nodes = space.nodes or (next(iter(clusters.values())).nodes,)
    per_node = max(cluster.devices_per_node for cluster in clusters.values())
    most = per_node * max(nodes)
    powers = [2**n for n in range(11)]
    policies = space.policy or ("vllm",)
    natural: dict[str, Sequence[Any]] = {
        "cluster": () if step.cluster is None else (step.cluster.id,),
        "nodes": nodes,
        "precision": [step.quantization or step.precision],
        "pools": ["together", "apart"],
        "policy": policies,
        "tp": [n for n in powers if n <= per_node and (not facts.heads or facts.heads % n == 0)],
        "pp": [1],
        "dp": [n for n in powers if n <= most] if facts.experts else [1],
        "ep": [n for n in powers if n <= most and facts.experts % n == 0] if facts.experts else [1],
        "batch": BATCHES,
        "max_tokens": sorted({*CHUNKS, *(usual_rules(policy).max_tokens for policy in policies)}),
        "prefill_cluster": [""],
    }
    axes = {name: getattr(space, name) or tuple(values) for name, values in natural.items()}
    columns = combinations({"cluster": [*clusters]} | {name: axes[name] for name in ("nodes", "precision", *LAYOUT)})
    count = len(columns["tp"])
    layouts, left_out = fitting_together(requirements(columns, clusters, facts, bool(space.ep)), count, "layouts")
    rows = zip(*(column[layouts].tolist() for column in columns.values()), strict=True)
    return ServedSearchSetup(
        request, clusters, axes, tuple(ReplicaLayout(*row) for row in rows), left_out, count, facts
    )


def requirements(
    columns: Columns, clusters: Mapping[str, Cluster], facts: Facts, any_experts: bool
) -> dict[str, np.ndarray]:
    """Where layouts meet what they must, by what a person is told of it [layouts]."""
    tp, pp, dp, ep = (columns[name] for name in LAYOUT)
    devices = np.array([clusters[name].devices_per_node for name in columns["cluster"]]) * columns["nodes"]
    shared = (facts.experts % ep == 0) & (tp * dp % ep == 0)
    met = {
        "tp divides the attention heads": (facts.heads % tp == 0),
        "pp is at most the number of layers": pp <= (facts.layers or pp),
        "a replica fits the cluster": tp * pp * dp <= devices,
        "attention data ranks share the experts out": (dp == 1) | bool(facts.experts),
        "ep divides the experts and the ranks of a replica": (ep == 1) | shared,
    }
    if not any_experts:
        spread_whole = np.where(dp > 1, ep == tp * dp, (ep == 1) | (ep == tp))
        met["experts are whole on all ranks of a replica, or sharded as its layers are"] = spread_whole
    return met


def search_serving(
    request: ServedSearchRequest, bench: Bench, crew: Crew, points_path: Path | None, progress: Progress
) -> SearchReport:
    """The answer to a request. RequestError for an empty space; the errors of models and clusters.

    Where there are many replicas a ``crew`` makes them. The points are written to the file ``points_path``, what the
    event loop says of ways is kept beside it until then.
    """
    started, kept = time.perf_counter(), PlayedWays(points_path, request)
    evaluator, outcome = ReplicaEvaluator.of(request, bench), SearchOutcome()
    setup = evaluator.setup
    engines = dict.fromkeys(policy_of(policy).framework for policy in setup.axes["policy"])
    pairs = [(layout, engine) for layout in setup.layouts for engine in engines]
    several = len(pairs) >= MANY and not crew.alone
    size = -(-len(pairs) // (crew.count * SHARES)) if several else 1
    parts = [pairs[at : at + size] for at in range(0, len(pairs), size)]
    replicas: Replicas = {}
    with progress(len(pairs)) as advance:
        answers = chain.from_iterable(spread(evaluator, crew if several else None, "replica", parts))
        for (layout, engine), result in zip(pairs, answers, strict=True):
            if isinstance(result, Refused):
                leave_layout(setup, layout, engine, result, outcome)
            else:
                replicas[layout, engine] = result
            advance(1)
    points(setup, replicas, outcome)
    reports = DecodeReports(request, replicas, bench)
    if request.slo.named:
        once(outcome)
    playing = plays(request)
    if playing:
        threads = crew.count if crew.engine == "joblib" else 1
        shortlist = Shortlist(request, replicas, partial(again, setup, replicas), reports.interval, kept, threads)
        outcome.rows = shortlist.played(outcome.rows)
        once(outcome)
    once_for_a_rate(outcome, request)
    counted = Counted(setup.combinations, len(outcome.rows) + outcome.count, setup.left_out)
    report = answer(ways(setup, reports), outcome, counted, started)
    if not playing and request.confirm:
        best = [{**row, "confirmed": confirmed(request, row, replicas)} for row in report.best[: request.confirm]]
        report = replace(report, best=(*best, *report.best[request.confirm :]))
    if points_path is not None and report.rows:
        write_points(report.rows, points_path)
        kept.end()
    return replace(report, slo_named=request.slo.named, wall_time_s=time.perf_counter() - started)


def once(outcome: SearchOutcome) -> None:
    """Leave out ways that nobody can tell from others: those with room for more sequences than ever run."""

    def alike(row: Mapping[str, Any]) -> tuple[Any, ...]:
        figures = (row[name] for name in ("requests_per_s", "tpot_ms", "ttft_ms"))
        return *kind_of(row), row["max_tokens"], row["ratio"], *(f"{value:.4g}" for value in figures)

    rows = sorted((row for row in outcome.rows if row["meets_slo"]), key=lambda row: row["batch"])
    keep_first(outcome, rows, alike, "alike", "does the same with batch={batch}: no more run at a time")


def once_for_a_rate(outcome: SearchOutcome, request: ServedSearchRequest) -> None:
    """Leave out ways that serve the rate asked for on as many GPUs as a better one, with other batches or chunks."""
    if request.size_for is not None:
        rows = ranked(request.good(outcome.rows), request.objectives)
        why = "needs as many GPUs with batch={batch} max_tokens={max_tokens}"
        keep_first(outcome, rows, lambda row: (*kind_of(row), row["devices"]), "tied", why)


def keep_first(
    outcome: SearchOutcome,
    rows: Sequence[Mapping[str, Any]],
    key: Callable[[Mapping[str, Any]], tuple[Any, ...]],
    reason: str,
    why: str,
) -> None:
    """Leave out all but the first of the ``rows`` that have one key, for a reason that the first fills in."""
    firsts: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    left = set()
    for row in rows:
        first = firsts.setdefault(key(row), row)
        if first is not row:
            outcome.leave(reason, row, why.format(**first))
            left.add(id(row))
    outcome.rows = [row for row in outcome.rows if id(row) not in left]


def again(
    setup: ServedSearchSetup, replicas: Replicas, row: Row, changes: Mapping[str, Any], rate: float | None
) -> Row:
    """The row of the way to serve that another is with some ``changes``, sized for a ``rate`` where one is given; empty
    where it cannot be."""
    ratio = (row["ratio"],) if rate is None and row["ratio"] else ()
    request = replace(setup.request, rate=rate, space=replace(setup.request.space, ratio=ratio))
    replica, moved = find(row, LAYOUT, replicas), {**row, **changes}
    moved = {name: value for name, value in moved.items() if name not in OF_PLAYED}
    if held_tokens(request, moved["policy"]) * moved["batch"] > replica.served.kv.tokens:
        return {}
    prefill = find(row, OF_PREFILL, replicas) if row["pools"] == "apart" else None
    figures = figures_of(replace(setup, request=request), moved, replica, prefill)
    return {**moved, **figures[0]} if figures else {}


def ways(setup: ServedSearchSetup, reports: DecodeReports) -> Search:
    """What a search over ways to serve says of itself."""

    def row_shown(row: Mapping[str, Any]) -> Row:
        low, high = reports.interval(row)
        return {**row, "way": settings(row), "low": low, "high": high}

    return Search(
        setup.request,
        setup.axes,
        changes,
        reason,
        ALIKE,
        reports.of,
        around=partial(around, setup.request),
        notes=partial(notes, setup.request),
        shown=row_shown,
        ahead=reports.ahead,
    )


@dataclass(frozen=True)
class ReplicaEvaluator:
    """Makes replicas of one search from a workbench."""

    setup: ServedSearchSetup
    bench: Bench

    @classmethod
    def of(cls, request: ServedSearchRequest, bench: Bench) -> Self:
        """The evaluator of a request."""
        return cls(set_up(request), bench)

    def replica(self, pair: tuple[ReplicaLayout, str]) -> LayoutReplica | Refused:
        """The replica of a layout and engine, or why there is none."""
        return replica_or_why(self.setup, *pair, self.bench)


@dataclass(frozen=True)
class Refused:
    """Why a layout has no replica: for lack of memory, or what its parts say."""

    reason: str
    why: str


def replica_or_why(
    setup: ServedSearchSetup, layout: ReplicaLayout, engine: str, bench: Bench
) -> LayoutReplica | Refused:
    """The replica of a layout, or why it has no KV memory or cannot be."""
    try:
        return replica_of(
            setup.request, layout, engine, setup.clusters, setup.axes["batch"], setup.axes["max_tokens"], bench
        )
    except ValueError as error:
        return Refused("memory" if isinstance(error, KvError) else "refused", refusal(error))


def leave_layout(
    setup: ServedSearchSetup, layout: ReplicaLayout, engine: str, why: Refused, outcome: SearchOutcome
) -> None:
    """Count the points of a layout that has no replica."""
    batches, chunks = setup.axes["batch"], setup.axes["max_tokens"]
    count = len(batches) * len(chunks) * sum(policy_of(policy).framework == engine for policy in setup.axes["policy"])
    outcome.leave(why.reason, row_of(layout, "", batches[0], chunks[0]), why.why, count)


def row_of(
    layout: ReplicaLayout, policy: str, batch: int, max_tokens: int, prefill: ReplicaLayout | None = None
) -> Row:
    """The axes of a point as a row."""
    settings = {"cluster": layout.cluster, "precision": layout.precision, "policy": policy, **layout.values()}
    pools = "together" if prefill is None else "apart"
    other: Row = {"prefill_cluster": "", **dict.fromkeys(OF_PREFILL, 0)}
    if prefill is not None:
        other = {"prefill_cluster": "" if prefill.cluster == layout.cluster else prefill.cluster}
        other |= prefill.values("prefill_")
    row = {**settings, "pools": pools, "batch": batch, "max_tokens": max_tokens, **other, "ratio": ""}
    return {name: row[name] for name in OF_POINT} | {"nodes": layout.nodes}


def points(setup: ServedSearchSetup, replicas: Replicas, outcome: SearchOutcome) -> None:
    """Every point that meets the rules and has KV memory, with its figures."""
    request, axes = setup.request, setup.axes
    curves = LoadCurves(request, axes["batch"])
    grid: list[tuple[Row, ServedWay]] = []
    for policy in axes["policy"]:
        of_engine = [replica for (_, engine), replica in replicas.items() if engine == policy_of(policy).framework]
        for replica in (one for one in of_engine if one.layout.cluster in axes["cluster"]):
            others: list[LayoutReplica | None] = [None] if "together" in axes["pools"] else []
            if "apart" in axes["pools"]:
                others += [other for other in of_engine if beside(setup, other.layout, replica.layout)]
            for other, chunk in product(others, axes["max_tokens"]):
                way, first = ServedWay(curves, replica, policy, chunk, other), None if other is None else other.layout
                batches = sorted({*axes["batch"], *(() if request.space.batch else limits(way))})
                grid += [(row_of(replica.layout, policy, batch, chunk, first), way) for batch in batches]
    if len(grid) > MOST_POINTS:
        raise RequestError(
            f"the space has {len(grid):,} points, more than {MOST_POINTS:,}: give fewer values of its axes"
        )
    rows = [row for row, _ in grid]
    rules, _ = request.expressions()
    passing = after_rules(rules, columns_of(rules, rows), rows.__getitem__, outcome) if rows else ()
    fits: list[tuple[Row, ServedWay]] = []
    for at in np.flatnonzero(passing).tolist():
        row, way = grid[at]
        tokens = held_tokens(request, row["policy"], prefilled=False) * row["batch"]
        if usual_rules(row["policy"]).uncut and row["max_tokens"] < request.input_len:
            why = f"{row['policy']} does not cut prompts: max_tokens must be at least {request.input_len}"
            outcome.leave("prompt", row, why)
        elif tokens > way.decode.served.kv.tokens:
            why = f"{tokens:,.0f} tokens of {way.decode.served.kv.tokens:,} that fit into the KV memory of a rank"
            outcome.leave("memory", row, why)
        else:
            fits.append(grid[at])
    for _, group in groupby(fits, lambda point: id(point[1])):
        same, (way, *_) = zip(*group, strict=True)
        for row, figures in zip(same, figures_of_alike(setup, way, [row["batch"] for row in same]), strict=True):
            outcome.rows += [{**row, "status": OK, "why": "", **replica} for replica in figures]


def beside(setup: ServedSearchSetup, prefill: ReplicaLayout, decode: ReplicaLayout) -> bool:
    """Whether replicas of one layout may prefill for those of the other."""
    clusters = {name or decode.cluster for name in setup.axes["prefill_cluster"]}
    return prefill.cluster in clusters and (prefill.nodes, prefill.precision) == (decode.nodes, decode.precision)


def limits(way: ServedWay) -> list[int]:
    """Batches between those of the axis at which something ends: the KV memory, or what users expect of TPOT."""
    slo, curves = way.request.slo, way.curves
    fits = int(way.decode.served.kv.tokens / held_tokens(way.request, way.policy))
    most = [fits]
    if slo.tpot_ms is not None:
        curve = curves.both(way) if way.prefill is None else curves.decoding(way.decode)
        most.append(int(np.interp(1e3 * slo.tpot_ms, curve.tpot_us, curve.n)))
    return [size for size in most if 1 < size <= min(fits, max(curves.batches))]


def columns_of(rules: Sequence[Expression], rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """The columns of rows that rules read [points]."""
    columns = {"": np.zeros(len(rows))}
    for name in {name for rule in rules for name in rule.names}:
        values = [row["tp"] * row["pp"] * row["dp"] if name == "replica_devices" else row[name] for row in rows]
        columns[name] = np.array(values)
    return columns


def figures_of(
    setup: ServedSearchSetup, row: Row, decode: LayoutReplica, prefill: LayoutReplica | None
) -> list[dict[str, Any]]:
    """The figures of a point; of pools apart one for each ratio that is looked at."""
    curves = LoadCurves(setup.request, (*setup.axes["batch"], row["batch"]))
    way = ServedWay(curves, decode, row["policy"], row["max_tokens"], prefill)
    return figures_of_alike(setup, way, [row["batch"]])[0]


def figures_of_alike(setup: ServedSearchSetup, way: ServedWay, batches: Sequence[int]) -> list[list[dict[str, Any]]]:
    """The figures of points that differ in their batch alone."""
    layout, devices = way.decode.layout, setup.devices(way.decode.layout)
    if way.prefill is not None:
        room = room_of(setup, way.prefill.layout, layout)
        several, devices = apart(way, batches, room), room[-1]
    else:
        most, several = devices // layout.devices, []
        for batch, load in zip(batches, loads(way, batches, most), strict=True):
            count, figures = sized(way, batch, most, float(load))
            figures |= {"ratio": "", "prefill_replicas": 0, "replicas": count, "devices": count * layout.devices}
            several.append([figures])
    return [
        [completed(setup.request, figures, hourly_cost(setup, figures, way), devices) for figures in alike]
        for alike in several
    ]


def sized(way: ServedWay, batch: int, most: int, load: float) -> tuple[int, dict[str, Any]]:
    """How many replicas that do both, and their figures: all that there are at their ``load``, or the fewest that serve
    the rate asked for."""
    every = loaded(way, batch, most, load)
    rate = way.request.size_for
    if rate is None or every["requests_per_s"] < rate or not every["meets_slo"]:
        return most, every
    for count in range(max(math.floor(rate * most / every["requests_per_s"]), 1), most):
        figures = loaded(way, batch, count, float(loads(way, [batch], count)[0]))
        if figures["requests_per_s"] >= rate and figures["meets_slo"]:
            return count, figures
    return most, every


def room_of(setup: ServedSearchSetup, prefill: ReplicaLayout, decode: ReplicaLayout) -> tuple[int, int, int]:
    """How many GPUs may prefill, may decode, and may do either: pools of unlike GPUs take none of each other's."""
    first, second = setup.devices(prefill), setup.devices(decode)
    return first, second, second if prefill.cluster == decode.cluster else first + second


def hourly_cost(setup: ServedSearchSetup, figures: Mapping[str, Any], way: ServedWay) -> float:
    """What an hour of all GPUs of a way costs, each at its own price."""
    cost = figures["replicas"] * way.decode.layout.devices * price_of(setup, way.decode.layout)
    if way.prefill is not None:
        cost += figures["prefill_replicas"] * way.prefill.layout.devices * price_of(setup, way.prefill.layout)
    return cost


def price_of(setup: ServedSearchSetup, layout: ReplicaLayout) -> float:
    """What a GPU costs an hour: as asked, or the cluster's own."""
    price = setup.request.prices.get(layout.cluster, setup.request.step.price_per_gpu_hour)
    return float(setup.clusters[layout.cluster].price_per_device_hour if price is None else price)


def notes(request: ServedSearchRequest, outcome: SearchOutcome) -> list[str]:
    """Why there is no answer."""
    if not outcome.rows:
        reasons = "; ".join(f"{group.count:,} points {name}: {group.why}" for name, group in outcome.pruned.items())
        return [f"no point of the space can run: {reasons}"]
    least = (f"{name} {min(row[name] for row in outcome.rows):.1f}" for name in ("ttft_ms", "tpot_ms", "e2e_ms"))
    limits = {"rate": request.rate, **{f"slo.{n}": limit for n, limit in vars(request.slo).items() if n != "share"}}
    wishes = [*request.constraints, *(f"{name}={limit:g}" for name, limit in limits.items() if limit)]
    return [
        f"no point meets {' and '.join(wishes)}; the least that any of {len(outcome.rows):,} has: {', '.join(least)}"
    ]
