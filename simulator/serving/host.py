"""What the host adds: to each iteration, and to the first token. The one place where its parts are summed.

Figures are fitted on runs that were measured (``conf/serving_host.json``, by ``tests/evidence/hosts.py``), one set for
each engine and way to schedule: ``vllm`` works a step ahead, ``vllm serial`` did not. An iteration takes what the GPU
takes, then ``step_us`` and ``seq_us`` for each sequence in it: what no step ahead hides (sampling, input preparation),
by version of the engine (``serial`` in ``conf/serving_engine``).
The server that streams tokens to clients works in a process of its own, beside the GPU: an iteration takes at least
``stream_us`` for each token that it yields (``conf/serving_engine``). A first token waits for HTTP, the tokeniser and
launches of a pass that no CUDA graph holds (:meth:`HostTime.first_token_parts`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from ...datasets.figure_sources import FigureSource
from ...datasets.loading import choice, load, number
from ...datasets.reading import read_json
from .engines import HostRule, SerialHost, ServingEngineError
from .rules import MOST_BEHIND_US

NUMBERS = re.compile(r"\d+")
SHIPPED = Path(__file__).resolve().parents[2] / "conf" / "serving_host.json"
SERIAL = " serial"
KNOWN_OF = ("engine", "version", "system", "model")  # of a run: what widths ask for
LAYERS = ("num_hidden_layers", "n_layer", "n_layers")  # as configurations call their number
FIGURES = ("step_us", "seq_us", "request_us", "client_us", "prompt_us", "layer_us", "experts_us")

NOBODY = FigureSource(assumed="the file of hosts does not say what it was fitted on")


@dataclass(frozen=True)
class FirstToken:
    """What the host's part of a first token depends on: ``clients`` that send to its replica at a time, tokens of its
    ``prompt``, ``layers`` of the model and those of them with ``experts``."""

    clients: float
    prompt: float
    layers: int = 0
    experts: int = 0


@dataclass(frozen=True)
class HostTime:
    """Microseconds of an iteration and of each sequence in it; of a first token, of each client, of a prompt token, of
    each layer and each layer with experts.

    ``stream_us`` is what the server to clients takes for each token, beside all that. ``overlapped``: the engine
    schedules a step ahead, so that who arrives waits for one more. ``most_clients`` are those of the largest run that
    the figures are fitted on.
    """

    step_us: float = 0.0
    seq_us: float = 0.0
    request_us: float = 0.0
    client_us: float = 0.0
    prompt_us: float = 0.0
    layer_us: float = 0.0
    experts_us: float = 0.0
    stream_us: float = 0.0
    overlapped: bool = True
    most_clients: float = math.inf

    def iteration_us(self, gpu_us: float, sequences: int) -> float:
        """Microseconds of an iteration that takes ``gpu_us`` on the GPU."""
        return max(gpu_us + self.step_us + self.seq_us * sequences, self.stream_us * sequences)

    def behind_us(self, gpu_us: float, sequences: float, outputs: float) -> float:
        """Microseconds that tokens wait for those that their server has not sent yet, of so many clients in steady
        state with answers of ``outputs`` tokens on average, and of different lengths.

        Where sending takes longer than the GPU, answers end as fast as they are sent, and all that they take beyond the
        GPU's time is that wait, by Little's law; the engine waits beyond :data:`MOST_BEHIND_US` of it.
        """
        computed_us = gpu_us + self.step_us + self.seq_us * sequences
        return min(max(self.stream_us * sequences - computed_us, 0.0) * outputs, MOST_BEHIND_US)

    def first_token_us(self, first: FirstToken) -> float:
        """Microseconds that a first token waits for the host, beside queue and GPU: the sum of its parts."""
        return sum(self.first_token_parts(first).values())

    def first_token_parts(self, first: FirstToken) -> dict[str, float]:
        """The same by part. Nobody knows how clients beyond the largest known run would wait, so that no more count."""
        return {
            "request": self.request_us,
            "clients": self.client_us * np.minimum(first.clients, self.most_clients),
            "prompt": self.prompt_us * first.prompt,
            "layers": self.layer_us * first.layers,
            "experts": self.experts_us * first.experts,
        }


def layers_and_experts(config: Mapping[str, object]) -> tuple[int, int]:
    """(layers, layers with experts) of a transformers configuration; zeros where it does not say."""
    text = config.get("text_config")
    sizes = text if isinstance(text, Mapping) else config
    layers = int(str(next((sizes[name] for name in LAYERS if sizes.get(name)), 0)))
    some = any(sizes.get(name) for name in ("num_local_experts", "n_routed_experts", "num_experts"))
    return layers, (layers - int(str(sizes.get("first_k_dense_replace") or 0))) if some else 0


@dataclass(frozen=True)
class FittedHost:
    """Figures of one engine: values, standard errors, the rows and groups that they rest on, and the most clients of a
    row (0: unknown)."""

    value: Mapping[str, float]
    error: Mapping[str, float] = field(default_factory=dict)
    rows: int = 0
    groups: int = 0
    most_clients: int = 0

    def __post_init__(self) -> None:
        for name, value in self.value.items():
            choice(ServingEngineError, "serving_host", name, FIGURES)
            number(ServingEngineError, f"serving_host: {name}", value)


@dataclass(frozen=True)
class FittedHosts:
    """All engines; ``all`` for those of which no run is known.

    ``widths`` are what 90 % of errors (ln) are within, by quantity, where so many of engine, version, system and model
    (:data:`KNOWN_OF`) are of no known run; ``known`` are those that runs are known of.
    """

    engines: Mapping[str, FittedHost]
    widths: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    made_by: str = ""
    source: FigureSource = NOBODY  # of all figures and widths
    known: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def of(self, name: str) -> HostTime:
        """The host of an engine, with ``serial`` behind its name where it schedules no step ahead."""
        fit = self.engines.get(name) or self.engines.get("all") or FittedHost({})
        most = fit.most_clients or math.inf
        return HostTime(**fit.value, overlapped=not name.endswith(SERIAL), most_clients=most)

    def unknown(self, run: Mapping[str, str]) -> list[str]:
        """What of a run (by :data:`KNOWN_OF`) no known run has."""
        return [name for name in KNOWN_OF if run.get(name, "") not in self.known.get(name, ())]

    def width(self, run: Mapping[str, str], quantity: str) -> float | None:
        """ln of what 90 % of a quantity's errors are within; None where nothing is known."""
        return self.widths.get(str(len(self.unknown(run))), {}).get(quantity)


@lru_cache(maxsize=4)
def fitted_hosts(path: Path = SHIPPED) -> FittedHosts:
    """The fitted hosts of a file. ServingEngineError for what is none."""
    values = read_json(path, ServingEngineError)
    engines = {
        name: load(FittedHost, fit, ServingEngineError, f"{path.name}: {name}")
        for name, fit in values.get("engines", {}).items()
    }
    given = values.get("source")
    source = load(FigureSource, given, ServingEngineError, f"{path.name}: source") if given else NOBODY
    return FittedHosts(engines, values.get("widths", {}), values.get("made_by", ""), source, values.get("known", {}))


def host_time(name: str, rule: HostRule, hosts: FittedHosts | None = None, version: str = "") -> HostTime:
    """The host that :func:`host_name` names, by the fitted ones that ship unless others are given, with what the
    engine's rule says of its server, and of iterations of a ``version`` that schedules no step ahead (empty: the
    newest)."""
    host = replace((hosts or fitted_hosts()).of(name), stream_us=rule.stream_us)
    serial = serial_host(rule, version)
    if host.overlapped or serial is None:
        return host
    return replace(host, step_us=serial.step_us, seq_us=serial.seq_us)


def serial_host(rule: HostRule, version: str) -> SerialHost | None:
    """What a rule says of iterations of a version that schedules no step ahead; None where it says nothing."""
    numbers = _numbers(version) or (math.inf,)
    return next((host for host in rule.serial if not host.before or numbers < _numbers(host.before)), None)


def host_name(engine: str, rule: HostRule, version: str = "", overlapped: bool | None = None) -> str:
    """What an engine's version is called among fitted hosts; ``overlapped`` goes before its usual way."""
    beside = overlapped
    if beside is None:
        numbers = _numbers(version)
        beside = not numbers or not rule.overlapped_from or numbers >= _numbers(rule.overlapped_from)
    return engine if beside else engine + SERIAL


def _numbers(version: str) -> tuple[float, ...]:
    return tuple(int(digits) for digits in NUMBERS.findall(version)[:2]) if version[:1].isdigit() else ()
