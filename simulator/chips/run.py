"""From a request about chips to its report: the same workload simulated on each."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...datasets.clusters import Cluster, load_cluster
from ...datasets.counts import counted
from ...models.clocks import anchor
from ..question.canonical import RequestError
from ..question.place import THIS_MACHINE
from ..report.answer import InferenceReport, StepReport
from ..report.worth import worth_of
from ..timing.clocks import KNOWN, UNKNOWN
from .answer import ChipRow, ChipsReport
from .request import CompareRequest

if TYPE_CHECKING:
    from ..engines.bench import Bench


def compare_chips(request: CompareRequest, bench: Bench) -> ChipsReport:
    """The report of all chips. RequestError for a cluster that cannot have as many GPUs, and the errors of a step."""
    started = time.perf_counter()
    reference = request.step.cluster
    assert reference is not None
    rows: list[ChipRow] = []
    reports: list[Any] = []
    notes: list[str] = []
    for cluster in (reference, *(alike(load_cluster(name), reference) for name in request.others)):
        caps: Sequence[float | None] = (request.step.power_cap_w, *request.power_caps_w)
        device = request.step.device if cluster is reference else THIS_MACHINE
        for cap in caps:
            step = replace(request.step, cluster=cluster, device=device, power_cap_w=cap)
            reports.append(bench.simulate(step))
            rows.append(row_of(request, cluster, cap, reports[-1], reports[0], rows[0] if rows else None))
    rows = [replace(row, front=on_front(row, rows)) for row in rows]
    if any(row.joules is None for row in rows):
        notes.append("no energy where a chip's power limit is not known")
    if rows[0].price is None:
        notes.append("no break-even price without one of the first cluster: give price_per_gpu_hour")
    notes.append(
        "intervals of speed and break-even take the errors of two chips as independent; what they have in common "
        "cancels, so they are rather too wide. Caps of one chip share its errors"
    )
    if request.power_caps_w:
        notes.append("watts have no interval")
    first, wall_s = reports[0], time.perf_counter() - started
    return ChipsReport(
        first.model, first.workload, first.coverage, tuple(rows), request.measure_minutes, tuple(notes), wall_s
    )


def alike(cluster: Cluster, reference: Cluster) -> Cluster:
    """A cluster with as many GPUs as another. RequestError where its nodes cannot make them up."""
    nodes, odd = divmod(reference.devices, cluster.devices_per_node)
    if odd or not nodes:
        raise RequestError(
            f"{cluster.id} has {counted(cluster.devices_per_node, 'GPU')} a node, and no number of nodes has the "
            f"{reference.devices} of {reference.id}: change cluster.nodes"
        )
    return replace(cluster, nodes=nodes)


def row_of(
    request: CompareRequest,
    cluster: Cluster,
    cap_w: float | None,
    report: StepReport | InferenceReport,
    reference: StepReport | InferenceReport,
    first: ChipRow | None,
) -> ChipRow:
    """One chip beside the first."""
    times = report.times_s
    rate = report.tokens_per_s_per_gpu
    speed = 1.0 if first is None else rate / first.tokens_per_s_per_gpu
    alone = first is None
    below, above = (0.0, 0.0) if alone else widths_of(report, reference, times, reference.times_s)
    after = [measured_times(side, request.measure_minutes) for side in (report, reference)]
    measured_below, measured_above = (0.0, 0.0) if alone else widths_of(report, reference, *after)
    joules = None if report.power_w is None else report.power_w / rate
    gpu_hour = price_of(request, cluster)
    electricity = 0.0 if joules is None else joules * request.pue / 3.6e6 * request.price_per_kwh  # of a token
    price = None if gpu_hour is None else 1e6 * (gpu_hour / 3600.0 / rate + electricity)
    break_even = gpu_hour if first is None else None
    if first is not None and first.price is not None:
        break_even = max((first.price / 1e6 - electricity) * rate * 3600.0, 0.0)
    return ChipRow(
        cluster=cluster.id,
        device=report.device,
        devices=cluster.devices,
        cap_w=cap_w,
        time_s=times[0],
        low_s=times[1],
        high_s=times[2],
        tokens_per_s_per_gpu=rate,
        speed=speed,
        speed_low=speed * math.exp(-below),
        speed_high=speed * math.exp(above),
        measured_speed_low=speed * math.exp(-min(measured_below, below)),
        measured_speed_high=speed * math.exp(min(measured_above, above)),
        power_w=report.power_w,
        joules=joules,
        price_per_gpu_hour=gpu_hour,
        price=price,
        break_even=break_even,
        break_even_low=None if break_even is None else break_even * math.exp(-below),
        break_even_high=None if break_even is None else break_even * math.exp(above),
        peak_gib=report.memory.peak_gib,
        fits=report.fits,
        front=False,
    )


def measured_times(report: StepReport | InferenceReport, minutes: float) -> tuple[float, float, float]:
    """The same once the chip was measured for so long."""
    if report.state is None:
        return report.times_s
    worth = worth_of(report.state, minutes)
    return report.times_s[0], worth.low_s, worth.high_s


def widths_of(
    report: StepReport | InferenceReport,
    reference: StepReport | InferenceReport,
    times: tuple[float, float, float],
    first: tuple[float, float, float],
) -> tuple[float, float]:
    """How much lower and higher a speed may be, as logarithms.

    Errors of two chips count as independent. Caps of one chip share theirs: what is left is the law of clocks, and
    what one of the two is less sure of.
    """
    assert report.state is not None
    assert reference.state is not None
    if report.state.device.id != reference.state.device.id:
        return widths(times, first)
    is_anchored = anchor(reference.state.device, reference.precision) is not None
    slower, faster = (math.log(one / other) for one, other in ((times[2], times[0]), (times[0], times[1])))
    slower_first, faster_first = (math.log(one / other) for one, other in ((first[2], first[0]), (first[0], first[1])))
    law_slower, law_faster = KNOWN if is_anchored else UNKNOWN
    return math.hypot(slower - slower_first, law_slower), math.hypot(faster - faster_first, law_faster)


def widths(times: tuple[float, float, float], first: tuple[float, float, float]) -> tuple[float, float]:
    """How much lower and higher a speed may be, as logarithms: errors of both times as if they were independent."""
    slower, slower_first = math.log(times[2] / times[0]), math.log(first[2] / first[0])
    faster, faster_first = math.log(times[0] / times[1]), math.log(first[0] / first[1])
    return math.hypot(slower, faster_first), math.hypot(faster, slower_first)


def price_of(request: CompareRequest, cluster: Cluster) -> float | None:
    """The price of a GPU-hour, None where nobody says it."""
    named = request.prices.get(cluster.id)
    if named is None and cluster is request.step.cluster:
        named = request.step.price_per_gpu_hour
    return named if named is not None else cluster.price_per_device_hour or None


def on_front(row: ChipRow, rows: Sequence[ChipRow]) -> bool:
    """Whether no other cap of the same chip is at least as good in time and joules, and better in one of them."""
    if row.joules is None:
        return False
    others = [other for other in rows if other.cluster == row.cluster and other.joules is not None]
    return not any(
        other.time_s <= row.time_s
        and (other.joules or 0.0) <= row.joules
        and (other.time_s, other.joules) != (row.time_s, row.joules)
        for other in others
    )
