"""How two ways to serve differ: setting by setting, part by part of what users wait for, and op by op."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...memory.breakdown import GIB
from ...question.canonical import RequestError
from ...report.answer import InferenceReport
from ...report.view import ViewColumn
from ...serving.policies import policy_of
from ..compare import SHOWN_OPS, Change, ComparedPoints, by_op, differences, named_point, stepwise, typed_value
from ..outcome import Row
from ..space import combinations
from .decoding import decode_reports
from .estimate import held_tokens
from .replicas import LayoutReplica
from .request import LAYOUT, OF_PAIR, OF_PREFILL, SETTINGS, ReplicaLayout, ServedSearchRequest, ServedSpace
from .run import Refused, ServedSearchSetup, figures_of, replica_or_why, requirements, row_of, set_up

if TYPE_CHECKING:
    from ...engines.bench import Bench

WHOLE = ("nodes", "batch", "max_tokens", *LAYOUT, *OF_PREFILL)  # settings that are whole numbers
USUAL_BATCH = 64
FIGURES = (
    *("tokens_per_s_per_gpu", "tokens_per_s_per_user", "ttft_ms", "tpot_ms", "e2e_ms", "requests_per_s"),
    *("concurrency", "kv_share", "devices", "cost_per_million_tokens"),
)
OF_TPOT = {"decode_ms": "iteration that decodes", "prompt_ms": "prompts beside it"}
OF_TTFT = {"queue_ms": "waiting for a turn", "transfer_ms": "moving the cache"}


@dataclass(frozen=True)
class WayStep:
    """Settings changed after those before them: from what to what, and the figures then (None: ``why`` not)."""

    settings: str
    one: str
    other: str
    tokens_per_s_per_gpu: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    why: str = ""


@dataclass(frozen=True)
class ServedComparison(ComparedPoints):
    """Two ways to serve and how the second differs from the first.

    ``settings`` lead from one to the other. ``tpot`` and ``ttft`` add up to what users wait for (ms), ``dimensions`` to
    an iteration that decodes (ms: compute, what each kind of ranks exchanges while nothing computes, the host).
    ``decode_ops`` are kernels of such an iteration of a replica, ``prompt_ops`` of one with prompts (ms), those that
    differ most first. ``memory`` is of a GPU that decodes (GiB).
    """

    one: Mapping[str, Any]
    other: Mapping[str, Any]
    settings: tuple[WayStep, ...]
    figures: tuple[Change, ...]
    tpot: tuple[Change, ...]
    ttft: tuple[Change, ...]
    dimensions: tuple[Change, ...]
    memory: tuple[Change, ...]
    decode_ops: tuple[Change, ...]
    prompt_ops: tuple[Change, ...]

    STEPS = (
        *("settings", "setting by setting"),
        (
            *(ViewColumn("setting"), ViewColumn("from → to"), ViewColumn("tokens/s/GPU", "figure")),
            *(ViewColumn("TTFT ms", "figure"), ViewColumn("TPOT ms", "figure"), ViewColumn("")),
        ),
    )
    CHANGES: ClassVar[Mapping[str, tuple[str, str, str]]] = {
        name: (caption, "figure", "more")
        for name, caption in {
            "figures": "what users and owners have",
            "tpot": "time of an output token, ms",
            "ttft": "time of the first token, ms",
            "dimensions": "an iteration that decodes, by dimension, ms",
            "decode_ops": "its ops that differ most, ms",
            "prompt_ops": "ops of prompts that differ most, ms",
            "memory": "memory of a GPU, GiB",
        }.items()
    }


@dataclass(frozen=True)
class Way:
    """A way to serve with its figures and the replicas that it is made of; ``prefill`` is None where one does both."""

    row: Row
    decode: LayoutReplica
    prefill: LayoutReplica | None


def compare_ways(
    request: ServedSearchRequest, bench: Bench, names: Sequence[str], path: Path | None
) -> ServedComparison:
    """How two ways to serve differ that a person names, as ranks in a file or by settings. RequestError for one that
    cannot be."""
    setup = set_up(request)
    one, other = (way_named(setup, text, path) for text in names)
    setup = with_places(setup, (one, other))
    ways = [way_of(setup, point, bench) for point in (one, other)]
    rows = [way.row for way in ways]
    decodes = [decode_reports(request, way.decode, [way.row["batch"]], bench)[0] for way in ways]
    prompts = [prompt_report(request, way, bench) for way in ways]

    def row_of(point: Row) -> Row:
        try:
            return way_of(setup, point, bench).row
        except RequestError as error:
            return {"why": str(error)}

    steps = []
    for names, row in stepwise(one, other, groups(one, other), row_of):
        before, after = (" ".join(str(way[name]) for name in names if way[name] != "") for way in (one, other))
        rate, ttft_ms, tpot_ms = (row.get(name) for name in ("tokens_per_s_per_gpu", "ttft_ms", "tpot_ms"))
        steps.append(WayStep(" ".join(names), before, after, rate, ttft_ms, tpot_ms, row.get("why", "")))
    return ServedComparison(
        one=rows[0],
        other=rows[1],
        settings=tuple(steps),
        figures=tuple(Change(name, rows[0][name], rows[1][name]) for name in FIGURES),
        tpot=tuple(differences((adding_up(row, OF_TPOT, "tpot_ms", "host") for row in rows), last=("host", "tpot_ms"))),
        ttft=tuple(
            differences(
                (adding_up(row, OF_TTFT, "ttft_ms", "prompt and host") for row in rows),
                last=("prompt and host", "ttft_ms"),
            )
        ),
        dimensions=tuple(differences(map(by_dimension, decodes), last=("iteration",))),
        memory=tuple(differences(memory_gib(*report_and_way) for report_and_way in zip(decodes, ways, strict=True))),
        decode_ops=tuple(in_ms(by_op(*decodes))),
        prompt_ops=tuple(in_ms(by_op(*prompts))),
    )


def with_places(setup: ServedSearchSetup, points: Sequence[Row]) -> ServedSearchSetup:
    """The request with the batches and chunks of points among its own, so that tables have them."""
    axes = dict(setup.axes)
    for name in ("batch", "max_tokens"):
        axes[name] = tuple(sorted({*axes[name], *(point[name] for point in points)}))
    return replace(setup, axes=axes)


def way_of(setup: ServedSearchSetup, point: Row, bench: Any) -> Way:
    """The way to serve at a point, with its figures. RequestError for what cannot be."""
    layout, first = layout_of(setup, point, LAYOUT), None
    decode, prefill = replica(setup, layout, point, bench), None
    if point["pools"] == "apart":
        first = layout_of(setup, point, OF_PREFILL)
        prefill = replica(setup, first, point, bench)
    tokens = held_tokens(setup.request, point["policy"]) * point["batch"]
    if tokens > decode.served.kv.tokens:
        raise RequestError(
            f"batch={point['batch']} holds {tokens:,.0f} tokens of {decode.served.kv.tokens:,} that a rank has"
        )
    ratio = (point["ratio"],) if point["ratio"] else ()
    fixed = replace(setup, request=replace(setup.request, space=replace(setup.request.space, ratio=ratio)))
    row = row_of(layout, point["policy"], point["batch"], point["max_tokens"], first)
    figures = figures_of(fixed, row, decode, prefill)
    if not figures:
        devices = setup.devices(layout)
        raise RequestError(f"ratio={point['ratio'] or 'any'} does not fit the {devices} GPUs of the cluster")
    return Way({**row, **figures[0]}, decode, prefill)


def layout_of(setup: ServedSearchSetup, point: Row, names: Sequence[str]) -> ReplicaLayout:
    """The layout of a point's replicas that decode, or that prefill. RequestError where it does not fit together."""
    layout = ReplicaLayout.of(point, names)
    if layout.cluster not in setup.clusters:
        raise RequestError(f"cluster={layout.cluster} is not searched: space.cluster=[{layout.cluster},…]")
    column = combinations({name: [value] for name, value in vars(layout).items()})
    for what, holds in requirements(column, setup.clusters, setup.facts, any_experts=True).items():
        if not holds.all():
            settings = " ".join(f"{name}={value}" for name, value in layout.values().items())
            raise RequestError(f"{settings} cannot be: {what}")
    return layout


def replica(setup: ServedSearchSetup, layout: ReplicaLayout, point: Row, bench: Any) -> LayoutReplica:
    """The replica of a layout. RequestError for why there is none."""
    result = replica_or_why(setup, layout, policy_of(point["policy"]).framework, bench)
    if isinstance(result, Refused):
        settings = " ".join(f"{name}={value}" for name, value in layout.values().items())
        raise RequestError(f"{settings} cannot be compared: {result.why}")
    return result


def groups(one: Row, other: Row) -> list[tuple[str, ...]]:
    """Settings that differ, those together that cannot change alone: degrees over which experts are shared, and pools
    with what prefills in them."""
    differs = [name for name in SETTINGS if one[name] != other[name]]
    alike = (("tp", "dp", "ep") if "ep" in differs else (), OF_PREFILL if "pools" not in differs else ())
    joined = [tuple(name for name in differs if name in together) for together in alike]
    if "pools" in differs:
        joined.append(tuple(name for name in differs if name in ("pools", *OF_PAIR)))
    of = {name: group for group in joined for name in group}
    return list(dict.fromkeys(of.get(name, (name,)) for name in differs))


def adding_up(row: Row, parts: Mapping[str, str], total: str, remainder: str) -> dict[str, float]:
    """Parts of a figure that add up to it; the last but one is what no other part is."""
    named = {name: row[key] for key, name in parts.items() if row[key]}
    return {**named, remainder: row[total] - sum(named.values()), total: row[total]}


def by_dimension(report: InferenceReport) -> dict[str, float]:
    """Milliseconds of an iteration by what the GPUs do: compute, each kind of exchange, wait."""
    breakdown = report.breakdown
    seconds_of = {"compute": breakdown.compute_s}
    seconds_of |= {f"exposed {name}": seconds for name, seconds in breakdown.by_parallelism.items()}
    seconds_of |= {"other exchanges": breakdown.exposed_comm_s - sum(breakdown.by_parallelism.values())}
    seconds_of |= {"waiting for the host": breakdown.host_s, "pipeline bubble": breakdown.bubble_s}
    parts = {name: 1e3 * seconds for name, seconds in seconds_of.items() if abs(seconds) > 1e-12}
    return {**parts, "iteration": report.e2e_ms}


def memory_gib(report: InferenceReport, way: Way) -> dict[str, float]:
    """GiB of a GPU that decodes: weights, and the KV cache that its batch holds."""
    kv, layout = way.decode.served.kv, way.decode.layout
    kv_gib = way.row["kv_share"] * kv.tokens * kv.bytes_per_token / (layout.tp * layout.pp) / GIB
    return {"weights": report.memory.weights_gib, "KV cache in use": kv_gib}


def prompt_report(request: ServedSearchRequest, way: Way, bench: Any) -> InferenceReport:
    """The whole report of an iteration of prompts only: as many as fit into ``max_tokens``, or a chunk of one."""
    prefill, most = way.prefill or way.decode, way.row["max_tokens"]
    count, length = max(most // request.input_len, 1), min(request.input_len, most)
    work = replace(prefill.step.work, kind="prefill", batch=count, input_len=length, cache="static")
    report = bench.simulate(replace(prefill.step, work=work))
    assert isinstance(report, InferenceReport)
    return report


def in_ms(ops: Sequence[Change]) -> Iterator[Change]:
    """The ops that differ most, in milliseconds."""
    for op in ops[:SHOWN_OPS]:
        yield Change(op.name, 1e3 * op.one, 1e3 * op.other)


# --- points that a person names ---------------------------------------------------------------------------


def way_named(setup: ServedSearchSetup, text: str, path: Path | None) -> Row:
    """The way to serve that a person names (:func:`..compare.named_point`).

    A setting that is not named has its only value, or what is usual: degrees of 1, replicas that do both unless
    something of a pool is named, 64 sequences.
    """
    row = named_point(setup.request, text, partial(kept_ways, path), value_of, partial(usual, setup))
    return row | ({"prefill_cluster": ""} if row["prefill_cluster"] == row["cluster"] else {})


def usual(setup: ServedSearchSetup, typed: Row) -> Row:
    """What a way has of settings that nobody ``typed``. RequestError for parts of pools where there are none."""
    axes = setup.axes
    row: Row = {name: axes[name][0] for name in ("cluster", "nodes", "precision", "policy", "max_tokens")}
    row |= dict.fromkeys(LAYOUT, 1) | {"batch": min(axes["batch"], key=lambda size: abs(size - USUAL_BATCH))}
    row |= {name: values[0] for name, values in axes.items() if len(values) == 1 and name in row}
    row |= {"ep": typed.get("tp", row["tp"]) * typed["dp"]} if typed.get("dp", 1) > 1 else {}
    apart = typed.get("pools") == "apart" or bool(typed.keys() & set(OF_PAIR))
    if apart and typed.get("pools", "apart") != "apart":
        raise RequestError("pools=together has no ratio and nothing that only prefills: leave these out")
    prefills = {f"prefill_{name}": typed.get(name, row[name]) for name in LAYOUT}
    prefills["prefill_cluster"] = axes["prefill_cluster"][0]
    row |= {"pools": "apart" if apart else "together", "ratio": ""}
    return row | (prefills if apart else {**dict.fromkeys(OF_PREFILL, 0), "prefill_cluster": ""})


def value_of(name: str, text: str) -> Any:
    """The value of a setting that a person types. RequestError for what it cannot be."""
    if name in ("pools", "ratio"):
        ServedSpace.CHECKS[name](name, text)
    return typed_value(name, text, int if name in WHOLE else str)


def kept_ways(path: Path | None) -> list[Row]:
    """The rows of a file that a search kept; none without one. RequestError for a file of anything else."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path is None or not path.is_file():
        return []
    try:
        rows: list[Row] = pq.read_table(path).to_pylist()
    except (OSError, pa.ArrowInvalid):
        rows = [{}]
    if rows and not {"meets_slo", *SETTINGS} <= rows[0].keys():
        raise RequestError(f"points={path} holds no points of a search over ways to serve")
    return rows
