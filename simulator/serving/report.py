"""From the state of a run that has ended to its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from operator import mul
from typing import TYPE_CHECKING, Any

import numpy as np

from ..memory.breakdown import GIB
from ..question.expert_balance import ExpertBalance
from ..question.request_classes import TARGETS, RequestClass
from ..question.serving import ServingRequest
from ..report.account import shares_of_total
from ..report.served import NOBODY, ServingReport, TimeSpread
from ..report.view import number_text
from .adapter_costs import most_in_host, most_loras
from .autoscale import fleet_figures
from .histogram import Histogram
from .kinds import KINDS, kind_figures
from .limits import rejection_note, rejections
from .rules import SchedulerRules, ServingSetup, first_decode_rank
from .state import OWN_TIERS, SIZES, LoopState

if TYPE_CHECKING:
    from .replica import ServedReplica
    from .tally import Tally

PERCENTILES = (50, 90, 99)
MOST_SHOWN = 20  # adapters
CDF_POINTS = 100
OVERLOADED = 0.1  # of all requests still waiting when the last comes in, more than at half time
MS = 1e3
MOVED = ("prefill_e2e", "kv_transfer", "decode_e2e")
SLO_SCALES = np.geomspace(0.1, 10, 61)


def spread(times: Histogram) -> TimeSpread:
    """The spread of times in microseconds."""
    if not times.count:
        return NOBODY
    points = tuple((value / MS, share) for value, share in times.cdf(CDF_POINTS))
    p50, p90, p99 = (times.percentiles(np.array(PERCENTILES)) / MS).tolist()
    return TimeSpread(times.mean / MS, p50, p90, p99, int(times.count), points)


def report_of(
    request: ServingRequest,
    setup: ServingSetup,
    state: LoopState,
    tally: Tally,
    backlog: list[tuple[float, int, int]],
    replicas: tuple[ServedReplica, ServedReplica],
    wall_s: float,
) -> ServingReport:
    """The report of a run that has ended."""
    totals = {name: state.totals[name][0].item() for name in state.totals.dtype.names}
    seconds = max(totals["now_us"] / 1e6, 1e-9)
    names = [kind.name for kind in request.traffic.classes]
    rules = setup.rules, setup.decode_rules
    rejected = rejections(state.classes.tolist(), names, *rules, request.admission, setup.mixed > 0)
    apart = request.decode_pool.replicas > 0
    counted = max(totals["arrived"] - tally.warmup, 0)
    attained = tally.good / counted if counted else 0.0
    hit_tokens = totals["hit_tokens"] + int(state.shelves["tokens"].sum())
    by_class = zip(request.traffic.classes, tally.parts, strict=True)
    expenses = expenses_of(request, state, totals, replicas, seconds)
    devices, output_tokens = expenses["devices"], totals["output_tokens"]
    busy, rank_counts = float(state.ranks["busy_us"].mean()), (request.attention_dp, request.second_dp)
    return ServingReport(
        requests=totals["arrived"],
        completed=totals["completed"],
        rejected=totals["rejected"],
        **times_of(state, totals, tally, apart),
        duration_s=seconds,
        requests_per_s=totals["completed"] / seconds,
        output_tokens_per_s=output_tokens / seconds,
        output_tokens_per_s_per_gpu=output_tokens / seconds / devices,
        total_tokens_per_s=(output_tokens + totals["input_tokens"]) / seconds,
        goodput=attained * totals["arrived"] / seconds,
        slo_attainment=attained,
        kv_peak=kv_peak(state, setup),
        **kv_tokens(state.ranks[: first_decode_rank(setup)], setup.rules, request.attention_dp),
        **iterations_of(totals),
        prefix_hit_share=hit_tokens / max(1, hit_tokens + totals["computed_tokens"]),
        kv_tiers=tier_figures(state, replicas[0], totals),
        adapters=adapter_figures(request, tally, totals, replicas[0], seconds) if request.lora.exist else {},
        expert_balance=expert_figures(setup, totals, request.eplb) if request.eplb.exist else {},
        utilisation=busy / (totals["now_us"] or 1.0) * on_share(state, expenses["fleet"]),
        replicas=setup.replicas,
        **expenses,
        overload=overload(request, backlog, totals["rejected"]),
        backlog=tuple({"s": at / 1e6, "came": came, "waiting": waits} for at, came, waits in backlog),
        over_time=over_time(state, setup),
        slo={name: value for name, value in asdict(request.slo).items() if value is not None and request.slo.named},
        slo_curve=slo_curve(tally, counted) if request.targets_named else (),
        classes={kind.name: class_figures(kind, part, seconds) for kind, part in by_class},
        pools=pools(state, setup, devices_of(request, replicas), rank_counts) if apart else {},
        kinds=kind_figures(request, setup, state, tally, replicas, spread) if setup.mixed else {},
        failed=totals["failed"],
        kv_transfer_bytes=totals["moved_tokens"] * replicas[1].kv.bytes_per_token,
        rejections=rejected,
        notes=notes(request, rejection_note(rejected, totals["arrived"]), replicas),
        sources=sources_of(replicas),
        wall_time_s=wall_s,
    )


def iterations_of(totals: Mapping[str, Any]) -> dict[str, Any]:
    """How many iterations there were, what was in them, and who had to leave them."""
    return {
        "iterations": totals["iterations"],
        "mean_batch": totals["computed_tokens"] / max(1, totals["iterations"]),
        "tokens_per_decode": 1 + totals["guessed"] / max(totals["guesses"], 1),
        "preemptions": totals["preemptions"],
        "swaps": totals["swaps"],
    }


def times_of(state: LoopState, totals: Mapping[str, Any], tally: Tally, apart: bool) -> dict[str, Any]:
    """What requests waited for, by the names of a report; with pools ``apart`` those of a cache that moved, too."""
    names = ("ttft", "tpot", "e2e", "queue", "normalised", *(MOVED if apart else ()))
    gaps = Histogram(state.gaps, (totals["gaps"], totals["gap_us"], totals["least_gap_us"], totals["most_gap_us"]))
    return {"itl_ms": spread(gaps)} | {f"{name}_ms": spread(tally.times[name]) for name in names}


def devices_of(request: ServingRequest, replicas: tuple[ServedReplica, ServedReplica]) -> tuple[int, int]:
    """GPUs of the replicas of the first and of the second pool."""
    ffn_gpus = request.afd.ffn_gpus if request.second_pool.replicas else 0
    second = request.second_pool.replicas * replicas[1].devices + ffn_gpus
    return request.replicas * replicas[0].devices, second


def expenses_of(
    request: ServingRequest,
    state: LoopState,
    totals: Mapping[str, Any],
    replicas: tuple[ServedReplica, ServedReplica],
    seconds: float,
) -> dict[str, Any]:
    """GPUs, the replicas that came and went, and what power and a million output tokens cost, where that is known."""
    counts = devices_of(request, replicas)
    devices = sum(counts) + request.images.gpus * request.images.exist
    joules = energy_j(request, state, replicas, seconds)
    per_gpu = replicas[0].price_per_hour, replicas[1].price_per_hour
    fleet = fleet_figures(state, (replicas[0].devices, replicas[1].devices), per_gpu, request.most_replicas)
    price = fleet["price"] if fleet else sum(map(mul, counts, per_gpu)) * seconds / 3600
    million = max(totals["output_tokens"], 1) / 1e6
    return {
        "devices": devices,
        "fleet": fleet,
        "power_w": None if joules is None else joules / seconds / devices,
        "kwh_per_million_tokens": None if joules is None else joules / 3.6e6 / million,
        "cost_per_million_tokens": price / million if price else None,
    }


def on_share(state: LoopState, fleet: Mapping[str, float]) -> float:
    """How many times as much of its own time a replica was busy as of all the time: it may be off."""
    return len(state.fleet) / max(fleet["mean_replicas"], 1e-9) if fleet else 1.0


def tier_figures(state: LoopState, replica: ServedReplica, totals: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    """Each tier of the prefix cache, the GPU first: tokens that fit (of all ranks together), tokens found, their share
    of all that was found or computed, loads and the time that one took."""
    if not len(state.shelves):
        return {}
    size = replica.kv.block_tokens
    total = max(totals["hit_tokens"] + int(state.shelves["tokens"].sum()) + totals["computed_tokens"], 1)
    tiers: dict[str, Mapping[str, float]] = {
        "gpu": {"tokens_found": totals["hit_tokens"], "share": totals["hit_tokens"] / total}
    }
    private, shared = state.shelves[:-1].reshape(-1, OWN_TIERS), state.shelves[-1:]
    for name, shelves in (("host", private[:, 0]), ("ssd", private[:, 1]), ("remote", shared)):
        if not shelves["blocks"].any():
            continue
        tokens = int(shelves["tokens"].sum())
        tiers[name] = {
            "tokens_found": tokens,
            "share": tokens / total,
            "loads": int(shelves["loads"].sum()),
            "tokens_kept": int(shelves["used"].sum()) * size,
            "tokens_evicted": int(shelves["evicted"].sum()) * size,
            "bytes_read": tokens * replica.kv.bytes_per_token,
        }
    tiers["loads"] = {"loads": totals["loads"], "mean_ms": totals["load_us"] / max(totals["loads"], 1) / MS}
    return tiers


def adapter_figures(
    request: ServingRequest, tally: Tally, totals: Mapping[str, Any], replica: ServedReplica, seconds: float
) -> dict[str, Any]:
    """What adapters took and what their requests had (``by_adapter``, the most asked for first)."""
    lora, costs = request.lora, replica.adapters
    requests, outputs, ttft_us = tally.by_adapter
    order = np.argsort(-requests, kind="stable")[:MOST_SHOWN]
    loads = totals["adapter_loads"]
    most = most_loras(lora, request.scheduler.policy)
    return {
        "on_gpu": most,
        "in_host": most_in_host(lora, request.scheduler.policy),
        "gib_per_gpu": most * costs.gpu_bytes / GIB if costs else 0.0,
        "in_batch": totals["adapters_used"] / max(totals["iterations"], 1),
        "loads": loads,
        "loads_from_disk": totals["adapter_reads"],
        "load_ms": totals["adapter_load_us"] / max(loads, 1) / MS,
        "waited": totals["adapter_waits"],
        "asked_for": int(np.count_nonzero(requests)),
        "by_adapter": tuple(
            {
                "adapter": int(code),
                "requests": int(requests[code]),
                "requests_per_s": float(requests[code]) / seconds,
                "output_tokens_per_s": float(outputs[code]) / seconds,
                "ttft_ms": float(ttft_us[code] / requests[code]) / MS,
            }
            for code in order
            if requests[code]
        ),
    }


def expert_figures(setup: ServingSetup, totals: Mapping[str, Any], balance: ExpertBalance) -> dict[str, Any]:
    """How uneven the GPUs of experts were (busiest over mean), what it took, and how it went over iterations."""
    timing, iterations = setup.timing, max(totals["iterations"], 1)
    blocks = min(-(-iterations // (setup.replicas * timing.drift_block)), len(timing.imbalance))
    ran, starts = timing.imbalance[:blocks], np.arange(blocks) * timing.drift_block
    return {
        "mean": totals["uneven"] / iterations,
        "most": float(ran.max()),
        "longer_ms": totals["uneven_us"] / iterations / MS,
        "rebalances": totals["rebalances"],
        "move_ms": totals["rebalance_us"] / max(totals["rebalances"], 1) / MS,
        "step_interval": balance.step_interval,
        "over_time": tuple(zip(starts.tolist(), ran.tolist(), strict=True)),
    }


def class_figures(kind: RequestClass, part: Tally, seconds: float) -> dict[str, Any]:
    """What a class saw: requests that ended after the warm-up, those served, times, and how many had their targets."""
    times = {f"{name}_ms": spread(part.times[name]).to_dict() for name in ("ttft", "tpot", "e2e", "queue")}
    return {
        "priority": kind.priority,
        "requests": part.ended,
        "completed": int(part.times["e2e"].count),
        "slo": {name: float(part.limits_us[name][0]) / MS for name in TARGETS if np.isfinite(part.limits_us[name][0])},
        "slo_attainment": part.good / part.ended if part.ended else 0.0,
        "goodput": part.good / seconds,
        **times,
    }


def kv_peak(state: LoopState, setup: ServingSetup) -> float:
    """The largest share of its KV blocks that any rank had in use."""
    first = first_decode_rank(setup)
    blocks = np.where(np.arange(len(state.ranks)) < first, setup.rules.blocks, setup.decode_rules.blocks)
    return float((state.ranks["peak"] / blocks).max())


def kv_tokens(ranks: np.ndarray, rules: SchedulerRules, ranks_per_replica: int) -> dict[str, Any]:
    """Tokens that fit into the KV memory of a replica, of each of its ranks, and the most that any rank had in use."""
    fit = rules.blocks * rules.block_tokens
    most = int(ranks["peak"].max()) * rules.block_tokens
    return {"kv_tokens": fit * ranks_per_replica, "kv_rank_tokens": fit, "kv_peak_tokens": most}


def parts(state: LoopState, setup: ServingSetup) -> dict[str, tuple[slice, SchedulerRules]]:
    """The ranks of each pool and their rules, ``all`` where there is one."""
    first = first_decode_rank(setup)
    if first == len(state.ranks):
        return {"all": (slice(0, first), setup.rules)}
    names = KINDS if setup.mixed else ("prefill", "decode")
    return {names[0]: (slice(0, first), setup.rules), names[1]: (slice(first, None), setup.decode_rules)}


def over_time(state: LoopState, setup: ServingSetup) -> dict[str, tuple[Mapping[str, float], ...]]:
    """Each pool's spans of time up to the last iteration: means over their iterations, weighted by their length."""
    pools = parts(state, setup)
    spans = state.spans.reshape(len(pools), -1)
    used = np.flatnonzero(spans["iterations"].sum(axis=0))
    width_s = float(state.totals["width_us"][0]) / 1e6
    series: dict[str, tuple[Mapping[str, float], ...]] = {}
    for (name, (ranks, rules)), pool_spans in zip(pools.items(), spans, strict=True):
        used_spans = pool_spans[: used[-1] + 1] if len(used) else pool_spans[:0]
        busy, count = np.maximum(used_spans["busy_us"], 1e-9), len(state.ranks[ranks])
        stages = setup.stages if name in ("all", "prefill", KINDS[0]) else setup.decode_stages
        columns = {
            "start_s": np.arange(len(used_spans)) * width_s,
            "iterations": used_spans["iterations"],
            "busy_share": carried_on(used_spans["busy_us"] / (width_s * 1e6 * count * stages)),
            "decodes": used_spans["decodes"] / busy,
            "prefill_tokens": used_spans["prefill_tokens"] / np.maximum(used_spans["iterations"], 1),
            "kv_share": used_spans["blocks"] / busy / rules.blocks,
            "waiting": used_spans["waiting"] / busy,
        }
        rows = zip(*columns.values(), strict=True)
        series[name] = tuple(dict(zip(columns, map(float, row), strict=True)) for row in rows)
    return series


def carried_on(shares: np.ndarray) -> np.ndarray:
    """Shares of spans that iterations which began in them take, none above 1: what is more goes on in the next."""
    pieces, remainder = [], 0.0
    for share in shares.tolist():
        pieces.append(min(share + remainder, 1.0))
        remainder += share - pieces[-1]
    return np.array(pieces)


def pools(
    state: LoopState, setup: ServingSetup, devices: tuple[int, int], ranks: tuple[int, int]
) -> dict[str, dict[str, float]]:
    """Replicas and devices of each pool, the share of the time that they compute, KV memory, the most of it in use."""
    duration_us = float(state.totals["now_us"][0]) or 1.0
    return {
        name: {
            "replicas": float(setup.first_decode if name == "prefill" else setup.replicas - setup.first_decode),
            "devices": float(count),
            "utilisation": float(state.ranks["busy_us"][pool_ranks].mean()) / duration_us,
            "kv_peak": float(state.ranks["peak"][pool_ranks].max()) / rules.blocks,
            **kv_tokens(state.ranks[pool_ranks], rules, dp),
        }
        for (name, (pool_ranks, rules)), count, dp in zip(parts(state, setup).items(), devices, ranks, strict=True)
    }


def slo_curve(tally: Tally, requests: int) -> tuple[tuple[float, float], ...]:
    """(how many times as long the targets are, share of all requests that meet all of them then)."""
    within = tally.needed.count / max(requests, 1)
    return tuple((scale, tally.needed.share_within(scale * 1e6) * within) for scale in map(float, SLO_SCALES))


def energy_j(
    request: ServingRequest, state: LoopState, replicas: tuple[ServedReplica, ServedReplica], seconds: float
) -> float | None:
    """Joules of all devices: what they draw in iterations of the sizes that ran, and idle for the rest; None where that
    is unknown."""
    counts = (request.replicas, request.second_pool.replicas)
    total, sizes = 0.0, state.sizes.reshape(-1, 2, SIZES)
    ranks = (request.attention_dp, request.second_dp)
    for pool_sizes, replica, count, dp in zip(sizes, replicas, counts, ranks, strict=False):
        figures = replica.figures
        if figures is None or not np.isfinite(figures.idle_w):
            return None
        per_rank = replica.devices / dp
        rest_s = seconds * replica.devices * count - float(pool_sizes["busy_us"].sum()) * per_rank * 1e-6
        total += max(rest_s, 0.0) * float(figures.idle_w)
        axes = (figures.decode_axis, figures.decode_w), (figures.prompt_axis, figures.prompt_w)
        for sized, (axis, watts) in zip(pool_sizes, axes, strict=True):
            ran = sized[sized["iterations"] > 0]
            watts_drawn = np.interp(ran["tokens_us"] / np.maximum(ran["busy_us"], 1e-9), axis, watts)
            total += float((ran["busy_us"] * watts_drawn).sum()) * per_rank * 1e-6
    return total


def overload(request: ServingRequest, backlog: list[tuple[float, int, int]], rejected: int) -> str:
    """What to say where the queue grew as long as requests came, empty where it did not. Clients of a closed loop wait
    for answers: they cannot overload anything."""
    if request.traffic.arrival == "closed" or len(backlog) < 2:
        return ""
    at = {came: (time_us, waiting) for time_us, came, waiting in backlog[:-1]}
    last, half = max(at), min(at, key=lambda came: abs(came - max(at) / 2))
    grown = at[last][1] - at[half][1]
    if grown < OVERLOADED * (last - half) or at[last][1] < 10:
        return ""
    seconds = max((at[last][0] - at[half][0]) / 1e6, 1e-9)
    share = grown / max(1, last - half)
    return (
        f"overload: when {last:,} requests had come {at[last][1]:,} waited, {number_text(grown / seconds)} more every "
        f"second; {share:.0%} of what comes is more than is served, so that times depend on how long the run is"
    )


def sources_of(replicas: tuple[ServedReplica, ServedReplica]) -> dict[str, float]:
    """Share of kernel time by whose measurements answered, the mean of prefilling and decoding replicas."""
    names = dict.fromkeys(name for replica in replicas for name in replica.sources)
    return shares_of_total({name: sum(replica.sources.get(name, 0.0) for replica in replicas) for name in names})


def notes(request: ServingRequest, rejected: str, replicas: tuple[ServedReplica, ServedReplica]) -> tuple[str, ...]:
    """What a reader should know."""
    candidates = (note for replica in replicas for note in (*replica.notes, replica.shortened) if note)
    texts = list(dict.fromkeys(candidates))
    if (request.traffic.prefixes or request.traffic.turns > 1) and not request.scheduler.prefix_caching:
        texts.append(
            "prompts begin alike, and each is computed whole: scheduler.prefix_caching=true finds what was before"
        )
    return (*texts, rejected) if rejected else tuple(texts)
