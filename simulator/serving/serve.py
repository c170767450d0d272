"""Serve the traffic of a request on its replicas, chunk by chunk, and gather what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from ..question.canonical import RequestError
from ..question.fleet import ColdStart, ReplicaFailures
from ..question.serving import ServingRequest
from ..report.served import ServingReport
from . import autoscale, confidence
from . import setup as setups
from .adapter_costs import most_loras
from .adapter_draws import with_adapters
from .classes import with_classes
from .compiled import compiled, on_disk, with_own
from .histogram import BINS
from .images import with_images
from .limits import CONTEXT, MEMORY, tokens_allowed
from .loop import RequestChunk
from .own import load_router
from .policies import policy_of
from .replica import ServedReplica
from .report import report_of
from .requests import drifts, out_of_step, stream
from .rules import ServingSetup, first_decode_rank
from .state import NONE, LoopState, as_lists, as_objects, empty_state, with_room, write_back
from .streams import RequestStream
from .tally import Tally

# Output tokens of a run from which machine code pays: plain Python takes 7 to 15 us for each. To load it takes half
# a second, and a small run has two others beside it for its intervals, eleven with targets. To make it takes some
# 20 s, once; a run so long has no intervals.
LOADED_FROM, COMPILED_FROM = 20_000, 2_000_000
RunLoop = Callable[[LoopState, ServingSetup, RequestChunk, bool], None]


@dataclass(frozen=True)
class Keeping:
    """What is kept beside the report: so many ``iterations`` of the log, and every request where ``requests``."""

    iterations: int = 0
    requests: bool = False


@dataclass(frozen=True)
class ServedTraffic:
    """The report, the requests that ended and the iterations, as records (:mod:`.state`), as far as they were kept."""

    report: ServingReport
    requests: np.ndarray
    iterations: np.ndarray
    state: LoopState
    setup: ServingSetup
    replica: ServedReplica
    bytes_per_token: float  # of keys and values, as they move to another replica
    host_us: float  # that the host adds to a first token


def serve(
    request: ServingRequest,
    replica: ServedReplica,
    decoder: ServedReplica | None = None,
    keeping: Keeping | None = None,
    progress: Callable[[int], None] | None = None,
    clients: float | None = None,
    of_tokens: float = 0.0,
) -> ServedTraffic:
    """The traffic of a request on replicas like ``replica``, and ``decoder`` where a pool only decodes.

    ``progress`` is told how many more requests came in. ``clients`` send to a replica at a time; None: its part of
    those of the traffic, as each that prefills has a server of its own, none where requests come at a rate. Where this
    is one of many runs, they have ``of_tokens`` of answers together, for which compiling may pay. Always
    ends: overload is reported, not waited for. Raises RequestError and RequestTraceError.
    """
    keeping, source = keeping or Keeping(), requests_of(request, replica, decoder)
    if request.scheduler.prefix_caching and not source.shares and not request.tiers.exist and alike_without(request):
        bare = replace(request, scheduler=replace(request.scheduler, prefix_caching=False))
        served = serve_once(bare, source, replica, decoder, keeping, progress, clients, of_tokens)
        if not served.report.preemptions:
            return served
        source = requests_of(request, replica, decoder)
    return serve_once(request, source, replica, decoder, keeping, progress, clients, of_tokens)


def requests_of(request: ServingRequest, replica: ServedReplica, decoder: ServedReplica | None) -> RequestStream:
    """The requests of its traffic, with their classes and adapters."""
    traffic = request.traffic
    if drifts(traffic):
        setup = setups.setup(request, replica, decoder)
        limits = [tokens_allowed(of, code) for of in (setup.rules, setup.decode_rules) for code in (CONTEXT, MEMORY)]
        traffic = out_of_step(traffic, min(limits))
    source = with_classes(stream(traffic), traffic)
    return with_adapters(source, request.lora, request.traffic)


def alike_without(request: ServingRequest) -> bool:
    """Whether prefix caching changes nothing where prompts share nothing and nobody comes back after a preemption:
    SGLang's sums of ends and caches that move to a pool differ with it, and a user's own function may look at it."""
    custom = request.scheduler.own or ":" in request.router
    ends = request.scheduler.ignore_eos and policy_of(request.scheduler.policy).counts_ends
    return not (custom or ends or request.decode_pool.replicas or request.changing)


def serve_once(
    request: ServingRequest,
    source: RequestStream,
    replica: ServedReplica,
    decoder: ServedReplica | None,
    keeping: Keeping,
    progress: Callable[[int], None] | None,
    clients: float | None,
    of_tokens: float,
) -> ServedTraffic:
    """Serve the requests of a stream once."""
    began = time.perf_counter()
    source = with_images(source, request, replica.encoder)
    warmup = request.traffic.warmup or 0
    if warmup >= source.requests:
        raise RequestError(f"traffic.warmup={warmup} leaves none of {source.requests} requests to count")
    setup = setups.setup(request, replica, decoder)
    tiers = setups.tier_blocks(request, replica, source.requests * source.prompt + source.outputs)
    shape = setups.shape(request, setup, source.requests, source.longest, keeping.iterations, BINS, tiers)
    setup = setups.with_room_for(setup, shape.seats)
    sending = request.traffic.concurrency / request.replicas if clients is None else clients
    host_us = replica.first_token_us(sending, source.prompt)
    ledger = Tally(host_us, request.slo, keeping.requests, warmup, request.traffic.classes, shape.adapters)
    state = empty_state(shape, min(1024, source.requests), request.traffic.seed)
    state.totals["ordered"] = request.scheduler.queue == "priority"
    state.totals["most_adapters"] = most_loras(request.lora, request.scheduler.policy)
    state.classes[:, 0] = [kind.priority for kind in request.traffic.classes] or [0]
    tally_kinds(ledger, setup, request)
    if request.changing:
        autoscale.set_up_fleet(state, request, (replica.devices, (decoder or replica).devices))
    pilot = autoscale.Autoscaler(request, setup, replica) if request.autoscale.policy else None
    if tiers:
        first, count = first_decode_rank(setup), len(state.ranks)
        pools = (replica, request.attention_dp, first), (decoder or replica, request.second_dp, count - first)
        setups.fill_shelves(state.shelves, request, pools)
    run = runner(request, max(source.outputs, of_tokens))
    state, backlog = run_chunks(setup, state, source, ledger, run, progress, pilot)
    ended = state.totals["completed"] + state.totals["rejected"] + state.totals["failed"]
    if unserved := int((state.totals["arrived"] - ended)[0]):
        raise RequestError(
            f"scheduler.policy={request.scheduler.policy} left {unserved} requests unserved: it formed no batch of them"
        )
    rows = np.concatenate(ledger.rows) if ledger.rows else state.left[:0]
    wall_s = time.perf_counter() - began
    replicas = replica, decoder or replica
    report = report_of(request, setup, state, ledger, backlog, replicas, wall_s)
    report = replace(report, fleet_over_time=tuple(pilot.rows)) if pilot else report
    report = replace(report, notes=(*report.notes, *source.notes), images=source.images)
    kept_rows, log = rows[np.argsort(rows["request"])], state.log[: int(state.totals["logged"][0])]
    return ServedTraffic(report, kept_rows, log, state, setup, replica, replicas[1].kv.bytes_per_token, host_us)


def tally_kinds(ledger: Tally, setup: ServingSetup, request: ServingRequest) -> None:
    """Count what each kind of replicas serves apart, where there are two."""
    if setup.mixed:
        alike = ledger.host_us, request.slo, False, ledger.warmup, request.traffic.classes
        ledger.first_other, ledger.kinds = first_decode_rank(setup), [Tally(*alike), Tally(*alike)]


def serve_with_intervals(
    request: ServingRequest,
    replica: ServedReplica,
    decoder: ServedReplica | None = None,
    keeping: Keeping | None = None,
    progress: Callable[[int], None] | None = None,
) -> ServedTraffic:
    """The same as :func:`serve`, with the intervals of its figures where they are wanted and steps have some."""
    served = beside_no_failures(serve(request, replica, decoder, keeping, progress), request, decoder)
    if not confidence.wants_intervals(request) or replica.figures is None:
        return served
    began = time.perf_counter()

    @cache
    def at(z: float) -> ServingReport:
        other = None if decoder is None else confidence.at_deviation(decoder, z)
        return serve(request, confidence.at_deviation(replica, z), other).report

    report = confidence.with_known_runs(confidence.with_intervals(served.report, request, at), request, replica.run)
    if request.slo.ttft_ms is not None:
        seeds = [serve(seeded, replica, decoder).report for seeded in other_seeds(request)]
        report = confidence.with_seeds(report, seeds, at, request.slo.ttft_ms)
    wall_s = report.wall_time_s + time.perf_counter() - began
    return replace(served, report=replace(report, wall_time_s=wall_s))


def beside_no_failures(served: ServedTraffic, request: ServingRequest, decoder: ServedReplica | None) -> ServedTraffic:
    """The same, and beside it what would be if no replica failed."""
    if request.failures.mtbf_h is None:
        return served
    start = request.cold_start if request.autoscale.policy else ColdStart()
    never = replace(request, failures=ReplicaFailures(), cold_start=start)
    other = serve(never, served.replica, decoder).report
    spreads = {name: getattr(other, name) for name in ("ttft_ms", "tpot_ms", "e2e_ms")}
    figures = {name: getattr(other, name) for name in ("slo_attainment", "goodput", "completed")}
    without = figures | {name: spread.to_dict() for name, spread in spreads.items()}
    return replace(served, report=replace(served.report, without_failures=without))


def other_seeds(request: ServingRequest) -> list[ServingRequest]:
    """The same with requests of other seeds; none for a trace, which is what came."""
    traffic = request.traffic
    if traffic.trace is not None:
        return []
    seeds = (traffic.seed + more for more in range(1, confidence.OTHER_SEEDS + 1))
    return [replace(request, traffic=replace(traffic, seed=seed)) for seed in seeds]


def runner(request: ServingRequest, outputs: float) -> RunLoop:
    """The event loop for so many tokens of answers: compiled, or in plain Python with functions of the user's own."""
    form = policy_of(request.scheduler.policy).form if request.scheduler.own else None
    route = load_router(request.router) if ":" in request.router else None
    if form is None and route is None and worth_compiling(outputs):
        return compiled()
    return plain(with_own(form, route))


def worth_compiling(outputs: float) -> bool:
    """Whether machine code pays for so many tokens of answers: there is more to do than loading it takes, or than
    making it where it is not on disk."""
    import importlib.util

    least = LOADED_FROM if on_disk() else COMPILED_FROM
    return importlib.util.find_spec("numba") is not None and outputs > least


def plain(run: Callable[..., Any]) -> RunLoop:
    """A loop in plain Python on objects, which it reads faster than arrays; they last until slots are added."""
    last: tuple[np.ndarray, LoopState] | None = None  # slots, and the objects of their state

    def on_objects(state: LoopState, setup: ServingSetup, chunk: RequestChunk, more: bool) -> None:
        nonlocal last
        objects = last[1] if last is not None and last[0] is state.slots else as_objects(state)
        objects.totals[0].desired, objects.totals[0].left = (int(state.totals[name][0]) for name in ("desired", "left"))
        run(objects, as_lists(setup), as_lists(chunk), more)
        write_back(objects, state)
        last = state.slots, objects

    return on_objects


def run_chunks(
    setup: ServingSetup,
    state: LoopState,
    source: RequestStream,
    ledger: Tally,
    run: RunLoop,
    progress: Callable[[int], None] | None = None,
    pilot: autoscale.Autoscaler | None = None,
) -> tuple[LoopState, list[tuple[float, int, int]]]:
    """Run all chunks; the state at the end, and (microseconds, requests that came, requests that wait) after each
    tenth of them came in."""
    first = first_decode_rank(setup)
    state.ranks["free"][:first], state.ranks["free"][first:] = setup.rules.blocks, setup.decode_rules.blocks
    state.ranks["bare"] = state.ranks["free"]
    state.totals["credits"], state.totals["key_tokens"] = setup.concurrency, source.key_tokens
    state.totals["bucket"] = setup.bucket_size
    state = state._replace(keys=source.keys)
    backlog: list[tuple[float, int, int]] = []
    came = 0
    for chunk in source.chunks:
        for rows in parts(chunk, max(1, source.requests // 10)):
            came += len(rows.input)
            state = with_room(state, len(rows.input))
            run(state, setup, rows, came < source.requests)
            while pilot and state.totals["paused"][0]:
                state.totals["desired"] = pilot.look(state)
                run(state, setup, rows, came < source.requests)
            totals = state.totals[0]
            ended = state.left[: totals["left"]]
            if pilot:
                pilot.add(ended)
            ledger.add(ended)
            if len(rows.follower):
                backlog += backlog_of(ended, rows.arrival_us[rows.comes_after == 0])
            state.totals["left"] = 0
            backlog.append((float(totals["now_us"]), came, int(totals["waiting"])))
            if progress is not None:
                progress(len(rows.input))
    return state, backlog


def backlog_of(ended: np.ndarray, begun_us: np.ndarray) -> list[tuple[float, int, int]]:
    """The same of sessions, which have ended: after each tenth of them that began at ``begun_us``, ascending."""
    came = np.sort(ended["arrival_us"])
    admitted = np.sort(np.where(ended["rank"] == NONE, ended["arrival_us"], ended["admitted_us"]))
    backlog = []
    for index in sorted({max(len(begun_us) * tenth // 10 - 1, 0) for tenth in range(1, 11)}):
        time_us = float(begun_us[index])
        arrived, gone = (int(np.searchsorted(times, time_us, side="right")) for times in (came, admitted))
        backlog.append((time_us, arrived, arrived - gone))
    return backlog


def parts(chunk: RequestChunk, size: int) -> list[RequestChunk]:
    """A chunk in smaller ones; whole where its rows follow each other."""
    rows = len(chunk.input)
    if len(chunk.follower) or rows <= size:
        return [chunk]
    cuts = range(0, rows, size)
    return [
        RequestChunk(*(column[cut : cut + size] if len(column) == rows else column for column in chunk)) for cut in cuts
    ]


def rescale(request: ServingRequest, rate: float) -> ServingRequest:
    """The request at another rate; a trace is sent faster or slower, a ramp ends as many times faster."""
    traffic = request.traffic
    if traffic.trace is not None:
        return replace(request, traffic=replace(traffic, speed=rate))
    end = traffic.rate_end * (rate / traffic.rate) if traffic.arrival == "ramp" else traffic.rate_end
    return replace(request, traffic=replace(traffic, rate=rate, rate_end=end))
