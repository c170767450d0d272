"""YAML and JSON become plain values here, whatever stands in them: else the caller's error, in one line.

What comes out can be walked, printed and counted with: it is not nested deeper than Python's own recursion goes, no
alias of YAML makes it endless, and every whole number has a float. Infinities and NaN are left to who checks ranges.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Error = type[ValueError]
DEEPEST = 100
MOST = 3_000_000  # values of a YAML, each counted as often as an alias repeats it
LARGEST = 10**300
NESTING = "nesting depth"  # in what PyYAML's compiled parser says of it from 6.0.4 on; before, Python says it
NO_TEXT = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # halves of a sign, which no file or terminal takes
# What PyYAML raises beside YAMLError for scalars that are not what their tag says, and json for numbers of 5,000 digits
UNREADABLE = (ValueError, RecursionError, ArithmeticError, LookupError, AttributeError, TypeError)


def read_yaml(source: Path | str, error: Error, what: str = "") -> Any:
    """The values of a YAML text or file; ``error`` says that ``what`` (else the file) cannot be read, and why."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a tenth of the time, where PyYAML was built with it
    what = what or str(source)
    text = _text(source, error, what)
    try:
        values = yaml.load(text, loader)
    except (yaml.YAMLError, *UNREADABLE) as reason:
        raise error(f"{what} is no YAML: {_reason(reason)}") from None
    return _usable(values, error, what, MOST)


def read_json(source: Path | str | bytes, error: Error, what: str = "") -> Any:
    """The values of a JSON text or file; ``error`` says that ``what`` (else the file) cannot be read, and why."""
    what = what or str(source)
    text = _text(source, error, what)
    try:
        values = json.loads(text)
    except UNREADABLE as reason:
        raise error(f"{what} is no JSON: {_reason(reason)}") from None
    return _usable(values, error, what)


def problem(values: Any, most: float = float("inf")) -> str:
    """Why nobody can work with plain values, as the end of a sentence; "" where all is well."""
    level, count = [values], 1
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                inner += value.values()
            elif isinstance(value, (list, tuple, set)):
                inner += value
            elif isinstance(value, int) and not -LARGEST < value < LARGEST:
                return "it has a whole number of more than 300 digits"
            elif isinstance(value, str) and not value.isascii() and NO_TEXT.search(value):
                return f"{value[:40]!r} is no Unicode"
        if not inner:
            return ""
        level, count = inner, count + len(inner)
        if count > most:
            return f"it has more than {most:,} values"
    return f"it is nested more than {DEEPEST} deep"


def _text(source: Path | str | bytes, error: Error, what: str) -> str | bytes:
    return read_text(source, error, what) if isinstance(source, Path) else source


def read_text(path: Path, error: Error, what: str = "") -> str:
    """The text of a file, without a byte order mark; ``error`` says that ``what`` (else the file) is none, and why."""
    what = what or str(path)
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as reason:
        raise error(f"{what} cannot be read: {getattr(reason, 'strerror', None) or 'it is no text'}") from None


def _usable(values: Any, error: Error, what: str, most: float = float("inf")) -> Any:
    if why := problem(values, most):
        raise error(f"{what} cannot be read: {why}")
    return values


def _reason(error: Exception) -> str:
    """What a parser stumbled over, in one line with the line number."""
    mark = getattr(error, "problem_mark", None)
    first_line = (str(getattr(error, "problem", None) or error).splitlines() or [type(error).__name__])[0]
    if isinstance(error, RecursionError) or NESTING in first_line:
        return "it is nested too deep"
    return f"line {mark.line + 1}: {first_line}" if mark is not None else first_line.partition(";")[0]


def flat(values: Mapping[Any, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """What stands in mappings within mappings, by its path, as ``days.p50``."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def named_words(words: Iterable[str]) -> list[tuple[str, list[str]]]:
    """The arguments of a command: each name, which a dash and a letter begin, with the words after it; what comes
    before the first is left out."""
    named: list[tuple[str, list[str]]] = []
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.partition("=")
            named.append((name, [value] if equals else []))
        elif named:
            named[-1][1].append(word)
    return named
