"""What is known of runs beyond the columns of their table: rules, applied to cells.

``conf/own_tables`` has those that hold for every table. Published runs have a folder of rules of their own, which
a checkout has in ``tests/evidence/published`` and ``rules=`` names elsewhere. A file is about one publication. ``of``
names the kinds of rows, ``said`` the words by which they are told: a row belongs to the first file, by ``order`` and
name, whose words it has. Files with ``every`` apply to all rows of their kinds, before that one.

A rule counts where every condition of its ``when`` holds: it fills columns that a row leaves blank (``usual``),
replaces what a row says (``set``, or ``look_up`` in a file) or says why the row cannot be simulated (``refuse``). Later
rules see what earlier ones did. Columns called ``options.NAME`` are the simulator's options. Every rule names its
source, and of which kind it is (``basis``, one of :data:`BASES`). ``look_up`` is ``{file: NAME.csv, by: [columns]}``:
the first line of that file whose ``by`` cells are a row's own (blank: any; ``a|b``: either; ``>8``: more) fills its
other columns. A line may have a ``basis`` of its own.

What was ``read off TABLE`` was told by measured results. It fills nothing where the rows of that table are scored, as
nobody would know it before the run; a row that it refuses is answered, too, and scores are given with it and without.

A file with ``table`` is about tables that have these columns, and ``columns`` says which of theirs are ours:
``{ours: theirs}``, or ``{ours: {of: theirs, words: pattern}}`` for the part of a cell that a pattern's first group
takes; those that only rules fill are ``null``, also where theirs of that name means something else.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..reading import read_yaml
from .cells import FILL, REFUSE, Cells
from .rows import TruthError

ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / "conf" / "own_tables"
CHECKOUT = ROOT / "tests" / "evidence" / "published"  # what is known of published runs; no wheel has it
OPTION = "options."
BASES = ("documented", "code", "measured elsewhere", "assumed")  # and read off a table
READ_OFF = "read off "
NOT_FILLED = ("source", "basis")  # columns of a file to look up in


class OutcomeError(TruthError):
    """A row that is refused because of its measured result."""


@dataclass(frozen=True)
class PublishedRule:
    """One thing that is known: where it counts, what it fills, replaces or refuses, and who says so."""

    source: str
    when: Mapping[str, Any] = field(default_factory=dict)
    usual: Mapping[str, Any] = field(default_factory=dict)
    set: Mapping[str, Any] = field(default_factory=dict)
    look_up: Mapping[str, Any] = field(default_factory=dict)
    refuse: str = ""
    basis: str = ""
    lines: tuple[Mapping[str, str], ...] = ()  # of the file to look up in

    @property
    def is_outcome(self) -> bool:
        """Whether measured results told it."""
        return self.basis.startswith(READ_OFF)

    def looked_up(self, cells: Cells) -> dict[str, Any]:
        """What the file to look up in has for a row, by column."""
        by = self.look_up.get("by", ())
        lines = (
            line for line in self.lines if FILL in cells.outcomes or not line.get("basis", "").startswith(READ_OFF)
        )
        line = next(
            (candidate for candidate in lines if all(meant(fact(cells, name), candidate[name]) for name in by)), {}
        )
        return {name: value_of(text) for name, text in line.items() if text and name not in (*by, *NOT_FILLED)}


@dataclass(frozen=True)
class Publication:
    """A file of rules: whose rows they are about, in which order files are asked, and names of a table's columns."""

    id: str
    of: tuple[str, ...]
    rules: tuple[PublishedRule, ...]
    said: str = ""
    order: int = 0
    every: bool = False
    table: tuple[str, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)


@lru_cache(maxsize=8)
def publications(folder: Path | None = None) -> tuple[Publication, ...]:
    """The rules for every table and those of a folder (None: of the checkout, if it is one), files for every row first.

    TruthError for a folder without rules, or with a file that holds something else.
    """
    paths = sorted((folder or CHECKOUT).glob("*.yaml"))
    if folder is not None and not paths:
        raise TruthError(f"rules={folder}: no folder with rules on published tables (*.yaml)")
    rules = [publication(path) for path in (*sorted(OWN.glob("*.yaml")), *paths)]
    return tuple(sorted(rules, key=lambda rule: (not rule.every, rule.order, rule.id)))


def publication(path: Path) -> Publication:
    """The rules of a file. TruthError for a file that holds something else."""
    content = read_yaml(path, TruthError)
    try:
        rules = tuple(PublishedRule(**rule, lines=lines_of(path, rule)) for rule in content.pop("rules"))
        of, table = tuple(content.pop("of")), tuple(content.pop("table", ()))
        result = Publication(path.stem, of, rules, table=table, **content)
        check(result)
    except (KeyError, TypeError, ValueError, AttributeError, OSError, re.error, csv.Error) as error:
        raise TruthError(f"rules: {path} holds no rules on published tables: {error}") from None
    return result


def check(publication: Publication) -> None:
    """ValueError, re.error and their like for patterns, conditions and columns that are none."""
    re.compile(publication.said)
    for rule in publication.rules:
        for basis in (rule.basis, *(line.get("basis") or "" for line in rule.lines)):
            if basis and basis not in BASES and not re.fullmatch(READ_OFF + r"\w+", basis):
                raise ValueError(f"basis: {basis!r} is none of {', '.join(BASES)}, {READ_OFF}TABLE")
        for condition in rule.when.values():
            holds("", condition)
        for number, line in enumerate(rule.lines, start=2):
            file = rule.look_up["file"]
            if lacks := set(rule.look_up["by"]) - set(line):
                raise ValueError(f"{file} has no column {', '.join(sorted(lacks))}")
            if None in line or None in line.values():
                raise ValueError(f"{file}, line {number}: as many cells as columns are needed")
            for cell in (line[name] for name in rule.look_up["by"] if line[name].startswith(">")):
                if not is_number(cell[1:]):
                    raise ValueError(f"{file}, line {number}: {cell!r} is no number to be above")
    for theirs in publication.columns.values():
        if isinstance(theirs, Mapping) and not (theirs["of"] and re.compile(theirs["words"]).groups):
            raise ValueError(f"{theirs['words']} has no group")


def lines_of(path: Path, rule: Mapping[str, Any]) -> tuple[Mapping[str, str], ...]:
    """The lines of the file that a rule looks up in, which is beside its own."""
    if "look_up" not in rule:
        return ()
    with path.with_name(rule["look_up"]["file"]).open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def meant(text: str, cell: str) -> bool:
    """Whether the text of a row is what a cell of a file to look up in means: one of ``a|b``, more than ``>8``, all."""
    if cell.startswith(">"):
        return holds(text, {"above": float(cell[1:])})
    return not cell or any(value_of(text) == value_of(choice) for choice in cell.split("|"))


def is_number(text: str) -> bool:
    """Whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def value_of(text: str) -> float | str:
    """A number where a text is one."""
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


def columns_of(names: Iterable[str], folder: Path | None) -> Mapping[str, Any]:
    """Our columns of a table by what it calls them, where a file knows a table of such columns; else nothing."""
    tables = (rule for rule in publications(folder) if rule.table and set(rule.table) <= set(names))
    return next((rule.columns for rule in tables), {})


def named(line: Mapping[str, str], columns: Mapping[str, Any]) -> dict[str, str]:
    """A line with our columns beside its own."""
    cells = dict(line)
    for ours, theirs in columns.items():
        if theirs is None:
            cells.pop(ours, None)  # what they call so is something else
            continue
        if isinstance(theirs, str):
            cells[ours] = line.get(theirs) or ""
        elif match := re.search(theirs["words"], line.get(theirs["of"]) or ""):
            cells[ours] = match[1]
    return cells


def known(cells: Cells, kind: str) -> Cells:
    """The cells of a row with what is known of its publication; TruthError where a rule refuses it."""
    changed = False
    statement = cells.said  # of the row itself
    for entry in publications(cells.rules):
        others = kind not in entry.of or not cells.values.keys() >= set(entry.table)
        if others or (changed and not entry.every):
            continue
        if entry.every or re.search(entry.said, statement, re.IGNORECASE):
            changed = changed or not entry.every
            for rule in entry.rules:
                cells = applied(cells, rule)
    return cells


def applied(cells: Cells, rule: PublishedRule) -> Cells:
    """The cells after a rule; TruthError where it refuses the row."""
    if not all(holds(fact(cells, name), condition) for name, condition in rule.when.items()):
        return cells
    if rule.is_outcome and (REFUSE if rule.refuse else FILL) not in cells.outcomes:
        return cells
    if rule.refuse:
        raise (OutcomeError if rule.is_outcome else TruthError)(rule.refuse.format_map(_Facts(cells)))
    filled = {name: value for name, value in rule.usual.items() if not cells.has(name)} | dict(rule.set)
    filled |= rule.looked_up(cells)
    options = {name.removeprefix(OPTION): value for name, value in filled.items() if name.startswith(OPTION)}
    values = {name: written(value) for name, value in filled.items() if not name.startswith(OPTION)}
    return replace(cells, values={**cells.values, **values}, options={**cells.options, **options})


def written(value: Any) -> str:
    """A value of a rule as a table would have it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def fact(cells: Cells, name: str) -> str:
    """What a condition looks at: a column, all that a row ``said`` of its source, or its ``model``."""
    if name == "said":
        return cells.said
    if name == "model":
        return cells.text("model_canon") or cells.text("model")
    return cells.text(name)


class _Facts(dict[str, str]):
    """What a refusal may name in braces."""

    def __init__(self, cells: Cells) -> None:
        super().__init__()
        self.cells = cells

    def __missing__(self, name: str) -> str:
        return fact(self.cells, name)


def holds(text: str, condition: Any) -> bool:
    """Whether a text meets a condition: words (a pattern, any case), ``{above: N}``, ``{at_most: N}``, ``{not: …}``."""
    if isinstance(condition, str):
        return re.search(condition, text, re.IGNORECASE) is not None
    ((name, value),) = condition.items()
    if name == "not":
        return not holds(text, value)
    if name not in ("above", "at_most"):
        raise TruthError(f"{name} is no condition; take above, at_most or not")
    try:
        number = float(text)
    except ValueError:
        return False
    return number > value if name == "above" else number <= value
