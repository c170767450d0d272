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

from .stored_formats import EVERY_MODULE, ModuleRule, WeightFormat
from .workload import TraceError

PLAIN = re.compile(r"^[\w.-]+$")
TREE = re.compile(r"^([\w.-]*\w)\.?\*$")
BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"
CLASS_NAME = re.compile(r"^[A-Z]\w*$")  # a class of modules, as ``Linear``
MAX_ENTRIES = 200_000
SKIP_SETTINGS = (  # what libraries call the list of modules that stay as they compute
    *("modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules", "skip_modules"),
    *("ignore", "exclude", "exclude_modules"),
)


def entries(value: Any, setting: str) -> list[str]:
    """The entries of a list; TraceError for what is no list of words."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if not isinstance(value, (list, tuple)) or not all(isinstance(entry, str) for entry in value):
        raise TraceError(f"{setting} must be a list of modules' names")
    if len(value) > MAX_ENTRIES:
        raise TraceError(f"{setting} has {len(value):,} entries, more than the {MAX_ENTRIES:,} that are read")
    return list(value)


def unquantized_rules(config: Mapping[str, Any], globs: bool = True) -> tuple[ModuleRule, ...]:
    """The rules of the lists of modules that stay as they compute."""
    return tuple(
        list_rule(WeightFormat(), entries(config.get(key), key), key, globs) for key in SKIP_SETTINGS if config.get(key)
    )


def all_but_skipped(config: Mapping[str, Any], weights: WeightFormat, globs: bool = False) -> tuple[ModuleRule, ...]:
    """All modules in one format but those that stay as they compute."""
    return *unquantized_rules(config, globs), ModuleRule(weights, patterns=EVERY_MODULE)


def list_rule(weights: WeightFormat, items: Iterable[str], setting: str, globs: bool = True) -> ModuleRule:
    """The rule of a list; without ``globs`` its patterns are regular expressions. TraceError for one that is none."""
    names, patterns = [], []
    for entry in items:
        tree = TREE.match(entry) if globs else None
        if tree or PLAIN.match(entry):
            names.append(tree[1] if tree else entry)
        else:
            patterns.append(_pattern(entry, setting, globs))
    return ModuleRule(weights, tuple(sorted(names)), tuple(patterns))


def _pattern(entry: str, setting: str, globs: bool) -> str:
    if entry.startswith("re:"):
        return check_pattern(entry.removeprefix("re:"), setting)
    if globs:
        return fnmatch.translate(entry)
    return check_pattern(rf"(?:{entry}){BOUNDARY}", setting)


def check_pattern(pattern: str, setting: str) -> str:
    """The pattern itself; TraceError where it is no regular expression."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise TraceError(f"{setting}: {pattern[:60]!r} is no regular expression ({error})") from None
    return pattern
