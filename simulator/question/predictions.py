"""What is asked about single ops, collectives and transfers (:class:`PredictRequest`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...datasets.clusters import Cluster
from ...datasets.devices import Device
from ...datasets.loading import choice, flag
from ...datasets.ops import Op, OpError, make_op
from ...models.power import Limits
from ..network.transfers import Transfer
from .canonical import Request, RequestError
from .declaration import setting
from .network import NetworkChoice, needs_cluster, shown
from .place import THIS_MACHINE, looked_up, shipped
from .sources import Sources

CACHES = ("warm", "cold")
OF_LIMITS = {
    "power_cap_w": "the watts a device may draw at most: latency, power and energy under that cap",
    "sm_clock_mhz": "the clock that compute units sustain, where it lies below the device's",
}
OF_LINKS = ("group", "stride", "all_groups", "algorithm", "loads", "transfers")


@dataclass(frozen=True)
class PredictRequest(Request):
    """How long ops take on a device, or collectives and transfers on the links of a cluster.

    ``group`` are the devices that run a collective, else the first ``ranks`` that lie ``stride`` apart; with
    ``all_groups`` all groups like it run it at once; with ``loads`` the answer says what its links
    carry. ``transfers``, called ``names``, stand in place of ops.
    """

    ops: tuple[Op, ...] = setting((), hidden=True)
    device: Device | str = setting(THIS_MACHINE, "what runs it", chosen=True)
    cluster: Cluster | None = setting(None, "the devices and their links, for collectives", chosen=True)
    cache: str = setting("warm", "warm | cold: whether inputs lie in the last-level cache")
    limits: Limits = setting(Limits, hidden=True, words=OF_LIMITS)
    group: tuple[int, ...] | None = setting(
        None, "the devices that run it, as a list: [0,8,16,24]; default: the first op.ranks"
    )
    stride: int | None = setting(None, "or op.ranks devices so far apart: stride=8 takes one of each node of eight")
    all_groups: bool = setting(False, "while all groups of as many devices as far apart run it too")
    algorithm: str | None = setting(
        None, "ring | tree | nvls | collnet | direct | pairwise | halving_doubling | hierarchical; default: NCCL's"
    )
    loads: bool = setting(False, hidden=True)
    transfers: tuple[Transfer, ...] = setting((), hidden=True)
    names: tuple[str, ...] = setting((), hidden=True)
    network: NetworkChoice = setting(NetworkChoice, group="")
    sources: Sources = setting(Sources, group="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", shipped(self.device))
        choice(RequestError, "cache", self.cache, CACHES)
        flag(RequestError, "all_groups", self.all_groups)
        if self.transfers:
            for name in ("group", "stride", "all_groups", "algorithm"):
                if getattr(self, name):
                    raise RequestError(
                        f"{name}={getattr(self, name)} is for op=…: in transfers=… every entry has its own"
                    )
        if self.cluster is None:
            for setting_text in self.of_links():
                raise needs_cluster(setting_text)
        elif self.cluster.topology:
            from ..network.build import check_settings

            check_settings(self.cluster.topology)

    def of_links(self) -> list[str]:
        """What only links can answer, as the command line has it."""
        settings = [f"{name}={shown(getattr(self, name))}" for name in OF_LINKS if getattr(self, name)]
        return settings + self.network.said(self.cluster)

    @classmethod
    def named(cls, values: dict[str, Any]) -> dict[str, Any]:
        ops = [item if isinstance(item, Op) else _op(item) for item in values.get("ops") or ()]
        transfers = [_transfer(item) for item in values.get("transfers") or ()]
        return looked_up(values) | {"ops": ops, "transfers": transfers}


def _op(values: Any) -> Op:
    """The op of ``Op.to_dict``; OpError for what it cannot be."""
    if not isinstance(values, Mapping) or "kind" not in values:
        raise OpError(f"ops has {values!r}; an op is a mapping with its kind, dims and dtype")
    return make_op(values["kind"], **{str(name): value for name, value in values.items() if name != "kind"})


def _transfer(values: Any) -> list[Any]:
    """The fields of a transfer in order, as the loader takes them."""
    if isinstance(values, Transfer):
        return list(values)
    names = Transfer._fields
    if not isinstance(values, Mapping) or not set(values) <= set(names) or not set(names[:3]) <= set(values):
        raise RequestError(f"transfers has {values!r}; a transfer is a mapping of {', '.join(names)}")
    return list(Transfer(**values))
