"""Pictures of an evaluation as PNG files: predicted against measured, error against size, importance of features."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

POINTS = 4000
FEATURES = 20
WIDE = 100.0  # largest over smallest value from which ticks at powers of ten are enough
MARGIN, NAMES = 0.14, 0.33  # of the width, left of the axes: for numbers, and for names of features


def save(
    measured_us: np.ndarray,
    predicted_us: np.ndarray,
    importance: Mapping[str, float],
    title: str,
    directory: Path,
) -> list[Path]:
    """Write the pictures of held-out answers [n] and of importances into ``directory``; returns their paths."""
    if len(measured_us) > POINTS:
        chosen = np.linspace(0, len(measured_us) - 1, POINTS).astype(int)
        measured_us, predicted_us = measured_us[chosen], predicted_us[chosen]
    return [
        _agreement(measured_us, predicted_us, title, directory / "predicted-vs-measured.png"),
        _errors(measured_us, predicted_us, title, directory / "error-vs-size.png"),
        _importance(importance, title, directory / "importance.png"),
    ]


def _agreement(measured_us: np.ndarray, predicted_us: np.ndarray, title: str, path: Path) -> Path:
    figure, axes = _axes(title, "measured, µs", "predicted on held-out shapes, µs")
    _logarithmic(axes.xaxis, measured_us)
    _logarithmic(axes.yaxis, predicted_us)
    ends = [min(measured_us.min(), predicted_us.min()), max(measured_us.max(), predicted_us.max())]
    axes.plot(ends, ends, color="0.6", linewidth=1)
    axes.plot(measured_us, predicted_us, ".", markersize=4, alpha=0.5)
    figure.savefig(path)
    return path


def _errors(measured_us: np.ndarray, predicted_us: np.ndarray, title: str, path: Path) -> Path:
    figure, axes = _axes(title, "measured, µs", "error on held-out shapes, %")
    _logarithmic(axes.xaxis, measured_us)
    axes.axhline(0.0, color="0.6", linewidth=1)
    axes.plot(measured_us, 100.0 * (predicted_us / measured_us - 1.0), ".", markersize=4, alpha=0.5)
    figure.savefig(path)
    return path


def _importance(importance: Mapping[str, float], title: str, path: Path) -> Path:
    figure, axes = _axes(title, "growth of mean log error when shuffled", "", NAMES)
    top = sorted(importance.items(), key=lambda item: -item[1])[:FEATURES][::-1]
    axes.hlines(range(len(top)), 0.0, [value for _, value in top], linewidth=8)
    axes.set_yticks(range(len(top)), [name for name, _ in top], fontsize=8)
    figure.savefig(path)
    return path


def _axes(title: str, x: str, y: str, left: float = MARGIN) -> tuple[Any, Any]:
    """Axes at a fixed place: to fit the margins to the labels, everything would be drawn twice."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 4.0), dpi=90)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((left, 0.13, 0.96 - left, 0.79))
    axes.set(title=title, xlabel=x, ylabel=y)
    return figure, axes


def _logarithmic(axis: Any, values: np.ndarray) -> None:
    """A logarithmic axis with plain numbers at few ticks, into which most of the time of a picture goes."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1.0,) if values.max() >= WIDE * values.min() else (1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
