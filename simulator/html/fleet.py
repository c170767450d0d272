"""Pictures of the page of served traffic about replicas that come and go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..report.served import ServingReport
from .charts import LEGEND, RIGHT, curve, figure, titled
from .page import Figure

REPLICAS = {  # what an autoscaler saw: its name there -> (what it is, colour)
    "ready": ("serve", "blue"),
    "starting": ("start", "orange"),
    "draining": ("drain", "purple"),
    "down": ("are down", "red"),
}
ARRIVING = {"requests_per_s": ("requests/s", "green")}
LOAD = {"waiting": ("wait", "red"), "outstanding": ("not ended", "teal")}


def fleet_pictures(report: ServingReport) -> list[Figure]:
    """Replicas and requests as an autoscaler saw them over time; none without one."""
    if not report.fleet_over_time:
        return []
    return [
        Figure("Replicas, and requests that come", {"": fleet_curves(report, REPLICAS, ARRIVING)}),
        Figure("Requests that wait, and those not ended", {"": fleet_curves(report, {}, LOAD)}),
    ]


def fleet_curves(
    report: ServingReport, stacked: Mapping[str, tuple[str, str]], beside: Mapping[str, tuple[str, str]]
) -> dict[str, Any]:
    """What an autoscaler saw over time: some of it stacked in steps, some as lines (on the right axis, if both)."""
    rows = report.fleet_over_time
    times = [row["s"] / 3600 for row in rows]
    data = []
    steps = {"shape": "hv", "width": 0.5}
    for figures, line, more in ((stacked, steps, {"stackgroup": "replicas"}), (beside, {}, {})):
        for name, (what, hue) in figures.items():
            right = bool(stacked) and not more
            hint = f"%{{y:.3g}} {what} at %{{x:.3g}} h<extra></extra>"
            entry = {"name": what, "yaxis": "y2" if right else "y", "hovertemplate": hint}
            data.append(curve(times, [row[name] for row in rows], hue, line, **more, **entry))
    right_axis = {"yaxis2": titled("requests/s", **RIGHT)} if stacked else {}
    left = titled("replicas" if stacked else "requests", rangemode="tozero")
    return figure(data, 300, **LEGEND, xaxis=titled("hours"), yaxis=left, **right_axis)
