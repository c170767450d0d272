"""How much traffic a set-up serves: the largest rate that meets what users expect, and latency against rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..question.canonical import RequestError
from ..question.serving import ServingRequest
from ..report.served import ServingReport
from .serve import rescaled

Answer = Callable[[ServingRequest], ServingReport]
PRECISION = 1.03  # between the largest rate that is met and the smallest that is not
FARTHEST = 40  # doublings or halvings
IDLE = 0.05  # share of the time below which a smaller rate changes nothing
SEEDS = 3  # runs at the rate that was found


@dataclass(frozen=True)
class Capacity:
    """The largest ``rate`` (requests a second; of a trace its speed) that meets the targets, and what was tried.

    ``attained`` are the shares of requests that met all targets at this rate, for several seeds.
    """

    rate: float
    requests_per_s_per_gpu: float
    attained: tuple[float, ...]
    at_rate: ServingReport
    tried: tuple[tuple[float, float, bool], ...]  # rate, share that met all, whether that was enough

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        tried = [{"rate": rate, "slo_attainment": share, "met": met} for rate, share, met in self.tried]
        at_rate = self.at_rate.to_dict()
        values = {"rate": self.rate, "requests_per_s_per_gpu": self.requests_per_s_per_gpu}
        return values | {"attained": list(self.attained), "tried": tried, "at_rate": at_rate}


def capacity(request: ServingRequest, answer: Answer) -> Capacity:
    """Doubles or halves the rate until the targets are met on one side, then closes in.

    RequestError without targets, for clients of a closed loop, and where no rate meets them.
    """
    traffic = request.traffic
    if not request.slo.named:
        raise RequestError("capacity needs what users expect: slo.ttft_ms=500, slo.tpot_ms=30 or slo.e2e_ms=…")
    if traffic.arrival == "closed":
        raise RequestError("traffic.arrival=closed has no rate: take poisson for capacity")
    tried: list[tuple[float, float, bool]] = []
    reports: dict[float, ServingReport] = {}

    def met(rate: float) -> bool:
        found = answer(rescaled(request, rate))
        reports[rate] = found
        enough = found.slo_attainment >= request.slo.share and not found.overload
        tried.append((rate, found.slo_attainment, enough))
        return enough

    low = high = traffic.speed if traffic.trace is not None else traffic.rate
    if met(low):
        for _ in range(FARTHEST):
            high = low * 2
            if not met(high):
                break
            low = high
    else:
        for _ in range(FARTHEST):
            high, low = low, low / 2
            if met(low):
                break
            if reports[low].utilisation < IDLE:
                break
    if not reports[low].slo_attainment >= request.slo.share:
        best = reports[low].ttft_ms.p50, reports[low].tpot_ms.p50
        raise RequestError(
            f"no rate meets slo: even at {low:.3g} requests a second the median TTFT is {best[0]:.0f} ms and "
            f"TPOT {best[1]:.1f} ms"
        )
    while high / low > PRECISION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if met(middle) else (low, middle)
    seeds = [replace(traffic, seed=traffic.seed + more) for more in range(1, SEEDS)] if traffic.trace is None else []
    others = [answer(rescaled(replace(request, traffic=each), low)).slo_attainment for each in seeds]
    at_rate = reports[low]
    return Capacity(low, low / at_rate.devices, (at_rate.slo_attainment, *others), at_rate, tuple(tried))


def sweep(request: ServingRequest, rates: list[float], answer: Answer) -> list[tuple[float, ServingReport]]:
    """The report at each rate; from a tenth of the request's rate to twice it where none is given."""
    usual = request.traffic.speed if request.traffic.trace is not None else request.traffic.rate
    asked = rates or [usual * share for share in (0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)]
    return [(rate, answer(rescaled(request, rate))) for rate in asked]
