"""What differs between two answers, field by field, as a person reads it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opcast.tests.golden.asking import RANKED

# Another processor or another BLAS sums in another order and rounds exponentials otherwise: the last digits may differ,
# and where a difference of large figures is told (what is exposed, what waits) a few more. A change that means anything
# is larger.
TOLERANCE = 1e-6
NOTHING = 1e-12  # below this a figure is rounding: seconds, microseconds, shares, GiB
LINES = 25  # of one case that are shown
HEADLINES = ("step_time_s", "e2e_ms", "latency_us", "fits")  # what is asked for: told beside a case's name
NAMES = ("op", "kind", "link", "id", "name", "where", "group")  # what an item of a list is called by


@dataclass(frozen=True)
class Change:
    """One field that differs; ``old`` or ``new`` is what a person reads, "nothing" where the field is not there."""

    path: str
    old: str
    new: str
    relative: float | None = None  # of numbers: new / old - 1

    @property
    def size(self) -> float:
        """How much of a change it is: what is no number counts most."""
        return math.inf if self.relative is None else abs(self.relative)

    def __str__(self) -> str:
        share = "" if self.relative is None or math.isinf(self.relative) else f"   {percent(self.relative)}"
        return f"{self.path or 'all of it'}: {self.old} -> {self.new}{share}"


def percent(share: float) -> str:
    """A relative change, with enough digits to be seen."""
    return f"{share:+.2%}" if abs(share) >= 1e-4 else f"{share * 100:+.1e}%"


def differences(old: Any, new: Any) -> list[Change]:
    """All fields that differ by more than rounding, largest change first."""
    return sorted(changes(old, new, ""), key=lambda change: (-change.size, change.path))


def changes(old: Any, new: Any, path: str) -> Iterator[Change]:
    """Fields that differ, in the order of the answer."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted(old.keys() | new.keys()):
            inner = f"{path}.{key}" if path else str(key)
            if key not in new:
                yield Change(inner, told(old[key]), "nothing")
            elif key not in old:
                yield Change(inner, "nothing", told(new[key]))
            elif key in RANKED and (named := by_name(old[key], new[key])) is not None:
                yield from members(*named, inner)
            else:
                yield from changes(old[key], new[key], inner)
    elif isinstance(old, list) and isinstance(new, list):
        yield from members(dict(enumerate(old)), dict(enumerate(new)), path)
    elif is_number(old) and is_number(new):
        exact = isinstance(old, int) and isinstance(new, int)
        if old != new and (exact or not math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=NOTHING)):
            yield Change(path, told(old), told(new), new / old - 1 if old else math.inf)
    elif type(old) is not type(new) or old != new:
        yield Change(path, told(old), told(new))


def members(old: Mapping[Any, Any], new: Mapping[Any, Any], path: str) -> Iterator[Change]:
    """The differences of two lists whose items have names (or numbers)."""
    for key in dict.fromkeys([*old, *new]):
        inner = f"{path}[{key}]"
        if key not in new:
            yield Change(inner, told(old[key]), "nothing")
        elif key not in old:
            yield Change(inner, "nothing", told(new[key]))
        else:
            yield from changes(old[key], new[key], inner)


def by_name(*lists: Any) -> list[dict[str, Any]] | None:
    """Items by what they are called, where each has a name of its own."""
    found = []
    for items in lists:
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            return None
        named = {called(item): item for item in items}
        if len(named) < len(items):
            return None
        found.append(named)
    return found


def called(item: Mapping[str, Any]) -> str:
    """The name of an item of a list."""
    name = next((item[key] for key in NAMES if key in item), "")
    if isinstance(name, Mapping):
        dims = (f"{key}={name[key]}" for key in sorted(name) if key != "kind")
        return " ".join([str(name.get("kind", "")), *dims])
    return str(name)


def is_number(value: Any) -> bool:
    """Whether a value is a figure; true and false are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def told(value: Any) -> str:
    """A value in a line."""
    text = repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= 160 else f"{text[:150]} …"


def report(name: str, found: Sequence[Change], lines: int = LINES) -> str:
    """The differences of one case: a head with what was asked for, and a line for each, the largest first."""
    asked = next((f"; {change}" for each in HEADLINES for change in found if change.path == each), "")
    head = f"{name}: {len(found)} {'field differs' if len(found) == 1 else 'fields differ'}{asked}"
    shown = [f"  {change}" for change in found[:lines]]
    more = [f"  … and {len(found) - lines} more"] if len(found) > lines else []
    return "\n".join([head, *shown, *more])
