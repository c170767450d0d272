"""A page: cards, figures and tables under headings, in one HTML file that needs nothing else.

Reports are put together from these parts (:mod:`.quickstart`, :mod:`.step`) and rendered by one template. Text is
escaped by the template, figures travel as JSON that cannot end its script element, and the page's own security
policy forbids any connection.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ...datasets.files import write_atomically
from ..report.view import PAGE, Toned, ViewColumn, ViewTable, finite, written
from . import units
from .colours import PALETTE

HERE = Path(__file__).resolve().parent
PLOTLY = HERE / "plotly-basic.min.js.gz"  # npm plotly.js-basic-dist-min 4.1.1 (MIT, plotly-LICENSE)
UNITS = {  # how a page writes values of some kinds
    "seconds": lambda seconds: units.duration(1e6 * seconds),
    "us": units.duration,
    "us_range": lambda ends: units.duration_range(*ends),
    "error": lambda percent: units.percent(percent, signed=True),
    "digits": units.three_digits,
    "ms": lambda ms: units.duration(1e3 * ms),
    "fine_ms": lambda ms: units.duration(1e3 * ms),
    "time_ms": lambda ms: units.duration(1e3 * ms),
    "ms_range": lambda ends: units.duration_range(*(1e3 * ms for ms in ends)),
    "size": lambda size: units.with_prefix(size, "B"),
    "quantity": lambda value: units.with_prefix(value, "").rstrip(),
    "share": units.share,
    "bytes": lambda size: units.gib(size / 2**30),
}
LEAST_BAR = {"cost": 0.01, "share": 1.0}  # what a full bar stands for at least


class ReportError(ValueError):
    """A report that cannot be written. The message says where and why."""


@dataclass(frozen=True)
class Strip:
    """A small picture on one scale: an interval, the value inside it, and measured runs; positions from 0 to 100."""

    low: float
    value: float
    high: float
    runs: tuple[float, ...] = ()
    left: str = ""
    right: str = ""
    label: str = ""


@dataclass(frozen=True)
class Card:
    """Headline figures (name, value) side by side, lines below them, and a verdict with its tone (good, fair, poor)."""

    title: str
    values: tuple[tuple[str, str], ...]
    lines: tuple[tuple[str, str], ...] = ()
    verdict: str = ""
    tone: str = ""
    strip: Strip | None = None


@dataclass(frozen=True)
class Figure:
    """A Plotly figure per variant of its section.

    ``zoom`` adds buttons that move along the x axis; two ``half`` ones stand side by side where there is room.
    """

    label: str
    variants: Mapping[str, Mapping[str, Any]]
    zoom: bool = False
    half: bool = False
    part: ClassVar[str] = "figure"


@dataclass(frozen=True)
class Legend:
    """The kinds of op in the section's figures, each with its colour; pressing one hides it in all of them."""

    part: ClassVar[str] = "legend"


@dataclass(frozen=True)
class Cell:
    """One cell: text, its tone, a bar of that fraction behind it, more on hover, over how many columns."""

    text: str
    tone: str = ""
    bar: float | None = None
    bar_tone: str = ""
    hint: str = ""
    span: int = 1


@dataclass(frozen=True)
class Column:
    """A column's heading, and what it means."""

    title: str
    hint: str = ""
    words: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of cells; ``variant`` shows it with that choice of its section only, ``footer`` rows close it."""

    caption: str
    columns: tuple[Column, ...]
    rows: Sequence[Sequence[Cell]]
    variant: str = ""
    footer: Sequence[Sequence[Cell]] = ()
    part: ClassVar[str] = "table"


@dataclass(frozen=True)
class Piece:
    """One piece of a stack: its fraction of the whole, its colour."""

    name: str
    text: str
    fraction: float
    colour: str


@dataclass(frozen=True)
class StackedBar:
    """A bar in pieces. What the fractions leave of 1 stays empty; ``limit`` marks where the device ends."""

    label: str
    pieces: tuple[Piece, ...]
    limit: float | None = None
    part: ClassVar[str] = "stack"


@dataclass(frozen=True)
class Note:
    """A paragraph, or with ``items`` a list; ``variant`` as in :class:`Table`."""

    text: str
    items: tuple[str, ...] = ()
    variant: str = ""
    part: ClassVar[str] = "note"


@dataclass(frozen=True)
class Picture:
    """A drawing as SVG, which the page shows as it is: the text in it must be escaped already."""

    label: str
    svg: str
    part: ClassVar[str] = "picture"


@dataclass(frozen=True)
class LayeredTimeline:
    """A picture in three dimensions that a reader turns (:mod:`.layers`), drawn by ``report-layers.js``."""

    label: str
    data: Mapping[str, Any]
    part: ClassVar[str] = "layers"


Part = Figure | Legend | Table | StackedBar | Note | Picture | LayeredTimeline


@dataclass(frozen=True)
class PageSection:
    """A heading, what it shows in plain words, and its parts. ``variants`` are the choices (name, label) it offers."""

    id: str
    title: str
    text: str
    parts: tuple[Part, ...]
    variants: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Page:
    """Everything a report shows."""

    title: str
    subtitle: str
    facts: tuple[str, ...]
    cards: tuple[Card, ...]
    sections: tuple[PageSection, ...]
    caption: str = ""
    glossary: tuple[tuple[str, str], ...] = field(default=())


def notes_sections(notes: Sequence[str]) -> tuple[PageSection, ...]:
    """The section of an answer's notes; none where there are none."""
    return (PageSection("notes", "Notes", "", (Note("", tuple(notes)),)),) if notes else ()


def drawn_table(view: ViewTable, caption: str | None = None, variant: str = "") -> Table:
    """A table of an answer as a page has it, under a caption of its own or the table's; ``variant`` as in Table."""
    columns, rows = view.on(PAGE)
    most = [
        max([LEAST_BAR.get(column.kind, 1e-300), *(_length(row[at]) for row in rows)]) if column.bar else 0.0
        for at, column in enumerate(columns)
    ]
    return Table(
        view.caption if caption is None else caption,
        tuple(Column(each.title, each.hint, each.kind == "words") for each in columns),
        [
            tuple(_cell(value, own, largest) for value, own, largest in zip(row, columns, most, strict=True))
            for row in rows
        ],
        variant,
    )


def _cell(value: Any, column: ViewColumn, most: float) -> Cell:
    bar = _length(value) / most if column.bar else None
    tone, hint = (value.tone, value.hint) if isinstance(value, Toned) else ("", "")
    return Cell(written(value, column.kind, UNITS), tone, bar, hint=hint)


def _length(value: Any) -> float:
    """How long a value's bar is; nothing behind words and what is below 0."""
    value = value.value if isinstance(value, Toned) else value
    return 0.0 if value is None or isinstance(value, str) else max(value, 0.0)


def render(page: Page) -> str:
    """The page as HTML, with styles, scripts and Plotly inside."""
    from markupsafe import Markup

    return rendered(
        HERE / "report.html.j2",
        page=page,
        style=Markup(style()),
        script=Markup(script() + (HERE / "report-alone.js").read_text(encoding="utf-8")),
        plotly=Markup(base64.b64encode(PLOTLY.read_bytes()).decode()) if has_figures(page) else None,
    )


def render_body(page: Page) -> str:
    """Cards and sections of the page alone, for a page that has :func:`style`, :func:`script` and Plotly already."""
    return rendered(HERE / "report.body.j2", page=page)


def style() -> str:
    """The styles of reports."""
    return (HERE / "report.css").read_text(encoding="utf-8")


def script() -> str:
    """What draws the charts of a report: ``opcastReport(scope, ready)``."""
    return "".join((HERE / name).read_text(encoding="utf-8") for name in ("report-layers.js", "report.js"))


def rendered(template: Path, **values: Any) -> str:
    """A template with what it names, and the colours of both themes."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["drawn"] = Markup
    environment.filters["embed"] = lambda value: Markup(embed(value))
    light, dark = ({name: pair[theme] for name, pair in PALETTE.items()} for theme in (0, 1))
    return environment.get_template(template.name).render(light=light, dark=dark, **values)


def has_figures(page: Page) -> bool:
    """Whether anything on the page needs Plotly."""
    return any(isinstance(part, Figure) for section in page.sections for part in section.parts)


def embed(value: Any) -> str:
    """JSON that can stand inside a script element. NaN and infinities become null."""
    text = json.dumps(finite(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def write(page: Page, path: Path) -> Path:
    """Write the page whole or not at all, and return its path; ReportError when it cannot be written."""
    text = render(page)
    return write_atomically(path, lambda file: file.write_text(text, "utf-8"), ReportError, "the report to ")
