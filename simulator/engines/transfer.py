"""Answers for what nobody measured, from the nearest of what somebody did (``models/kinship.py``).

A device without predictors is answered by those of its kin; a kind without any by another kind's, whose kernels work
alike (``models/donors.py``), on the device itself or its kin. The nearest device goes first; on it, the kind itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...datasets.backends import framework
from ...datasets.devices import RATE_OF, Device, DeviceError, load_device
from ...datasets.launches import ANYONE, Caller
from ...datasets.ops import KINDS
from ...datasets.row_checks import unit_of
from ...models.choice import ALIKE, KIN
from ...models.donors import ANY_FORMAT, Donor, able, donors, group
from ...models.intervals import Intervals
from ...models.kinship import OWN, TIERS, Kin, constant, errors, recast_share, recast_widths, voices, wider
from ...models.predictor import Predictor
from ...models.registry import Registry
from .answers import Answers, Columns
from .coverage import apart, rescale_bounds, widen_for_labs
from .learned import COMMUNICATION, NEAR_TIERS, LearnedEngine
from .library import row_sources
from .masks import each_mask

TIER_ORDER = (OWN, *TIERS)
MEMORY_BOUND_FAMILIES = ("norm", "pointwise", "optimizer", "copy")  # families that wait for memory
PredictorPlace = tuple[Device, Registry, str]  # a device, where its predictor lies, and of which backend that is


@dataclass(frozen=True)
class TransferEngine:
    """Asks the kin of a device that have learned the kind in the format, or in one that runs on the same units.

    Where no backend is asked for, kinds alike too. Declines what neither has learned, and what answers from as far were
    no nearer to the truth than physics. ``backend`` counts by its framework, ``preferences`` order several; with
    ``calls`` one with these words in its name answers. Who is ``named`` runs no other framework's kernel: near kin
    answer, though kin of another framework are nearer. With ``inside_cluster`` communication is left to the network,
    which knows the links. Attention without a mask is asked by its head size, of an engine for each: ``unmasked``
    (:mod:`.masks`).
    """

    device: Device
    registries: Sequence[Registry]
    backend: str | None = None
    inside_cluster: bool = False
    preferences: Sequence[str] | None = None
    name: str = "transfer"
    caller: Caller = ANYONE
    unmasked: int = 0
    calls: str = ""
    named: bool = False
    _found: dict[tuple[str, str], Kin | None] = field(default_factory=dict, init=False, compare=False, repr=False)
    of_head: dict[int, TransferEngine] = field(default_factory=dict, init=False, compare=False, repr=False)

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        by_mask = each_mask(self, kind, columns, dtype, out_dtype, cache)
        if by_mask is not None:
            return by_mask
        answers = Answers.declined(len(next(iter(columns.values()))))
        communication = KINDS[kind].family in COMMUNICATION
        kin = None if communication and self.inside_cluster else self.kin(kind, dtype)
        if kin is not None:
            prediction = kin.predict(columns, dtype, out_dtype, self.device, cache)
            answers.latency_us[:] = prediction.latency_us
            measured_by_labs = (
                kin.donor is not None and not kin.donor.partly
            )  # found on tables of several labs: held already
            lab = apart("" if measured_by_labs else KINDS[kind].family, kin.predictors[0].card, prediction.latency_us)
            bounds = rescale_bounds(
                prediction.latency_us, prediction.low_us, prediction.high_us, kin.intervals.coverage
            )
            answers.low_us[:], answers.high_us[:] = widen_for_labs(prediction.latency_us, *bounds, lab)
            answers.in_envelope[:] = prediction.in_envelope
            answers.engine[:] = self.name
            answers.predictor[:] = kin.name
            same_device = kin.tier == OWN
            answers.clause[:], answers.source[:] = (ALIKE, row_sources(*kin.predictors)) if same_device else (KIN, KIN)
            if communication:  # over links that kin do not have, their answers say nothing
                answers.latency_us[~prediction.in_envelope] = np.nan
            answers.latency_us[~able(kind, columns)] = np.nan
        return answers

    def kin(self, kind: str, dtype: str) -> Kin | None:
        """Who answers for a kind and format, looked up once. PredictorError when one of them cannot be used."""
        if (kind, dtype) not in self._found:
            candidates = () if self.device.synchronous else self._candidates(kind, dtype)
            self._found[kind, dtype] = min(candidates, key=lambda kin_: TIER_ORDER.index(kin_.tier), default=None)
        return self._found[kind, dtype]

    def _candidates(self, kind: str, dtype: str) -> Iterator[Kin]:
        """Kin that have learned the kind, then whoever has learned one alike.

        Kernels of a framework differ less than chips: those of kin that are further away than another's are left out.
        """
        for kin in self._learners(kind, dtype):
            anyone = replace(self, backend=None, calls="")
            nearest = next(anyone._learners(kind, dtype), kin) if self.backend is not None else kin
            reach = TIERS.index(NEAR_TIERS[-1] if self.named else nearest.tier)
            if TIERS.index(kin.tier) <= reach:
                yield kin
        widths = recast_widths(kind, group(kind))
        for donor in donors(kind) if self.backend is None else ():
            if donor.kind in widths:
                recast = replace(donor, share=recast_share(kind, donor))
                yield from self.recast(kind, recast, dtype, errors().get(donor.kind, {}), widths[donor.kind])

    def _learners(self, kind: str, dtype: str) -> Iterator[Kin]:
        """Kin that have learned the kind: nobody, or one."""
        waits = KINDS[kind].family in MEMORY_BOUND_FAMILIES
        intervals, widths = errors().get(kind, {}), recast_widths(kind, group(kind))
        if not intervals:  # no two kin have the kind: chips differ in a backward pass as in the forward one
            intervals = {
                tier: wider(interval, widths[donor.kind])
                for donor in donors(kind)
                if donor.partly and donor.kind in widths
                for tier, interval in errors().get(donor.kind, {}).items()
            }
        if intervals:
            yield from self._first(kind, (dtype, *(ANY_FORMAT if waits else RATE_OF.get(dtype, ()))), intervals)

    def recast(
        self, kind: str, donor: Donor, dtype: str, intervals: Mapping[str, Intervals], width: float
    ) -> Iterator[Kin]:
        """Who has learned a donor of the kind, on the device itself or on kin that ``intervals`` has intervals of.

        ``width`` is half of what answers of another kind miss by, in ln units. Nobody, or one.
        """
        for kin in self._first(donor.kind, donor.formats(dtype), intervals, donor):
            widened = constant(width) if kin.tier == OWN else wider(kin.intervals, width)
            yield replace(kin, donor=donor, kind=kind, intervals=widened)

    def _first(
        self, kind: str, dtypes: Sequence[str], intervals: Mapping[str, Intervals], donor: Donor | None = None
    ) -> Iterator[Kin]:
        """Who answers in the first of the formats that anybody has learned; nobody, or one.

        Products of a format that the device has no units for tell nothing that its features could say.
        """
        able_dtypes = [name for name in dtypes if unit_of(kind) != "tensor" or self.device.supports(name)]
        kin_by_format = (self._nearest(kind, dtype, intervals, donor) for dtype in able_dtypes)
        yield from list(filter(None, kin_by_format))[:1]

    def _nearest(self, kind: str, dtype: str, intervals: Mapping[str, Intervals], donor: Donor | None) -> Kin | None:
        """The device itself, asked as another kind, or the nearest kin that ``intervals`` are known of."""
        framework_name = self.backend and framework(self.backend)
        calls = donor.calls if donor is not None else self.calls
        unmasked = self.unmasked if donor is None else 0  # what carries over was told of the table with most rows
        places = {
            candidate[0].id: candidate
            for candidate in learned_places(
                self.registries, kind, dtype, framework_name, self.preferences, calls, self.caller, unmasked
            )
        }
        for name in (self.device.id, self.device.variant_of) if donor is not None else ():
            own_predictor = _predictor(kind, places[name]) if name in places else None
            if own_predictor is not None:
                return Kin(OWN, (own_predictor,), (1.0,), dtype, own_predictor.intervals, donor)
        devices = [device for device, *_ in places.values()]
        for min_tier in TIERS:
            reached_tier, shares = voices(self.device, devices, dtype, min_tier)
            if shares and reached_tier in intervals:
                predictors = [_predictor(kind, places[name]) for name in shares]
                return Kin(
                    reached_tier,
                    [predictor for predictor in predictors if predictor],
                    list(shares.values()),
                    dtype,
                    intervals[reached_tier],
                )
        return None


@dataclass(frozen=True)
class NearFormatEngine:
    """Answers by near kin of a framework what its ``table`` of this device leaves to them; declines all else.

    B200's table of vLLM has experts of 4-bit weights, those of GB200, B300 and GB300 have them in more bits alone.
    """

    table: LearnedEngine
    kin: TransferEngine
    name: str = "transfer"

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        if not self.table.leaves_to_kin(kind, dtype):
            return Answers.declined(len(next(iter(columns.values()))))
        return self.kin.answer(kind, columns, dtype, out_dtype, cache)


def _predictor(kind: str, candidate: PredictorPlace) -> Predictor | None:
    device, registry, backend = candidate
    return registry.find(kind, device.id, backend)


def learned_places(
    registries: Sequence[Registry],
    kind: str,
    dtype: str,
    backend: str | None,
    preferences: Sequence[str] | None,
    calls: str = "",
    caller: Caller = ANYONE,
    unmasked: int = 0,
) -> list[PredictorPlace]:
    """Each device with a predictor of the kind that has learned the format, where it lies, and of which backend.

    With ``calls`` of the backends that have it in their names, the one with most rows of each device.
    """
    places: dict[str, PredictorPlace] = {}
    for registry in registries:
        for device_id in registry.devices():
            try:
                device = load_device(device_id)
            except DeviceError:  # measured by the user, or learned from several
                continue
            if calls:
                name = registry.calling(kind, device_id, calls, dtype, backend)
            else:
                name = registry.learned(kind, device_id, backend, dtype, preferences, caller, unmasked)
            if name is not None:
                places.setdefault(device_id, (device, registry, name))
    return list(places.values())
