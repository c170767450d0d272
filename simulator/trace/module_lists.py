"""Lists of modules as quantized checkpoints have them, as rules: how each library reads an entry of such a list.

An entry is one of three. ``re:…`` is a regular expression from the start of the name (compressed-tensors
``match_name``, Quark). A plain name is a module and what is in it (ModelOpt and AutoAWQ look for it anywhere in a name,
transformers at the start or the end of it, compressed-tensors for the whole of it); so is one with a star after it,
which is how ModelOpt writes a module whose whole tree is left out (vLLM, ``apply_vllm_mapper``). Anything else is a
pattern: of transformers a regular expression that ends with a name (``should_convert_module``), of ModelOpt a glob
(``fnmatch``).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .stored import EVERY, ModuleRule, WeightFormat
from .workload import TraceError

PLAIN = re.compile(r"^[\w.-]+$")
TREE = re.compile(r"^([\w.-]*\w)\.?\*$")
BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"
OF_CLASS = re.compile(r"^[A-Z]\w*$")  # a class of modules, as ``Linear``
MOST_ENTRIES = 200_000
SKIPPED = (  # what libraries call the list of modules that stay as they compute
    *("modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules", "skip_modules"),
    *("ignore", "exclude", "exclude_modules"),
)


def entries(value: Any, what: str) -> list[str]:
    """The entries of a list; TraceError for what is no list of words."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
        raise TraceError(f"{what} must be a list of modules' names")
    if len(value) > MOST_ENTRIES:
        raise TraceError(f"{what} has {len(value):,} entries, more than the {MOST_ENTRIES:,} that are read")
    return list(value)


def kept(said: Mapping[str, Any], globs: bool = True) -> tuple[ModuleRule, ...]:
    """The rules of the lists of modules that stay as they compute."""
    return tuple(rule(WeightFormat(), entries(said.get(key), key), key, globs) for key in SKIPPED if said.get(key))


def skipping(said: Mapping[str, Any], weights: WeightFormat, globs: bool = False) -> tuple[ModuleRule, ...]:
    """All modules in one format but those that stay as they compute."""
    return *kept(said, globs), ModuleRule(weights, patterns=EVERY)


def rule(weights: WeightFormat, listed: Iterable[str], what: str, globs: bool = True) -> ModuleRule:
    """The rule of a list; without ``globs`` its patterns are regular expressions. TraceError for one that is none."""
    names, patterns = [], []
    for each in listed:
        tree = TREE.match(each) if globs else None
        if tree or PLAIN.match(each):
            names.append(tree[1] if tree else each)
        else:
            patterns.append(_pattern(each, what, globs))
    return ModuleRule(weights, tuple(sorted(names)), tuple(patterns))


def _pattern(entry: str, what: str, globs: bool) -> str:
    if entry.startswith("re:"):
        return checked(entry.removeprefix("re:"), what)
    if globs:
        return fnmatch.translate(entry)
    return checked(rf"(?:{entry}){BOUNDARY}", what)


def checked(pattern: str, what: str) -> str:
    """The pattern itself; TraceError where it is no regular expression."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise TraceError(f"{what}: {pattern[:60]!r} is no regular expression ({error})") from None
    return pattern
