"""Reports as web pages: one HTML file each, which needs no network and no server.

``write_quickstart_report`` shows predicted beside measured, ``write_step_report`` one simulated step,
``write_network_report`` transfers on the links of a cluster, ``write_serving_report`` served traffic; a search has its
page in :mod:`..search.view`. All are put together from the parts of :mod:`.page`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...datasets.devices import Device
from ..report.answer import InferenceReport, OpPrediction, StepReport
from ..report.comparison import Comparison
from ..report.served import ServingReport
from . import network, quickstart, serving, step
from .cluster import ClusterView
from .page import ReportError, render, render_body, write, write_text

__all__ = [
    "ClusterView",
    "ReportError",
    "network_body",
    "network_page",
    "step_body",
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


def step_body(
    report: StepReport | InferenceReport, device: Device | None = None, cluster: ClusterView | None = None
) -> str:
    """The same without its frame: cards and sections for a page that has styles and scripts of reports."""
    return render_body(step.page(report, device, cluster))


def write_step_report(
    report: StepReport | InferenceReport, path: Path, device: Device | None = None, cluster: ClusterView | None = None
) -> Path:
    """Write the :func:`step_page` of a step and return its path; ReportError when it cannot be written."""
    return write_text(step_page(report, device, cluster), path)


def network_page(prediction: OpPrediction) -> str:
    """What the links of a cluster did as the text of a page."""
    return render(network.page(prediction))


def network_body(prediction: OpPrediction) -> str:
    """The same without its frame: cards and sections for a page that has styles and scripts of reports."""
    return render_body(network.page(prediction))


def write_network_report(prediction: OpPrediction, path: Path) -> Path:
    """Write what the links of a cluster did as a page and return its path; ReportError when it cannot be written."""
    return write(network.page(prediction), path)


def write_serving_report(
    report: ServingReport,
    title: str,
    facts: Sequence[str],
    path: Path,
    rates: Sequence[tuple[float, ServingReport]] = (),
) -> Path:
    """Write served traffic as a page and return its path; ReportError when it cannot be written.

    ``facts`` are said below the title; ``rates`` are (rate, what came of it) of a sweep.
    """
    return write(serving.page(report, title, facts, rates), path)
