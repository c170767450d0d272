"""Answers from registered predictors, found by kind, device and backend; else by those that know any device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...datasets.backends import framework
from ...datasets.devices import Device
from ...datasets.ops import KINDS, LINKS
from ...models.choice import ANY as ANY_TABLE
from ...models.choice import ANYONE, OTHER, OWN, OWN_ROWS, TABLE, Caller, place
from ...models.predictor import ANY, Prediction, Predictor
from ...models.registry import Registry
from .answers import Answers, Columns
from .coverage import apart, between_labs, brought
from .library import known_as, source_of
from .network import NetworkEngine

COMMUNICATION = ("collective", "expert_parallel")
USUAL_NODE, USUAL_DTYPE = 8, "bf16"  # how most collectives are measured


@dataclass(frozen=True)
class LearnedEngine:
    """Asks the first registry with a predictor of the kind on this device, then on the device that it is a variant of,
    then the first with one over devices; declines kinds without any.

    ``backend`` may be a whole backend, a version or a framework; of several that answers which :mod:`...models.choice`
    puts first for the ``caller``. ``rows`` are ``any``, those of one clause of the rule (``own``: of the kernel that
    is launched, on this very device) or those of other labs (``others``).
    Predictors over devices learned from GPUs: they do not answer
    for a CPU, nor do those that learned from matrix units answer for fp32 products. With ``inside_node``, groups that
    leave their node, or what was measured of it, are a network's affair; not those of CPUs, whose links nobody knows.
    Messages larger than any that was measured go on from the largest at the rate of ``network``, the formula of a node;
    that alone answers where its cards reach each other as those of the tables did not (``Cluster.peers``).
    """

    device: Device
    registries: Sequence[Registry]
    backend: str | None = None
    inside_node: bool = False
    preferences: Sequence[str] | None = None
    network: NetworkEngine | None = None
    name: str = "learned"
    rows: str = "any"
    caller: Caller = ANYONE
    _found: dict[tuple[str, str], Predictor | None] = field(default_factory=dict, init=False, compare=False, repr=False)

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        predictor = self.predictor(kind, dtype)
        if predictor is None or (self.network is not None and self.network.cluster.peers and _communicates(kind)):
            return Answers.declined(len(next(iter(columns.values()))))
        found = self._predicted(predictor, kind, columns, dtype, out_dtype, cache)
        lab = apart(KINDS[kind].family, predictor.card, found.latency_us)
        held = brought(found.latency_us, found.low_us, found.high_us, predictor.coverage)
        low, high = between_labs(found.latency_us, *held, lab)
        engine, who = (
            np.broadcast_to(np.array(name, dtype=object), len(found))
            for name in (self.name, f"{predictor.name}@{predictor.version}")
        )
        answers = Answers(found.latency_us, low, high, engine, who, found.in_envelope)
        answers.by(self._clause(predictor, dtype), source_of(predictor))
        if self.inside_node and not self.device.synchronous and KINDS[kind].family in COMMUNICATION:
            leaves = columns["ranks"] > columns["ranks_per_node"]
            answers.latency_us[leaves | ~answers.in_envelope] = np.nan
        if self.network is not None and KINDS[kind].family == "collective":
            self._go_on(answers, predictor, self.network, kind, columns, (dtype, out_dtype, cache))
        return answers

    def _go_on(
        self,
        answers: Answers,
        predictor: Predictor,
        network: NetworkEngine,
        kind: str,
        columns: Columns,
        formats: tuple[str, str, str],
    ) -> None:
        """Collectives beyond the table, inside a node.

        More ranks than its most: its time for those, as many times as long as by the network. Larger than its largest:
        its last time, and at the network's rate what comes after. Smaller than its smallest: as long as that.
        """
        reach = predictor.card.get("range", {})
        least = reach.get("size_bytes", (0, 0))[0]
        largest, most = (reach.get(name, (0, 0))[1] or np.inf for name in ("size_bytes", "ranks"))
        size, ranks = np.maximum(columns["size_bytes"], least), columns["ranks"]
        columns = {**columns, "size_bytes": size}
        inside = ranks <= np.minimum(columns["ranks_per_node"], network.cluster.devices)
        inside &= columns["link"] == LINKS.index(network.cluster.link)
        beyond = (size > largest) | (ranks > most) | ((size == least) & np.isnan(answers.latency_us))
        far = np.flatnonzero(beyond & inside)
        if len(far):
            part = {name: values[far] for name, values in columns.items()}
            here = {**part, "size_bytes": np.minimum(part["size_bytes"], largest).astype(np.int64)}
            end = {**here, "ranks": np.minimum(part["ranks"], most).astype(np.int64)}
            end["ranks_per_node"] = np.where(part["ranks"] > most, end["ranks"], part["ranks_per_node"])
            last = self._predicted(predictor, kind, end, *formats)
            low, high = brought(last.latency_us, last.low_us, last.high_us, predictor.coverage)
            whole, wide, near = (network.answer(kind, each, *formats) for each in (part, here, end))
            more = wide.latency_us / near.latency_us
            spread = np.where(part["ranks"] > most, wide.high_us / wide.latency_us, 1.0)
            share, known = 1.0 - here["size_bytes"] / part["size_bytes"], last.in_envelope
            ends = (("latency_us", last.latency_us), ("low_us", low / spread), ("high_us", high * spread))
            for name, at in ends:
                getattr(answers, name)[far[known]] = (at * more + share * getattr(whole, name))[known]

    def predictor(self, kind: str, dtype: str) -> Predictor | None:
        """Who answers for a kind and format, looked up once. PredictorError when that one cannot be used."""
        if (kind, dtype) not in self._found:
            self._found[kind, dtype] = self._find(kind, dtype)
        return self._found[kind, dtype]

    def _predicted(
        self, predictor: Predictor, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str
    ) -> Prediction:
        """The predictor's answer; a collective that it does not know as asked is asked about in the usual form.

        A collective moves bytes: neither their format nor the GPUs of the node that stay out of it matter much.
        """
        target = known_as(self.device, predictor)
        found = predictor.predict(columns, dtype, out_dtype, target, cache)
        if KINDS[kind].family != "collective" or found.in_envelope.all():
            return found
        inside = columns["ranks"] <= columns["ranks_per_node"]
        whole = np.where(inside, np.maximum(columns["ranks_per_node"], USUAL_NODE), columns["ranks_per_node"])
        usual = predictor.predict({**columns, "ranks_per_node": whole}, USUAL_DTYPE, USUAL_DTYPE, target, cache)
        better = usual.in_envelope & ~found.in_envelope
        pairs = zip(dataclasses.astuple(usual), dataclasses.astuple(found), strict=True)
        return Prediction(*(np.where(better, one, other) for one, other in pairs))

    def _clause(self, predictor: Predictor, dtype: str) -> str:
        """The clause by which a predictor answers."""
        if source_of(predictor) == OWN_ROWS:
            launched = (
                self.device.synchronous or place(self.caller, predictor.kind, dtype, predictor.backend) is not None
            )
            return OWN if launched else OTHER
        return ANY_TABLE if self.backend is None else TABLE

    def _find(self, kind: str, dtype: str) -> Predictor | None:
        if self.rows == "own":
            return self._usable(self._launched(kind, dtype), kind, dtype)
        places = [(self.device.id, self.backend)]
        if self.device.variant_of:
            places.append((self.device.variant_of, self.backend))
        if not self.device.synchronous:
            places.append((ANY, None if self.backend is None else framework(self.backend)))
        for device_id, wanted in places:
            for registry in self.registries:
                asked = kind, device_id, wanted, dtype, self.preferences, self.caller
                backend = registry.matching(*asked, foreign=self.rows == "others")
                if backend is not None:
                    return self._usable(registry.find(kind, device_id, backend), kind, dtype)
        return None

    def _launched(self, kind: str, dtype: str) -> Predictor | None:
        """The predictor of own rows of the kernel that is launched."""
        for registry in self.registries:
            backend = registry.launched(kind, self.device.id, dtype, self.preferences, self.caller)
            if backend is not None:
                return registry.find(kind, self.device.id, backend)
        return None

    def _usable(self, predictor: Predictor | None, kind: str, dtype: str) -> Predictor | None:
        return None if predictor is None or _on_lanes(predictor, kind, dtype) else predictor


def _communicates(kind: str) -> bool:
    return KINDS[kind].family in COMMUNICATION


def _on_lanes(predictor: Predictor, kind: str, dtype: str) -> bool:
    """Whether ordinary lanes would run products that a predictor knows from matrix units alone, which says nothing."""
    products = dtype == "fp32" and KINDS[kind].family == "gemm"
    return products and "fp32" not in predictor.card.get("dtypes", ("fp32",))
