"""Pictures of an evaluation as PNG files: predicted against measured, error against size, importance of features."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

POINTS = 4000
FEATURES = 20


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
    axes.set_yscale("log")
    ends = [min(measured_us.min(), predicted_us.min()), max(measured_us.max(), predicted_us.max())]
    axes.plot(ends, ends, color="0.6", linewidth=1)
    axes.plot(measured_us, predicted_us, ".", markersize=4, alpha=0.5)
    figure.savefig(path)
    return path


def _errors(measured_us: np.ndarray, predicted_us: np.ndarray, title: str, path: Path) -> Path:
    figure, axes = _axes(title, "measured, µs", "error on held-out shapes, %")
    axes.axhline(0.0, color="0.6", linewidth=1)
    axes.plot(measured_us, 100.0 * (predicted_us / measured_us - 1.0), ".", markersize=4, alpha=0.5)
    figure.savefig(path)
    return path


def _importance(importance: Mapping[str, float], title: str, path: Path) -> Path:
    figure, axes = _axes(title, "growth of mean log error when shuffled", "")
    axes.set_xscale("linear")
    top = sorted(importance.items(), key=lambda item: -item[1])[:FEATURES][::-1]
    axes.barh([name for name, _ in top], [value for _, value in top])
    figure.savefig(path)
    return path


def _axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 4.0), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y, xscale="log")
    return figure, axes
