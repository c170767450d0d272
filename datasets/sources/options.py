"""What a source of foreign measurements is told beside its path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..devices import device_id_of
from ..loading import choice
from ..ops import LINKS
from .tables import SourceError


@dataclass(frozen=True)
class ImportOptions:
    """Null or empty is not given. A source says in its ``OPTIONS`` which of these it takes, and what they mean there.

    SourceError for a link that does not exist.
    """

    device: str | None = None
    systems: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    frameworks: tuple[str, ...] = ()
    link: str | None = None
    collective: str | None = None
    measured_at: str | None = None
    mapping: str | None = None

    def __post_init__(self) -> None:
        if self.device is not None:
            object.__setattr__(self, "device", device_id_of(self.device))
        if self.link is not None:
            choice(SourceError, "link", self.link, LINKS)

    def check(self, source: str, taken: Mapping[str, Any]) -> None:
        """SourceError for an option that was given to a source which does not take it."""
        for each in fields(self):
            if getattr(self, each.name) and each.name not in taken:
                takes = ", ".join(taken) or "none"
                raise SourceError(f"source={source} takes no {each.name}=…; its settings: {takes}")
