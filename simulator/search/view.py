"""What a person is shown of a search, on a terminal and on a page: one description for all kinds of searches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...datasets.counts import counted
from ..html import colours, units
from ..html.charts import figure, hover, round_number
from ..html.page import Card, Figure, Note, Page, PageSection, Part, drawn_table
from ..report.served_view import NO_SLO
from ..report.view import TERMINAL, Toned, ViewColumn, ViewTable, dims_text
from .objectives import Objective
from .outcome import OK
from .rank import Row
from .result import SearchReport

TIES = {"noise": "two runs of one recipe differ as much", "interval": "only a measurement tells them apart"}
SHOWN_REASONS = 12  # of points left out, on a terminal
LEGEND = {"orientation": "h", "y": 1.08}
FRONT = {"mode": "lines+markers", "line": {"color": colours.css("blue"), "width": 1.5, "dash": "dot"}}
MORE = (ViewColumn("tie", "words", "with the row before"), ViewColumn("better than the next", "words"))


@dataclass(frozen=True)
class RowsView:
    """How rows of a kind of search are shown.

    ``noun`` is what one is (and many are), ``looked`` what was done with them, ``grid`` what combinations are. ``name``
    is a row in short, ``place`` and ``title`` say what it runs on too. ``columns`` are figures by the row's own
    names. ``objectives`` may be an axis of the front, ``kinds`` are titles, colours and the rows of its dots, ``hints``
    what pointing at one says; ``turned`` has the first objective go up. ``change`` is what a change of the best is told
    by, ``measured`` what differences of ops are of.
    """

    noun: tuple[str, str]
    looked: str
    grid: str
    name: Callable[[Row], str]
    place: Callable[[Row], str]
    title: Callable[[Row], str]
    columns: Mapping[str, ViewColumn]
    objectives: Mapping[str, Objective]
    kinds: Sequence[tuple[str, str, Callable[[Row], bool]]]
    hints: Callable[[Row], Sequence[str]]
    cards: Callable[[SearchReport], Sequence[Card]]
    front_note: str
    change: str
    shown_front: int
    turned: bool = False
    measured: str = ""

    def heads(self) -> list[ViewColumn]:
        """Columns of a table of rows."""
        return [ViewColumn(""), ViewColumn(self.noun[0], "words"), *self.columns.values()]

    def line(self, at: int, row: Row) -> list[Any]:
        """A row of a table."""
        return [at, self.place(row), *(row[name] for name in self.columns)]


# --- tables -----------------------------------------------------------------------------------------------


def tables(report: SearchReport, view: RowsView) -> list[ViewTable]:
    """The best, those of each chip, the front, the best as the event loop has them, one change of the best, and what
    was left out."""
    result = [best_table(report, view), chip_table(report, view)]
    if len(report.objectives) > 1:
        front = [view.line(at, row) for at, row in enumerate(report.pareto[: view.shown_front], 1)]
        caption = f"Pareto front of {', '.join(report.objectives)}: {counted(len(report.pareto), 'point')}"
        result.append(ViewTable(caption, view.heads(), front, TERMINAL))
    return [*result, played_table(report), change_table(report, view), left_table(report, view, SHOWN_REASONS)]


def best_table(report: SearchReport, view: RowsView) -> ViewTable:
    """The best rows, each with why it is better than the next."""
    rows = []
    for row in report.best:
        tie = Toned(row["tie"], "fair" if row["tie"] else "", TIES.get(row["tie"], ""))
        rows.append([*view.line(row["rank"], row), tie, row["reason"]])
    return ViewTable(f"{report.model}: best by {report.objectives[0]}", [*view.heads(), *MORE], rows)


def chip_table(report: SearchReport, view: RowsView) -> ViewTable:
    """The best of each chip where several are searched, the best first, and what an hour of it costs."""
    priced = any(row.get("hourly_cost") for row in report.chips)
    more = [ViewColumn("cost of an hour", "hundredths")] if priced else []
    rows = [[*view.line(row["rank"], row), *(row["hourly_cost"] for _ in more)] for row in report.chips]
    return ViewTable("best of each chip", [*view.heads(), *more], rows)


def played_table(report: SearchReport) -> ViewTable:
    """What the event loop says of the rows that were played through it."""
    rows, loads = [], set()
    for row in report.best:
        if run := row.get("confirmed"):
            loads.add(round(run["rate"] / row["requests_per_s"], 2))
            keeps_up = "yes" if run["keeps_up"] else "no"
            had = run["slo_attainment"] if report.slo_named else NO_SLO
            rows.append([row["rank"], run["ttft_ms"], run["tpot_ms"], keeps_up, run["goodput"], had])
    times = ViewColumn("TTFT", "ms"), ViewColumn("TPOT", "fine_ms"), ViewColumn("keeps up")
    columns = (ViewColumn(""), *times, ViewColumn("goodput", "hundredths"), ViewColumn("had all of slo", "percent"))
    share = "" if loads <= {1.0} else f", at {min(loads):.0%} of the rate"
    return ViewTable(f"the same in the event loop{share}", columns, rows)


def change_table(report: SearchReport, view: RowsView) -> ViewTable:
    """What one change of the best costs, those that can be first."""
    columns = ViewColumn("change", "words"), ViewColumn("instead of"), ViewColumn("costs", "cost", bar=True)
    rows = []
    for entry in report.sensitivity:
        why = Toned(entry["why"] or entry["status"], "poor" if entry["cost"] is None else "")
        rows.append((f"{entry['axis']}={entry['value']}", entry["instead_of"], entry["cost"], why))
    return ViewTable("one change of the best", (*columns, ViewColumn(view.change, "words")), rows)


def left_table(report: SearchReport, view: RowsView, most: int | None = None) -> ViewTable:
    """Which points were left out before they were timed, with one of each reason."""
    columns = [ViewColumn(title, "words") for title in ("because of", "points", "such as", "which")]
    columns[1] = ViewColumn("points", "count")
    reasons = list(report.pruned_by.items())[:most]
    rows = [(name, entry.count, view.name(entry.example), entry.why) for name, entry in reasons]
    return ViewTable("left out", columns, rows)


def headline(report: SearchReport, view: RowsView) -> str:
    """How many points there were, and how long it took."""
    return (
        f"{counted(report.combinations, view.grid)}, {counted(report.points, 'point')}; "
        f"{report.evaluated:,} {view.looked}, "
        f"{report.pruned:,} left out, in {report.wall_time_s:.1f} s"
    )


def measurements(report: SearchReport) -> list[tuple[str, float]]:
    """The ops that would tell the tied ones apart, and the seconds by which each differs."""
    return [(f"{op['op']['kind']} {dims_text(op['op'])}", op["difference_s"]) for op in report.measure_next]


# --- page -------------------------------------------------------------------------------------------------


def page(report: SearchReport, view: RowsView) -> Page:
    """Everything the page of a search shows."""
    candidates = [front_section(report, view), best_section(report, view), change_section(report, view)]
    looked = f"{units.count(report.evaluated)} {view.looked}, {units.count(report.pruned)} left out"
    ties = Card("Ties", (("", units.count(report.ties)),), verdict=ties_said(report, view))
    by = objective_words(report.objectives[0], view)
    return Page(
        title=f"{report.model}: {view.title(report.best[0])}",
        subtitle=f"the best of {units.count(report.points)} {view.noun[1]} by {by}",
        facts=(looked, *report.constraints),
        cards=(*view.cards(report), ties),
        sections=(*(section for section in candidates if section is not None), left_section(report, view)),
    )


def objective_words(name: str, view: RowsView) -> str:
    """An objective as a person says it: its axis of the picture without the unit."""
    return view.objectives[name].heading.partition(",")[0]


def ties_said(report: SearchReport, view: RowsView) -> str:
    """How alone the best one is, as a sentence."""
    if not report.ties:
        return f"No other {view.noun[0]} is as good."
    one = report.ties == 1
    others = f"One other {view.noun[0]}" if one else f"{units.count(report.ties)} other {view.noun[1]}"
    return f"{others} cannot be told apart from it: repeats of one run differ by more."


def front_section(report: SearchReport, view: RowsView) -> PageSection | None:
    """All points that were timed and the front of the first two objectives; None with one objective."""
    pair = [*dict.fromkeys(view.objectives[name] for name in report.objectives)][:2]
    if len(pair) < 2:
        return None
    pair = pair[::-1] if view.turned else pair
    timed = [
        row for row in report.rows if all(row.get(each.figure) is not None for each in pair) and row.get("status") == OK
    ]
    faint = {"size": 6, "opacity": 0.4}
    data = [
        dots(title, [row for row in timed if belongs(row)], pair, view, {**faint, "color": f"var(--{colour})"})
        for title, colour, belongs in view.kinds
    ]
    front = sorted(report.pareto, key=lambda row: row[pair[0].figure])
    data.append(dots("front", front, pair, view, {"size": 9, "color": colours.css("blue")}) | FRONT)
    star = {"size": 13, "symbol": "star", "color": colours.css("orange")}
    data.append(dots("best", report.best[:1], pair, view, star))
    axes = {f"{axis}axis": {"title": {"text": objective.heading}} for axis, objective in zip("xy", pair, strict=True)}
    drawn = figure(data, 460, **axes, showlegend=True, legend=LEGEND)
    return PageSection("front", "The front", view.front_note, (Figure(f"All {view.noun[1]}", {"": drawn}),))


def dots(
    name: str, rows: Sequence[Row], pair: Sequence[Objective], view: RowsView, marker: dict[str, Any]
) -> dict[str, Any]:
    """Points of a picture, with what pointing at one says."""
    x, y = ([round_number(row[axis.figure] * axis.factor) for row in rows] for axis in pair)
    hints = [hover(view.name(row), *view.hints(row)) for row in rows]
    kind = {"type": "scatter", "mode": "markers", "hovertemplate": "%{text}<extra></extra>"}
    return {**kind, "name": name, "x": x, "y": y, "marker": marker, "text": hints}


def best_section(report: SearchReport, view: RowsView) -> PageSection:
    """The best, and what would tell those that are tied apart."""
    many = view.noun[1]
    parts: list[Part] = [drawn_table(best_table(report, view), f"Best {many}")]
    if (played := played_table(report)).rows:
        parts.append(drawn_table(played))
    if report.measure_next:
        lines = tuple(f"{op}: differs by {units.duration(seconds * 1e6)}" for op, seconds in measurements(report))
        parts.append(Note("Measuring these would help to tell the tied ones apart:", lines))
    text = f"{many.capitalize()} from best to worst. A tie says that nobody can tell a row from the one before it."
    return PageSection("best", "The best", text, tuple(parts))


def change_section(report: SearchReport, view: RowsView) -> PageSection | None:
    """What one change of the best costs, those that can run first."""
    if not report.sensitivity:
        return None
    text = f"The best {view.noun[0]} with one setting changed by one step, and what that costs in the first objective."
    return PageSection("around", "One change", text, (drawn_table(change_table(report, view), "Around the best"),))


def left_section(report: SearchReport, view: RowsView) -> PageSection:
    """Which points were left out before they were timed, and which combinations never were points."""
    table = left_table(report, view)
    parts: list[Part] = [drawn_table(table, "Left out") if table.rows else Note("Nothing was left out.")]
    unfit = tuple(f"{units.count(count)}: {what}" for what, count in report.left_out.items())
    if unfit:
        parts.append(Note("Combinations that do not fit together, by the first requirement they miss:", unfit))
    text = (
        f"{units.count(report.combinations)} combinations of the axes are {units.count(report.points)} {view.noun[1]}."
    )
    return PageSection("left", "What was left out", text, tuple(parts))
