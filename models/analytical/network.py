"""Collectives by alpha-beta, and work of the host.

Conventions of nccl-tests: ``size_bytes`` is the reported buffer, time = size x bus factor / bus bandwidth.
A single op is answered here; whole topologies, congestion and faults are a network simulator's affair.
"""

from __future__ import annotations

import numpy as np

from ...datasets.ops import LINKS, bus_factor
from .setting import Array, Dims, Setting, Terms

SUSTAINED_LINK = 0.75  # protocol and flags (NCCL "simple" moves payload at about this share)
LOW_LATENCY_SHARE = 0.30  # of an NVLink: flags travel with the data, and few channels carry it (NCCL "LL", "LL128")
BULK_US = 15.0  # until NCCL "simple" is under way on NVLink: staging buffers and fences
NIC_OF_PCIE = 0.78  # one NIC a GPU, matched to its x16 slot: 200 Gb/s in 32 GB/s, 400 Gb/s in 64 GB/s
LOOPBACK_COPIES = 6.0  # user to socket, socket to user, and the sum, each reading and writing memory
# us of one hop between neighbours: memory flags over NVLink, through the host, across a switch, through sockets
HOP_US = {"nvlink": 0.75, "pcie": 3.0, "ib": 4.0, "roce": 5.0, "loopback": 25.0}
NVLINK_TREE = 2.5  # hops of a ring that one up or down a tree takes: its flags wait for two children
RESIDUAL_PASSES = 2.0  # of a kernel that also adds the residual and normalises: it reads the residual and writes it
BASE_LAUNCHES = 2.3  # of a kernel's time that NCCL's own start takes: its channels, flags and the last barrier
# Of the choices launch, dispatch, view, module, autograd, operator, in eager operator calls (a device's dispatch_us). A
# GPU's call is dispatch and launch together, about half each; on a CPU launch is the call on one element. An operator
# inside a model takes 20 us where dispatch_us is the 5 us of a data sheet: read off decodes of one sequence on an H200
# whose host is a virtual machine of 16 EPYC cores (datasets/measured/h200; fastest of 15 runs: 18 us an operator in
# Qwen3-0.6B, 22 and 23 in layers of Llama-2 and Llama-3, 29 in Qwen3-30B-A3B, 52 in DeepSeek-V2-Lite, during whose run
# every operator of that host took twice as long). It is one machine.
HOST_COST = {"cpu": (1.0, 1.0, 0.3, 0.5, 2.0, 4.0), "gpu": (0.5, 0.5, 0.3, 0.5, 2.0, 4.0)}


def link_rates(s: Setting) -> Array:
    """Bytes a microsecond one rank sends, by link choice."""
    device = s.device
    pcie = device.pcie_gbps or device.memory_gbps / 8.0
    by_name = {
        "nvlink": device.link_gbps or pcie,
        "pcie": pcie,
        "ib": pcie * NIC_OF_PCIE,
        "roce": pcie * NIC_OF_PCIE,
        "loopback": device.memory_gbps / LOOPBACK_COPIES,
    }
    return np.array([by_name[name] for name in LINKS]) * 1e3


def collective(name: str, d: Dims, s: Setting) -> Terms:
    """Launch, hops of the better of ring and tree (or the direct exchange), and bytes over the slowest link.

    Ring and tree as in NCCL; all_reduce takes 2 (n-1) hops round a ring, 2 log2 n up and down a tree. On NVLink the
    better of a protocol for few bytes and one for many (Hu et al., arXiv 2507.04786, sec. 3). A norm behind the sum
    moves the residual in memory.
    """
    link = d.link.astype(np.int64)
    hop = np.array([HOP_US[name_of_link] for name_of_link in LINKS])[link]
    rate = link_rates(s)[link]
    ranks = np.maximum(d.ranks, 1.0)
    if s.cpu:
        rate = rate / np.maximum(ranks, 1.0)  # ranks of one machine share its memory
    steps = _steps(name, ranks, np.where(d.link == 0, NVLINK_TREE, 1.0))
    sent = d.size_bytes * bus_factor(name, ranks)
    local = 0.0 * sent
    if name == "all_reduce":
        local = np.where(d.norm > 0, s.traffic_us(RESIDUAL_PASSES * d.size_bytes), 0.0)
    overhead = s.device.launch_us * BASE_LAUNCHES
    alpha = steps * hop
    few, many = sent / (rate * LOW_LATENCY_SHARE), sent / (rate * SUSTAINED_LINK)
    bulk = np.where(d.link > 0, 0.0, BULK_US)
    network = np.minimum(few, bulk + many)
    hints = {
        "steps": np.maximum(steps, 1.0),
        "message_per_rank": 1.0 + d.size_bytes / ranks,
        "protocol": np.maximum(few, 1e-3) / np.maximum(bulk + many, 1e-3),
    }
    return Terms(0.0 * sent, local, overhead + alpha, network, hints=hints)


def expert_exchange(d: Dims, s: Setting) -> Terms:
    """Tokens to the ranks of their experts, or back: two launches, a hop, and the bytes a rank sends over its link."""
    link = d.link.astype(np.int64)
    hop = np.array([HOP_US[name_of_link] for name_of_link in LINKS])[link]
    rate = link_rates(s)[link] * SUSTAINED_LINK
    rate = rate / np.maximum(d.ranks, 1.0) if s.cpu else rate
    overhead = BASE_LAUNCHES * s.device.launch_us + 2.0 * hop
    hints = {"steps": d.ranks, "message_per_rank": 1.0 + s.cost.read_bytes / np.maximum(d.ranks, 1.0)}
    return Terms(0.0 * hop, s.traffic_us(2.0 * s.cost.read_bytes), overhead, s.cost.read_bytes / rate, hints=hints)


def _steps(name: str, ranks: Array, tree: Array) -> Array:
    depth = np.ceil(np.log2(ranks))
    if name == "all_reduce":
        return np.minimum(2.0 * (ranks - 1.0), 2.0 * depth * tree)
    if name in ("all_gather", "reduce_scatter"):
        return np.minimum(ranks - 1.0, 4.0 * np.sqrt(ranks))
    if name == "all_to_all":
        return np.sqrt(ranks)
    return depth if name == "broadcast" else np.ones_like(ranks)


def host_overhead(d: Dims, s: Setting) -> Terms:
    """Calls times the device's time for an eager operator, weighted by what a call does."""
    weight = np.array(HOST_COST["cpu" if s.cpu else "gpu"])[d.what.astype(np.int64)]
    return Terms(0.0 * d.calls, 0.0 * d.calls, 0.0 * d.calls, host=d.calls * weight * s.device.dispatch_us)


def host_pass(d: Dims, s: Setting) -> Terms:
    """Bytes over the rate that the op names: no figure of the device has a part in it."""
    none = 0.0 * d.size_bytes
    return Terms(none, none, none, host=d.size_bytes / d.host_mbps)
