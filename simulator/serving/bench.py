"""What making a replica needs of a workbench: devices, engines and traced graphs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ...datasets.clusters import Cluster
    from ...datasets.devices import Device
    from ..engines import FusedEngine
    from ..question.network import NetworkChoice
    from ..question.plan import Plan
    from ..question.sources import Sources


class ServingBench(Protocol):
    """The part of a workbench that answers for steps."""

    sources: Sources

    def device(self, id_or_device: Device | str, cluster: Cluster | None = None) -> Device:
        """The figures of a device."""

    def engine_with_links(
        self, device: Device, cluster: Cluster | None, network: NetworkChoice, plan: Plan | None = None
    ) -> FusedEngine:
        """The engines of a device."""

    @property
    def stamp(self) -> tuple[int, ...]:
        """What changes when a measurement or predictor is added."""

    @property
    def graphs(self) -> Path:
        """The folder of traced graphs."""
