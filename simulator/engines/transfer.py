"""Answers for devices that nobody measured, from the predictors of their nearest kin (``models/kinship.py``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...datasets.backends import framework
from ...datasets.devices import RATE_OF, Device, DeviceError, load_device
from ...datasets.ops import KINDS
from ...models.intervals import Intervals
from ...models.kinship import TIERS, Kin, errors, tier, voices
from ...models.registry import Registry
from .answers import Answers, Columns
from .coverage import brought
from .learned import COMMUNICATION


@dataclass(frozen=True)
class TransferEngine:
    """Asks the kin of a device that have learned the kind in the format, or in one that runs on the same units.

    Declines kinds that no kin has learned, or whose answers from kin as far were no nearer to the truth than physics.
    ``backend`` counts by its framework, ``preferences`` order several. With ``inside_cluster`` communication is left to
    the network, which knows the links.
    """

    device: Device
    registries: Sequence[Registry]
    backend: str | None = None
    inside_cluster: bool = False
    preferences: Sequence[str] | None = None
    name: str = "transfer"
    _found: dict[tuple[str, str], Kin | None] = field(default_factory=dict, init=False, compare=False, repr=False)

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        answers = Answers.declined(len(next(iter(columns.values()))))
        communication = KINDS[kind].family in COMMUNICATION
        kin = None if communication and self.inside_cluster else self.kin(kind, dtype)
        if kin is not None:
            found = kin.predict(columns, dtype, out_dtype, self.device, cache)
            answers.latency_us[:] = found.latency_us
            answers.low_us[:], answers.high_us[:] = brought(
                found.latency_us, found.low_us, found.high_us, kin.intervals.coverage
            )
            answers.in_envelope[:] = found.in_envelope
            answers.engine[:] = self.name
            answers.predictor[:] = kin.name
            if communication:  # over links that kin do not have, their answers say nothing
                answers.latency_us[~found.in_envelope] = np.nan
        return answers

    def kin(self, kind: str, dtype: str) -> Kin | None:
        """Who answers for a kind and format, looked up once. PredictorError when one of them cannot be used."""
        if (kind, dtype) not in self._found:
            self._found[kind, dtype] = self._find(kind, dtype)
        return self._found[kind, dtype]

    def _find(self, kind: str, dtype: str) -> Kin | None:
        known = {} if self.device.synchronous else errors().get(kind, {})
        for each in (dtype, *RATE_OF.get(dtype, ())) if known else ():
            found = self._of_format(kind, each, known)
            if found is not None:
                return found
        return None

    def _of_format(self, kind: str, dtype: str, known: Mapping[str, Intervals]) -> Kin | None:
        others = {
            device.id: (device, path, name)
            for device, path, name in learned(
                self.registries, kind, dtype, self.backend and framework(self.backend), self.preferences
            )
        }
        devices = [device for device, *_ in others.values()]
        for least in TIERS:
            found, heard = voices(self.device, devices, dtype, least)
            if heard and found in known:
                predictors = [others[name][1].find(kind, name, others[name][2]) for name in heard]
                whole = [each for each in predictors if each is not None]
                return Kin(found, whole, list(heard.values()), dtype, known[found])
        return None


def is_kin(device: Device, device_id: str) -> bool:
    """Whether predictors of another device may answer for a device, near or far."""
    try:
        return tier(device, load_device(device_id), "bf16") is not None
    except DeviceError:  # measured by the user, or learned from several
        return False


def learned(
    registries: Sequence[Registry], kind: str, dtype: str, backend: str | None, preferences: Sequence[str] | None
) -> list[tuple[Device, Registry, str]]:
    """Each device with a predictor of the kind that has learned the format, where it lies, and of which backend."""
    found: dict[str, tuple[Device, Registry, str]] = {}
    for registry in registries:
        for device_id in registry.devices():
            try:
                device = load_device(device_id)
            except DeviceError:  # measured by the user, or learned from several
                continue
            name = registry.learned(kind, device_id, backend, dtype, preferences)
            if name is not None:
                found.setdefault(device_id, (device, registry, name))
    return list(found.values())
