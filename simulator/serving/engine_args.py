"""The arguments of a serving engine as its users give them, as layout, limits and memory here.

What each is stands in the engine's YAML (:mod:`.engines`): ``parallel.tp`` takes its value, ``limits.chunked`` is true
where it is given, ``no limits.chunked`` false, ``null eager`` true where it is null, and ``file`` is a YAML file of
arguments. What stands in objects and sections is named by its path, as ``--kv_cache_config.dtype``; - and _ are alike.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ...datasets.reading import flat, named_words, read_json, read_yaml
from .engines import ServingEngine, ServingEngineError
from .policies import TABLE

FLAGS = (
    "experts",
    "attention_dp",
    "eager",
    "limits.chunked",
    "limits.prefix_caching",
    "limits.mixed",
    "limits.whole_prompt",
    "limits.balance",
    "host.overlapped",
)
WORDS = ("quantization", "kv.dtype", "policy", "speculation.method", "limits.queue")
NUMBERS = ("kv.fraction", "limits.conservativeness", "limits.wait_share", "limits.watermark", "tiers.host_gib")
SHARES = ("kv.fraction", "limits.wait_share", "limits.watermark")
LISTS = ("graphs.sizes",)
CALLED_HERE = {
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    **dict.fromkeys(("bfloat16", "float16", "bf16", "fp16"), "same"),
    "modelopt": "",
    "compressed-tensors": "",
    "mxfp4": "",
    "modelopt_fp4": "nvfp4",
    "modelopt_fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "w8a8_fp8": "fp8",
    "w8a8_int8": "int8",
    **dict.fromkeys(("awq", "gptq", "awq_marlin", "gptq_marlin"), "w4a16"),
    **{alias: policy.name for policy in TABLE.values() for alias in policy.said},
}
REAL, COUNT = r"[+-]?(\d+\.?\d*|\.\d+)(e-?\d+)?", r"([+-]?\d+(?:\.\d+(?=[kmgKMG]))?)([kmgKMG]?)"
SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}  # as vLLM reads them
ALIKE = 0.85  # of a name that may exist and a known one, from which on it is taken for a misspelling
LIKE = 0.6  # of one that does not exist, from which on a known one is named
SHORT = 4
UNLIMITED = 1 << 30  # tokens of a chunk where prompts are not cut
OF_ENGINE = ("parallel", "limits", "kv", "graphs", "host", "admission", "tiers", "lora", "eplb")
BALANCE = 50, 10  # iterations that TensorRT-LLM's attention ranks wait for each other, and to gather more


@dataclass(frozen=True)
class EngineArguments:
    """What arguments say: ``parallel`` degrees, ``limits`` of the scheduler, ``kv`` memory, ``graphs`` and ``host``,
    ``admission``, ``tiers`` of its caches, limits of its adapters (``lora``) and how experts are shared out (``eplb``).

    With ``experts`` all tensor and data ranks share the experts out; with ``attention_dp`` the tensor ranks are data
    ranks of attention. ``replicas`` is how many whole copies run. ``speculation`` are tokens guessed ahead.
    ``ignored`` are those that change no time, ``not_simulated`` those that may, of which opcast knows nothing.
    """

    parallel: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    kv: Mapping[str, Any] = field(default_factory=dict)
    graphs: Mapping[str, Any] = field(default_factory=dict)
    host: Mapping[str, bool] = field(default_factory=dict)
    admission: Mapping[str, int] = field(default_factory=dict)
    tiers: Mapping[str, float] = field(default_factory=dict)
    lora: Mapping[str, int] = field(default_factory=dict)
    eplb: Mapping[str, int] = field(default_factory=dict)
    quantization: str = ""
    policy: str = ""
    eager: bool = False
    replicas: int = 1
    speculation: int = 0
    ignored: tuple[str, ...] = ()
    not_simulated: tuple[str, ...] = ()


def read_arguments(engine: ServingEngine, text: str) -> EngineArguments:
    """The arguments of an engine in one string, with or without the command before them.

    ServingEngineError for a bad value, for a name that looks like a misspelt one, and for a file that cannot be read.
    """
    try:
        words = shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise ServingEngineError(f"args={text!r} cannot be read: {error}") from None
    meanings = {_plain(name): meaning for name, meaning in engine.arguments.items()}
    meanings |= dict.fromkeys(map(_plain, engine.without_effect), "")
    values: dict[str, Any] = {}
    ignored: list[str] = []
    unknown: list[str] = []
    for name, value, typed in _pairs(words, meanings):
        meaning = _meaning(name, meanings)
        if meaning is None:
            _check_known(engine, name, typed)
            unknown.append(name)
        elif not meaning:
            ignored.append(name)
        elif meaning.startswith("null "):
            values |= {meaning.removeprefix("null "): True} if value is None else {}
        elif value is not None:
            values[meaning.removeprefix("no ")] = _value(name, meaning, value)
    if "speculation.method" in values and "speculation.tokens" not in values:
        unknown.append(f"{values['speculation.method']} without a number of tokens")
    return _arranged(engine, values, tuple(ignored), tuple(unknown))


def _plain(name: str) -> str:
    return name.replace("_", "-")


def _pairs(words: Sequence[str], meanings: Mapping[str, str]) -> Iterator[tuple[str, Any, bool]]:
    """Names with their values, which are lists of words, or what stands in an object of JSON or in a file; and whether
    the name itself was typed."""
    for name, values in named_words(words):
        if _meaning(name, meanings) == "file":
            path = Path(" ".join(values)).expanduser()
            pairs = _named("--", read_yaml(path, ServingEngineError, f"{name} {path}"))
        elif len(values) == 1 and values[0].startswith("{"):
            pairs = _named(f"{name}.", read_json(values[0], ServingEngineError, name))
        else:
            yield name, values, True
            continue
        for inner, value in pairs:
            yield inner, value, False


def _named(prefix: str, values: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(values, Mapping):
        raise ServingEngineError(f"{prefix.rstrip('.-') or 'the file of arguments'} must have names with values")
    return flat(values, prefix)


def _meaning(name: str, meanings: Mapping[str, str]) -> str | None:
    """What an argument is here; "" where it changes no time, None where opcast does not know it."""
    plain = _plain(name)
    if plain in meanings:
        return meanings[plain]
    positive = meanings.get(f"--{plain.removeprefix('--no-')}") if plain.startswith("--no-") else None
    if positive == "" or (positive or "").removeprefix("no ") in FLAGS:
        return positive and (positive.removeprefix("no ") if positive.startswith("no ") else f"no {positive}")
    section = plain.partition(".")[0]
    return "" if section != plain and meanings.get(section) == "" else None


def _check_known(engine: ServingEngine, name: str, typed: bool) -> None:
    """ServingEngineError for a name that the engine has not, as far as that is known: all that its command takes are
    listed; of what stands in objects and files one that looks like a misspelt one."""
    names = {
        _plain(argument): argument for argument in (*engine.arguments, *engine.without_effect, *engine.not_simulated)
    }
    head = _plain(name).partition(".")[0]
    sections = {argument.partition(".")[0] for argument in names if "." in argument}
    if _plain(name) in names or f"--{head.removeprefix('--no-')}" in names or (not typed and len(name) <= SHORT):
        return
    if "." in name and typed and (head in names or head in sections):
        typed = False
    close = get_close_matches(_plain(name), names, 1, LIKE if typed else ALIKE)
    if close or typed:
        meant = f"did you mean {names[close[0]]}?" if close else "leave it out if another version has it"
        version = f" {engine.version}" if engine.version else ""
        raise ServingEngineError(f"engine={engine.id}{version} has no argument {name!r} that opcast knows; {meant}")


def _value(name: str, meaning: str, value: Any) -> Any:
    words = [str(item) for item in (value if isinstance(value, list) else [value])]
    if meaning.removeprefix("no ") in FLAGS:
        text = words[0].lower() if words else "true"
        if len(words) > 1 or text not in ("true", "false"):
            raise ServingEngineError(f"{name} takes no value, but got {' '.join(words)!r}")
        return (text == "true") != meaning.startswith("no ")
    if meaning in LISTS:
        return [_number(name, meaning, word) for word in words]
    if len(words) != 1:
        raise ServingEngineError(f"{name} needs a value: {name} VALUE" if not words else f"{name} takes one value")
    return CALLED_HERE.get(words[0], words[0]) if meaning in WORDS else _number(name, meaning, words[0])


def _number(name: str, meaning: str, text: str) -> Any:
    if meaning == "limits.max_model_len" and text in ("auto", "-1"):
        return "auto"
    match = re.fullmatch(REAL if meaning in NUMBERS else COUNT, text)
    if not match:
        raise ServingEngineError(f"{name}={text} must be {'a number' if meaning in NUMBERS else 'a whole number'}")
    value = float(text) if meaning in NUMBERS else int(float(match[1]) * SUFFIXES.get(match[2], 1))
    if meaning == "limits.chunk" and value <= 0:
        return UNLIMITED
    some = meaning.startswith(("parallel.", "kv.", "limits.max_")) and meaning not in NUMBERS
    if value < int(some) or (meaning in SHARES and value > 1):
        raise ServingEngineError(f"{name}={text} is out of range")
    return value


def _arranged(
    engine: ServingEngine, values: Mapping[str, Any], ignored: tuple[str, ...], unknown: tuple[str, ...]
) -> EngineArguments:
    rooms: dict[str, dict[str, Any]] = {name: {} for name in OF_ENGINE}
    for meaning, value in values.items():
        room, _, name = meaning.partition(".")
        if name and room in rooms and value is not None:
            rooms[room][name] = value
    parallel, limits = rooms["parallel"], rooms["limits"]
    copies = parallel.pop("dp", 1) if engine.data_parallel == "replicas" and not values.get("attention_dp") else 1
    ranks = parallel.get("tp", 1) * parallel.get("dp", 1)
    if values.get("attention_dp"):
        ranks = max(parallel.get("tp", 1), parallel.get("dp", 1))
        parallel |= {"tp": ranks // parallel.get("dp", ranks), "dp": parallel.get("dp", ranks)}
        parallel.setdefault("ep", ranks)
    if values.get("experts"):
        parallel["ep"] = ranks
    waits = limits.pop("balance_iterations", BALANCE[0]), limits.pop("gather_iterations", BALANCE[1])
    if limits.pop("balance", False):
        limits |= {"balance_iterations": waits[0], "gather_iterations": waits[1]}
    return EngineArguments(
        **rooms,
        quantization=values.get("quantization", ""),
        policy=values.get("policy", ""),
        eager=bool(values.get("eager")),
        replicas=copies,
        speculation=values.get("speculation.tokens", 0),
        ignored=ignored,
        not_simulated=unknown,
    )
