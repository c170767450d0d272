"""How much traffic a set-up serves: the largest rate that meets what users expect, and latency against rate.

Runs do not hang together, so that they may go side by side in processes: what applies a function to many parts is
given (:meth:`..search.spread.Crew.apply`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from ..question.canonical import RequestError
from ..question.serving import ServingRequest
from ..report.served import ServingReport
from ..report.view import number_text
from .confidence import at_deviation, chance_of_p99, met
from .figures import Z90
from .replica import ServedReplica
from .serve import rescale, serve

Apply = Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], Iterable[Any]]
PRECISION = 1.03  # between the largest rate that is met and the smallest that is not
FARTHEST = 40  # steps up or down
FAR, NEAR = 2.0, 1.1  # how far a step goes where nothing is known, and where another seed's rate is
IDLE = 0.05  # share of the time below which a smaller rate changes nothing
SEEDS = 5
T90 = 2.132  # Student's t of SEEDS - 1 degrees of freedom, within which 90 % lie
KEPT_UP = 0.9  # of the rate that is served where a run is long enough
WARM_UP = 0.1  # of the requests, whose times do not count unless a number is given


@dataclass(frozen=True)
class PlayedReplicas:
    """One run of a request on replicas like ``own``, and ``decoder`` where a pool only decodes."""

    own: ServedReplica
    decoder: ServedReplica | None

    def __call__(self, request: ServingRequest) -> ServingReport:
        """The report."""
        return serve(request, self.own, self.decoder if request.second_pool.replicas else None).report

    def at(self, z: float) -> PlayedReplicas:
        """The same with iterations ``z`` standard deviations slower than is likely."""
        return PlayedReplicas(
            at_deviation(self.own, z), None if self.decoder is None else at_deviation(self.decoder, z)
        )


@dataclass(frozen=True)
class LargestRate:
    """The largest ``rate`` that meets the targets, 0 where none does; the ``report`` there, or at the least rate."""

    rate: float
    report: ServingReport
    tried: tuple[tuple[float, float, bool], ...]  # rate, share of requests that met all, whether that was enough


@dataclass(frozen=True)
class Capacity:
    """The largest ``rate`` (requests a second; of a trace its speed) that meets the targets, as sure as 19 in 20.

    ``rates`` are those of several seeds, ``interval`` has their mean in nine of ten cases; ``rate`` is its lower end,
    or the largest rate of a seed below it at which a seed meets the targets.
    ``attained`` are the shares of requests that met all targets at this rate, seed by seed; ``seeds_met`` of them are
    enough, and ``at_rate`` is the first of these runs. ``rates_of_errors`` are the rates if steps take as long as 90 %
    of the errors of known runs let them, slow and fast; None where none are known. ``p_p99_ttft_met`` is how likely the
    99th percentile of TTFT is within ``slo.ttft_ms`` at the rate (:func:`.confidence.chance_of_p99`).
    """

    rate: float
    interval: tuple[float, float]
    rates: tuple[float, ...]
    rates_of_errors: tuple[float, float] | None
    requests_per_s_per_gpu: float
    attained: tuple[float, ...]
    seeds_met: int
    p_p99_ttft_met: float | None
    at_rate: ServingReport
    tried: tuple[tuple[float, float, bool], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        tried = [{"rate": rate, "slo_attainment": share, "met": enough} for rate, share, enough in self.tried]
        return values | {"tried": tried, "at_rate": self.at_rate.to_dict()}


def at_once(side: PlayedReplicas, request: ServingRequest) -> ServingReport:
    """One run."""
    return side(request)


def with_warmup(request: ServingRequest) -> ServingRequest:
    """The request with a part of its first requests left out of what counts, where it does not say how many."""
    traffic = request.traffic
    if traffic.warmup is not None or traffic.trace is not None:
        return request
    return replace(request, traffic=replace(traffic, warmup=int(WARM_UP * traffic.requests)))


def largest(side: PlayedReplicas, request: ServingRequest, start: float, factor: float) -> LargestRate:
    """Goes up or down from ``start`` by a factor until the targets are met on one side, then closes in."""
    tried: list[tuple[float, float, bool]] = []
    reports: dict[float, ServingReport] = {}

    def enough(rate: float) -> bool:
        report = side(rescale(request, rate))
        reports[rate] = report
        tried.append((rate, report.slo_attainment, met(request, report)))
        return tried[-1][2]

    low = high = start
    good = enough(low)
    for _ in range(FARTHEST):
        if good:
            high = low * factor
            if not enough(high):
                break
            low = high
        else:
            high, low = low, low / factor
            if enough(low) or reports[low].utilisation < IDLE:
                break
    if not met(request, reports[low]):
        return LargestRate(0.0, reports[low], tuple(tried))
    while high / low > PRECISION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if enough(middle) else (low, middle)
    return LargestRate(low, reports[low], tuple(tried))


def capacity(request: ServingRequest, side: PlayedReplicas, apply: Apply) -> Capacity:
    """The largest rate of several seeds, and of slow and fast steps.

    RequestError without targets, for clients of a closed loop, and where no rate meets them.
    """
    request = with_warmup(request)
    traffic = request.traffic
    if not request.slo.named:
        raise RequestError("capacity needs what users expect: slo.ttft_ms=500, slo.tpot_ms=30 or slo.e2e_ms=…")
    _check_rate(request, "capacity")
    first = largest(side, request, traffic.speed if traffic.trace is not None else traffic.rate, FAR)
    if not first.rate:
        best = first.report
        tpot = f" and TPOT {best.tpot_ms.p50:.1f} ms" if best.tpot_ms.count else ""
        raise RequestError(
            f"no rate meets slo: even at {first.tried[-1][0]:.3g} requests a second "
            + (f"the median TTFT is {best.ttft_ms.p50:.0f} ms{tpot}" if best.completed else "nobody is served")
        )
    seeds = (
        [replace(traffic, seed=traffic.seed + more) for more in range(SEEDS)] if traffic.trace is None else [traffic]
    )
    candidates = [replace(request, traffic=seeded) for seeded in seeds]
    parts = [(side, candidate, first.rate, NEAR) for candidate in candidates[1:]]
    has_figures = side.own.figures is not None
    parts += [(side.at(z), request, first.rate, FAR) for z in (Z90, -Z90)] if has_figures else []
    limits = list(apply(largest, parts))
    rates = (first.rate, *(limit.rate for limit in limits[: len(candidates) - 1]))
    interval = between(rates)
    for rate in (interval[0], *sorted((rate for rate in rates if rate < interval[0]), reverse=True)):
        reports = list(apply(at_once, [(side, rescale(candidate, rate)) for candidate in candidates]))
        enough = [index for index, report in enumerate(reports) if met(request, report)]
        if enough:  # at the least of the rates its own seed has them, so that this comes true
            break
    chance = None
    if has_figures and request.slo.ttft_ms is not None:
        fast, slow = apply(at_once, [(side.at(z), rescale(request, rate)) for z in (-Z90, Z90)])
        chance = chance_of_p99(reports, fast, slow, request.slo.ttft_ms)
    return Capacity(
        rate=rate,
        interval=interval,
        rates=rates,
        rates_of_errors=(limits[-2].rate, limits[-1].rate) if has_figures else None,
        requests_per_s_per_gpu=rate / reports[0].devices,
        attained=tuple(report.slo_attainment for report in reports),
        seeds_met=len(enough),
        p_p99_ttft_met=chance,
        at_rate=with_note(reports[enough[0] if enough else 0], rate, request.traffic.trace is not None),
        tried=first.tried,
    )


def with_note(report: ServingReport, rate: float, of_trace: bool) -> ServingReport:
    """The report, which says so where the traffic ends before the set-up has to keep up with it. The rate of a trace is
    how many times faster than recorded it is sent."""
    sent = sent_per_s(report) if of_trace else rate
    if report.requests_per_s >= KEPT_UP * sent:
        return report
    way = "a longer trace" if of_trace else f"more of traffic.requests (now {report.requests:,})"
    times = f" ({rate:.4g} times its speed)" if of_trace else ""
    note = (
        f"the run is short: at {number_text(sent)} requests/s{times} it serves {number_text(report.requests_per_s)} "
        f"until the last has ended; take {way} for a rate that lasts"
    )
    return replace(report, notes=(*report.notes, note))


def sent_per_s(report: ServingReport) -> float:
    """Requests a second that came, up to the last tenth of them; 0 where that is unknown."""
    came = [point for point in report.backlog[:-1] if point["s"] > 0]
    return came[-1]["came"] / came[-1]["s"] if came else 0.0


def _check_rate(request: ServingRequest, what: str) -> None:
    if request.traffic.arrival == "closed" and request.traffic.trace is None:
        raise RequestError(f"traffic.arrival=closed has no rate: take poisson for {what}")


def between(rates: Sequence[float]) -> tuple[float, float]:
    """The 90 % interval of the mean of rates, never below their least or above their largest."""
    if len(rates) < 2:
        return rates[0], rates[0]
    mean, half = fmean(rates), T90 * stdev(rates) / math.sqrt(len(rates))
    return max(mean - half, min(rates)), min(mean + half, max(rates))


def sweep(
    request: ServingRequest, rates: list[float], side: PlayedReplicas, apply: Apply
) -> list[tuple[float, ServingReport]]:
    """The report at each rate; from a tenth of the request's rate to twice it where none is given."""
    request = with_warmup(request)
    _check_rate(request, "sweep")
    usual = request.traffic.speed if request.traffic.trace is not None else request.traffic.rate
    candidates = rates or [usual * share for share in (0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)]
    return list(zip(candidates, apply(side, [(rescale(request, rate),) for rate in candidates]), strict=True))
