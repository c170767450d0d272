"""What a source of foreign measurements is told beside its path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..devices import Device, device_id_of, load_device
from ..loading import choice
from ..ops import LINKS
from .tables import SourceError


@dataclass(frozen=True)
class ImportOptions:
    """Null or empty is not given. A source says in its ``OPTIONS`` which of these it takes, and what they mean there.

    ``device`` is an id, or the figures of a device that nobody else knows: they are kept in the store. SourceError for
    a link that does not exist.
    """

    device: Device | str | None = None
    systems: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    frameworks: tuple[str, ...] = ()
    link: str | None = None
    collective: str | None = None
    measured_at: str | None = None
    mapping: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.device, str):
            object.__setattr__(self, "device", device_id_of(self.device))
        if self.link is not None:
            choice(SourceError, "link", self.link, LINKS)

    @property
    def device_id(self) -> str | None:
        """The id of the device that was given."""
        return self.device.id if isinstance(self.device, Device) else self.device

    def figures(self, device_id: str) -> Device:
        """The figures of a device: those given, or those that ship. DeviceError for an unknown one."""
        device = self.device
        return device if isinstance(device, Device) and device.id == device_id else load_device(device_id)

    def check(self, source: str, taken: Mapping[str, Any]) -> None:
        """SourceError for an option that was given to a source which does not take it."""
        for field in fields(self):
            if getattr(self, field.name) and field.name not in taken:
                takes = ", ".join(taken) or "none"
                raise SourceError(f"source={source} takes no {field.name}=…; its settings: {takes}")
