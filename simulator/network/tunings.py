"""Constants of :mod:`.law` by kind of device, fitted on NCCL measurements of one node; what NICs reach comes on top.

Fitted on every second (collective, ranks) of aiconfigurator's NCCL tables; ``docs/network.md`` has the errors on the
other half. Between nodes, public nccl-tests runs reach 0.92 to 0.95 of the NICs in all-reduce, and in all-to-all 0.92
over two nodes and 0.78 over four (Oracle's and CoreWeave's documentation).
"""

from __future__ import annotations

from ...datasets.devices import Device
from .law import Tuning

TUNINGS = {
    "h100_sxm": Tuning(0.77, 1.30, 1.8, 0.88, 1.10, 0.574, 61.0, 0.77, 0.38),
    "h200_sxm": Tuning(0.74, 1.45, 1.1, 0.89, 1.16, 0.578, 52.0, 0.82, 0.37),
    "a100_sxm_80gb": Tuning(1.48, 1.44, 6.7, 0.74, 1.56, 0.0, 50.0, 0.70, 0.48),
    "b200_sxm": Tuning(1.17, 2.13, 0.4, 0.86, 1.06, 0.470, 40.0, 0.64, 0.30),
    "gb200": Tuning(1.29, 1.97, 0.1, 0.74, 2.64, 0.470, 40.0, 0.58, 0.26),
    "rtx_pro_6000_server": Tuning(0.55, 1.64, 0.5, 0.43, 9.0, 0.0, 50.0, 0.36, 1.18),
}
ALIKE = {"hopper": "h100_sxm", "ampere": "a100_sxm_80gb", "blackwell": "b200_sxm"}
USUAL = Tuning()


def tuning(device: Device, link: str) -> Tuning:
    """The constants for devices of a kind that talk over ``link`` inside a node."""
    if link == "pcie" or not device.link_gbps:
        return TUNINGS["rtx_pro_6000_server"]
    return TUNINGS.get(device.id) or TUNINGS.get(ALIKE.get(device.architecture, ""), USUAL)
