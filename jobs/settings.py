"""The settings of a verb as Hydra composed them: every one there, of its kind, and none else.

What stands inside a group (a device's figures, the dims of an op) is checked where it is used.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..datasets.near import likeliest_setting, question
from ..datasets.reading import read_yaml
from ..simulator.question.declaration import defaults_of
from .questions import CHOICES, of_choice, of_command
from .show import CONFIG_DIRECTORY, BadInputError, say

FOLDERS = ("home", "store", "predictors", "graphs")
FILES = (
    "shapes",
    "output",
    "table",
    "to",
    "report",
    "picture",
    "trace",
    "simai",
    "truth",
    "rules",
    "plan_out",
    "path",
    "mapping",
    "tracking",
    "points",
    "launch",
    *("observed", "output", "row", "key_file", "log"),
)
ENDINGS = {"picture": (".svg",), "report": (".html", ".htm")}  # of files that are written in one format alone
FLAGS = ("all_groups", "detail", "details", "promote", "power", "watch", "set_aside", "rollback")
GROUPS = (
    "engine",
    "device",
    "cluster",
    "model",
    "workload",
    "precision",
    "parallel",
    "stack",
    "op",
    "campaign",
    "space",
    "where",
)
SERVED = (
    *("traffic", "scheduler", "kv", "slo", "decode_pool", "admission", "tiers", "lora", "eplb", "images", "afd"),
    *("second_kind", "scorers", "autoscale", "cold_start"),
)
PLANNED = ("ramp", "evaluation", "checkpoint", "failures", "restart", "slow", "energy", "prices")
MAPPINGS = (
    *(*GROUPS, *SERVED, *PLANNED),
    *("crew", "predictor", "settings", "options", "active", "trusted", "train", "prefill", "decode", "repeats"),
)
LISTS = (
    "steps",
    "op",
    "eval",
    "systems",
    "tables",
    "frameworks",
    "offload",
    "passes",
    "group",
    "faults",
    "stragglers",
    "workload.expert_load",
    "phases",
    *("objectives", "constraints", "prune", "compare", "others", "power_caps_w", "changes"),
)
PARTS = {  # of groups that no loader checks
    "engine": ("order", "serving"),
    "precision": ("dtype", "quantization", "kv_dtype"),
    "model": ("name", "source", "config", "path"),
}
DEEPEST = 20  # brackets in a word of the command line
READERS = (
    "predict",
    "simulate",
    "serving",
    "search",
    "search_serving",
    "plan",
    "posttrain",
    "compare",
    "upgrade",
    "profile_coverage",
    "validate",
    "list",
)
"""Verbs that only read a store and predictors; all others write there, or say themselves that nothing is there."""


def command(verb: str) -> str:
    """What is typed for a verb: ``opcast profile coverage`` for the one whose file is ``profile_coverage``."""
    return f"opcast {verb.replace('_', ' ')}"


def readable(text: str) -> None:
    """BadInputError for a word of the command line that Hydra's parser, which calls itself for each bracket, cannot."""
    depth = max(itertools.accumulate((sign in "[{(") - (sign in "]})") for sign in text), default=0)
    if depth > DEEPEST:
        raise BadInputError(f"{shown(text)} cannot be read: it is nested more than {DEEPEST} deep")
    if re.search(r"\d{301}", text):
        raise BadInputError(f"{shown(text)} cannot be read: it has a number of more than 300 digits")


def check(verb: str, config: Mapping[str, Any]) -> None:
    """BadInputError for a setting that is unknown, taken away or of another kind.

    On stderr a line for each folder that was named and is not there, where it would only be read.
    """
    known = names(verb)
    for name in config:
        if name not in known and name != "hydra":
            raise BadInputError(f"{name} is no setting of `{command(verb)}`{advice(name, known, verb)}")
    for name in known:
        if name not in config and name not in optional(verb):
            told = f"{name} was taken away with ~{name}, and `{command(verb)}` needs it"
            raise BadInputError(f"{told}: leave ~{name} out")
    for name in FOLDERS:
        if name in config:
            _folder(verb, name, config)
    for name in FILES:
        if config.get(name) is not None and not (isinstance(config[name], str) and config[name]):
            raise BadInputError(f"{name}={shown(config[name])} must be a path, in quotes where it has odd signs")
    for name, endings in ENDINGS.items():
        path = Path(str(config.get(name) or ""))
        if path.suffix and path.suffix.lower() not in endings:
            right = path.with_suffix(endings[0])
            raise BadInputError(
                f"{name}={path} would be {endings[0][1:].upper()} under another name: take {name}={right}"
            )
    for name in FLAGS:
        if name in config and not isinstance(config[name], bool):
            raise BadInputError(f"{name}={shown(config[name])} must be true or false")
    of_verb = defaults(verb)
    for name in MAPPINGS:
        if name in config and isinstance(of_verb.get(name, {}), dict):
            _mapping(verb, name, config[name])
    order = (config.get("engine") or {}).get("order", ())
    if order is not None and not (isinstance(order, (list, tuple)) and all(isinstance(each, str) for each in order)):
        raise BadInputError(f"engine.order={shown(order)} must be a list of engines, as engine.order=[analytical]")
    for name, parts in PARTS.items():
        given = config.get(name)
        for part in given if isinstance(given, Mapping) else ():
            if part not in parts:
                known_parts = [f"{name}.{each}" for each in parts]
                raise BadInputError(
                    f"{name}.{part} is no setting of `{command(verb)}`{advice(f'{name}.{part}', known_parts, verb)}"
                )
    work = config.get("workload")
    if isinstance(work, Mapping) and isinstance(work.get("kind"), str):
        _workload(verb, work)


def _folder(verb: str, name: str, config: Mapping[str, Any]) -> None:
    given = config[name]
    if not isinstance(given, str) or not given:
        raise BadInputError(f"{name}={shown(given)} must be a folder, such as {name}=~/.opcast/{name}")
    try:
        path = Path(given).expanduser()
        if path.exists() and not path.is_dir():
            raise BadInputError(f"{name}={given} is a file, not a folder; name another")
        there = path.is_dir()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, an unknown ~user
        raise BadInputError(f"{name}={given[:80]} can be no folder: {getattr(error, 'strerror', error)}") from None
    usual = f"{config['home']}/{name}"
    if not there and given != usual and verb in READERS and name in ("store", "predictors"):
        what = "measurements" if name == "store" else "predictors"
        say(f"{name}={given} does not exist: only {what} that come with opcast are read")


def _mapping(verb: str, name: str, value: Any) -> None:
    """A group must have been chosen, or be null where it may be left out."""
    if isinstance(value, Mapping):
        return
    if value is None and (name in optional(verb) or name in ("engine", "options", "settings")):
        return
    raise BadInputError(f"{name}={shown(value)} must be settings of their own, as {name}.NAME=VALUE")


def _workload(verb: str, work: Mapping[str, Any]) -> None:
    """A workload has the settings of its kind, no other's."""
    if work["kind"] not in CHOICES["workload"]:
        return
    known = {f"workload.{each.name}" for each in of_choice("workload", work["kind"])}
    for name in work:
        if f"workload.{name}" not in known:
            raise BadInputError(
                f"workload.{name} is no setting of workload={work['kind']}{advice(f'workload.{name}', known, verb)}"
            )


def names(verb: str) -> tuple[str, ...]:
    """The settings of a verb, groups included."""
    return tuple(defaults(verb))


@lru_cache
def defaults(verb: str) -> dict[str, Any]:
    """The settings of a verb with their defaults; a group is an empty mapping."""
    found: dict[str, Any] = {}
    for file in ("base", verb):
        values = dict(read(CONFIG_DIRECTORY / f"{file}.yaml"))
        for entry in values.pop("defaults", ()):
            if isinstance(entry, dict):
                found |= {name: {} for name in entry if not name.startswith("override ")}
        values.pop("hydra", None)
        found |= values
    return found | defaults_of(of_command(verb))


@lru_cache
def optional(verb: str) -> frozenset[str]:
    """The groups of which a verb needs none."""
    entries = read(CONFIG_DIRECTORY / f"{verb}.yaml").get("defaults", ())
    return frozenset(name for entry in entries if isinstance(entry, dict) for name in entry if entry[name] is None)


def read(file: Path) -> dict[str, Any]:
    """A file of ``conf`` as plain values."""
    return dict(read_yaml(file, BadInputError))


def advice(name: str, known: Iterable[str], verb: str) -> str:
    """What was meant by a name that does not exist, as the end of a sentence."""
    return f"; {question(likeliest_setting(name, known)) or f'`{command(verb)} --help` lists them'}"


def by_alias(text: str) -> str:
    """``device=h100`` and the like by their full names, in a sweep (``device=h100,a100``) each of them."""
    group, equals, choice = text.partition("=")
    if not equals or not (CONFIG_DIRECTORY / "aliases.yaml").is_file():
        return text
    known = aliases().get(group)
    if not known:
        return text
    return f"{group}={','.join(known.get(each.lower(), each) for each in choice.split(','))}"


@lru_cache
def aliases() -> Mapping[str, Mapping[str, str]]:
    """Other names of a group's choices, from ``conf/aliases.yaml``."""
    return read(CONFIG_DIRECTORY / "aliases.yaml")


def shown(value: Any) -> str:
    """A value as its user would have written it, short."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
