"""The figures of worlds that are not there: chips, their hosts and their links, all drawn from a seed.

A world has *true* figures, which its laws use, and a *sheet*: what a data sheet, a driver or a probe would say of it.
The two differ as they do on real machines. Nothing here is taken from opcast's own models.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random

from opcast.datasets.clusters import Cluster, load_cluster
from opcast.datasets.devices import Device, load_device

WORLDS = ("like_h100", "unlike_any", "slow_pcie")
Span = tuple[float, float]


@dataclass(frozen=True)
class Links:
    """What joins ranks: inside a node (``near``) and between nodes (``far``); one direction, of each rank."""

    near_gbps: float
    near_us: float  # of one hop
    far_gbps: float
    far_us: float
    base_us: float  # of a collective's kernel before its first hop
    half_bytes: float  # of a hop's message that reaches half of the rate
    far_loss: float  # of the rate for each doubling of nodes
    tree_gain: float  # of the tree's rate against the ring's
    exchange: float  # of the rate that an all-to-all reaches


@dataclass(frozen=True)
class Chip:
    """True figures. Rates are TFLOP/s and GB/s that the best kernel reaches, times are microseconds."""

    units: int
    tflops: Mapping[str, float]  # by format
    vector_tflops: float
    memory_gbps: float
    memory_half_bytes: float  # of a kernel's traffic that reaches half of the bandwidth
    l2_mib: float
    l2_gbps: float
    memory_gib: float
    kernel_us: float  # the shortest kernel in a graph
    prologue_us: float  # of a product's wave
    tile_half: float  # of a tile's side products: where half of the rate is reached
    both: float  # of the shorter of arithmetic and memory that does not hide behind the longer
    shape_spread: float  # ln: what no law tells of a shape
    kernel_spread: float  # ln: how far implementations of one op lie apart
    noise: float  # ln: from one sample to the next
    limit: float  # of the boost clock's power at full rate that the power limit allows
    alpha: float  # watts grow as the clock to this power
    bus_gbps: float
    host_us: Mapping[str, float]  # of one call, by the choices of host_overhead


@dataclass(frozen=True)
class World:
    """A chip and its links by name and seed; ``device`` and ``cluster`` are what opcast is told of them."""

    name: str
    seed: int
    chip: Chip
    links: Links
    device: Device
    cluster: Cluster
    shipped: bool  # whether the device has a file, and perhaps tables, among those that ship

    def factor(self, spread: float, *about: object) -> float:
        """A constant of this world, lognormal around 1, of whatever is named."""
        text = f"{self.name} {self.seed} {about}".encode()
        return math.exp(spread * Random(hashlib.sha256(text).digest()).gauss(0.0, 1.0))


def make_world(name: str, seed: int) -> World:
    """The world of a name in :data:`WORLDS` with figures drawn by ``seed``."""
    random = Random(f"world {name} {seed}")
    return {"like_h100": _like_h100, "unlike_any": _unlike_any, "slow_pcie": _slow_pcie}[name](seed, random)


def _rates(best: float, random: Random, formats: Mapping[str, Span]) -> dict[str, float]:
    """Rates by format from that of bf16: each so many times as fast."""
    return {"bf16": best, "fp16": best} | {name: best * random.uniform(*span) for name, span in formats.items()}


def _host(random: Random, slow: float) -> dict[str, float]:
    spans = {"launch": (1.6, 2.8), "dispatch": (2.2, 4.5), "view": (0.6, 1.4), "module": (0.6, 1.5)}
    spans |= {"autograd": (2.5, 5.5), "operator": (10.0, 30.0)}
    return {name: slow * random.uniform(*span) for name, span in spans.items()}


def _chip(random: Random, **known: object) -> Chip:
    """A chip whose other figures lie where those of real ones do."""
    drawn: dict[str, object] = {
        "memory_half_bytes": random.uniform(0.6e6, 2.5e6),
        "kernel_us": random.uniform(1.5, 2.8),
        "prologue_us": random.uniform(0.4, 1.2),
        "tile_half": random.uniform(16.0, 40.0),
        "both": random.uniform(0.05, 0.25),
        "shape_spread": random.uniform(0.01, 0.03),
        "kernel_spread": random.uniform(0.03, 0.08),
        "noise": random.uniform(0.005, 0.02),
        "limit": random.uniform(0.75, 1.1),
        "alpha": random.uniform(1.8, 2.6),
    }
    return Chip(**{**drawn, **known})  # type: ignore[arg-type]


def _like_h100(seed: int, random: Random) -> World:
    """H100's sheet; what is true is up to a fifth off it."""
    device, cluster = load_device("h100_sxm"), load_cluster("dgx_h100")

    def off(sheet: float, usual: float) -> float:
        return sheet * usual * random.uniform(0.8, 1.2)

    chip = _chip(
        random,
        units=device.compute_units,
        tflops=_rates(off(989.4, 0.8), random, {"fp8": (1.6, 2.0), "fp8_block": (1.4, 1.8), "tf32": (0.45, 0.55)})
        | {"fp32": off(60.0, 0.8), "fp64": off(60.0, 0.8)},
        vector_tflops=off(60.0, 0.8),
        memory_gbps=off(device.memory_gbps, 0.88),
        l2_mib=off(device.l2_mib, 0.8),
        l2_gbps=off(device.l2_gbps, 0.75),
        memory_gib=device.memory_gib,
        bus_gbps=off(device.pcie_gbps, 0.85),
        host_us=_host(random, 1.0),
    )
    return World(
        "like_h100", seed, chip, _links(random, off(device.link_gbps, 0.8), off(50.0, 0.88)), device, cluster, True
    )


def _unlike_any(seed: int, random: Random) -> World:
    """Ratios of arithmetic, bandwidth, cache and launches that no shipped chip has."""
    best = random.uniform(250.0, 1600.0)
    memory = random.uniform(1200.0, 7000.0)
    chip = _chip(
        random,
        units=random.choice((56, 76, 96, 160, 208, 304)),
        tflops=_rates(
            best, random, {"fp8": (1.5, 2.1), "fp8_block": (1.3, 1.9), "tf32": (0.3, 0.6), "fp32": (0.05, 0.2)}
        )
        | {"fp64": random.uniform(5.0, 50.0), "mxfp8": 1.7 * best, "nvfp4": 3.1 * best, "mxfp4": 3.1 * best},
        vector_tflops=random.uniform(0.04, 0.12) * best,
        memory_gbps=memory,
        l2_mib=random.uniform(16.0, 256.0),
        l2_gbps=memory * random.uniform(2.0, 5.0),
        memory_gib=random.uniform(90.0, 280.0),
        kernel_us=random.uniform(1.2, 5.0),
        bus_gbps=random.uniform(20.0, 120.0),
        host_us=_host(random, random.uniform(0.7, 1.6)),
    )
    links = _links(random, random.uniform(150.0, 900.0), random.uniform(20.0, 90.0))
    return World("unlike_any", seed, chip, links, *_sheet("unlike_any", chip, links, random, "nvlink"), False)


def _slow_pcie(seed: int, random: Random) -> World:
    """Cards for players on one PCIe bus, without NVLink."""
    best = random.uniform(70.0, 220.0)
    chip = _chip(
        random,
        units=random.choice((70, 82, 128, 170)),
        tflops=_rates(
            best, random, {"fp8": (1.6, 2.1), "fp8_block": (1.2, 1.9), "tf32": (0.4, 0.55), "fp32": (0.3, 0.5)}
        )
        | {"fp64": 1.0},
        vector_tflops=random.uniform(0.3, 0.5) * best,
        memory_gbps=random.uniform(600.0, 1700.0),
        l2_mib=random.uniform(30.0, 96.0),
        l2_gbps=random.uniform(2500.0, 5000.0),
        memory_gib=random.uniform(24.0, 48.0),
        bus_gbps=random.uniform(12.0, 50.0),
        host_us=_host(random, random.uniform(0.8, 1.5)),
    )
    links = replace(
        _links(random, chip.bus_gbps * random.uniform(0.35, 0.7), random.uniform(3.0, 12.0)),
        near_us=random.uniform(3.0, 8.0),
    )
    return World("slow_pcie", seed, chip, links, *_sheet("slow_pcie", chip, links, random, "pcie"), False)


def _links(random: Random, near_gbps: float, far_gbps: float) -> Links:
    return Links(
        near_gbps=near_gbps,
        near_us=random.uniform(0.6, 1.8),
        far_gbps=far_gbps,
        far_us=random.uniform(4.0, 11.0),
        base_us=random.uniform(4.0, 9.0),
        half_bytes=random.uniform(2e4, 1.2e5),
        far_loss=random.uniform(0.0, 0.04),
        tree_gain=random.uniform(0.75, 0.95),
        exchange=random.uniform(0.6, 0.9),
    )


def _sheet(name: str, chip: Chip, links: Links, random: Random, link: str) -> tuple[Device, Cluster]:
    """What a probe measures of a chip without a file, and the cluster as its owner describes it."""

    def said(true: float, low: float = 0.93, high: float = 1.1) -> float:
        return true * random.uniform(low, high)

    watts = random.uniform(300.0, 1000.0)
    device = Device(
        id=name,
        name=f"{name} accelerator",
        vendor="nvidia",
        architecture="hopper" if link == "nvlink" else "ada",  # by compute capability, as the probe names it
        compute_units=chip.units,
        clock_mhz=random.uniform(1400.0, 2600.0),
        tensor_tflops={dtype: said(rate, 0.95, 1.05) for dtype, rate in chip.tflops.items() if dtype != "fp8_block"},
        vector_tflops=said(chip.vector_tflops),
        memory_gib=chip.memory_gib,
        memory_gbps=said(chip.memory_gbps),
        l2_mib=said(chip.l2_mib, 0.9, 1.3),
        l2_gbps=said(chip.l2_gbps, 0.8, 1.2),
        shared_kib=228.0,
        link_gbps=said(links.near_gbps, 1.0, 1.3) if link == "nvlink" else 0.0,
        pcie_gbps=said(chip.bus_gbps, 1.0, 1.2),
        launch_us=said(chip.kernel_us),
        dispatch_us=said(chip.host_us["dispatch"]),
        tdp_w=watts,
        idle_w=0.15 * watts,
        sm=9.0 if link == "nvlink" else 8.9,
    )
    cluster = Cluster(
        id=f"{name}_node",
        name=f"eight {name}",
        device=name,
        link=link,
        fabric="ib" if link == "nvlink" else "roce",
        nics_per_node=8 if link == "nvlink" else 1,
        nic_gbps=said(links.far_gbps, 1.0, 1.2) * (1 if link == "nvlink" else 8),
        nic_latency_us=2.0,
    )
    return device, cluster
