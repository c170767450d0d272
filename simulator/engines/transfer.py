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
from ...datasets.ops import KINDS
from ...models.choice import ALIKE, ANYONE, KIN, Caller
from ...models.donors import ANY_FORMAT, Donor, able, donors, group
from ...models.intervals import Intervals
from ...models.kinship import OWN, TIERS, Kin, constant, errors, recast_share, recast_widths, tier, voices, wider
from ...models.predictor import Predictor
from ...models.registry import Registry
from .answers import Answers, Columns
from .coverage import apart, between_labs, brought
from .learned import COMMUNICATION
from .library import source_of

NEARNESS = (OWN, *TIERS)
WAITING = ("norm", "pointwise", "optimizer", "copy")  # families that wait for memory
Place = tuple[Device, Registry, str]  # a device, where its predictor lies, and of which backend that is


@dataclass(frozen=True)
class TransferEngine:
    """Asks the kin of a device that have learned the kind in the format, or in one that runs on the same units.

    Where no backend is asked for, kinds alike too. Declines what neither has learned, and what answers from as far were
    no nearer to the truth than physics. ``backend`` counts by its framework, ``preferences`` order several. With
    ``inside_cluster`` communication is left to the network, which knows the links.
    """

    device: Device
    registries: Sequence[Registry]
    backend: str | None = None
    inside_cluster: bool = False
    preferences: Sequence[str] | None = None
    name: str = "transfer"
    caller: Caller = ANYONE
    _found: dict[tuple[str, str], Kin | None] = field(default_factory=dict, init=False, compare=False, repr=False)

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        answers = Answers.declined(len(next(iter(columns.values()))))
        communication = KINDS[kind].family in COMMUNICATION
        kin = None if communication and self.inside_cluster else self.kin(kind, dtype)
        if kin is not None:
            found = kin.predict(columns, dtype, out_dtype, self.device, cache)
            answers.latency_us[:] = found.latency_us
            by_labs = kin.donor is not None and not kin.donor.partly  # found on tables of several labs: held already
            lab = apart("" if by_labs else KINDS[kind].family, kin.predictors[0].card, found.latency_us)
            held = brought(found.latency_us, found.low_us, found.high_us, kin.intervals.coverage)
            answers.low_us[:], answers.high_us[:] = between_labs(found.latency_us, *held, lab)
            answers.in_envelope[:] = found.in_envelope
            answers.engine[:] = self.name
            answers.predictor[:] = kin.name
            here = kin.tier == OWN
            answers.clause[:], answers.source[:] = (ALIKE, source_of(*kin.predictors)) if here else (KIN, KIN)
            if communication:  # over links that kin do not have, their answers say nothing
                answers.latency_us[~found.in_envelope] = np.nan
            answers.latency_us[~able(kind, columns)] = np.nan
        return answers

    def kin(self, kind: str, dtype: str) -> Kin | None:
        """Who answers for a kind and format, looked up once. PredictorError when one of them cannot be used."""
        if (kind, dtype) not in self._found:
            known = () if self.device.synchronous else self._candidates(kind, dtype)
            self._found[kind, dtype] = min(known, key=lambda each: NEARNESS.index(each.tier), default=None)
        return self._found[kind, dtype]

    def _candidates(self, kind: str, dtype: str) -> Iterator[Kin]:
        """Kin that have learned the kind, then whoever has learned one alike."""
        waits = KINDS[kind].family in WAITING
        known = errors().get(kind, {})
        if known:
            yield from self._first(kind, (dtype, *(ANY_FORMAT if waits else RATE_OF.get(dtype, ()))), known)
        widths = recast_widths(kind, group(kind))
        for donor in donors(kind) if self.backend is None else ():
            if donor.kind in widths:
                part = replace(donor, share=recast_share(kind, donor))
                yield from self.recast(kind, part, dtype, errors().get(donor.kind, {}), widths[donor.kind])

    def recast(
        self, kind: str, donor: Donor, dtype: str, known: Mapping[str, Intervals], width: float
    ) -> Iterator[Kin]:
        """Who has learned a donor of the kind, on the device itself or on kin that ``known`` has intervals of.

        ``width`` is half of what answers of another kind miss by, in ln units. Nobody, or one.
        """
        for found in self._first(donor.kind, donor.formats(dtype), known, donor):
            near = constant(width) if found.tier == OWN else wider(found.intervals, width)
            yield replace(found, donor=donor, kind=kind, intervals=near)

    def _first(
        self, kind: str, dtypes: Sequence[str], known: Mapping[str, Intervals], donor: Donor | None = None
    ) -> Iterator[Kin]:
        """Who answers in the first of the formats that anybody has learned; nobody, or one."""
        found = (self._nearest(kind, dtype, known, donor) for dtype in dtypes)
        yield from list(filter(None, found))[:1]

    def _nearest(self, kind: str, dtype: str, known: Mapping[str, Intervals], donor: Donor | None) -> Kin | None:
        """The device itself, asked as another kind, or kin as near as there are any that ``known`` has intervals of."""
        wanted = self.backend and framework(self.backend)
        calls = donor.calls if donor is not None else ""
        places = {
            each[0].id: each
            for each in learned(self.registries, kind, dtype, wanted, self.preferences, calls, self.caller)
        }
        for name in (self.device.id, self.device.variant_of) if donor is not None else ():
            own = _predictor(kind, places[name]) if name in places else None
            if own is not None:
                return Kin(OWN, (own,), (1.0,), dtype, own.intervals, donor)
        devices = [device for device, *_ in places.values()]
        for least in TIERS:
            found, heard = voices(self.device, devices, dtype, least)
            if heard and found in known:
                predictors = [_predictor(kind, places[name]) for name in heard]
                return Kin(found, [each for each in predictors if each], list(heard.values()), dtype, known[found])
        return None


def _predictor(kind: str, place: Place) -> Predictor | None:
    device, registry, backend = place
    return registry.find(kind, device.id, backend)


def is_kin(device: Device, device_id: str) -> bool:
    """Whether predictors of another device may answer for a device, near or far."""
    try:
        return tier(device, load_device(device_id), "bf16") is not None
    except DeviceError:  # measured by the user, or learned from several
        return False


def learned(
    registries: Sequence[Registry],
    kind: str,
    dtype: str,
    backend: str | None,
    preferences: Sequence[str] | None,
    calls: str = "",
    caller: Caller = ANYONE,
) -> list[Place]:
    """Each device with a predictor of the kind that has learned the format, where it lies, and of which backend.

    With ``calls`` of the backends that have it in their names, the one with most rows of each device.
    """
    found: dict[str, Place] = {}
    for registry in registries:
        for device_id in registry.devices():
            try:
                device = load_device(device_id)
            except DeviceError:  # measured by the user, or learned from several
                continue
            if calls:
                name = registry.calling(kind, device_id, calls, dtype)
            else:
                name = registry.learned(kind, device_id, backend, dtype, preferences, caller)
            if name is not None:
                found.setdefault(device_id, (device, registry, name))
    return list(found.values())
