"""What is known of published runs beyond their tables' columns: rules of ``conf/published``, applied to cells.

A file is about one publication. ``of`` names the kinds of rows, ``said`` the words by which they are told: a row
belongs to the first file, by ``order`` and name, whose words it has. Files with ``every`` apply to all rows of their
kinds, before that one. A rule counts where every condition of its ``when`` holds: it fills columns that a row leaves
blank (``usual``), replaces what a row says (``set``, or ``look_up`` by the row's own columns) or says why the row
cannot be simulated (``refuse``). Later rules see what earlier ones did. Columns called ``options.NAME`` are the
simulator's options. Every rule names its source.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..reading import read_yaml
from .cells import Cells
from .rows import TruthError

DIRECTORY = Path(__file__).resolve().parents[2] / "conf" / "published"
OPTION = "options."


@dataclass(frozen=True)
class PublishedRule:
    """One thing that is known: where it counts, what it fills, replaces or refuses, and who says so."""

    source: str
    when: Mapping[str, Any] = field(default_factory=dict)
    usual: Mapping[str, Any] = field(default_factory=dict)
    set: Mapping[str, Any] = field(default_factory=dict)
    look_up: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    refuse: str = ""

    def found(self, cells: Cells) -> dict[str, Any]:
        """What ``look_up`` has for a row, by column: ``{by: [columns], of: values nested by those columns' own}``."""
        made = {}
        for name, table in self.look_up.items():
            value: Any = table["of"]
            for column in table["by"]:
                value = value.get(cells.whole(column, 0)) if value is not None else None
            if value is not None:
                made[name] = value
        return made


@dataclass(frozen=True)
class Publication:
    """A file of rules: whose rows they are about, and in which order files are asked."""

    id: str
    of: tuple[str, ...]
    rules: tuple[PublishedRule, ...]
    said: str = ""
    order: int = 0
    every: bool = False


@lru_cache(maxsize=1)
def publications() -> tuple[Publication, ...]:
    """All files of ``conf/published``, those for every row first."""
    made = []
    for path in DIRECTORY.glob("*.yaml"):
        read = read_yaml(path, TruthError)
        rules = tuple(PublishedRule(**rule) for rule in read.pop("rules"))
        made.append(Publication(path.stem, tuple(read.pop("of")), rules, **read))
    return tuple(sorted(made, key=lambda each: (not each.every, each.order, each.id)))


def known(cells: Cells, kind: str) -> Cells:
    """The cells of a row with what is known of its publication; TruthError where a rule refuses it."""
    told = False
    said = cells.said  # of the row itself
    for publication in publications():
        if kind not in publication.of or (told and not publication.every):
            continue
        if publication.every or re.search(publication.said, said, re.IGNORECASE):
            told = told or not publication.every
            for rule in publication.rules:
                cells = applied(cells, rule)
    return cells


def applied(cells: Cells, rule: PublishedRule) -> Cells:
    """The cells after a rule; TruthError where it refuses the row."""
    if not all(holds(fact(cells, name), condition) for name, condition in rule.when.items()):
        return cells
    if rule.refuse:
        raise TruthError(rule.refuse.format_map(_Facts(cells)))
    filled = {name: value for name, value in rule.usual.items() if not cells.has(name)} | dict(rule.set)
    filled |= rule.found(cells)
    options = {name.removeprefix(OPTION): value for name, value in filled.items() if name.startswith(OPTION)}
    values = {name: written(value) for name, value in filled.items() if not name.startswith(OPTION)}
    return Cells({**cells.values, **values}, cells.line, {**cells.options, **options})


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
    try:
        number = float(text)
    except ValueError:
        return False
    return number > value if name == "above" else number <= value
