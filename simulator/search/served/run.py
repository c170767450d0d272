"""A search over ways to serve, from its request to its answer.

Replicas are made once for each layout and engine; batches, chunks, policies and ratios of pools are then closed forms
over their tables. What has no KV memory for its batch is left out before it is timed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby, product
from typing import Any, Self

import numpy as np

from ....datasets.clusters import Cluster
from ...question.canonical import RequestError
from ...question.sources import Sources
from ...report.answer import InferenceReport
from ...serving.bench import ServingBench
from ...serving.kv import KvError
from ...serving.policies import policy_of
from ..answer import Counted, Search, answer
from ..expressions import Columns, Expression
from ..outcome import OK, Row, SearchOutcome, after_rules, fitting_together
from ..result import SearchReport
from ..space import Facts, combinations, facts_of
from ..spread import Crew
from ..workers import spread
from .estimate import LoadCurves, apart, completed, held_tokens, loaded, loads
from .explain import around, changes, reason, settings
from .kept import PlayedWays
from .played import confirmed, find
from .replicas import LayoutReplica, Replicas, replica_of, usual_max_tokens
from .request import LAYOUT, OF_POINT, OF_PREFILL, ReplicaLayout, ServedSearchRequest
from .shortlist import Shortlist, kind_of, plays

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CHUNKS = (2048, 8192)
MOST_POINTS = 500_000
MANY = 8  # layouts from which processes are worth their start
SHARES = 4  # parts of the work that each process takes, one after the other
Progress = Callable[[int], Any]
ALIKE = ("cluster", "policy", *LAYOUT, "batch")  # rows that are the same in these have one report


@dataclass(frozen=True)
class ServedAsked:
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


def asked(request: ServedSearchRequest) -> ServedAsked:
    """The request made ready. RequestError for axes of which nothing fits together."""
    clusters, space = request.clusters(), request.space
    step = request.step
    facts = facts_of(step.model, request.input_len, 1)
    nodes = space.nodes or (next(iter(clusters.values())).nodes,)
    per_node = max(each.devices_per_node for each in clusters.values())
    most = per_node * max(nodes)
    powers = [2**n for n in range(11)]
    policies = space.policy or ("vllm",)
    natural: dict[str, Sequence[Any]] = {
        "cluster": list(clusters),
        "nodes": nodes,
        "precision": [step.quantization or step.precision],
        "pools": ["together", "apart"],
        "policy": policies,
        "tp": [n for n in powers if n <= per_node and (not facts.heads or facts.heads % n == 0)],
        "pp": [1],
        "dp": [n for n in powers if n <= most] if facts.experts else [1],
        "ep": [n for n in powers if n <= most and facts.experts % n == 0] if facts.experts else [1],
        "batch": BATCHES,
        "max_tokens": sorted({*CHUNKS, *(usual_max_tokens(each) for each in policies)}),
    }
    axes = {name: getattr(space, name) or tuple(values) for name, values in natural.items()}
    columns = combinations({name: axes[name] for name in ("cluster", "nodes", "precision", *LAYOUT)})
    count = len(columns["tp"])
    kept, left_out = fitting_together(requirements(columns, clusters, facts, bool(space.ep)), count, "layouts")
    rows = zip(*(column[kept].tolist() for column in columns.values()), strict=True)
    return ServedAsked(request, clusters, axes, tuple(ReplicaLayout(*row) for row in rows), left_out, count, facts)


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
        whole = np.where(dp > 1, ep == tp * dp, (ep == 1) | (ep == tp))
        met["experts are whole on all ranks of a replica, or sharded as its layers are"] = whole
    return met


def search_serving(
    request: ServedSearchRequest,
    bench: ServingBench,
    progress: Progress,
    crew: Crew | None = None,
    bench_of: Callable[[Sources], ServingBench] | None = None,
    kept: PlayedWays | None = None,
) -> SearchReport:
    """The answer to a request. RequestError for an empty space; the errors of models and clusters.

    Where there are many replicas a ``crew`` makes them, each in a process whose workbench ``bench_of`` makes. What the
    event loop says of ways is ``kept``.
    """
    started = time.perf_counter()
    made, found = asked(request), SearchOutcome()
    engines = dict.fromkeys(policy_of(policy).framework for policy in made.axes["policy"])
    wanted = [(layout, engine) for layout in made.layouts for engine in engines]
    several = len(wanted) >= MANY and crew is not None and not crew.alone
    size = -(-len(wanted) // (crew.count * SHARES)) if crew is not None and several else 1
    parts = [wanted[at : at + size] for at in range(0, len(wanted), size)]
    evaluator, crew = ReplicaEvaluator(made, bench), crew if several else None
    replicas: Replicas = {}
    with progress(len(wanted)) as advance:
        answers = chain.from_iterable(spread(evaluator, request, crew, bench_of, "replica", parts))
        for (layout, engine), own in zip(wanted, answers, strict=True):
            if isinstance(own, Refused):
                leave_layout(made, layout, engine, own, found)
            else:
                replicas[layout, engine] = own
            advance(1)
    points(made, replicas, found)
    search = WaySearch(made, replicas, bench)
    if request.slo.named:
        once(found)
    playing = plays(request)
    if playing:
        shortlist = Shortlist(request, replicas, partial(again, made, replicas), search.interval, kept or PlayedWays())
        found.rows = shortlist.played(found.rows)
        once(found)
    counted = Counted(made.combinations, len(found.rows) + found.count, made.left_out)
    report = answer(search.search(), found, counted, started)
    if not playing and request.confirm:
        best = [{**row, "confirmed": confirmed(request, row, replicas)} for row in report.best[: request.confirm]]
        report = replace(report, best=(*best, *report.best[request.confirm :]))
    return replace(report, wall_time_s=time.perf_counter() - started)


def once(found: SearchOutcome) -> None:
    """Leave out ways that nobody can tell from others: those with room for more sequences than ever run."""
    kept: dict[tuple[Any, ...], Row] = {}
    rows = []
    for row in sorted(found.rows, key=lambda row: row["batch"]):
        figures = (row[name] for name in ("requests_per_s", "tpot_ms", "ttft_ms"))
        alike = *kind_of(row), row["max_tokens"], row["ratio"], *(f"{value:.4g}" for value in figures)
        if kept.setdefault(alike, row) is row or not row["meets_slo"]:
            rows.append(row)
        else:
            found.leave("alike", row, f"does the same with batch={kept[alike]['batch']}: no more run at a time")
    ids = {id(row) for row in rows}
    found.rows = [row for row in found.rows if id(row) in ids]


def again(made: ServedAsked, replicas: Replicas, row: Row, changes: Mapping[str, Any], rate: float | None) -> Row:
    """The row of the way to serve that another is with some ``changes``, sized for a ``rate`` where one is given; empty
    where it cannot be."""
    ratio = (row["ratio"],) if rate is None and row["ratio"] else ()
    request = replace(made.request, rate=rate, space=replace(made.request.space, ratio=ratio))
    own, moved = find(row, LAYOUT, replicas), {**row, **changes}
    if held_tokens(request, moved["policy"]) * moved["batch"] > own.served.kv.tokens:
        return {}
    prefill = find(row, OF_PREFILL, replicas) if row["pools"] == "apart" else None
    figures = figures_of(replace(made, request=request), moved, own, prefill)
    return {**moved, **figures[0]} if figures else {}


@dataclass(frozen=True)
class WaySearch:
    """What a search over ways to serve says of itself."""

    made: ServedAsked
    replicas: Replicas
    bench: ServingBench
    known: dict[tuple[Any, ...], tuple[float, float]] = field(default_factory=dict)

    def report(self, row: Mapping[str, Any]) -> InferenceReport:
        """The whole report of a row's iteration that decodes."""
        return decode_report(self.made.request, find(row, LAYOUT, self.replicas), row["batch"], self.bench)

    def interval(self, row: Mapping[str, Any]) -> tuple[float, float]:
        """Low and high of a row's times of iterations by that of the answer, at the coverage of its report."""
        key = tuple(row[name] for name in ("precision", *ALIKE))
        if key not in self.known:
            own = self.report(row)
            self.known[key] = own.low_ms / own.e2e_ms, own.high_ms / own.e2e_ms
        return self.known[key]

    def shown(self, row: Mapping[str, Any]) -> Row:
        """A row as the answer has it."""
        low, high = self.interval(row)
        return {**row, "way": settings(row), "low": low, "high": high}

    def search(self) -> Search:
        """The same as any search has it."""
        return Search(
            self.made.request,
            self.made.axes,
            changes,
            reason,
            ALIKE,
            self.report,
            around=partial(around, self.made.request),
            notes=partial(notes, self.made.request),
            shown=self.shown,
        )


@dataclass(frozen=True)
class ReplicaEvaluator:
    """Makes replicas of one search from a workbench."""

    made: ServedAsked
    bench: ServingBench

    @classmethod
    def of(cls, text: str, bench_of: Callable[[Sources], ServingBench]) -> Self:
        """The evaluator of a request as JSON, in a process of its own."""
        request = ServedSearchRequest.from_json(text)
        return cls(asked(request), bench_of(request.step.sources))

    def replica(self, wanted: tuple[ReplicaLayout, str]) -> LayoutReplica | Refused:
        """The replica of a layout and engine, or why there is none."""
        return replica_or_why(self.made, *wanted, self.bench)


@dataclass(frozen=True)
class Refused:
    """Why a layout has no replica: for lack of memory, or what its parts say."""

    reason: str
    why: str


def replica_or_why(
    made: ServedAsked, layout: ReplicaLayout, engine: str, bench: ServingBench
) -> LayoutReplica | Refused:
    """The replica of a layout, or why it has no KV memory or cannot be."""
    try:
        return replica_of(
            made.request, layout, engine, made.clusters, made.axes["batch"], made.axes["max_tokens"], bench
        )
    except ValueError as error:
        if not type(error).__module__.startswith("opcast"):
            raise
        return Refused("memory" if isinstance(error, KvError) else "refused", " ".join(str(error).split()))


def leave_layout(made: ServedAsked, layout: ReplicaLayout, engine: str, why: Refused, found: SearchOutcome) -> None:
    """Count the points of a layout that has no replica."""
    batches, chunks = made.axes["batch"], made.axes["max_tokens"]
    count = len(batches) * len(chunks) * sum(policy_of(each).framework == engine for each in made.axes["policy"])
    found.leave(why.reason, row_of(layout, "", batches[0], chunks[0]), why.why, count)


def row_of(
    layout: ReplicaLayout, policy: str, batch: int, max_tokens: int, prefill: ReplicaLayout | None = None
) -> Row:
    """The axes of a point as a row."""
    own = {"cluster": layout.cluster, "precision": layout.precision, "policy": policy, **layout.values()}
    pools = "together" if prefill is None else "apart"
    other = dict.fromkeys(OF_PREFILL, 0) if prefill is None else prefill.values("prefill_")
    made = {**own, "pools": pools, "batch": batch, "max_tokens": max_tokens, **other, "ratio": ""}
    return {name: made[name] for name in OF_POINT} | {"nodes": layout.nodes}


def points(made: ServedAsked, replicas: Replicas, found: SearchOutcome) -> None:
    """Every point that meets the rules and has KV memory, with its figures."""
    request, axes = made.request, made.axes
    curves = LoadCurves(request, axes["batch"])
    grid: list[tuple[Row, LayoutReplica, LayoutReplica | None]] = []
    for policy in axes["policy"]:
        own = [each for (_, engine), each in replicas.items() if engine == policy_of(policy).framework]
        for each in own:
            others: list[LayoutReplica | None] = [None] if "together" in axes["pools"] else []
            if "apart" in axes["pools"]:
                alike = (each.layout.cluster, each.layout.nodes, each.layout.precision)
                others += [x for x in own if (x.layout.cluster, x.layout.nodes, x.layout.precision) == alike]
            for other, chunk in product(others, axes["max_tokens"]):
                place = None if other is None else other.layout
                more = () if request.space.batch else limits(request, each, policy, chunk, other is None, curves)
                batches = sorted({*axes["batch"], *more})
                grid += [(row_of(each.layout, policy, batch, chunk, place), each, other) for batch in batches]
    if len(grid) > MOST_POINTS:
        raise RequestError(
            f"the space has {len(grid):,} points, more than {MOST_POINTS:,}: give fewer values of its axes"
        )
    rows = [row for row, _, _ in grid]
    rules, _ = request.expressions()
    kept = after_rules(rules, columns_of(rules, rows), rows.__getitem__, found) if rows else ()
    fits: list[tuple[Row, LayoutReplica, LayoutReplica | None]] = []
    for at in np.flatnonzero(kept).tolist():
        row, decode, _ = grid[at]
        held = held_tokens(request, row["policy"], prefilled=False) * row["batch"]
        if held <= decode.served.kv.tokens:
            fits.append(grid[at])
        else:
            why = f"{held:,.0f} tokens of {decode.served.kv.tokens:,} that fit into the KV memory of a rank"
            found.leave("memory", row, why)
    for _, group in groupby(fits, lambda each: (id(each[1]), id(each[2]), each[0]["policy"], each[0]["max_tokens"])):
        same = list(group)
        for (row, _, _), figures in zip(same, figures_of_alike(made, same, curves), strict=True):
            found.rows += [{**row, "status": OK, "why": "", **each} for each in figures]


def limits(
    request: ServedSearchRequest, own: LayoutReplica, policy: str, chunk: int, both: bool, curves: LoadCurves
) -> list[int]:
    """Batches between those of the axis at which something ends: the KV memory, or what users expect of TPOT."""
    fits = int(own.served.kv.tokens / held_tokens(request, policy))
    most = [fits]
    if request.slo.tpot_ms is not None:
        known = curves.both(own, policy, chunk) if both else curves.decoding(own)
        most.append(int(np.interp(1e3 * request.slo.tpot_ms, known.tpot_us, known.n)))
    return [each for each in most if 1 < each <= min(fits, max(curves.batches))]


def columns_of(rules: Sequence[Expression], rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """The columns of rows that rules read [points]."""
    columns = {"": np.zeros(len(rows))}
    for name in {name for rule in rules for name in rule.names}:
        own = [row["tp"] * row["pp"] * row["dp"] if name == "replica_devices" else row[name] for row in rows]
        columns[name] = np.array(own)
    return columns


def figures_of(
    made: ServedAsked,
    row: Row,
    own: LayoutReplica,
    prefill: LayoutReplica | None,
    curves: LoadCurves | None = None,
) -> list[dict[str, Any]]:
    """The figures of a point; of pools apart one for each ratio that is looked at."""
    curves = curves or LoadCurves(made.request, (*made.axes["batch"], row["batch"]))
    return figures_of_alike(made, [(row, own, prefill)], curves)[0]


def figures_of_alike(
    made: ServedAsked, ways: Sequence[tuple[Row, LayoutReplica, LayoutReplica | None]], curves: LoadCurves
) -> list[list[dict[str, Any]]]:
    """The figures of points that differ in their batch alone."""
    (row, own, prefill), request = ways[0], made.request
    devices, price = made.devices(own.layout), price_of(made, own.layout)
    policy, max_tokens, batches = row["policy"], row["max_tokens"], [each["batch"] for each, _, _ in ways]
    if prefill is not None:
        several = apart(request, prefill, own, policy, batches, max_tokens, devices, curves)
        return [[completed(request, each, price, devices) for each in figures] for figures in several]
    most = devices // own.layout.devices
    made_of = []
    for batch, load in zip(batches, loads(request, own, policy, batches, max_tokens, most, curves), strict=True):
        replicas, each = sized(request, own, policy, batch, max_tokens, most, curves, float(load))
        each |= {"ratio": "", "prefill_replicas": 0, "replicas": replicas, "devices": replicas * own.layout.devices}
        made_of.append([completed(request, each, price, devices)])
    return made_of


def sized(
    request: ServedSearchRequest,
    own: LayoutReplica,
    policy: str,
    batch: int,
    max_tokens: int,
    most: int,
    curves: LoadCurves,
    load: float,
) -> tuple[int, dict[str, Any]]:
    """How many replicas that do both, and their figures: all that there are at their ``load``, or the fewest that serve
    the rate asked for."""
    every = loaded(request, own, policy, batch, max_tokens, most, curves, load)
    rate = request.size_for
    if rate is None or every["requests_per_s"] < rate or not every["meets_slo"]:
        return most, every
    for count in range(max(math.floor(rate * most / every["requests_per_s"]), 1), most):
        fewer = float(loads(request, own, policy, [batch], max_tokens, count, curves)[0])
        made = loaded(request, own, policy, batch, max_tokens, count, curves, fewer)
        if made["requests_per_s"] >= rate and made["meets_slo"]:
            return count, made
    return most, every


def price_of(made: ServedAsked, layout: ReplicaLayout) -> float:
    """What a GPU costs an hour: as asked, or the cluster's own."""
    said = made.request.prices.get(layout.cluster, made.request.step.price_per_gpu_hour)
    return float(made.clusters[layout.cluster].price_per_device_hour if said is None else said)


def decode_report(request: ServedSearchRequest, own: LayoutReplica, batch: int, bench: Any) -> InferenceReport:
    """The whole report of the iteration in which a replica's sequences decode."""
    context = round(request.input_len + request.output_len / 2)
    work = replace(own.step.work, kind="decode", batch=batch, input_len=context, cache="static")
    made = bench.simulate(replace(own.step, work=work))
    assert isinstance(made, InferenceReport)
    return made


def notes(request: ServedSearchRequest, found: SearchOutcome) -> list[str]:
    """Why there is no answer."""
    if not found.rows:
        said = "; ".join(f"{each.count:,} points {name}: {each.why}" for name, each in found.pruned.items())
        return [f"no point of the space can run: {said}"]
    least = {name: min(row[name] for row in found.rows) for name in ("ttft_ms", "tpot_ms", "e2e_ms")}
    asked_for = [*request.constraints, *(f"slo.{n}={v}" for n, v in vars(request.slo).items() if v and n != "share")]
    reached = ", ".join(f"{name} {value:.1f}" for name, value in least.items())
    return [
        f"no point meets {' and '.join(asked_for)}; the least of each that any of {len(found.rows):,} has: {reached}"
    ]
