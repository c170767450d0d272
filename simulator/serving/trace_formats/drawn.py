"""Traces that ship by name: requests drawn, always the same, from what is published of real traffic (``conf/traffic``).

No recorded request is among them, and their names end in ``_like``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ....datasets.loading import load, number, whole
from ....datasets.reading import read_yaml
from .rows import RequestRows, RequestTraceError

FOLDER = Path(__file__).resolve().parents[3] / "conf" / "traffic"
NOTE = "{name}: requests drawn from published figures of real traffic, not recorded ones (conf/traffic/{name}.yaml)"


@dataclass(frozen=True)
class DrawnLengths:
    """Tokens, lognormal around a ``median`` with ln of one standard deviation ``spread``, at ``most`` so many."""

    median: float
    spread: float
    most: int


@dataclass(frozen=True)
class DrawnTraffic:
    """So many requests that come by chance at a mean rate, and where the figures are from."""

    requests: int
    rate_per_s: float
    input: DrawnLengths
    output: DrawnLengths
    seed: int
    sources: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        whole(RequestTraceError, "requests", self.requests, 1)
        number(RequestTraceError, "rate_per_s", self.rate_per_s, 1e-6)


def drawn_names() -> tuple[str, ...]:
    """The traces that ship."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def is_drawn(trace: str | Path) -> bool:
    """Whether a trace is named that ships, and no file of that name is there."""
    return str(trace) in drawn_names() and not Path(trace).exists()


def drawn_requests(name: str) -> RequestRows:
    """The requests of a trace that ships."""
    import pandas as pd

    path = FOLDER / f"{name}.yaml"
    traffic = load(DrawnTraffic, read_yaml(path, RequestTraceError), RequestTraceError, path.name)
    random = np.random.default_rng(traffic.seed)
    gaps = random.exponential(1 / traffic.rate_per_s, traffic.requests)
    table = pd.DataFrame({"arrival_s": np.cumsum(gaps)})
    for column, lengths in (("input_tokens", traffic.input), ("output_tokens", traffic.output)):
        sizes = lengths.median * np.exp(lengths.spread * random.standard_normal(traffic.requests))
        table[column] = np.clip(np.round(sizes), 1, lengths.most).astype(np.int64)
    return RequestRows(path, table, "arrival_s", "input_tokens", "output_tokens", notes=(NOTE.format(name=name),))
