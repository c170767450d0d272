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

from ..report.step import OpShare
from . import colours, units
from .sites import Errors, Site

FONT = "system-ui, sans-serif"
HOST = "host"
PERCENT = "\u00a0%"
LARGEST_MARKER_PX = 38.0
ERROR_BINS_PERCENT = np.arange(-50.0, 50.1, 5.0)  # what lies beyond is counted in a bin at either end
MIN_BOX_PERCENT = 0.6
ERROR_AXIS_PERCENT = (-100.0, 200.0)
LEGEND: dict[str, Any] = {"showlegend": True, "legend": {"orientation": "h", "y": 1.12}}  # above a picture
RIGHT = {"overlaying": "y", "side": "right", "showgrid": False, "rangemode": "tozero"}  # of a second y axis


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


def titled(text: str, **more: Any) -> dict[str, Any]:
    """An axis with its title."""
    return {"title": {"text": text}} | more


def from_top(names: Sequence[str], **more: Any) -> dict[str, Any]:
    """A y axis of names, the first on top."""
    return {"categoryorder": "array", "categoryarray": [*names][::-1], "showgrid": False} | more


def curve(
    xs: Iterable[float], ys: Iterable[float], hue: str, line: Mapping[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """A line through points; ``line`` says how it differs from a plain one, ``more`` what else Plotly is told."""
    style = {"color": colours.css(hue), "width": 1.5} | dict(line or {})
    points = {"x": [round_number(x) for x in xs], "y": [round_number(y) for y in ys]}
    return {"type": "scatter", "mode": "lines", **points, "line": style} | more


def bars(
    name: str, colour: str, x: Sequence[float], y: Sequence[Any], hints: Sequence[str], **more: Any
) -> dict[str, Any]:
    """Bars along x of one entry of the legend (none where it has no name), and what hovering says of each."""
    entry = {"name": label(name), "legendgroup": name, "meta": {"name": name}} if name else {}
    marker = {"color": colour, "line": {"width": 0}}
    points = {"x": x, "y": y, "hovertext": hints, "hoverinfo": "text", "textposition": "none", "marker": marker}
    return {"type": "bar", "orientation": "h", **entry, **points} | more


def dashed(axis: str, at: float) -> dict[str, Any]:
    """A dashed line across the picture, where the axis ``x`` or ``y`` is ``at``."""
    across = "y" if axis == "x" else "x"
    ends = {f"{axis}0": at, f"{axis}1": at, f"{across}ref": "paper", f"{across}0": 0, f"{across}1": 1}
    return {"type": "line", **ends, "line": {"color": colours.css("red"), "width": 1.5, "dash": "dash"}}


def agreement(sites: Sequence[Site]) -> dict[str, Any]:
    """Predicted over measured time per call site, both on log axes, marker areas by share of the measured time."""
    low, high = _range(sites)
    data = [_band(low, high, 0.25, "band-far"), _band(low, high, 0.10, "band-near"), _diagonal(low, high)]
    data += _discs(sites, lambda site: site.predicted_us)
    return figure(
        data,
        height=460,
        xaxis=titled("measured", **log_axis(low, high)),
        yaxis=titled("predicted", **log_axis(low, high)),
    )


def error_by_size(sites: Sequence[Site]) -> dict[str, Any]:
    """Signed error over measured time per call site: what a log axis of predictions is too coarse to show."""
    low, high = _range(sites)
    errors = np.clip([site.error for site in sites], *ERROR_AXIS_PERCENT)
    return figure(
        _discs(sites, lambda site: min(max(site.error, ERROR_AXIS_PERCENT[0]), ERROR_AXIS_PERCENT[1])),
        height=460,
        shapes=error_bands("y"),
        xaxis=titled("measured", **log_axis(low, high)),
        yaxis=errors_axis(errors.min() * 1.15, errors.max() * 1.15),
    )


def errors_axis(low: float, high: float, beyond: float = 0.0) -> dict[str, Any]:
    """An axis of signed errors in percent, wide enough for the bands, and ``beyond`` at both ends."""
    ends = [min(-28.0, low) - beyond, max(28.0, high) + beyond]
    return titled("signed error", ticksuffix=PERCENT, range=ends, zeroline=True)


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
        rounded = [round_number(value) for value in heights.tolist()]
        hints = [
            hover(kind, f"error {name}", f"{units.percent(value)} of the measured operator time")
            for name, value in zip(names, heights.tolist(), strict=True)
        ]
        data.append(bars(kind, colours.of_kind(kind), centres.tolist(), rounded, hints, orientation="v"))
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
        xaxis=titled("signed error", tickvals=ticks, ticktext=words, **ends),
        yaxis=titled("% of operator time"),
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
        base = p25 if p75 - p25 > MIN_BOX_PERCENT else (p25 + p75 - MIN_BOX_PERCENT) / 2
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
            bars(kind, colour, [max(p75 - p25, MIN_BOX_PERCENT)], [label(kind)], hint, base=[base]),
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
        xaxis=errors_axis(min(ends), max(ends), beyond=4),
        yaxis=from_top([label(kind) for kind in kinds]),
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
    sides = ["predicted", "measured"]
    hints = [
        hover(
            kind,
            f"{title}, {side}",
            f"{units.duration(value)}, {units.share(value / total)} of the step",
            _error_text(pair),
        )
        for side, value, total in zip(sides, pair, totals, strict=True)
    ]
    colour = colours.of_kind(kind)
    more = {
        "xaxis": f"x{number}",
        "yaxis": f"y{number}",
        "text": [label(kind)] * 2,
        "marker": {"color": colour, "line": {"width": 1, "color": "var(--surface)"}},
        **inside("var(--on-fill)"),
    }
    return bars(kind, colour, [round_number(value / divisor) for value in pair], sides, hints, **more)


def inside(ink: str) -> dict[str, Any]:
    """Of bars: their text in the middle of them."""
    font = {"color": ink}
    return {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0, "insidetextfont": font}


def where_room(ink: str) -> dict[str, Any]:
    """Of bars: their text in them where there is room, else behind them."""
    fonts = {"insidetextfont": {"color": ink}, "outsidetextfont": {"color": "var(--text)"}}
    return {"textposition": "auto", **fonts}


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
        bars(
            "",
            colours.of_kind(kind),
            [round_number(seconds * 1e6 / divisor)],
            [label(kind)],
            [hover(kind, f"{units.duration(seconds * 1e6)}, {units.share(seconds / step_s)} of the step", what)],
            text=[f"{units.duration(seconds * 1e6)}  {units.share(seconds / step_s)}"],
            cliponaxis=False,
            **where_room("var(--on-fill)"),
        )
        for kind, seconds, what in rows
    ]
    return figure(
        data,
        height=70 + 30 * max(len(rows), 1),
        barmode="overlay",
        bargap=0.25,
        xaxis={"ticksuffix": f"\u00a0{unit}", "rangemode": "tozero"},
        yaxis=from_top([label(row[0]) for row in rows]),
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
