"""Constants of :mod:`.law` by kind of device, fitted on NCCL measurements of one node; what NICs reach comes on top.

Fitted on every second (collective, ranks) of aiconfigurator's NCCL tables; ``docs/network.md`` has the errors on the
other half. Between nodes, public nccl-tests runs reach 0.92 to 0.95 of the NICs in all-reduce, and in all-to-all 0.92
over two nodes and 0.78 over four (Oracle's and CoreWeave's documentation).
"""

from __future__ import annotations

from ...datasets.devices import Device
from .law import Tuning

TUNINGS = {
    "ampere": Tuning(base=1.4, hop=1.3, bulk_us=12.0, ring=0.76, copy=1.4, exchange=0.72, peer_us=0.6),
    "hopper": Tuning(base=0.92, hop=0.99, bulk_us=5.9, ring=0.796, copy=1.64, nvls=0.56, exchange=0.66, peer_us=0.9),
    "blackwell": Tuning(
        base=1.29, hop=1.97, bulk_us=20.7, ring=0.79, copy=1.65, nvls=0.478, exchange=0.55, peer_us=0.34
    ),
    "pcie": Tuning(base=0.9, hop=1.3, bulk_us=6.0, ring=0.45, copy=4.0, exchange=0.35, peer_us=1.0),
}
USUAL = Tuning()


def tuning(device: Device, link: str) -> Tuning:
    """The constants for devices of a kind that talk over ``link`` inside a node."""
    if link == "pcie" or not device.link_gbps:
        return TUNINGS["pcie"]
    return TUNINGS.get(device.architecture, USUAL)
