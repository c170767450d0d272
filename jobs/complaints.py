"""Hydra's complaints in one plain line each, with the way out."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from ..datasets.near import did_you_mean, likeliest, question
from . import settings
from .helping import choices

GRAMMAR = "settings are written name=value, with quotes round a value that has spaces or odd signs: name='value'"


Compose = Callable[[str, Sequence[str]], Any]


def explain(verb: str, error: Exception, overrides: Sequence[str], composed: Compose) -> str:
    """One line that says what is wrong with the ``overrides`` of a verb, and what to do.

    ``composed`` gives the configuration of a verb with some overrides; it says what could have been meant.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    quoted = re.findall(r"'([^']*)'", lines[0])
    wrong = getattr(error, "override", None)
    if isinstance(wrong, str):
        return f"{settings.shown(wrong)} cannot be read: {GRAMMAR}"
    if "Could not find" in lines[0] and quoted:
        group, _, choice = quoted[-1].rpartition("/")
        return no_choice(group, choice)
    if lines[0].startswith("Could not override") and quoted:
        name = quoted[0].partition("@")[0]
        beside = within(verb, name, overrides, composed)
        return f"{name} is no setting of `{settings.command(verb)}`{settings.advice(name, beside, verb)}"
    if lines[0].startswith("Ambiguous value") and quoted:
        name, _, value = quoted[0].partition("=")
        if name in settings.LISTS or name.endswith("order"):
            return f"{name}={value} is ambiguous: write a list as {name}=[{value}], and several runs with --multirun"
        return f"{name}={value} is more than one value: add --multirun to run once for each of them"
    if lines[0].startswith("Sweep parameters") and quoted:
        return f"{quoted[0]} is more than one value: add --multirun to run once for each of them"
    if lines[0].startswith(("Multiple values for", "Could not delete")) or "more than once" in lines[0]:
        bad = next((text for text in overrides if text.startswith(("+", "~"))), "")
        return f"{bad or lines[0]} cannot be: write name=value, without + or ~ before it"
    if lines[0].startswith("Config group override must be") or isinstance(error, TypeError):
        defaults = settings.defaults(verb)
        for text in overrides:
            group, _, choice = text.partition("=")
            if defaults.get(group) == {} and choice not in choices(group):
                return no_choice(group, choice)
        return f"{' '.join(overrides)} cannot be read: {GRAMMAR}"
    return f"{lines[0]} (see `{settings.command(verb)} --help`)"


def no_choice(group: str, choice: str) -> str:
    """The line for a choice that a group does not have."""
    options = choices(group)
    hint = did_you_mean(choice, options, f"choose from {', '.join(options)}")
    return f"{group}={choice} does not exist; {hint}"


def no_word(verb: str, word: str, words: Sequence[str]) -> str:
    """The line for a word that is no setting: ``words`` may follow the verb, and choices follow their group."""
    chosen = [f"{group}={word}" for group, value in settings.defaults(verb).items() if value == {}]
    near = [text for text in chosen if is_choice(text)] or likeliest(word, words)
    return f"`{settings.command(verb)}` takes no word {settings.shown(word)!r}; {question(near) or GRAMMAR}"


def is_choice(text: str) -> bool:
    """Whether ``group=choice`` is a choice by its name or a short one."""
    group, _, choice = settings.by_alias(text).partition("=")
    return choice in choices(group)


def within(verb: str, name: str, overrides: Sequence[str], composed: Compose) -> list[str]:
    """The settings of a verb beside ``name``: its own, and those of its groups as they were chosen."""
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    groups = settings.defaults(verb)
    chosen = [text for text in overrides if groups.get(text.partition("=")[0]) == {}]
    try:
        values = OmegaConf.to_container(composed(verb, chosen), resolve=False)
    except (HydraException, OmegaConfBaseException):  # what was chosen is wrong too: the verb's own settings are left
        return list(groups)
    paths: list[str] = []

    def walk(values_: object, prefix: str) -> None:
        for key, value in values_.items() if isinstance(values_, dict) else ():
            paths.append(f"{prefix}{key}")
            walk(value, f"{prefix}{key}.")

    walk(values, "")
    return paths
