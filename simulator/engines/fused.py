"""The engine behind every answer: measured, else learned, else by kin, by the network or analytical, op by op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ...datasets.clusters import Cluster, one_node
from ...datasets.devices import Device
from ...datasets.loading import nearest
from ...datasets.ops import Op
from ...datasets.store import Store
from ...models.registry import Registry
from ..question.plan import Stack
from ..question.sources import ORDER
from .analytical import AnalyticalEngine
from .answers import Answers, Columns, Engine, in_turn
from .chain import order_engines
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
        return order_engines(self.engines, self.stack)

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        answers = in_turn(self.chain, kind, columns, dtype, out_dtype, cache)
        if len(answers.open):
            first = int(answers.open[0])
            raise EngineError(self._unanswered(kind, {name: int(c[first]) for name, c in columns.items()}, dtype))
        return answers

    def _unanswered(self, kind: str, dims: Mapping[str, int], dtype: str) -> str:
        names, sizes = ",".join(engine.name for engine in self.engines), " ".join(f"{n}={v}" for n, v in dims.items())
        return f"no engine of engine.order=[{names}] answers {kind} {sizes} {dtype}; measure it, or add analytical"


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
    opened_stores = [Store(path) for path in stores if path.is_dir()]
    opened_registries = [Registry(path) for path in registries if path.is_dir()]
    preferences = tuple(line for registry in opened_registries for line in registry.preferences())
    if cluster is not None and cluster.nccl and "network" in order:
        engines.append(NetworkEngine(device, cluster, opened_stores, ("collective",)))
    for name in order:
        if name == "measured":
            if opened_stores:
                engines.append(MeasuredEngine(device, opened_stores, backend, preferences))
        elif name == "learned":
            inside_node = cluster is not None and "network" in order
            formula = None if device.synchronous else NetworkEngine(device, cluster or one_node(device), opened_stores)
            engines.append(LearnedEngine(device, opened_registries, backend, inside_node, preferences, formula))
        elif name == "transfer":
            inside_cluster = cluster is not None and "network" in order
            engines.append(TransferEngine(device, opened_registries, backend, inside_cluster, preferences))
        elif name == "network":
            if cluster is not None:
                engines.append(NetworkEngine(device, cluster, opened_stores))
            elif not device.synchronous:
                engines.append(NodeEngine(NetworkEngine(device, one_node(device), opened_stores)))
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

    engine: Engine = called(lambda: load(name, "engine")(device), f"engine {name!r}")
    if not isinstance(getattr(engine, "name", None), str) or not callable(getattr(engine, "answer", None)):
        raise EngineError(
            f"engine {name!r} returned {type(engine).__name__}, not an object with a name and a method answer"
        )
    return engine
