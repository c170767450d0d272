"""The pictures, as Plotly figures in plain dicts: nothing here imports Plotly.

Text that Plotly draws is escaped here, because Plotly reads a subset of HTML in it. A trace belongs to a legend entry
by its ``legendgroup``; ``meta.name`` is the entry's text. Colours are names that the page resolves by theme.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..report.answer import OpShare
from . import colours, units
from .sites import Errors, Site

FONT = "system-ui, sans-serif"
HOST = "host"
PERCENT = "\u00a0%"
LARGEST_MARKER_PX = 38.0
ERROR_BINS_PERCENT = np.arange(-50.0, 50.1, 5.0)  # what lies beyond is counted in a bin at either end
MIN_BOX_PERCENT = 0.6
ERROR_AXIS_PERCENT = (-100.0, 200.0)


def label(text: str) -> str:
    """Text as Plotly must be given it."""
    return html.escape(text, quote=False)


def hover(title: str, *lines: str) -> str:
    """What hovering shows: a bold line and others, the empty ones left out."""
    return "<br>".join([f"<b>{label(title)}</b>", *(label(line) for line in lines if line)])


def figure(data: list[dict[str, Any]], height: int, **layout: Any) -> dict[str, Any]:
    """A figure in the page's style; axes given in ``layout`` are completed."""
    axis = {
        "gridcolor": "var(--grid)",
        "linecolor": "var(--line)",
        "zerolinecolor": "var(--line)",
        "tickcolor": "var(--line)",
        "automargin": True,
    }
    base: dict[str, Any] = {
        "height": height,
        "margin": {"l": 12, "r": 16, "t": 12, "b": 12},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 12, "color": "var(--text)"},
        "hoverlabel": {
            "bgcolor": "var(--raised)",
            "bordercolor": "var(--line)",
            "font": {"family": FONT, "color": "var(--text)", "size": 12},
            "align": "left",
        },
        "hovermode": "closest",
        "showlegend": False,
        "xaxis": {},
        "yaxis": {},
    }
    base |= layout
    for name in [name for name in base if name.startswith(("xaxis", "yaxis"))]:
        base[name] = axis | base[name]
    return {"data": data, "layout": base}


def agreement(sites: Sequence[Site]) -> dict[str, Any]:
    """Predicted over measured time per call site, both on log axes, marker areas by share of the measured time."""
    low, high = _range(sites)
    data = [_band(low, high, 0.25, "band-far"), _band(low, high, 0.10, "band-near"), _diagonal(low, high)]
    data += _discs(sites, lambda site: site.predicted_us)
    return figure(
        data,
        height=460,
        xaxis={"title": {"text": "measured"}} | log_axis(low, high),
        yaxis={"title": {"text": "predicted"}} | log_axis(low, high),
    )


def error_by_size(sites: Sequence[Site]) -> dict[str, Any]:
    """Signed error over measured time per call site: what a log axis of predictions is too coarse to show."""
    low, high = _range(sites)
    errors = np.clip([site.error for site in sites], *ERROR_AXIS_PERCENT)
    return figure(
        _discs(sites, lambda site: min(max(site.error, ERROR_AXIS_PERCENT[0]), ERROR_AXIS_PERCENT[1])),
        height=460,
        shapes=error_bands("y"),
        xaxis={"title": {"text": "measured"}} | log_axis(low, high),
        yaxis={
            "title": {"text": "signed error"},
            "ticksuffix": PERCENT,
            "range": [min(-28.0, errors.min() * 1.15), max(28.0, errors.max() * 1.15)],
            "zeroline": True,
        },
    )


def _range(sites: Sequence[Site]) -> tuple[float, float]:
    times = [value for site in sites for value in (site.predicted_us, site.measured_us)]
    return min(times) / 1.8, max(times) * 1.8


def _discs(sites: Sequence[Site], height: Callable[[Site], float]) -> list[dict[str, Any]]:
    largest = max(site.share for site in sites)
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": label(kind),
            "legendgroup": kind,
            "meta": {"name": kind},
            "x": [round_number(site.measured_us) for site in group],
            "y": [round_number(height(site)) for site in group],
            "hovertext": [_site_hint(site) for site in group],
            "hoverinfo": "text",
            "marker": {
                "color": colours.of_kind(kind),
                "size": [round_number(site.share) for site in group],
                "sizemode": "area",
                "sizeref": largest / LARGEST_MARKER_PX**2 * 2,
                "sizemin": 3.5,
                "opacity": 0.8,
                "line": {"width": 1, "color": "var(--surface)"},
            },
        }
        for kind, group in group_sites(sites)
    ]


def _band(low: float, high: float, width: float, colour: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [low, high, high, low],
        "y": [low * (1 - width), high * (1 - width), high * (1 + width), low * (1 + width)],
        "fill": "toself",
        "fillcolor": colours.css(colour),
        "line": {"width": 0},
        "hoverinfo": "skip",
    }


def _diagonal(low: float, high: float) -> dict[str, Any]:
    line = {"width": 1, "color": "var(--muted)"}
    return {"type": "scatter", "mode": "lines", "x": [low, high], "y": [low, high], "line": line, "hoverinfo": "skip"}


def log_axis(low: float, high: float) -> dict[str, Any]:
    """A log axis over microseconds whose decades are labelled with their unit."""
    decades = [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    return {
        "type": "log",
        "range": [math.log10(low), math.log10(high)],
        "tickvals": decades,
        "ticktext": [units.duration(value) for value in decades],
    }


def _site_hint(site: Site) -> str:
    apart = f" ({units.duration_range(site.fastest_us, site.slowest_us)} over the calls)" if site.calls > 1 else ""
    return hover(
        site.detail,
        site.path or "the model itself",
        f"{site.workload}, {site.phase}, {site.source}, {units.count(site.calls)} calls",
        f"predicted {units.duration(site.predicted_us)} ({units.duration_range(site.low_us, site.high_us)})",
        f"measured {units.duration(site.measured_us)}{apart}",
        f"error {units.percent(site.error, signed=True)}, {units.share(site.share)} of the measured operator time",
    )


def histogram(errors: Mapping[str, Errors]) -> dict[str, Any]:
    """Share of the measured time by signed error, kinds stacked. ``errors`` are those of each kind."""
    total = sum(kind_errors.weight for kind_errors in errors.values())
    edges = np.concatenate([[-np.inf], ERROR_BINS_PERCENT, [np.inf]])
    centres = np.concatenate(
        [
            [ERROR_BINS_PERCENT[0] - 2.5],
            (ERROR_BINS_PERCENT[:-1] + ERROR_BINS_PERCENT[1:]) / 2,
            [ERROR_BINS_PERCENT[-1] + 2.5],
        ]
    )
    names = [
        f"below {_signed_text(ERROR_BINS_PERCENT[0])}",
        *map(_bin_name, ERROR_BINS_PERCENT[:-1], ERROR_BINS_PERCENT[1:]),
        f"above {_signed_text(ERROR_BINS_PERCENT[-1])}",
    ]
    data = []
    for kind, kind_errors in errors.items():
        heights = np.histogram(kind_errors.percent, edges, weights=kind_errors.weights)[0] / total * 100.0
        data.append(
            {
                "type": "bar",
                "name": label(kind),
                "legendgroup": kind,
                "meta": {"name": kind},
                "x": centres.tolist(),
                "y": [round_number(value) for value in heights.tolist()],
                "hovertext": [
                    hover(kind, f"error {name}", f"{units.percent(value)} of the measured operator time")
                    for name, value in zip(names, heights.tolist(), strict=True)
                ],
                "hoverinfo": "text",
                "textposition": "none",
                "marker": {"color": colours.of_kind(kind), "line": {"width": 0}},
            }
        )
    ticks = [ERROR_BINS_PERCENT[0] - 2.5, -25.0, 0.0, 25.0, ERROR_BINS_PERCENT[-1] + 2.5]
    words = [
        f"< {_signed_text(ERROR_BINS_PERCENT[0])}",
        *(_signed_text(value) for value in ticks[1:-1]),
        f"> {_signed_text(ERROR_BINS_PERCENT[-1])}",
    ]
    ends = {"range": [ERROR_BINS_PERCENT[0] - 10.0, ERROR_BINS_PERCENT[-1] + 10.0], "showgrid": False}
    return figure(
        data,
        height=errors_height(len(errors)),
        barmode="stack",
        bargap=0.08,
        shapes=error_bands("x"),
        xaxis={"title": {"text": "signed error"}, "tickvals": ticks, "ticktext": words} | ends,
        yaxis={"title": {"text": "% of operator time"}},
    )


def _signed_text(value: float) -> str:
    return units.percent(value, signed=value > 0).replace(".0", "")


def _bin_name(low: float, high: float) -> str:
    return f"{_signed_text(low)} to {_signed_text(high)}"


def errors_height(kinds: int) -> int:
    """The height in pixels of the two pictures of errors, which stand side by side."""
    return max(320, 90 + 30 * kinds)


def error_bands(axis: str) -> list[dict[str, Any]]:
    """Bands of ±25 % and ±10 % behind a chart with errors on this axis."""
    across = "y" if axis == "x" else "x"
    common = {"type": "rect", f"{across}ref": "paper", f"{across}0": 0, f"{across}1": 1, "line": {"width": 0}}
    return [
        common | {f"{axis}0": -width, f"{axis}1": width, "fillcolor": colours.css(name), "layer": "below"}
        for width, name in ((25, "band-far"), (10, "band-near"))
    ]


def spreads(errors: Mapping[str, Errors]) -> dict[str, Any]:
    """Signed error per kind, weighted by time: line from p10 to p90, box over the middle half, mark at the median."""
    kinds = list(errors)
    quantiles = {
        kind: np.clip(kind_errors.quantiles(), *ERROR_AXIS_PERCENT).tolist() for kind, kind_errors in errors.items()
    }
    data = []
    for kind, kind_errors in errors.items():
        p10, p25, median, p75, p90 = quantiles[kind]
        common = {"legendgroup": kind, "meta": {"name": kind}, "name": label(kind), "hoverinfo": "text"}
        colour, hint = colours.of_kind(kind), _spread_hint(kind, kind_errors)
        data += [
            common
            | {
                "type": "scatter",
                "mode": "lines",
                "x": [p10, p90],
                "y": [label(kind)] * 2,
                "hovertext": hint,
                "line": {"width": 2, "color": colour},
            },
            common
            | {
                "type": "bar",
                "orientation": "h",
                "base": [p25 if p75 - p25 > MIN_BOX_PERCENT else (p25 + p75 - MIN_BOX_PERCENT) / 2],
                "x": [max(p75 - p25, MIN_BOX_PERCENT)],
                "y": [label(kind)],
                "hovertext": hint,
                "textposition": "none",
                "marker": {"color": colour, "line": {"width": 0}},
            },
            common
            | {
                "type": "scatter",
                "mode": "markers",
                "x": [median],
                "y": [label(kind)],
                "hovertext": hint,
                "marker": {
                    "symbol": "diamond",
                    "size": 9,
                    "color": "var(--surface)",
                    "line": {"width": 2, "color": colour},
                },
            },
        ]
    ends = [value for values in quantiles.values() for value in (values[0], values[-1])]
    return figure(
        data,
        height=errors_height(len(kinds)),
        barmode="overlay",
        bargap=0.5,
        shapes=error_bands("x"),
        xaxis={
            "title": {"text": "signed error"},
            "ticksuffix": PERCENT,
            "range": [min(-28.0, *ends) - 4, max(28.0, *ends) + 4],
            "zeroline": True,
        },
        yaxis={"categoryorder": "array", "categoryarray": [label(kind) for kind in kinds[::-1]], "showgrid": False},
    )


def _spread_hint(kind: str, kind_errors: Errors) -> str:
    p10, p25, median, p75, p90 = (units.percent(value, signed=True) for value in kind_errors.quantiles())
    return hover(
        kind,
        f"median {median}",
        f"half of the time from {p25} to {p75}",
        f"four fifths from {p10} to {p90}",
        f"{units.count(len(kind_errors.percent))} calls, {units.duration(kind_errors.weight)} measured",
    )


def side_by_side(rows: Sequence[tuple[str, Mapping[str, tuple[float, float]]]]) -> dict[str, Any]:
    """Predicted above measured, for each workload on a scale of its own.

    ``rows`` hold (title, kind -> (predicted, measured) microseconds), the kinds in drawing order.
    """
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {}
    notes = []
    slot = 1.0 / len(rows)
    for position, (title, parts) in enumerate(rows):
        number = "" if position == 0 else str(position + 1)
        top = 1.0 - position * slot
        totals = [sum(value[side] for value in parts.values()) for side in (0, 1)]
        divisor, unit = units.duration_unit(max(totals))
        data += [_pair(kind, pair, totals, divisor, title, number) for kind, pair in parts.items()]
        layout[f"yaxis{number}"] = {
            "domain": [top - slot * 0.68, top - slot * 0.16],
            "categoryorder": "array",
            "categoryarray": ["measured", "predicted"],
            "anchor": f"x{number}",
            "showgrid": False,
        }
        layout[f"xaxis{number}"] = {"anchor": f"y{number}", "ticksuffix": f"\u00a0{unit}", "nticks": 7}
        notes.append(_heading(title, top))
    return figure(
        data,
        height=150 * len(rows) + 16,
        barmode="stack",
        bargap=0.22,
        annotations=notes,
        uniformtext={"minsize": 12, "mode": "hide"},
        **layout,
    )


def _pair(
    kind: str, pair: tuple[float, float], totals: Sequence[float], divisor: float, title: str, number: str
) -> dict[str, Any]:
    sides = zip(("predicted", "measured"), pair, totals, strict=True)
    return {
        "type": "bar",
        "orientation": "h",
        "name": label(kind),
        "legendgroup": kind,
        "meta": {"name": kind},
        "x": [round_number(value / divisor) for value in pair],
        "y": ["predicted", "measured"],
        "xaxis": f"x{number}",
        "yaxis": f"y{number}",
        "text": [label(kind)] * 2,
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "insidetextfont": {"color": "var(--on-fill)"},
        "hovertext": [
            hover(
                kind,
                f"{title}, {side}",
                f"{units.duration(value)}, {units.share(value / total)} of the step",
                _error_text(pair),
            )
            for side, value, total in sides
        ],
        "hoverinfo": "text",
        "marker": {"color": colours.of_kind(kind), "line": {"width": 1, "color": "var(--surface)"}},
    }


def _error_text(pair: tuple[float, float]) -> str:
    predicted, measured = pair
    return f"predicted {units.percent((predicted / measured - 1) * 100, signed=True)}" if measured > 0 else ""


def _heading(text: str, top: float) -> dict[str, Any]:
    return {
        "text": f"<b>{label(text)}</b>",
        "xref": "paper",
        "yref": "paper",
        "x": 0,
        "y": top - 0.01,
        "xanchor": "left",
        "yanchor": "top",
        "showarrow": False,
    }


def kinds_chart(shares: Sequence[OpShare], host_s: float, step_s: float) -> dict[str, Any]:
    """Time of a step per kind of op as bars, the longest on top, with host time."""
    rows = [(s.kind, s.time_s, f"{units.count(s.count)} calls, answered by {' and '.join(s.engines)}") for s in shares]
    if host_s > 0:
        rows.append((HOST, host_s, "between operators: calls, views, modules, autograd"))
    rows.sort(key=lambda row: -row[1])
    divisor, unit = units.duration_unit(rows[0][1] * 1e6 if rows else 1.0)
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "x": [round_number(seconds * 1e6 / divisor)],
            "y": [label(kind)],
            "text": [f"{units.duration(seconds * 1e6)}  {units.share(seconds / step_s)}"],
            "textposition": "auto",
            "insidetextfont": {"color": "var(--on-fill)"},
            "outsidetextfont": {"color": "var(--text)"},
            "cliponaxis": False,
            "hovertext": [
                hover(kind, f"{units.duration(seconds * 1e6)}, {units.share(seconds / step_s)} of the step", what)
            ],
            "hoverinfo": "text",
            "marker": {"color": colours.of_kind(kind), "line": {"width": 0}},
        }
        for kind, seconds, what in rows
    ]
    return figure(
        data,
        height=70 + 30 * max(len(rows), 1),
        barmode="overlay",
        bargap=0.25,
        xaxis={"ticksuffix": f"\u00a0{unit}", "rangemode": "tozero"},
        yaxis={"categoryorder": "array", "categoryarray": [label(row[0]) for row in rows[::-1]], "showgrid": False},
    )


def group_sites(sites: Iterable[Site]) -> list[tuple[str, list[Site]]]:
    """Sites by kind, the kind with the most time first, so that small markers are drawn over large ones."""
    by_kind: dict[str, list[Site]] = {}
    for site in sites:
        by_kind.setdefault(site.kind, []).append(site)
    return sorted(by_kind.items(), key=lambda item: -sum(site.share for site in item[1]))


def round_number(value: float) -> float:
    """Five significant digits: enough for any screen, and a smaller page."""
    return float(f"{value:.5g}")
