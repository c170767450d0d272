"""The arguments of a serving engine as its users give them, as layout, limits and memory here.

What each is stands in the engine's YAML (:mod:`.engines`): ``parallel.tp`` takes its value, ``limits.chunked`` is true
where it is given, ``no limits.chunked`` false.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...datasets.loading import nearest
from .engines import ServingEngine, ServingEngineError

FLAGS = (
    "experts",
    "attention_dp",
    "eager",
    "limits.chunked",
    "limits.prefix_caching",
    "limits.mixed",
    "host.overlapped",
)
WORDS = ("quantization", "kv.dtype")
NUMBERS = ("kv.fraction", "limits.conservativeness")
FORMATS = {
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "auto": "same",
    "bfloat16": "same",
    "modelopt": "",
    "modelopt_fp4": "nvfp4",
}


@dataclass(frozen=True)
class EngineArguments:
    """What arguments say: ``parallel`` degrees, ``limits`` of the scheduler, ``kv`` memory, ``graphs`` and ``host``.

    With ``experts`` all tensor and data ranks share the experts out; with ``attention_dp`` the tensor ranks are data
    ranks of attention. ``ignored`` are those that change no time.
    """

    parallel: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    kv: Mapping[str, Any] = field(default_factory=dict)
    graphs: Mapping[str, int] = field(default_factory=dict)
    host: Mapping[str, bool] = field(default_factory=dict)
    quantization: str = ""
    eager: bool = False
    ignored: tuple[str, ...] = ()


def read_arguments(engine: ServingEngine, text: str) -> EngineArguments:
    """The arguments of an engine in one string. ServingEngineError for one that it does not have, or a bad value."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ServingEngineError(f"args={text!r} cannot be read: {error}") from None
    given: dict[str, Any] = {}
    ignored: list[str] = []
    place = 0
    while place < len(words):
        name, equals, value = words[place].partition("=")
        place += 1
        if f"{name}!" in engine.without_effect:
            ignored.append(name)
            continue
        meaning = engine.arguments.get(name, "")
        if not meaning and name not in engine.without_effect:
            known = (*engine.arguments, *(each.rstrip("!") for each in engine.without_effect))
            raise ServingEngineError(
                f"engine={engine.id} has no argument {name!r} that opcast knows; {nearest(name, known)}"
            )
        if meaning.removeprefix("no ") in FLAGS:
            given[meaning.removeprefix("no ")] = not meaning.startswith("no ")
            continue
        if not equals:
            if place >= len(words):
                raise ServingEngineError(f"{name} needs a value: {name} VALUE")
            value, place = words[place], place + 1
        if meaning:
            given[meaning] = _value(name, meaning, value)
        else:
            ignored.append(name)
    return _arranged(given, tuple(ignored))


def _value(name: str, meaning: str, text: str) -> Any:
    if meaning in WORDS:
        return FORMATS.get(text, text)
    try:
        value = float(text) if meaning in NUMBERS else int(text)
    except ValueError:
        kind = "a number" if meaning in NUMBERS else "a whole number"
        raise ServingEngineError(f"{name}={text} must be {kind}") from None
    if value < 0 or (meaning.startswith("parallel.") and value < 1) or (meaning == "kv.fraction" and value > 1):
        raise ServingEngineError(f"{name}={text} is out of range")
    return value


def _arranged(given: Mapping[str, Any], ignored: tuple[str, ...]) -> EngineArguments:
    rooms: dict[str, dict[str, Any]] = {name: {} for name in ("parallel", "limits", "kv", "graphs", "host")}
    for meaning, value in given.items():
        room, _, name = meaning.partition(".")
        if name:
            rooms[room][name] = value
    parallel = rooms["parallel"]
    ranks = parallel.get("tp", 1) * parallel.get("dp", 1)
    if given.get("attention_dp"):
        ranks = max(parallel.get("tp", 1), parallel.get("dp", 1))
        parallel |= {"tp": ranks // parallel.get("dp", ranks), "dp": parallel.get("dp", ranks)}
        parallel.setdefault("ep", ranks)
    if given.get("experts"):
        parallel["ep"] = ranks
    return EngineArguments(
        **rooms, quantization=given.get("quantization", ""), eager=bool(given.get("eager")), ignored=ignored
    )
