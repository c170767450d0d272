"""What an engine's own log of steps says of its step times: factors on parts of an iteration, and what its host takes.

``opcast serving calibrate`` learns it (:mod:`..serving.step_fit`) and writes it into a calibration, from where
``opcast serving`` and ``opcast search serving`` take it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...datasets.loading import number, whole
from .errors import PlanError

VERSION = 1
FACTORS = ("weights", "narrow", "products", "attention", "prompts", "sampling")
HOST = ("step_us", "seq_us", "token_us")
LEARNED = (*FACTORS, *HOST)
MOST_FACTOR = 20.0  # either way: a file with more was not learned from steps. A judgement


@dataclass(frozen=True)
class LearnedSteps:
    """What was learned of a model on a device under an engine, from so many ``rows`` of its log.

    ``factors`` multiply the predicted times of: reading weights (token-wise kernels of one token), what a few more
    tokens add to it (narrow products), products of so many tokens that arithmetic bounds them, attention of decodes,
    attention of prompts, the last layer with its sampler. ``host`` is what an iteration takes beside the GPU: of each,
    of each sequence, of each token. ``errors`` is the covariance of
    ln factors and of host times, in that order. ``noise`` is ln of one standard deviation of a step like those logged,
    ``apart`` of one unlike them; ranges are those of the logged iterations.
    """

    model: str
    device: str
    engine: str
    factors: Mapping[str, float]
    host: Mapping[str, float]
    errors: tuple[tuple[float, ...], ...]
    noise: float
    apart: float
    rows: int
    context: float = 0.0  # tokens of a decoding sequence, on average
    decodes: tuple[float, float] = (0.0, 0.0)  # the fewest and the most of iterations that only decode
    prompts: tuple[float, float] = (0.0, 0.0)  # tokens of iterations with prompts
    contexts: tuple[float, float] = (0.0, 0.0)  # cached tokens of a decoding sequence, on average of an iteration
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise PlanError(
                f"learned steps have version {self.version!r}; this opcast reads {VERSION}: learn them anew"
            )
        for name in FACTORS:
            value = number(PlanError, f"learned steps: factors.{name}", self.factors.get(name))
            if not 1 / MOST_FACTOR <= value <= MOST_FACTOR:
                raise PlanError(
                    f"learned steps: factors.{name}={value} must be from {1 / MOST_FACTOR} to {MOST_FACTOR}"
                )
        for name in HOST:
            number(PlanError, f"learned steps: host.{name}", self.host.get(name))
        for name in ("noise", "apart"):
            number(PlanError, f"learned steps: {name}", getattr(self, name))
        whole(PlanError, "learned steps: rows", self.rows, 1)
        if [len(row) for row in self.errors] != [len(LEARNED)] * len(LEARNED):
            raise PlanError(f"learned steps: errors must be {len(LEARNED)} x {len(LEARNED)} numbers")
