"""What is asked of several chips, as frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...datasets.clusters import load_cluster
from ...datasets.loading import check_fields, number
from ...models.power import Limits
from ..question.canonical import RequestError
from ..question.declaration import setting
from ..question.requests import SimulateRequest, StepQuestion


@dataclass(frozen=True)
class CompareRequest(StepQuestion):
    """The workload of ``step`` on its cluster and on ``others`` with as many GPUs, each under all ``power_caps_w``.

    ``prices`` are those of a GPU-hour, by the name of the cluster; ``price_per_gpu_hour`` of the step is that of its
    own cluster.
    """

    step: SimulateRequest = field(
        default_factory=lambda: SimulateRequest(model="llama3_8b", cluster=load_cluster("dgx_h100")),
        metadata={"hidden": True},
    )
    others: tuple[str, ...] = setting((), "names in conf/cluster that are compared with cluster=…, with as many GPUs")
    prices: Mapping[str, float | None] = setting(
        {}, "of a GPU-hour of each, such as {dgx_h200: 3.1}; null: no price, or its own"
    )
    power_caps_w: tuple[float, ...] = setting((), "watts that each GPU is held to in turn, beside its own limit")
    price_per_kwh: float = setting(0.0, "of electricity, where it is paid beside the GPU-hour")
    measure_minutes: float = setting(60.0, "of measuring on each chip: how narrow intervals get by it is told")
    pue: float = setting(1.0, "of the building: all power over that of the machines", least=1)

    def __post_init__(self) -> None:
        check_fields(self, RequestError)
        for name in ("others", "power_caps_w"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, (str, int, float)) else tuple(value))
        if self.step.cluster is None:
            raise RequestError(
                "chips are compared on clusters: cluster=dgx_h100 others=[dgx_h200] (`opcast list clusters`)"
            )
        if self.step.file is not None:
            raise RequestError("workload=simai names no model: take a workload such as train or decode")
        if not self.others and not self.power_caps_w:
            raise RequestError("nothing to compare: name others=[dgx_h200], or power_caps_w=[500,400]")
        for name in self.others:
            if not isinstance(name, str):
                raise RequestError(f"others has {name!r}: name clusters, such as others=[dgx_h200]")
            load_cluster(name)
        names = (self.step.cluster.id, *self.others)
        if len(set(names)) < len(names):
            raise RequestError(f"others={list(self.others)} names a cluster twice, or that of cluster={names[0]}")
        for name, price in self.prices.items():
            if name not in names:
                raise RequestError(f"prices has {name}, which is not compared: {', '.join(names)} are")
            if price is not None:
                number(RequestError, f"prices.{name}", price)
        for watts in self.power_caps_w:
            Limits(watts)
        if self.power_caps_w and self.step.power_cap_w is not None:
            raise RequestError("power_cap_w and power_caps_w both hold GPUs back: leave power_cap_w out")
