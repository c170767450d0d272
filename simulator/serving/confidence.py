"""From intervals of steps to intervals of what users see, and to how likely their targets are met.

The same traffic is served again with all iteration times at another quantile of their errors
(:func:`.figures.at_quantile`). Slower steps make every figure worse, so that a figure's quantile is the figure at that
quantile of the times, and the chance that targets are met is that of steps no slower than they may be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist, fmean, stdev
from typing import Any

from ..question.serving import ServingRequest
from ..question.work import COVERAGE
from ..report.served import ServingReport
from ..report.served_times import TimeSpread
from .figures import Z90, at_quantile
from .host import fitted_hosts
from .replica import ServedReplica

FIGURES = ("duration_s", "requests_per_s", "output_tokens_per_s", "output_tokens_per_s_per_gpu", "goodput")
SHARES = ("slo_attainment", "utilisation", "kv_peak")
FARTHEST = 3.0  # standard deviations; beyond it, a chance is called that of it
HALVINGS = 5
OTHER_SEEDS = 4  # runs of other requests beside the one that is asked for
LEAST_MS, LEAST_WIDTH = 1e-6, 1e-6
SMALL = 1_000_000  # tokens of answers up to which a run has intervals unless said otherwise

QUANTITIES = {"ttft_ms": "ttft", "output_tokens_per_s": "throughput", "output_tokens_per_s_per_gpu": "throughput"}
QUANTITIES |= dict.fromkeys(("tpot_ms", "itl_ms", "normalised_ms"), "tpot")

AtQuantile = Callable[[float], ServingReport]


def wants_intervals(request: ServingRequest) -> bool:
    """Whether a run gets intervals: as asked, else where it is small."""
    if request.intervals is not None:
        return request.intervals
    return request.traffic.trace is None and request.traffic.requests * request.traffic.output.average <= SMALL


def at_deviation(replica: ServedReplica, z: float) -> ServedReplica:
    """A replica whose iterations take as long as ``z`` standard deviations above what is likely."""
    if replica.figures is None:
        return replica
    return replace(replica, tables=at_quantile(replica.tables, replica.figures, z))


def with_intervals(report: ServingReport, request: ServingRequest, at: AtQuantile) -> ServingReport:
    """The report with the intervals of its figures, and the chance of its targets; ``at`` answers at a quantile."""
    fast, slow = at(-Z90), at(Z90)
    intervals: dict[str, tuple[float, float]] = {}
    for name, value in vars(report).items():
        one, other = getattr(fast, name), getattr(slow, name)
        if isinstance(value, TimeSpread):
            if not (value.count and one.count and other.count):
                continue
            for attribute in value.to_dict():
                intervals[f"{name}.{attribute}"] = ascending(getattr(one, attribute), getattr(other, attribute))
        elif name in FIGURES + SHARES or (name.endswith("_per_million_tokens") and value is not None):
            intervals[name] = ascending(one, other)
    chance = None
    if request.slo.named:
        chance = chance_met(lambda z: met(request, {-Z90: fast, 0.0: report, Z90: slow}.get(z) or at(z)))
    return replace(report, intervals=intervals, coverage=COVERAGE, p_slo_met=chance)


def with_known_runs(report: ServingReport, request: ServingRequest, run: Mapping[str, str]) -> ServingReport:
    """The report with intervals as wide as errors of served runs were, and a note of what no served run is known of.

    Of a known engine and system they stand in place of those of step times; else the wider one counts. Throughput
    follows the traffic where it comes by itself. ``run`` is as :class:`.replica.ServedReplica` has it; empty: nothing
    is known.
    """
    hosts = fitted_hosts()
    if not run or not report.intervals:
        return report
    unknown = [name for name in hosts.unknown(run) if name in run]
    intervals = dict(report.intervals)
    for name, (low, high) in report.intervals.items():
        figure, _, attribute = name.partition(".")
        width = hosts.width(run, QUANTITIES.get(figure, ""))
        if width is None or (QUANTITIES[figure] == "throughput" and request.traffic.arrival != "closed"):
            continue
        value = getattr(report, figure)
        value = getattr(value, attribute) if attribute else value
        fast, slow = value * math.exp(-width), value * math.exp(width)
        if {"engine", "system"} & set(unknown):
            fast, slow = min(low, fast), max(high, slow)
        intervals[name] = fast, slow
    notes = (*report.notes, unknown_text(run, unknown)) if unknown else report.notes
    return replace(report, intervals=intervals, notes=notes)


def unknown_text(run: Mapping[str, str], unknown: Sequence[str]) -> str:
    """What no served run is known of, and how far off runs were of which as much was unknown."""
    hosts = fitted_hosts()
    within = [
        f"{quantity.upper()} by a factor of {math.exp(width):.2g}"
        for quantity in ("ttft", "tpot")
        if (width := hosts.width(run, quantity)) is not None
    ]
    names = " or ".join(f"the {name} {run[name]}" for name in unknown)
    return f"no served run is known of {names}: intervals allow for that ({', '.join(within)} each way, at least)"


def chance_of_p99(seeds: Sequence[ServingReport], fast: ServingReport, slow: ServingReport, most_ms: float) -> float:
    """How likely the 99th percentile of TTFT is at most ``most_ms``: its logarithm is normal around that of runs
    with other seeds, as wide as they lie apart and as steps at 90 % of their errors, ``fast`` and ``slow``, move it.

    A handful of runs say roughly how far they lie apart: one more lies in Student's distribution around them, of as
    many degrees of freedom as the sum of both variances has (B. L. Welch, "The generalization of Student's problem",
    1947).

    A side counts by itself: where steps that are slower break a queue, the slow side is far wider than the fast one.
    """
    logs = [math.log(max(report.ttft_ms.p99, LEAST_MS)) for report in seeds]
    mean, least = fmean(logs), math.log(max(most_ms, LEAST_MS))
    beside = slow if least > mean else fast
    of_steps = abs(math.log(max(beside.ttft_ms.p99, LEAST_MS)) - logs[0]) / Z90
    of_seeds = stdev(logs) * math.sqrt(1 + 1 / len(logs)) if len(logs) > 1 else 0.0
    width = max(math.hypot(of_steps, of_seeds), LEAST_WIDTH)
    if of_seeds < LEAST_WIDTH:
        return NormalDist().cdf((least - mean) / width)
    from scipy.special import stdtr

    return float(stdtr((len(logs) - 1) * (width / of_seeds) ** 4, (least - mean) / width))


def with_seeds(report: ServingReport, seeds: Sequence[ServingReport], at: AtQuantile, most_ms: float) -> ServingReport:
    """The report with the chance that the 99th percentile of TTFT is as expected, None where a run serves nobody;
    ``seeds`` are runs of other requests."""
    runs, fast, slow = [report, *seeds], at(-Z90), at(Z90)
    all_serve = all(run.ttft_ms.count for run in (*runs, fast, slow))
    return replace(report, p_p99_ttft_met=chance_of_p99(runs, fast, slow, most_ms) if all_serve else None)


def ascending(one: Any, other: Any) -> tuple[float, float]:
    """Two figures, the smaller first."""
    return (one, other) if one <= other else (other, one)


def met(request: ServingRequest, report: ServingReport) -> bool:
    """Whether enough requests have all that users expect, and no queue grows without end."""
    return report.slo_attainment >= request.slo.share and not report.overload


def chance_met(at: Callable[[float], bool]) -> float:
    """How likely targets are met, where ``at`` says whether they are at so many standard deviations of slowness."""
    places = (-Z90, 0.0, Z90)
    low, high = -FARTHEST, FARTHEST
    for index in places:
        if at(index):
            low = index
        else:
            high = index
            break
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle) else (low, middle)
    return 0.5 * (1 + math.erf((low + high) / 2 / math.sqrt(2)))
