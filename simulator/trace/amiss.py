"""What an error of a library says in one line, and which settings of a model's configuration it is about.

Libraries speak of their own names and values: ``k not in range for dimension``. A setting is meant where the message
quotes its name or its text, else where the code that stopped reads its value.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator, Mapping
from traceback import walk_tb
from types import FrameType
from typing import Any

MOST = 4  # settings that are named
NOT_OF_MODELS = ("torch", "opcast")  # packages whose own lines say nothing of a model's settings
TOPK = "k not in range"  # torch.topk
CHOSEN = "num_experts_per_tok"  # of so many:
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


def one_line(error: Exception) -> str:
    """An error as one line of at most 200 characters; of a name that something has not, that it is not there."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = f"there is no {text}" if isinstance(error, KeyError) else text
    return _short(text, 200)


def explained(error: Exception, config: Mapping[str, Any] | None) -> str:
    """An error in one line, and the settings of a model's configuration that it is about where they are found."""
    settings = dict(_settings(config or {}))
    by_line = (names for call in _calls(error) if (names := _settings_of_line(call, settings)))
    names = _settings_of_message(str(error), settings) or _too_few_experts(str(error), settings) or next(by_line, [])
    values = [f"model.config.{name}={_short(repr(settings[name]), 80)}" for name in names[:MOST]]
    return f"{one_line(error)}; look at {', '.join(values)}" if values else one_line(error)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _settings(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting by its path; lists as a whole."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _settings_of_message(message: str, settings: Mapping[str, Any]) -> list[str]:
    """Settings whose name, or else whose text, a message quotes."""
    quoted = set(re.findall(r"['\"`]([^'\"`]+)['\"`]", message))
    named = [name for name in settings if name.rpartition(".")[2] in quoted]
    return named or [name for name, value in settings.items() if isinstance(value, str) and value in quoted]


def _too_few_experts(message: str, settings: Mapping[str, Any]) -> list[str]:
    """The number of experts and how many of them a token takes, where torch says that these are more."""
    few = []
    for name, count in settings.items() if TOPK in message else ():
        above, _, last = name.rpartition(".")
        chosen = f"{above}.{CHOSEN}" if above else CHOSEN
        counts = count, settings.get(chosen, 1)
        if last in EXPERTS and all(isinstance(number, int) for number in counts) and counts[0] < counts[1]:
            few += [setting for setting in (name, chosen) if setting in settings]
    return few


def _calls(error: Exception) -> list[tuple[FrameType, int]]:
    """Calls of a model's code, and the lines that they were at, innermost first."""
    return [call for call in reversed([*walk_tb(error.__traceback__)]) if _package(call[0]) not in NOT_OF_MODELS]


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _settings_of_line(call: tuple[FrameType, int], settings: Mapping[str, Any]) -> list[str]:
    """Settings that a line reads: by their own names, else the one or two whose value is what it reads there."""
    frame, line = call
    names: dict[str, None] = {}
    for word in DOTTED.findall(linecache.getline(frame.f_code.co_filename, line, frame.f_globals)):
        value = _value(frame, word)
        alike = [name for name, setting in settings.items() if type(setting) is type(value) and setting == value]
        same = [name for name in alike if name.rpartition(".")[2] == word.rpartition(".")[2]]
        by_value = alike if len(alike) <= 2 and not isinstance(value, (bool, type(None))) else []
        names |= dict.fromkeys(same or by_value)
    return list(names) if len(names) <= MOST else []


def _value(frame: FrameType, dotted: str) -> Any:
    """What a dotted name is in a call; an object that no setting is where it is nothing."""
    first, *attributes = dotted.split(".")
    value: Any = frame.f_locals.get(first, frame)
    for name in attributes:
        value = getattr(value, "__dict__", {}).get(name, frame)
    return value
