"""What the verbs that do not simulate are asked, as frozen data: training, importing, looking into a store.

They go through JSON and have a key as the requests of :mod:`..simulator.question.requests` do. A campaign has its own
such form: the plan file of ``opcast profile plan_out=…``, which a bare node reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..datasets.devices import Device
from ..datasets.loading import choice
from ..datasets.sources.options import ImportOptions
from ..models.candidates import Options
from ..simulator.question.canonical import Request, RequestError
from ..simulator.question.place import THIS_MACHINE, shipped
from ..simulator.question.sources import Sources

ANY_DEVICE = "any"
VIEWS = ("summary", "check", "repeat", "drift", "gain", "nodes", "bundle")


@dataclass(frozen=True)
class TrainRequest(Request):
    """Predictors of a device, or over all devices (``any``), from a store into a registry.

    Without ``kinds`` every kind that the store holds; with ``power`` watts too; ``tracking`` is an MLflow URI.
    """

    device: Device | str = THIS_MACHINE
    store: str = Sources.store
    predictors: str = Sources.predictors
    kinds: tuple[str, ...] = ()
    options: Options = field(default_factory=Options)
    power: bool = False
    tracking: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", shipped(self.device))


@dataclass(frozen=True)
class ImportRequest(Request):
    """Foreign measurements at ``path`` into a store."""

    source: str
    path: str | None = None
    store: str = Sources.store
    options: ImportOptions = field(default_factory=ImportOptions)


@dataclass(frozen=True)
class DataRequest(Request):
    """What a store holds (``summary``), what is wrong with it (``check``), how well ``against`` agrees (``repeat``)."""

    what: str = VIEWS[0]
    store: str = Sources.store
    against: str = ""

    def __post_init__(self) -> None:
        choice(RequestError, "what", self.what, VIEWS)


def kinds_of(chosen: Any) -> tuple[str, ...]:
    """The kinds of ``op=…``: none, one, or a list."""
    return () if not chosen else (chosen,) if isinstance(chosen, str) else tuple(map(str, chosen))


def train_request(config: Mapping[str, Any], target: Device | str) -> TrainRequest:
    """The request of ``opcast train``. OptionError for an option that does not exist."""
    reported = {"evaluations": config.get("eval") or "groups", "promote": config.get("promote") or False}
    evaluation = {} if target == ANY_DEVICE else reported
    return TrainRequest(
        device=target,
        store=config["store"],
        predictors=config["predictors"],
        kinds=kinds_of(config.get("op")),
        options=Options.from_dict({**config["predictor"], **evaluation}),
        power=bool(config.get("power")),
        tracking=config.get("tracking"),
    )
