"""What a person sees: tables on a terminal, one JSON object for scripts, errors in one line."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

from ..simulator.report.view import TERMINAL, ViewTable, finite, written

CONFIG_DIRECTORY = Path(__file__).resolve().parent.parent / "conf"
GAP = 3  # characters between columns of a table
LINES = 3  # that a cell of a wide table is folded into at most
NUMBER = 24  # characters of a number with its unit, as 29.5 to 59.1


class BadInputError(ValueError):
    """Something the user gave cannot be used: exit code 2 and this one line."""


OWN: Mapping[str, Callable[[Any], str]] = {  # how a terminal writes values of some kinds
    "time_ms": lambda ms: "-" if math.isnan(ms) else f"{ms:,.1f}",  # a heading says the unit
    "bytes": lambda size: f"{size / 2**20:,.4g} MiB",
}


def one_line(error: BaseException) -> str:
    """An exception's message on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def wants_json(config: dict[str, Any]) -> bool:
    """Whether ``format=json`` was asked; BadInputError for a format that does not exist."""
    chosen = config.get("format", "text")
    if chosen not in ("text", "json"):
        raise BadInputError(f"format={chosen!r} does not exist; choose text or json")
    return chosen == "json"


_INDENT: ContextVar[int | None] = ContextVar("indent", default=1)


@contextmanager
def json_lines() -> Iterator[None]:
    """Within, every JSON object is one line: a sweep prints one for each of its runs."""
    token = _INDENT.set(None)
    try:
        yield
    finally:
        _INDENT.reset(token)


def print_json(value: Any) -> None:
    """Exactly one JSON object on stdout, for who reads it while the command goes on. NaN and infinities become null."""
    text = json.dumps(finite(value), indent=_INDENT.get(), ensure_ascii=False, allow_nan=False)
    print(text, flush=True)


def say(text: str) -> None:
    """A line of progress or explanation, on stderr so that stdout stays the answer."""
    print(text, file=sys.stderr, flush=True)


def table(title: str, headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on stdout: numbers right aligned, words left; one that is too wide goes on below, as often as needed."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    console = Console(width=None if sys.stdout.isatty() else 160)
    for part, columns in enumerate(parts(headers, cells, console.width)):
        if title and not part:
            console.print(f"[bold]{escape(title)}[/bold]", highlight=False)
        made = Table(box=box.SIMPLE_HEAD)
        made.show_header = any(headers)
        for column in columns:
            texts = [row[column] for row in cells if row[column]]
            made.add_column(escape(headers[column]), justify=side(column, texts), overflow="fold")
        for row in cells:
            made.add_row(*(escape(row[column]) for column in columns))
        console.print(made)


def show(view: ViewTable, empty: bool = False) -> None:
    """A table of an answer on stdout; one without rows only where it may be ``empty``."""
    columns, rows = view.on(TERMINAL)
    if rows or empty:
        texts = [[written(value, column.kind, OWN) for value, column in zip(row, columns, strict=True)] for row in rows]
        table(view.caption, [column.title for column in columns], texts)


def show_answer(head: str, tables: Iterable[ViewTable], notes: Iterable[str]) -> None:
    """An answer as one line of what it is about, its tables, and what a reader should know."""
    if head:
        say(head)
    for view in tables:
        show(view)
    for note in notes:
        say(note)


def side(column: int, texts: Sequence[str]) -> Literal["left", "right"]:
    """Where the cells of a column are aligned: short ones that all begin as numbers do on the right."""
    numbers = column > 0 and all((text[0].isdigit() or text[0] in "-+±.") and len(text) <= NUMBER for text in texts)
    return "right" if numbers else "left"


def parts(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """The columns of a table cut into tables of at most so many characters, each with the first column.

    A cell may be folded between words, into at most so many lines as ``LINES``.
    """
    from rich.cells import cell_len

    columns = [[header, *(row[at] for row in rows)] for at, header in enumerate(headers)]
    longest = [max(cell_len(word) for text in texts for word in text.split() or [""]) for texts in columns]
    needed = [
        GAP + max(most, *(-(-cell_len(t) // LINES) for t in texts))
        for most, texts in zip(longest, columns, strict=True)
    ]
    found = [[0]] if columns else []
    for at in range(1, len(columns)):
        if found[-1] != [0] and 1 + sum(needed[each] for each in (*found[-1], at)) > width:
            found.append([0])
        found[-1].append(at)
    return found


def with_units(text: str) -> str:
    """A text whose ``size_bytes=1073741824`` is ``size_bytes=1GiB``, as it may be asked; odd sizes stay bytes."""

    def shown(match: re.Match[str]) -> str:
        size = int(match[2])
        units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3))
        return match[1] + next((f"{size // each}{unit}" for unit, each in units if size and size % each == 0), match[2])

    return re.sub(r"(\bsize_bytes=)(\d+)\b", shown, text)
