"""What a question that is made of others asks of the workbench: devices, engines, traced graphs, and steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ...datasets.clusters import Cluster
    from ...datasets.devices import Device
    from ..question.network import NetworkChoice
    from ..question.plan import Plan
    from ..question.predictions import PredictRequest
    from ..question.requests import SimulateRequest
    from .fused import FusedEngine


class Bench(Protocol):
    """The part of a workbench that serving, searches, plans and post-training are built on."""

    def device(self, given: Device | str, cluster: Cluster | None = None) -> Device:
        """The figures of a device."""

    def engine(self, device: Device, cluster: Cluster | None = None) -> FusedEngine:
        """The engines of a device, alone or in a cluster."""

    def engine_with_links(
        self, device: Device, cluster: Cluster | None, network: NetworkChoice, plan: Plan | None = None
    ) -> FusedEngine:
        """The engines of a device whose collectives run over a simulated network."""

    @property
    def graphs(self) -> Path:
        """The folder of traced graphs."""

    @property
    def stamp(self) -> tuple[int, ...]:
        """What changes when a measurement or predictor is added."""

    def predict(self, request: PredictRequest) -> list[Any]:
        """The predictions of ops."""

    def simulate(self, request: SimulateRequest) -> Any:
        """The report of a step."""

    def search(self, request: Any) -> Any:
        """The best layouts: the report of a search."""
