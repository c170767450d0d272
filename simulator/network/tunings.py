"""Constants of :mod:`.law` by kind of device, fitted on NCCL measurements of one node; what NICs reach comes on top.

Fitted on half of the groups (a collective on so many ranks) of aiconfigurator's NCCL tables; ``docs/network.md`` has
the errors on the other half. Between nodes, public nccl-tests runs reach 0.92 to 0.95 of the NICs in all-reduce, and
in all-to-all 0.92 over two nodes and 0.78 over four (Oracle's and CoreWeave's documentation).
"""

from __future__ import annotations

from ...datasets.devices import Device
from .law import Tuning

# base, hop, line_hop, bulk_us, step_us, overlap; ring, copy, ll, line, channel_gbps, gather; nvls, nvls_us,
# nvls_wait_us; exchange, exchange_us, fill, peer_us; beyond, crowd. Groups of four GB200 do not use NVLS: as B200.
TUNINGS = {
    "h100_sxm": Tuning(
        *(0.767, 1.13, 0.434, 9.57, 4.24, 0.84),
        *(0.934, 1.12, 0.406, 0.779, 18.2, 1.4),
        *(0.614, 23.7, 9.21),
        *(0.8, 11.3, 0.239, 0.443),
    ),
    "h200_sxm": Tuning(
        *(0.738, 1.26, 0.779, 9.72, 5.04, 1.04),
        *(0.886, 1.22, 0.387, 0.801, 16.1, 1.24),
        *(0.645, 22.8, 10.2),
        *(0.853, 10.5, 0.248, 0.436),
    ),
    "a100_sxm_80gb": Tuning(
        *(1.44, 1.34, 0.465, 22.7, 6.4, 0.963),
        *(0.772, 1.76, 0.326, 0.691, 22.3, 1.3),
        *(0.0, 30.0, 9.0),
        *(0.738, 13.2, 0.585, 0.674),
    ),
    "b200_sxm": Tuning(
        *(1.22, 1.82, 1.0, 10.6, 11.7, 1.84),
        *(0.815, 0.969, 0.313, 0.8, 13.0, 1.09),
        *(0.534, 29.4, 18.2),
        *(0.672, 15.6, 0.186, 0.329),
    ),
    "gb200": Tuning(
        *(1.27, 1.68, 1.0, 9.15, 13.0, 1.79),
        *(0.828, 0.941, 0.245, 0.8, 7.67, 0.893),
        *(0.534, 29.4, 18.2),
        *(0.677, 15.0, 0.188, 0.41),
    ),
}
PCIE_TUNINGS = {
    "rtx_pro_6000_server": Tuning(
        *(0.604, 1.57, 1.0, 13.2, 1.92, 1.19),
        *(0.73, 1.41, 0.36, 0.8, 123.0, 0.889),
        *(0.0, 30.0, 9.0),
        *(0.752, 11.4, 0.124, 0.997),
        *(0.594, 0.166),
    ),
    "l40s": Tuning(  # a host whose cards do not reach each other, but through its memory
        *(0.701, 1.1, 1.0, 15.7, 11.0, 2.0),
        *(0.651, 6.31, 0.332, 0.8, 56.7, 0.637),
        *(0.0, 30.0, 9.0),
        *(0.641, 19.8, 0.0128, 1.02),
        *(0.238, 1.66),
    ),
}
ALIKE = {"hopper": "h100_sxm", "ampere": "a100_sxm_80gb", "blackwell": "b200_sxm"}
USUAL = Tuning()


def tuning(device: Device, link: str, peers: bool = False) -> Tuning:
    """The constants for devices of a kind that talk over ``link`` inside a node; ``peers``: see ``Cluster.peers``."""
    if link == "pcie" or not device.link_gbps:
        own = None if peers else PCIE_TUNINGS.get(device.id)
        return own or PCIE_TUNINGS["rtx_pro_6000_server"]
    return TUNINGS.get(device.id) or TUNINGS.get(ALIKE.get(device.architecture, ""), USUAL)
