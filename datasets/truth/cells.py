"""One line of a table as typed values: blanks are defaults, what cannot be read is said with its column."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import precisions
from .rows import TruthError

FILL, REFUSE = "fill", "refuse"
BLANK = {"", "nan", "none", "null", "n/a", "-"}

# What tables call a precision where opcast has another name for it.
SPELLINGS = {
    "amp_bf16": "bf16",
    "amp_fp8": "fp8",  # Composer's: Transformer Engine's layers under autocast
    "fp8-cs": "fp8",  # current scaling: one scale a tensor
    "fp8-ds": "fp8",  # delayed scaling
    "fp8-tensorwise": "fp8",
    "fp8-rowwise": "fp8",
    "fp8-sc": "fp8_block",
    "fp8-mx": "mxfp8",
    "mxfp8-rceil": "mxfp8",
    "fp4": "nvfp4",
}


@dataclass(frozen=True)
class Cells:
    """The cells of one line by column; ``line`` is its place in the file (the first after the head is 1).

    ``options`` are the simulator's, by what is known of the row's publication: ``rules`` is the folder that says it
    (:mod:`.published`). ``outcomes`` are what rules may do that were read off measured results: :data:`FILL`,
    :data:`REFUSE`.
    """

    values: Mapping[str, str]
    line: int
    options: Mapping[str, Any] = field(default_factory=dict)
    rules: Path | None = None
    outcomes: tuple[str, ...] = (REFUSE,)

    @property
    def id(self) -> str:
        """What the row is called: its ``row_id`` or ``id``, else its place."""
        return self.text("row_id") or self.text("id") or f"row {self.line}"

    def has(self, *columns: str) -> bool:
        """Whether none of the columns is blank."""
        return all(self.text(column) for column in columns)

    def text(self, column: str, default: str = "") -> str:
        """The cell without blanks around it; the default where nothing was published."""
        value = (self.values.get(column) or "").strip()
        return default if value.lower() in BLANK else value

    def number(self, column: str) -> float | None:
        """The cell as a number, None where it is blank; TruthError for words and infinities."""
        value = self.text(column)
        if not value:
            return None
        try:
            parsed = float(value)
        except ValueError:
            parsed = math.inf
        if not math.isfinite(parsed):
            raise TruthError(f"{column}={value!r} is not a number")
        return parsed

    def positive(self, column: str) -> float | None:
        """The cell as a number above zero; TruthError for others."""
        number = self.number(column)
        if number is not None and number <= 0:
            raise TruthError(f"{column}={number:g} must be positive")
        return number

    def whole(self, column: str, default: int = 1) -> int:
        """The cell as a whole number; TruthError for fractions and negative ones."""
        number = self.number(column)
        if number is None:
            return default
        if number != int(number) or number < 0:
            raise TruthError(f"{column}={number:g} is not a whole number")
        return int(number)

    def count(self, column: str) -> int:
        """The cell as a whole number of at least 1, which it is where it is blank; TruthError for others."""
        number = self.whole(column)
        if number < 1:
            raise TruthError(f"{column}={number} must be at least 1")
        return number

    def needed(self, column: str) -> int:
        """The cell as a whole number of at least 1; TruthError where it is blank."""
        number = self.whole(column, 0)
        if number < 1:
            raise TruthError(f"{column} is not published")
        return number

    def flag(self, column: str, default: bool = False) -> bool:
        """The cell as true or false."""
        return {"true": True, "1": True, "false": False, "0": False}.get(self.text(column).lower(), default)

    @property
    def said(self) -> str:
        """All that a row says in words about where it comes from and what was run."""
        columns = ("source", "gpu", "gpu_detail", "fabric", "extra", "scenario", "engine", "table")
        return " | ".join(self.text(column) for column in columns if self.text(column))


def precision_of(text: str) -> tuple[str, str]:
    """(dtype, format of matrix products) of a published name; TruthError for one that nobody knows."""
    plain = re.sub(r"\(.*\)|\?", "", text).strip().lower()
    name = SPELLINGS.get(plain, plain)
    if name == "auto" or name not in precisions.known_precisions():
        raise TruthError(f"precision {text!r} is not known" if text else "the precision is not published")
    return precisions.precision_of(name)
