"""What the host adds: to each iteration, and to the first token.

Figures are fitted on runs that were measured (``conf/serving_host.json``, by ``opcast calibrate``), one set for each
engine and way to schedule: ``vllm`` works a step ahead, ``vllm serial`` did not. An iteration takes what the GPU takes,
then ``step_us`` and ``seq_us`` for each sequence in it: what no step ahead hides (sampling, input preparation,
detokenisation). A first token waits ``ttft_us``, ``client_us`` more for each client that sends at a time, ``prompt_us``
for each token of its prompt, ``layer_us`` for each layer and ``experts_us`` more for each that has experts: HTTP, the
tokeniser, launches of a pass that no CUDA graph holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from ...datasets.loading import load, number
from ...datasets.reading import read_json
from .engines import HostRule, ServingEngineError

NUMBERS = re.compile(r"\d+")
SHIPPED = Path(__file__).resolve().parents[2] / "conf" / "serving_host.json"
SERIAL = " serial"
FIGURES = ("step_us", "seq_us", "ttft_us", "client_us", "prompt_us", "layer_us", "experts_us")


@dataclass(frozen=True)
class HostTime:
    """Microseconds of an iteration and of each sequence in it; of a first token, of each client, of a prompt token, of
    each layer and each layer with experts.

    ``overlapped``: the engine schedules a step ahead, so that who arrives waits for one more.
    """

    step_us: float = 0.0
    seq_us: float = 0.0
    ttft_us: float = 0.0
    client_us: float = 0.0
    prompt_us: float = 0.0
    layer_us: float = 0.0
    experts_us: float = 0.0
    overlapped: bool = True

    def iteration_us(self, gpu_us: float, sequences: int) -> float:
        """Microseconds of an iteration that takes ``gpu_us`` on the GPU."""
        return gpu_us + self.step_us + self.seq_us * sequences

    def first_token_us(self, clients: int, prompt: float, layers: int = 0, experts: int = 0) -> float:
        """What a first token waits for beside queue and GPU, of a model of so many layers, some with experts."""
        passed = self.layer_us * layers + self.experts_us * experts
        return self.ttft_us + self.client_us * clients + self.prompt_us * prompt + passed


def layers_and_experts(config: Mapping[str, object]) -> tuple[int, int]:
    """(layers, layers with experts) of a transformers configuration; zeros where it does not say."""
    text = config.get("text_config")
    sizes = text if isinstance(text, Mapping) else config
    layers = int(str(sizes.get("num_hidden_layers") or 0))
    some = any(sizes.get(name) for name in ("num_local_experts", "n_routed_experts", "num_experts"))
    return layers, (layers - int(str(sizes.get("first_k_dense_replace") or 0))) if some else 0


@dataclass(frozen=True)
class FittedHost:
    """Figures of one engine: values, standard errors, and the rows and groups that they rest on."""

    value: Mapping[str, float]
    error: Mapping[str, float] = field(default_factory=dict)
    rows: int = 0
    groups: int = 0

    def __post_init__(self) -> None:
        for name in FIGURES:
            number(ServingEngineError, f"serving_host: {name}", self.value.get(name, 0.0))


@dataclass(frozen=True)
class FittedHosts:
    """All engines; ``all`` for those of which no run is known. ``widths`` are what 90 % of errors (ln) are within, by
    engine and quantity."""

    engines: Mapping[str, FittedHost]
    widths: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    made_by: str = ""

    def of(self, name: str) -> HostTime:
        """The host of an engine, with ``serial`` behind its name where it schedules no step ahead."""
        found = self.engines.get(name) or self.engines.get("all")
        values = {figure: found.value.get(figure, 0.0) for figure in FIGURES} if found else {}
        return HostTime(**values, overlapped=not name.endswith(SERIAL))

    def width(self, name: str, quantity: str) -> float | None:
        """ln of what 90 % of a quantity's errors are within; None where nothing is known."""
        known = self.widths.get(name) or self.widths.get("all") or {}
        return known.get(quantity)


NO_HOSTS = FittedHosts({})


@lru_cache(maxsize=4)
def fitted_hosts(path: Path = SHIPPED) -> FittedHosts:
    """The fitted hosts of a file. ServingEngineError for what is none."""
    values = read_json(path, ServingEngineError)
    engines = {
        name: load(FittedHost, each, ServingEngineError, f"{path.name}: {name}")
        for name, each in values.get("engines", {}).items()
    }
    return FittedHosts(engines, values.get("widths", {}), values.get("made_by", ""))


def host_name(engine: str, rule: HostRule, version: str = "", overlapped: bool | None = None) -> str:
    """What an engine's version is called among fitted hosts; ``overlapped`` goes before its usual way."""
    beside = overlapped
    if beside is None:
        numbers = _numbers(version)
        beside = not numbers or not rule.overlapped_from or numbers >= _numbers(rule.overlapped_from)
    return engine if beside else engine + SERIAL


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in NUMBERS.findall(version)[:2]) if version[:1].isdigit() else ()
