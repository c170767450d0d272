"""Which machine a row ran on: device and cluster by the GPU's name, and what the row says about its network."""

from __future__ import annotations

import re
from typing import Any

from ..clusters import Cluster, known_clusters, load_cluster
from ..devices import Device, known_devices, load_device, measured_machines
from .cells import Cells
from .rows import Hardware, TruthError

# gpu_canon (letters and digits) -> id in conf/device. Other names are tried as ids themselves.
DEVICES = {
    "h100": "h100_sxm",
    "h100sxm": "h100_sxm",
    "nvidiah10080gbhbm3": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "a10080": "a100_sxm_80gb",
    "a100": "a100_sxm_80gb",
    "a10040": "a100_sxm_40gb",
    "nvidiaa100sxm440gb": "a100_sxm_40gb",
    "nvidiaa100pcie40gb": "a100_pcie_40gb",
    "nvidiaa10080gbpcie": "a100_pcie_80gb",
    "amdinstinctmi100": "mi100",
    "amdinstinctmi210": "mi210",
    "amdinstinctmi250": "mi250",
    "nvidial4": "l4",
    "teslap4": "p4",
    "teslat4": "t4",
    "teslap100pcie16gb": "p100_pcie",
    "teslav100pcie16gb": "v100_pcie",
    "teslav100pcie32gb": "v100_pcie",
    "rtx6000pro": "rtx_pro_6000_server",
}

USUAL = {
    "h100_sxm": "dgx_h100",
    "h200_sxm": "dgx_h200",
    "b200_sxm": "dgx_b200",
    "b300_sxm": "dgx_b300",
    "a100_sxm_80gb": "dgx_a100",
    "gb200": "gb200_nvl72",
    "gb300": "gb300_nvl72",
    "v100_sxm": "dgx1_v100",
}


def hardware_of(cells: Cells, devices: int) -> Hardware:
    """The machine of a row; TruthError for a GPU that opcast has no figures of."""
    gpu = cells.text("gpu_canon") or cells.text("gpu")
    named = cells.text("cluster")
    cluster = load_cluster(named) if named else usual_cluster(load_device(device_of(gpu)))
    return Hardware(
        gpu=gpu,
        device=cluster.device,
        cluster=cluster.id,
        devices=devices,
        cluster_figures=spread(cluster, devices) | network(cluster, cells.said),
    )


def device_of(gpu: str) -> str:
    """The id of a device by a GPU's published name; TruthError when opcast has none."""
    slug = re.sub(r"[^a-z0-9]", "", gpu.lower())
    if slug in DEVICES:
        return DEVICES[slug]
    by_plain_name = {re.sub(r"[^a-z0-9]", "", name): name for name in (*known_devices(), *measured_machines())}
    if slug in by_plain_name:
        return by_plain_name[slug]
    raise TruthError(f"no figures of the GPU {gpu!r} (conf/device)" if gpu else "the GPU is not published")


def usual_cluster(device: Device) -> Cluster:
    """The shipped cluster of a device; without one a plain server of eight."""
    names = known_clusters()
    if USUAL.get(device.id) in names:
        return load_cluster(USUAL[device.id])
    clusters = [cluster for cluster in map(load_cluster, names) if cluster.device == device.id]
    if clusters:
        return clusters[0]
    link = "loopback" if device.synchronous else "nvlink" if device.link_gbps else "pcie"
    return Cluster(f"{device.id}_server", f"Server of eight {device.name}", device.id, link=link)


def spread(cluster: Cluster, devices: int) -> dict[str, Any]:
    """Nodes and devices per node: full nodes where the count divides, else the largest divisor (64 of an NVL72)."""
    most = min(cluster.devices_per_node, devices)
    per_node = next(count for count in range(most, 0, -1) if devices % count == 0)
    if devices > most and per_node * 2 <= most:
        raise TruthError(f"{devices} devices do not fill nodes of {cluster.devices_per_node}")
    nics = max(1, cluster.nics_per_node * per_node // cluster.devices_per_node)
    return {"nodes": devices // per_node, "devices_per_node": per_node, "nics_per_node": nics}


def network(cluster: Cluster, text: str) -> dict[str, Any]:
    """The NICs that a row publishes, as ``800 Gb/s per node`` or ``400 Gb/s RDMA per GPU``."""
    rate = r"(\d+)\s*(?:Gb/s|Gbps)"
    per_node = re.search(rate + r"[^|,;)]{0,12} (?:per |node-)node", text) or re.search(rate + r" per node", text)
    if per_node:
        return {"nic_gbps": int(per_node[1]) / 8 / cluster.nics_per_node}
    per_gpu = re.search(rate + r"[^|,;)]{0,12} per GPU", text)
    if per_gpu:
        return {"nic_gbps": int(per_gpu[1]) / 8 * cluster.devices_per_node / cluster.nics_per_node}
    return {}
