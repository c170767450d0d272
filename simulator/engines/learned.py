"""Answers from registered predictors, found by kind, device and backend; else by those that know any device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...datasets.backends import framework
from ...datasets.devices import RATE_OF, Device
from ...datasets.dtypes import WEIGHT_BITS
from ...datasets.launches import ANYONE, Caller, place
from ...datasets.ops import KINDS, LINKS
from ...datasets.row_checks import unit_of
from ...datasets.vocabulary import OpColumns
from ...models import analytical
from ...models.choice import ANY as ANY_TABLE
from ...models.choice import OTHER, OTHER_FORMAT, OWN, OWN_ROWS, TABLE, has_learned
from ...models.kinship import TIERS, is_kin
from ...models.predictor import ANY, Prediction, Predictor
from ...models.registry import Registry
from .answers import Answers, Columns
from .coverage import apart, kernels_apart, rescale_bounds, widen_for_labs
from .library import device_for, row_sources
from .masks import each_mask
from .network import NetworkEngine

COMMUNICATION = ("collective", "expert_parallel")
NEAR_TIERS = TIERS[:2]  # of one die or one generation: the same kernels
EXPERTS = "fused_moe"
COMMON_NODE_SIZE, COMMON_DTYPE = 8, "bf16"  # how most collectives are measured


@dataclass(frozen=True)
class LearnedEngine:
    """Asks the first registry with a predictor of the kind on this device, then on the device that it is a variant of,
    then the first with one over devices; declines kinds without any.

    ``backend`` may be a whole backend, a version or a framework; of several that answers which :mod:`...models.choice`
    puts first for the ``caller``. ``rows`` are ``any``, those of one clause of the rule (``own``: of the kernel that
    is launched, on this very device) or those of other labs (``others``).
    Products in a format that this device's tables lack are left to kin whose tables have it.
    Predictors over devices learned from GPUs: they do not answer for a CPU, nor do those that learned from matrix
    units answer for fp32 products. With ``inside_node``, groups that
    leave their node, or what was measured of it, are a network's affair; not those of CPUs, whose links nobody knows.
    Messages larger than any that was measured go on from the largest at the rate of ``network``, the formula of a node;
    that alone answers where its cards reach each other as those of the tables did not (``Cluster.peers``).
    Attention without a mask is asked by its head size, of an engine for each: ``unmasked`` (:mod:`.masks`).
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
    unmasked: int = 0
    _found: dict[tuple[str, str], Predictor | None] = field(default_factory=dict, init=False, compare=False, repr=False)
    of_head: dict[int, LearnedEngine] = field(default_factory=dict, init=False, compare=False, repr=False)

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        by_mask = each_mask(self, kind, columns, dtype, out_dtype, cache)
        if by_mask is not None:
            return by_mask
        predictor = self.predictor(kind, dtype)
        if predictor is None or (self.network is not None and self.network.cluster.peers and _is_communication(kind)):
            return Answers.declined(len(next(iter(columns.values()))))
        prediction = self._predict(predictor, kind, columns, dtype, out_dtype, cache)
        if unit_of(kind) == "tensor" and not self.device.synchronous:
            prediction = no_faster_than_peak(prediction, OpColumns(kind, columns, dtype, out_dtype, cache), self.device)
        clause, family = self._clause(predictor, dtype), KINDS[kind].family
        lab = (
            kernels_apart(family, prediction.latency_us)
            if clause == OTHER
            else apart(family, predictor.card, prediction.latency_us)
        )
        bounds = rescale_bounds(prediction.latency_us, prediction.low_us, prediction.high_us, predictor.coverage)
        low, high = widen_for_labs(prediction.latency_us, *bounds, lab)
        engine, predictor_name = (
            np.broadcast_to(np.array(name, dtype=object), len(prediction))
            for name in (self.name, f"{predictor.name}@{predictor.version}")
        )
        answers = Answers(prediction.latency_us, low, high, engine, predictor_name, prediction.in_envelope)
        answers.by(clause, row_sources(predictor))
        if self.inside_node and not self.device.synchronous and KINDS[kind].family in COMMUNICATION:
            leaves = columns["ranks"] > columns["ranks_per_node"]
            fabric = leaves & (row_sources(predictor) != OWN_ROWS)  # another lab's is not this one's
            answers.latency_us[fabric | ~answers.in_envelope] = np.nan
        if self.network is not None and KINDS[kind].family == "collective":
            self._extrapolate(answers, predictor, self.network, kind, columns, (dtype, out_dtype, cache))
        return answers

    def _extrapolate(
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
        ranges = predictor.card.get("range", {})
        min_bytes = ranges.get("size_bytes", (0, 0))[0]
        max_bytes, max_ranks = (ranges.get(name, (0, 0))[1] or np.inf for name in ("size_bytes", "ranks"))
        size, ranks = np.maximum(columns["size_bytes"], min_bytes), columns["ranks"]
        columns = {**columns, "size_bytes": size}
        inside = ranks <= np.minimum(columns["ranks_per_node"], network.cluster.devices)
        inside &= columns["link"] == LINKS.index(network.cluster.link)
        beyond = (size > max_bytes) | (ranks > max_ranks) | ((size == min_bytes) & np.isnan(answers.latency_us))
        far = np.flatnonzero(beyond & inside)
        if len(far):
            far_columns = {name: values[far] for name, values in columns.items()}
            at_max_bytes = {
                **far_columns,
                "size_bytes": np.minimum(far_columns["size_bytes"], max_bytes).astype(np.int64),
            }
            at_table_end = {**at_max_bytes, "ranks": np.minimum(far_columns["ranks"], max_ranks).astype(np.int64)}
            at_table_end["ranks_per_node"] = np.where(
                far_columns["ranks"] > max_ranks, at_table_end["ranks"], far_columns["ranks_per_node"]
            )
            last = self._predict(predictor, kind, at_table_end, *formats)
            low, high = rescale_bounds(last.latency_us, last.low_us, last.high_us, predictor.coverage)
            at_size, at_bytes, at_end = (
                network.answer(kind, asked_columns, *formats)
                for asked_columns in (far_columns, at_max_bytes, at_table_end)
            )
            rank_factor = at_bytes.latency_us / at_end.latency_us
            spread = np.where(far_columns["ranks"] > max_ranks, at_bytes.high_us / at_bytes.latency_us, 1.0)
            share, in_table = 1.0 - at_max_bytes["size_bytes"] / far_columns["size_bytes"], last.in_envelope
            edges = (("latency_us", last.latency_us), ("low_us", low / spread), ("high_us", high * spread))
            for name, edge in edges:
                getattr(answers, name)[far[in_table]] = (edge * rank_factor + share * getattr(at_size, name))[in_table]

    def predictor(self, kind: str, dtype: str) -> Predictor | None:
        """Who answers for a kind and format, looked up once. PredictorError when that one cannot be used."""
        if (kind, dtype) not in self._found:
            self._found[kind, dtype] = self._find(kind, dtype)
        return self._found[kind, dtype]

    def _predict(
        self, predictor: Predictor, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str
    ) -> Prediction:
        """The predictor's answer; a collective that it does not know as asked is asked about in the usual form.

        A collective moves bytes: neither their format nor the GPUs of the node that stay out of it matter much.
        """
        target = device_for(self.device, predictor)
        prediction = predictor.predict(columns, dtype, out_dtype, target, cache)
        if KINDS[kind].family != "collective" or prediction.in_envelope.all():
            return prediction
        inside = columns["ranks"] <= columns["ranks_per_node"]
        node_ranks = np.where(
            inside, np.maximum(columns["ranks_per_node"], COMMON_NODE_SIZE), columns["ranks_per_node"]
        )
        common = predictor.predict({**columns, "ranks_per_node": node_ranks}, COMMON_DTYPE, COMMON_DTYPE, target, cache)
        better = common.in_envelope & ~prediction.in_envelope
        pairs = zip(dataclasses.astuple(common), dataclasses.astuple(prediction), strict=True)
        return Prediction(*(np.where(better, common_value, own_value) for common_value, own_value in pairs))

    def _clause(self, predictor: Predictor, dtype: str) -> str:
        """The clause by which a predictor answers."""
        if row_sources(predictor) == OWN_ROWS:
            launched = (
                self.device.synchronous or place(self.caller, predictor.kind, dtype, predictor.backend) is not None
            )
            return OWN if launched else OTHER
        if unit_of(predictor.kind) == "tensor" and not knows_format(predictor, dtype):
            return OTHER_FORMAT
        return ANY_TABLE if self.backend is None else TABLE

    def leaves_to_kin(self, kind: str, dtype: str) -> bool:
        """Whether there is a table of the kind here, of another format than the ones that near devices have."""
        predictor = self._find_table(kind, dtype) if self.predictor(kind, dtype) is None else None
        return predictor is not None and self._kin_know_better(predictor, dtype)

    def _find(self, kind: str, dtype: str) -> Predictor | None:
        find = self._find_launched if self.rows == "own" else self._find_table
        return self._check_usable(find(kind, dtype), kind, dtype)

    def _find_table(self, kind: str, dtype: str) -> Predictor | None:
        """The predictor of the device, its variant or any device, that is first by the rule."""
        places = [(self.device.id, self.backend)]
        if self.device.variant_of:
            places.append((self.device.variant_of, self.backend))
        if not self.device.synchronous:
            places.append((ANY, None if self.backend is None else framework(self.backend)))
        for device_id, framework_backend in places:
            for registry in self.registries:
                query = kind, device_id, framework_backend, dtype, self.preferences, self.caller
                backend = registry.matching(*query, foreign=self.rows == "others", unmasked=self.unmasked)
                if backend is not None:
                    return registry.find(kind, device_id, backend)
        return None

    def _find_launched(self, kind: str, dtype: str) -> Predictor | None:
        """The predictor of own rows of the kernel that is launched."""
        for registry in self.registries:
            backend = registry.launched(kind, self.device.id, dtype, self.preferences, self.caller)
            if backend is not None:
                return registry.find(kind, self.device.id, backend)
        return None

    def _check_usable(self, predictor: Predictor | None, kind: str, dtype: str) -> Predictor | None:
        if predictor is None or _only_matrix_units(predictor, kind, dtype) or self._kin_know_better(predictor, dtype):
            return None
        return predictor

    def _kin_know_better(self, predictor: Predictor, dtype: str) -> bool:
        """Whether a predictor never saw the format of products that one of a near device has learned.

        Experts of few bits are other kernels than those in 16 bits, though on the same units: of these a near device
        must have the framework's, where one is asked for.
        """
        if unit_of(predictor.kind) != "tensor" or has_learned(predictor.card, dtype):
            return False
        unpacks = predictor.kind == EXPERTS and dtype in WEIGHT_BITS
        if knows_format(predictor, dtype) and not unpacks:
            return False
        label = framework(self.backend) if unpacks and self.backend is not None else None
        return any(
            is_kin(self.device, device_id, NEAR_TIERS)
            and registry.learned(predictor.kind, device_id, label, dtype, self.preferences, self.caller)
            for registry in self.registries
            for device_id in registry.devices()
        )


def knows_format(predictor: Predictor, dtype: str) -> bool:
    """Whether a predictor has learned a format, or one that runs on the same units at the same rate."""
    return any(has_learned(predictor.card, name) for name in (dtype, *RATE_OF.get(dtype, ())))


def no_faster_than_peak(prediction: Prediction, ops: OpColumns, device: Device) -> Prediction:
    """The prediction of products, where no row is like them no faster than the roofline.

    Rows may be below it, at clocks above the data sheet's. That others run as fast is for rows of theirs to say.
    """
    outside = np.flatnonzero(~prediction.in_envelope)
    if not len(outside):
        return prediction
    asked = replace(ops, columns={name: np.asarray(values)[outside] for name, values in ops.columns.items()})
    slower = np.ones(len(prediction))
    slower[outside] = np.maximum(analytical.roofline_us(asked, device) / prediction.latency_us[outside], 1.0)
    latency, low, high = (us * slower for us in (prediction.latency_us, prediction.low_us, prediction.high_us))
    return Prediction(latency, low, high, prediction.in_envelope)


def _is_communication(kind: str) -> bool:
    return KINDS[kind].family in COMMUNICATION


def _only_matrix_units(predictor: Predictor, kind: str, dtype: str) -> bool:
    """Whether ordinary lanes would run products that a predictor knows from matrix units alone, which says nothing."""
    products = dtype == "fp32" and KINDS[kind].family == "gemm"
    return products and "fp32" not in predictor.card.get("dtypes", ("fp32",))
