"""The engine behind every answer: measured, else learned, else by kin, by the network or analytical, op by op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...datasets.clusters import Cluster, one_node
from ...datasets.devices import Device
from ...datasets.loading import nearest
from ...datasets.ops import Op
from ...datasets.store import Store
from ...models.registry import Registry
from ..question.plan import Stack
from ..question.sources import ORDER
from .analytical import AnalyticalEngine
from .answers import Answers, Columns, Engine
from .chain import chained
from .learned import LearnedEngine
from .measured import MeasuredEngine
from .network import NetworkEngine, NodeEngine
from .transfer import TransferEngine


class EngineError(ValueError):
    """An engine that does not exist, or no engine at all that could answer."""


@dataclass(frozen=True)
class FusedEngine:
    """Tries ``engines`` in order; each sees only the ops that those before it declined.

    What they know is asked clause by clause, as :mod:`.chain` puts it for a ``stack`` or for nobody in particular.
    ``memo`` is for who asks about single ops again and again: what was predicted, by op and cache state; ``answered``
    are the answers behind it (:func:`.answers.ask`). ``derived`` are these engines as
    frameworks want them, by backends.
    """

    engines: Sequence[Engine]
    name: str = "fused"
    stack: Stack | None = None
    memo: dict[tuple[Op, str], Any] = field(default_factory=dict, compare=False, repr=False)
    answered: dict[tuple[str, Op], tuple[Any, ...]] = field(default_factory=dict, compare=False, repr=False)
    derived: dict[str, FusedEngine] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def chain(self) -> Sequence[Engine]:
        """The engines in the order of the clauses."""
        return chained(self.engines, self.stack)

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        answers: Answers | None = None
        for engine in self.chain:
            waiting = slice(None) if answers is None else answers.open
            if not isinstance(waiting, slice) and not len(waiting):
                break
            part = columns if answers is None else {name: column[waiting] for name, column in columns.items()}
            found = engine.answer(kind, part, dtype, out_dtype, cache)
            known = ~np.isnan(found.latency_us)
            if answers is None and not known.any():
                continue
            if answers is None and known.all() and isinstance(found, Answers):
                return found  # the usual case of a large table: nothing is copied
            answers = answers or Answers.declined(len(next(iter(columns.values()))))
            answers.put(waiting, found)
        if answers is None or len(answers.open):
            first = 0 if answers is None else int(answers.open[0])
            raise EngineError(self._unanswered(kind, {name: int(c[first]) for name, c in columns.items()}, dtype))
        return answers

    def _unanswered(self, kind: str, dims: Mapping[str, int], dtype: str) -> str:
        asked, sizes = ",".join(each.name for each in self.engines), " ".join(f"{n}={v}" for n, v in dims.items())
        return f"no engine of engine.order=[{asked}] answers {kind} {sizes} {dtype}; measure it, or add analytical"


def build_engine(
    device: Device,
    stores: Sequence[Path],
    registries: Sequence[Path],
    order: Sequence[str] = ORDER,
    backend: str | None = None,
    cluster: Cluster | None = None,
) -> FusedEngine:
    """The engines named in ``order`` over what is known of the device. Folders that do not exist are skipped.

    Without a ``cluster``, ``network`` answers inside a usual node; with one, learned leaves it what crosses nodes. It
    answers all collectives of an NCCL that is told what to take (``cluster.nccl``), of which nobody measured anything.
    ``module:function`` is an engine of the user's own: what the function makes of the device.

    Raises EngineError for a name that is no engine.
    """
    if not isinstance(order, (list, tuple)):
        raise EngineError(f"engine.order={order!r} must be a list of engines, such as [{','.join(ORDER)}]")
    engines: list[Engine] = []
    known = [Store(path) for path in stores if path.is_dir()]
    found = [Registry(path) for path in registries if path.is_dir()]
    preferences = tuple(line for registry in found for line in registry.preferences())
    if cluster is not None and cluster.nccl and "network" in order:
        engines.append(NetworkEngine(device, cluster, known, ("collective",)))
    for name in order:
        if name == "measured":
            if known:
                engines.append(MeasuredEngine(device, known, backend, preferences))
        elif name == "learned":
            inside_node = cluster is not None and "network" in order
            formula = None if device.synchronous else NetworkEngine(device, cluster or one_node(device), known)
            engines.append(LearnedEngine(device, found, backend, inside_node, preferences, formula))
        elif name == "transfer":
            inside_cluster = cluster is not None and "network" in order
            engines.append(TransferEngine(device, found, backend, inside_cluster, preferences))
        elif name == "network":
            if cluster is not None:
                engines.append(NetworkEngine(device, cluster, known))
            elif not device.synchronous:
                engines.append(NodeEngine(NetworkEngine(device, one_node(device), known)))
        elif name == "analytical":
            engines.append(AnalyticalEngine(device))
        elif ":" in str(name):
            engines.append(own_engine(name, device))
        else:
            choices = nearest(name, ORDER, "choose from")
            raise EngineError(f"engine.order has {name!r}; {choices} (module:function will do, too)")
    if not engines:
        raise EngineError(f"engine.order={list(order)} leaves nothing that could answer; add learned or analytical")
    return FusedEngine(engines)


def own_engine(name: str, device: Device) -> Engine:
    """The engine that ``module:function`` makes of a device; PlanError or EngineError where it makes none."""
    from ..passes.custom import called, load

    made: Engine = called(lambda: load(name, "engine")(device), f"engine {name!r}")
    if not isinstance(getattr(made, "name", None), str) or not callable(getattr(made, "answer", None)):
        raise EngineError(
            f"engine {name!r} returned {type(made).__name__}, not an object with a name and a method answer"
        )
    return made
