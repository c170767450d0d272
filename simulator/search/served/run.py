"""A search over ways to serve, from its request to its answer.

Replicas are made once for each layout and engine; batches, chunks, policies and ratios of pools are then closed forms
over their tables. What has no KV memory for its batch is left out before it is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from ....datasets.clusters import Cluster
from ....datasets.own_warnings import own_warnings
from ...question.canonical import RequestError
from ...question.sources import Sources
from ...report.answer import InferenceReport
from ...serving.bench import ServingBench
from ...serving.kv import KvError
from ..rank import front, meeting, ranked
from ..result import Left, SearchReport
from ..space import Facts, facts_of
from ..spread import Crew
from .confirm import confirmed, find
from .estimate import apart, completed, held_tokens, together
from .explain import around, explained, settled
from .replicas import LayoutReplica, engine_name, replica_of, usual_max_tokens
from .request import (
    LAYOUT,
    OF_POINT,
    OF_PREFILL,
    ReplicaLayout,
    ServedSearchRequest,
    clusters_of,
)

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CHUNKS = (2048, 8192)
MOST_POINTS = 500_000
MANY = 8  # layouts from which processes are worth their start
SHARES = 4  # parts of the work that each process takes, one after the other
Progress = Callable[[int], Any]
BenchOf = Callable[[Sources], ServingBench]
Row = dict[str, Any]


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
    clusters, space = clusters_of(request), request.space
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
    grid = [
        ReplicaLayout(*values)
        for values in product(*(axes[name] for name in ("cluster", "nodes", "precision", *LAYOUT)))
    ]
    kept: list[ReplicaLayout] = list(grid)
    left_out: dict[str, int] = {}
    for what, holds in requirements(clusters, facts, bool(space.ep)):
        left = [each for each in kept if holds(each)]
        if len(left) < len(kept):
            left_out[what] = len(kept) - len(left)
        kept = left
        if not kept:
            raise RequestError(f"the space is empty: of {len(grid):,} layouts none is left after: {what}")
    return ServedAsked(request, clusters, axes, tuple(kept), left_out, len(grid), facts)


def requirements(
    clusters: Mapping[str, Cluster], facts: Facts, any_experts: bool
) -> Iterator[tuple[str, Callable[[ReplicaLayout], bool]]]:
    """What a layout must meet, by what a person is told of it."""
    yield "tp divides the attention heads", lambda x: not facts.heads or facts.heads % x.tp == 0
    yield "pp is at most the number of layers", lambda x: x.pp <= (facts.layers or x.pp)
    yield (
        "a replica fits the cluster",
        lambda x: x.devices <= clusters[x.cluster].devices_per_node * x.nodes,
    )
    yield "attention data ranks share the experts out", lambda x: x.dp == 1 or bool(facts.experts)
    yield (
        "ep divides the experts and the ranks of a replica",
        lambda x: x.ep == 1 or (facts.experts % x.ep == 0 and (x.tp * x.dp) % x.ep == 0),
    )
    if not any_experts:
        yield (
            "experts are whole on all ranks of a replica, or sharded as its layers are",
            lambda x: x.ep == x.tp * x.dp if x.dp > 1 else x.ep in (1, x.tp),
        )


def search_serving(
    request: ServedSearchRequest,
    bench: ServingBench,
    progress: Progress,
    crew: Crew | None = None,
    bench_of: BenchOf | None = None,
) -> SearchReport:
    """The answer to a request. RequestError for an empty space; the errors of models and clusters.

    Where there are many replicas a ``crew`` makes them, each in a process whose workbench ``bench_of`` makes.
    """
    started = time.perf_counter()
    made = asked(request)
    found = WaysFound()
    engines = dict.fromkeys(engine_name(policy) for policy in made.axes["policy"])
    wanted = [(layout, engine) for layout in made.layouts for engine in engines]
    replicas: dict[tuple[ReplicaLayout, str], LayoutReplica] = {}
    with progress(len(wanted)) as advance:
        for (layout, engine), own in zip(wanted, all_replicas(made, wanted, bench, crew, bench_of), strict=True):
            if isinstance(own, Refused):
                leave_layout(made, layout, engine, own, found)
            else:
                replicas[layout, engine] = own
            advance(1)
    points(made, replicas, found)
    return answer(made, replicas, bench, found, started)


def all_replicas(
    made: ServedAsked,
    wanted: Sequence[tuple[ReplicaLayout, str]],
    bench: ServingBench,
    crew: Crew | None,
    bench_of: BenchOf | None,
) -> Iterable[LayoutReplica | Refused]:
    """The replica of each layout and engine, or why there is none; by a crew where there are many."""
    request = made.request
    if crew is None or crew.alone or bench_of is None or len(wanted) < MANY or callable(request.step.model):
        return (replica_or_why(made, layout, engine, bench) for layout, engine in wanted)
    text = request.to_json()
    size = -(-len(wanted) // (crew.count * SHARES))
    groups = [list(wanted[at : at + size]) for at in range(0, len(wanted), size)]
    answers = crew.apply(replicas_in_process, [(bench_of, text, group) for group in groups])
    return (each for group in answers for each in group)


@own_warnings()
def replicas_in_process(
    bench_of: BenchOf, text: str, wanted: Sequence[tuple[ReplicaLayout, str]]
) -> list[LayoutReplica | Refused]:
    """The same in a process of its own."""
    request = ServedSearchRequest.from_json(text)
    bench, made = bench_of(request.step.sources), asked(request)
    return [replica_or_why(made, layout, engine, bench) for layout, engine in wanted]


@dataclass(frozen=True)
class Refused:
    """Why a layout has no replica: for lack of memory, or what its parts say."""

    reason: str
    why: str


class WaysFound:
    """Rows so far, and how many points were left out for which reason."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.pruned: dict[str, Left] = {}

    def leave(self, reason: str, example: Mapping[str, Any], why: str, count: int = 1) -> None:
        """Note points that are left out."""
        if count:
            known = self.pruned.get(reason) or Left(0, dict(example), why)
            self.pruned[reason] = Left(known.count + count, known.example, known.why)


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


def leave_layout(made: ServedAsked, layout: ReplicaLayout, engine: str, why: Refused, found: WaysFound) -> None:
    """Count the points of a layout that has no replica."""
    batches, chunks = made.axes["batch"], made.axes["max_tokens"]
    count = len(batches) * len(chunks) * sum(engine_name(each) == engine for each in made.axes["policy"])
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


def points(made: ServedAsked, replicas: Mapping[tuple[ReplicaLayout, str], LayoutReplica], found: WaysFound) -> None:
    """Every point that meets the rules and has KV memory, with its figures."""
    request, axes = made.request, made.axes
    grid: list[tuple[Row, LayoutReplica, LayoutReplica | None]] = []
    for policy in axes["policy"]:
        own = [each for (_, engine), each in replicas.items() if engine == engine_name(policy)]
        for each in own:
            others: list[LayoutReplica | None] = [None] if "together" in axes["pools"] else []
            if "apart" in axes["pools"]:
                alike = (each.layout.cluster, each.layout.nodes, each.layout.precision)
                others += [x for x in own if (x.layout.cluster, x.layout.nodes, x.layout.precision) == alike]
            for other, batch, chunk in product(others, axes["batch"], axes["max_tokens"]):
                place = None if other is None else other.layout
                grid.append((row_of(each.layout, policy, batch, chunk, place), each, other))
    if len(grid) > MOST_POINTS:
        raise RequestError(
            f"the space has {len(grid):,} points, more than {MOST_POINTS:,}: give fewer values of its axes"
        )
    kept = ruled(request, [row for row, _, _ in grid], found)
    for at in kept:
        row, decode, prefill = grid[at]
        held = held_tokens(request, row["policy"], prefilled=False) * row["batch"]
        if held > decode.kv.tokens:
            found.leave(
                "memory", row, f"{held:,.0f} tokens of {decode.kv.tokens:,} that fit into the KV memory of a rank"
            )
            continue
        for figures in figures_of(made, row, decode, prefill):
            found.rows.append({**row, "status": "evaluated", "why": "", **figures})


def ruled(request: ServedSearchRequest, rows: Sequence[Row], found: WaysFound) -> list[int]:
    """Places of the rows that meet all rules. RequestError where none does."""
    if not rows:
        return []
    rules, _ = request.expressions()
    kept = np.ones(len(rows), dtype=bool)
    for rule in rules:
        named = [{**row, "replica_devices": row["tp"] * row["pp"] * row["dp"]} for row in rows]
        columns = {name: np.array([row[name] for row in named]) for name in rule.names} or {"": np.zeros(len(rows))}
        holds = rule.holds(columns)
        lost = np.flatnonzero(kept & ~holds)
        found.leave(f"rule: {rule.text}", rows[lost[0]] if len(lost) else {}, "it does not hold", len(lost))
        kept &= holds
        if not kept.any():
            raise RequestError(f"the space is empty: no point meets {rule.text!r}")
    return np.flatnonzero(kept).tolist()


def figures_of(made: ServedAsked, row: Row, own: LayoutReplica, prefill: LayoutReplica | None) -> list[dict[str, Any]]:
    """The figures of a point; of pools apart one for each ratio that is looked at."""
    request, devices = made.request, made.devices(own.layout)
    price = price_of(made, own.layout)
    if prefill is None:
        each = together(request, own, row["policy"], row["batch"], row["max_tokens"])
        replicas = devices // own.layout.devices
        each |= {"ratio": "", "prefill_replicas": 0, "replicas": replicas, "devices": replicas * own.layout.devices}
        each["requests_per_s"] *= replicas
        return [completed(request, each, price, devices)]
    several = apart(request, prefill, own, row["policy"], row["batch"], row["max_tokens"], devices)
    return [completed(request, each, price, devices) for each in several]


def price_of(made: ServedAsked, layout: ReplicaLayout) -> float:
    """What a GPU costs an hour: as asked, or the cluster's own."""
    said = made.request.step.price_per_gpu_hour
    return float(made.clusters[layout.cluster].price_per_device_hour if said is None else said)


def answer(
    made: ServedAsked,
    replicas: Mapping[tuple[ReplicaLayout, str], LayoutReplica],
    bench: ServingBench,
    found: WaysFound,
    started: float,
) -> SearchReport:
    """The report of what was found."""
    from ...trace.models import resolve

    request = made.request
    good = good_rows(request, found.rows)
    order = ranked(good, request.objectives)

    def report(row: Mapping[str, Any]) -> InferenceReport:
        own = find(row, LAYOUT, replicas)
        return decode_report(request, own, row["batch"], bench)

    best, tied = explained(order, request, report)
    if request.confirm:
        best = [
            {**row, "confirmed": confirmed(request, row, replicas)} if at < request.confirm else row
            for at, row in enumerate(best)
        ]
    pruned = sum(each.count for each in found.pruned.values())
    return SearchReport(
        model=resolve(request.step.model).name,
        sampler="exhaustive",
        objectives=request.objectives,
        constraints=(*request.constraints, *(f"{n} <= {v:g}" for n, v in expected(request).items())),
        axes={name: list(values) for name, values in made.axes.items() if len(values) > 1},
        combinations=made.combinations,
        points=len(found.rows) + pruned,
        left_out=dict(made.left_out),
        evaluated=len(found.rows),
        pruned=pruned,
        pruned_by=dict(found.pruned),
        best=tuple(best),
        pareto=tuple(front(good, request.objectives)),
        ties=max(len(tied) - 1, 0),
        sensitivity=tuple(around(best[0], found.rows, good, request.objectives[0])) if best else (),
        measure_next=tuple(settled(tied, report)),
        notes=tuple(notes(request, found, good)),
        wall_time_s=time.perf_counter() - started,
        rows=tuple(found.rows),
    )


def expected(request: ServedSearchRequest) -> dict[str, float]:
    """What users expect at most, by figure."""
    slo = request.slo
    most = {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms, "e2e_ms": slo.e2e_ms}
    return {name: value for name, value in most.items() if value is not None}


def good_rows(request: ServedSearchRequest, rows: Sequence[Row]) -> list[Mapping[str, Any]]:
    """The rows that meet all constraints and give users what they expect."""
    _, constraints = request.expressions()
    most = expected(request).items()
    return [row for row in meeting(rows, constraints) if all(row[name] <= value for name, value in most)]


def decode_report(request: ServedSearchRequest, own: LayoutReplica, batch: int, bench: Any) -> InferenceReport:
    """The whole report of the iteration in which a replica's sequences decode."""
    context = round(request.input_len + request.output_len / 2)
    work = replace(own.step.work, kind="decode", batch=batch, input_len=context, cache="static")
    made = bench.simulate(replace(own.step, work=work))
    assert isinstance(made, InferenceReport)
    return made


def notes(request: ServedSearchRequest, found: WaysFound, good: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why there is no answer."""
    if good:
        return []
    if not found.rows:
        said = "; ".join(f"{each.count:,} points {name}: {each.why}" for name, each in found.pruned.items())
        return [f"no point of the space can run: {said}"]
    least = {name: min(row[name] for row in found.rows) for name in ("ttft_ms", "tpot_ms", "e2e_ms")}
    asked_for = [*request.constraints, *(f"slo.{n}={v}" for n, v in vars(request.slo).items() if v and n != "share")]
    reached = ", ".join(f"{name} {value:.1f}" for name, value in least.items())
    return [
        f"no point meets {' and '.join(asked_for)}; the least of each that any of {len(found.rows):,} has: {reached}"
    ]
