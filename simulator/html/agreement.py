"""Predicted over measured as a picture: a row for each table of runs, a dot for each run, exact ones in the middle."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence

WIDTH, LEFT, RIGHT, TOP, ROW = 760, 190, 92, 66, 21  # px
MAX_FACTOR = 2.5  # times too slow or too fast: runs beyond stand at the edge
MARKS = (0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0)
BAND_FACTOR = 1.1  # the shaded middle
DOT_PX = 2.2  # px
HUES = {"train": "#3f51b5", "other": "#d9660a"}
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#24292f}.small{font-size:11px;fill:#57606a}.head{font-weight:600;"
    "font-size:14px}.end{text-anchor:end}.mid{text-anchor:middle}path{stroke-linecap:round;stroke-opacity:.55}"
)


def svg(ratios: Mapping[str, Sequence[float]], title: str) -> str:
    """Predicted over measured times of the runs of each table, as SVG; the tables with the least errors first."""
    order = sorted((name for name in ratios if len(ratios[name])), key=lambda name: _median_error(ratios[name]))
    height = TOP + ROW * len(order) + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#fff"/>',
        _text(16, 24, title, "head"),
        *_scale(TOP - 8, height - 36),
        *(element for at, name in enumerate(order) for element in _row(name, ratios[name], TOP + ROW * at + ROW / 2)),
        _text(LEFT, height - 8, "◂ predicted too fast", "small"),
        _text(WIDTH - RIGHT, height - 8, "predicted too slow ▸", "small end"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _median_error(ratios: Sequence[float]) -> float:
    """The median error."""
    errors = sorted(abs(ratio - 1.0) for ratio in ratios)
    middle = len(errors) // 2
    return errors[middle] if len(errors) % 2 else (errors[middle - 1] + errors[middle]) / 2


def _x(ratio: float) -> float:
    """Where a ratio stands: logarithmic, the edges for what lies beyond."""
    share = math.log(min(max(ratio, 1.0 / MAX_FACTOR), MAX_FACTOR)) / math.log(MAX_FACTOR)
    return LEFT + (WIDTH - LEFT - RIGHT) * (1.0 + share) / 2


def _scale(top: float, bottom: float) -> Iterator[str]:
    """The shaded band, a line and a label for each mark, the head of the figures at the right."""
    low, high = _x(1.0 / BAND_FACTOR), _x(BAND_FACTOR)
    size = f'width="{high - low:.1f}" height="{bottom - top}"'
    yield f'<rect x="{low:.1f}" y="{top}" {size} fill="#2da44e" opacity=".13"/>'
    for mark in MARKS:
        colour = "#57606a" if mark == 1.0 else "#d8dee4"
        yield f'<path d="M{_x(mark):.1f} {top}V{bottom}" stroke="{colour}" style="stroke-opacity:1"/>'
        yield _text(_x(mark), top - 6, "exact" if mark == 1.0 else f"{mark:g} ×", "small mid")
    yield _text(WIDTH - 16, top - 6, "median error", "small end")


def _row(name: str, ratios: Sequence[float], y: float) -> Iterator[str]:
    """One table: its name and number of runs, its dots, its median error."""
    kind, _, rest = name.partition("_")
    hue = HUES["train" if kind == "train" else "other"]
    label = rest.replace("_", " ") if kind in ("train", "infer") else name.replace("_", " ")
    dots = "".join(f"M{_x(ratio):.1f} {y + _dot_offset(at):.1f}h0" for at, ratio in enumerate(sorted(ratios)))
    yield _text(16, y + 4, f"{label} ({len(ratios)})")
    yield f'<path d="{dots}" stroke="{hue}" stroke-width="{2 * DOT_PX}"/>'
    yield _text(WIDTH - 16, y + 4, f"{100 * _median_error(ratios):.1f} %", "end")


def _dot_offset(at: int) -> float:
    """How far a dot stands from its row's line, so that neighbours do not hide each other: the golden ratio's turns."""
    return ((at * 0.6180339887) % 1.0 - 0.5) * (ROW - 9)


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    css_class = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.0f}" y="{y:.0f}"{css_class}>{html.escape(text)}</text>'
