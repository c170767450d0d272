"""Reports as web pages: one HTML file each, which needs no network and no server.

``write_quickstart_report`` shows predicted beside measured, ``write_step_report`` one simulated step,
``write_network_report`` transfers on the links of a cluster, ``write_search_report`` the best layouts of a space,
``write_serving_report`` served traffic. All are put together from the parts of :mod:`.page`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...datasets.devices import Device
from ..report.answer import InferenceReport, OpPrediction, StepReport
from ..report.comparison import Comparison
from ..report.served import ServingReport
from . import network, quickstart, search, served, serving, step
from .cluster import ClusterView
from .page import ReportError, render, write, write_text

__all__ = [
    "ClusterView",
    "ReportError",
    "network_page",
    "step_page",
    "write_network_report",
    "write_quickstart_report",
    "write_serving_report",
    "write_step_report",
]


def write_quickstart_report(comparison: Comparison, path: Path) -> Path:
    """Write a comparison as a page and return its path; ReportError when it cannot be written."""
    return write(quickstart.page(comparison), path)


def step_page(
    report: StepReport | InferenceReport, device: Device | None = None, cluster: ClusterView | None = None
) -> str:
    """A simulated step as the text of a page.

    ``device`` gives the memory to compare with; without it the data sheet of ``report.device`` is looked up.
    ``cluster`` adds the pipeline, communication and stages of a step on many devices.
    """
    return render(step.page(report, device, cluster))


def write_step_report(
    report: StepReport | InferenceReport, path: Path, device: Device | None = None, cluster: ClusterView | None = None
) -> Path:
    """Write the :func:`step_page` of a step and return its path; ReportError when it cannot be written."""
    return write_text(step_page(report, device, cluster), path)


def network_page(found: OpPrediction) -> str:
    """What the links of a cluster did as the text of a page."""
    return render(network.page(found))


def write_network_report(found: OpPrediction, path: Path) -> Path:
    """Write what the links of a cluster did as a page and return its path; ReportError when it cannot be written."""
    return write(network.page(found), path)


def write_search_report(
    found: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    plotted: Sequence[str],
    named: Callable[[Mapping[str, Any]], str],
    path: Path,
) -> Path:
    """Write a search, as plain values, as a page and return its path; ReportError when it cannot be written.

    ``rows`` are all points, ``plotted`` the figures of the objectives, ``named`` says a row's layout in short.
    """
    return write(search.page(found, rows, plotted, named), path)


def write_served_report(
    found: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    plotted: Sequence[str],
    named: Callable[[Mapping[str, Any]], str],
    path: Path,
) -> Path:
    """Write a search over ways to serve as a page and return its path; see :func:`write_search_report`."""
    return write(served.page(found, rows, plotted, named), path)


def write_serving_report(
    report: ServingReport,
    title: str,
    facts: Sequence[str],
    path: Path,
    rates: Sequence[tuple[str, float, ServingReport]] = (),
) -> Path:
    """Write served traffic as a page and return its path; ReportError when it cannot be written.

    ``facts`` are said below the title; ``rates`` are (name, rate, what came of it) of a sweep.
    """
    return write(serving.page(report, title, facts, rates), path)
