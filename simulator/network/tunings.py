"""Constants of :mod:`.nccl_times` by device, fitted on NCCL measurements of one node; what NICs reach comes on top.

Fitted on half of the groups (a collective on so many ranks) of aiconfigurator's NCCL tables;
``docs/network-model.md`` has
the errors on the other half. Between nodes, public nccl-tests runs reach 0.92 to 0.95 of the NICs in all-reduce, and
in all-to-all 0.92 over two nodes and 0.78 over four (Oracle's and CoreWeave's documentation).
"""

from __future__ import annotations

from ...datasets.devices import Device
from ...datasets.figure_sources import FigureSource
from .nccl_times import Tuning

TUNINGS_SOURCE = FigureSource(
    measured_elsewhere="NCCL tables of aiconfigurator, half of the groups of each; nothing of a scored table"
)  # of all constants below
# fmt: off
# groups of four GB200 do not use NVLS: its figures are those of B200
TUNINGS = {
    "h100_sxm": Tuning(
        base=0.767, hop=1.13, line_hop=0.434, bulk_us=9.57, step_us=4.24, overlap=0.84,
        ring=0.934, copy=1.12, ll=0.406, line=0.779, channel_gbps=18.2, gather=1.4,
        nvls=0.614, nvls_us=23.7, nvls_wait_us=9.21,
        exchange=0.8, exchange_us=11.3, fill=0.239, peer_us=0.443,
    ),
    "h200_sxm": Tuning(
        base=0.738, hop=1.26, line_hop=0.779, bulk_us=9.72, step_us=5.04, overlap=1.04,
        ring=0.886, copy=1.22, ll=0.387, line=0.801, channel_gbps=16.1, gather=1.24,
        nvls=0.645, nvls_us=22.8, nvls_wait_us=10.2,
        exchange=0.853, exchange_us=10.5, fill=0.248, peer_us=0.436,
    ),
    "a100_sxm_80gb": Tuning(
        base=1.44, hop=1.34, line_hop=0.465, bulk_us=22.7, step_us=6.4, overlap=0.963,
        ring=0.772, copy=1.76, ll=0.326, line=0.691, channel_gbps=22.3, gather=1.3,
        nvls=0.0, nvls_us=30.0, nvls_wait_us=9.0,
        exchange=0.738, exchange_us=13.2, fill=0.585, peer_us=0.674,
    ),
    "b200_sxm": Tuning(
        base=1.22, hop=1.82, line_hop=1.0, bulk_us=10.6, step_us=11.7, overlap=1.84,
        ring=0.815, copy=0.969, ll=0.313, line=0.8, channel_gbps=13.0, gather=1.09,
        nvls=0.534, nvls_us=29.4, nvls_wait_us=18.2,
        exchange=0.672, exchange_us=15.6, fill=0.186, peer_us=0.329,
    ),
    "gb200": Tuning(
        base=1.27, hop=1.68, line_hop=1.0, bulk_us=9.15, step_us=13.0, overlap=1.79,
        ring=0.828, copy=0.941, ll=0.245, line=0.8, channel_gbps=7.67, gather=0.893,
        nvls=0.534, nvls_us=29.4, nvls_wait_us=18.2,
        exchange=0.677, exchange_us=15.0, fill=0.188, peer_us=0.41,
    ),
}
PCIE_TUNINGS = {
    "rtx_pro_6000_server": Tuning(
        base=0.604, hop=1.57, line_hop=1.0, bulk_us=13.2, step_us=1.92, overlap=1.19,
        ring=0.73, copy=1.41, ll=0.36, line=0.8, channel_gbps=123.0, gather=0.889,
        nvls=0.0, nvls_us=30.0, nvls_wait_us=9.0,
        exchange=0.752, exchange_us=11.4, fill=0.124, peer_us=0.997,
        beyond=0.594, crowd=0.166,
    ),
    "l40s": Tuning(  # a host whose cards do not reach each other, but through its memory
        base=0.701, hop=1.1, line_hop=1.0, bulk_us=15.7, step_us=11.0, overlap=2.0,
        ring=0.651, copy=6.31, ll=0.332, line=0.8, channel_gbps=56.7, gather=0.637,
        nvls=0.0, nvls_us=30.0, nvls_wait_us=9.0,
        exchange=0.641, exchange_us=19.8, fill=0.0128, peer_us=1.02,
        beyond=0.238, crowd=1.66,
    ),
}
# fmt: on
ARCHITECTURE_DEVICES = {"hopper": "h100_sxm", "ampere": "a100_sxm_80gb", "blackwell": "b200_sxm"}
DEFAULT_TUNING = Tuning()


def tuning(device: Device, link: str, peers: bool = False) -> Tuning:
    """The constants for devices of a kind that talk over ``link`` inside a node; ``peers``: see ``Cluster.peers``."""
    if link == "pcie" or not device.link_gbps:
        measured = None if peers else PCIE_TUNINGS.get(device.id)
        return measured or PCIE_TUNINGS["rtx_pro_6000_server"]
    return TUNINGS.get(device.id) or TUNINGS.get(ARCHITECTURE_DEVICES.get(device.architecture, ""), DEFAULT_TUNING)
