"""``opcast serving caps``: the same traffic under several power caps: joules of a token against what users wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets.loading import number
from ..models.power import Limits
from ..simulator.report.served import ServingReport
from ..simulator.serving.caps_picture import CapPoint, draw_caps
from .show import BadInputError, print_json, say, table
from .writing import write_text

if TYPE_CHECKING:
    from ..simulator.question.serving import ServingRequest
    from ..simulator.serving.capacity import Apply
    from ..simulator.workbench import Workbench


@dataclass(frozen=True)
class ServedCap:
    """A run under one cap (None: the GPUs' own limit).

    ``gpu_joules`` are those of the GPUs for an output token, ``joules`` with hosts and the building. ``front`` says
    that no other cap is at least as good in joules and in the share of requests that had what ``slo`` asks for
    (without one: in the p90 of TPOT), and better in one.
    """

    cap_w: float | None
    report: ServingReport
    gpu_joules: float
    joules: float
    front: bool = False

    @property
    def worse(self) -> float:
        """What a cap makes worse: requests without their targets, else milliseconds of a token."""
        return 1.0 - self.report.slo_attainment if self.report.slo else self.report.tpot_ms.p90


def run(config: Mapping[str, Any], request: ServingRequest, bench: Workbench, apply: Apply, as_json: bool) -> int:
    """Serve under each cap and print; returns the exit code."""
    caps, node_w, pue = asked(config, request)
    rows = front([served(request, cap, bench, apply, node_w, pue) for cap in (None, *caps)])
    if config["picture"]:
        model = "served traffic" if request.step is None else getattr(request.step.model, "name", request.step.model)
        title = f"{model}: the same traffic under power caps"
        points = [
            CapPoint(f"{row.cap_w:g} W" if row.cap_w else "no cap", row.report.tpot_ms.p90, row.joules, row.front)
            for row in rows
        ]
        say(f"picture: {write_text('picture', Path(str(config['picture'])), draw_caps(title, points))}")
    if as_json:
        print_json({"caps": [to_dict(row) for row in rows], "node_w": node_w, "pue": pue})
        return 0
    heads = ("cap, W", "TTFT p50", "p90", "TPOT p50", "p90", "tokens/s", "slo", "W a GPU", "J a token", "with all", "")
    table("joules of an output token against latency, milliseconds", heads, [shown(row) for row in rows])
    if not node_w or pue == 1.0:
        say("`with all` has no hosts without node_w=…, and no cooling without pue=…")
    for note in dict.fromkeys(note for row in rows for note in row.report.notes):
        say(note)
    return 0


def asked(config: Mapping[str, Any], request: ServingRequest) -> tuple[list[float], float, float]:
    """Caps, watts of a node beside its GPUs, and PUE. BadInputError for what is none."""
    values = config["power_caps_w"] or []
    caps = [number(BadInputError, "power_caps_w", cap) for cap in (values if isinstance(values, list) else [values])]
    if not caps:
        raise BadInputError("`opcast serving caps` needs power_caps_w=[600,500,400]")
    if request.step is None:
        raise BadInputError("a law by hand has no watts: `opcast serving caps` needs a model")
    if request.step.power_cap_w is not None:
        raise BadInputError("power_cap_w and power_caps_w both hold GPUs back: leave power_cap_w out")
    for cap in caps:
        Limits(cap)
    return caps, number(BadInputError, "node_w", config["node_w"]), number(BadInputError, "pue", config["pue"], 1)


def served(
    request: ServingRequest, cap_w: float | None, bench: Workbench, apply: Apply, node_w: float, pue: float
) -> ServedCap:
    """The traffic under one cap. BadInputError where nobody knows what the GPUs draw."""
    from ..simulator.serving.capacity import PlayedReplicas, sweep
    from ..simulator.serving.connect import replicas_of

    assert request.step is not None
    capped = replace(request, step=replace(request.step, power_cap_w=cap_w))
    ((_, report),) = sweep(capped, [capped.traffic.rate], PlayedReplicas(*replicas_of(capped, bench)), apply)
    if report.power_w is None:
        raise BadInputError("nobody knows what these GPUs draw: give device.tdp_w")
    cluster = request.step.cluster
    node = node_w * report.devices / (cluster.devices_per_node if cluster else 1)
    gpus = report.power_w * report.devices
    rate = max(report.output_tokens_per_s, 1e-9)
    return ServedCap(cap_w, report, gpus / rate, pue * (gpus + node) / rate)


def front(rows: Sequence[ServedCap]) -> list[ServedCap]:
    """The rows, marked where no other is at least as good in both and better in one."""
    points = [(row.joules, row.worse) for row in rows]
    return [
        replace(
            row, front=not any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in points)
        )
        for row, point in zip(rows, points, strict=True)
    ]


def shown(row: ServedCap) -> tuple[str, ...]:
    """A row for a person."""
    report = row.report
    return (
        "" if row.cap_w is None else f"{row.cap_w:g}",
        *(f"{value:,.1f}" for spread in (report.ttft_ms, report.tpot_ms) for value in (spread.p50, spread.p90)),
        f"{report.output_tokens_per_s:,.0f}",
        f"{report.slo_attainment:.1%}",
        f"{report.power_w:.0f}",
        f"{row.gpu_joules:.3g}",
        f"{row.joules:.3g}",
        "front" if row.front else "overload" if report.overload else "",
    )


def to_dict(row: ServedCap) -> dict[str, Any]:
    """A row for JSON."""
    values = row.report.to_dict()
    for name in ("cdf", "over_time", "slo_curve"):
        values.pop(name, None)
    told = {"cap_w": row.cap_w, "gpu_joules_per_token": row.gpu_joules, "joules_per_token": row.joules}
    return told | {"front": row.front} | values
