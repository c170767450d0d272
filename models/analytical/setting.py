"""What every law needs: the device's usable rates in bytes and FLOPs a microsecond, and the cache law.

Constants here are properties of a class of hardware, not of one GPU: what part of a data sheet's rate a good
kernel sustains. They were set on public GEMM tables of A100, H100, H200, B200 and L40S together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np

from ...datasets.devices import Device
from ...datasets.dtypes import BITS, itemsize, weight_itemsize
from ...datasets.vocabulary import Cost

Array = Any  # a float64 numpy array, or a float that stands for one

SUSTAINED_TENSOR = 0.80  # clocks under full tensor load lie below boost, and issue slots are lost
SUSTAINED_LANES = 0.88  # of fp32 products on ordinary lanes, where the power limit leaves the clock alone
SUSTAINED_MEMORY = 0.92  # refresh, read/write turnaround
KEPT, LOST = 1.25, 0.75  # of a working set in the last-level cache: all up to a third of the cache, none beyond 5/3
SM_BYTES_PER_CLOCK = 64.0  # what one compute unit draws from L2 (NVIDIA tuning guides, A100 to B200)
EXP_PER_CLOCK = 16.0  # special-function results of one compute unit a clock (CUDA programming guide, table 5)
ONE_MEMORY = ("trillium",)  # whose units all read VMEM (Google DeepMind, How To Scale Your Model)

# A scheduler issues one instruction of 32 threads a clock. Where a unit has 128 fp32 lanes for its four schedulers, a
# product takes a whole slot, and loads from shared memory take slots of products; with 64 lanes they are free (NVIDIA
# GA102 whitepaper, 2020; Jia et al., arXiv 1804.06826: Volta issues a product every second clock). Pascal issues two
# instructions a clock, Blackwell's products come in pairs (PTX ISA, fma.rn.f32x2 from sm_100 on).
ISSUED = 0.83  # PyTorch's best rates (tests/benchmarks/lanes.py says whose): 0.81 of peak on H20, 0.98 on A100, A800
MOST_FREE_LANES = 96.0  # of a unit: between 64 and 128
ONE_ISSUE = (7.0, 10.0)  # compute capabilities, from Volta to before Blackwell

BEHIND_L2 = ("cdna3", "cdna4")  # 2 KiB a clock from the L2 of a die of 38 units (CDNA 3 whitepaper)

# FLOPs of dense 16-bit products a clock and unit of chips that are also sold with their matrix units cut (NVIDIA's
# whitepapers of GA102, AD102, GB202 and H100): to a half on GeForce, A10G, L40 and L20, to a quarter on H20.
WHOLE_UNITS = {"ampere 8.6": 1024.0, "ada": 1024.0, "blackwell 12": 1024.0, "hopper": 4096.0}

# Energy of a fp32 FLOP in pJ with all that a device draws meanwhile: power limit over the rate that large products
# sustain: a 70 W card runs at half of its boost clock. Medians of the linear layers of at least 5 GFLOP in NeuSight's
# operator tables (arXiv 2407.13853), over what the tile law makes of their shapes, both splits alike: P4 and P100, T4,
# A100 40GB, L4, MI100 and MI210. V100 and A100 80GB stay below their limits. GA10x is of another process than GA100,
# with the energy that brings A100's answer to the rates of A40, RTX 3080 and 3090 (lanes.py). Hopper and
# Blackwell are of Ada's process; among them only workstation cards come near their limits.
FP32_PJ = {
    "pascal": 34.5,
    "turing": 19.9,
    "ampere": 16.4,
    "ampere 8.6": 13.7,
    **dict.fromkeys(("ada", "hopper", "blackwell"), 8.0),
    **dict.fromkeys(("cdna", "cdna2"), 10.4),
}


@dataclass(frozen=True)
class Setting:
    """Ops of one dtype on one device in one cache state: what a law is given beside the dimensions."""

    device: Device
    dtype: str
    out_dtype: str
    warm: bool
    cost: Cost

    @property
    def itemsize(self) -> float:
        return itemsize(self.dtype)

    @property
    def weight_itemsize(self) -> float:
        return weight_itemsize(self.dtype)

    @property
    def out_itemsize(self) -> float:
        return itemsize(self.out_dtype)

    @cached_property
    def cpu(self) -> bool:
        return self.device.synchronous

    @cached_property
    def units(self) -> float:
        return float(self.device.compute_units)

    @cached_property
    def tensor_rate(self) -> float:
        """Sustained FLOPs a microsecond of all matrix units; DeviceError when the device lacks the dtype."""
        peak = self.device.tensor_rate(self.dtype) * 1e6
        if self.cpu:
            return peak
        if self.dtype == "fp32":
            return self.lane_rate(peak)
        return min(peak, whole_rate(self.device, self.dtype) * 1e6 * SUSTAINED_TENSOR)

    def lane_rate(self, peak: float) -> float:
        """Sustained FLOPs a microsecond of fp32 products: what ordinary lanes reach, or what the power limit allows."""
        energy, limit = fp32_pj(self.device), self.device.tdp_w
        allowed = limit / energy * 1e6 if energy and limit else peak
        issued = ISSUED if shares_slots(self.device) else 1.0
        return min(peak * SUSTAINED_LANES * issued, allowed)

    @cached_property
    def vector_rate(self) -> float:
        """FLOPs a microsecond of all ordinary lanes."""
        return self.device.vector_tflops * 1e6

    @cached_property
    def exp_rate(self) -> float:
        """Exponentials a microsecond of the whole device; on a CPU about one a dozen vector FLOPs."""
        if self.cpu:
            return self.vector_rate / 12.0
        return EXP_PER_CLOCK * self.device.clock_mhz * self.units

    @cached_property
    def memory_rate(self) -> float:
        """Sustained bytes a microsecond from memory."""
        return self.device.memory_gbps * 1e3 * (1.0 if self.cpu else SUSTAINED_MEMORY)

    @cached_property
    def l2_rate(self) -> float:
        """Bytes a microsecond from the last-level cache, never below memory's."""
        return max(self.device.l2_gbps, self.device.memory_gbps) * 1e3

    @cached_property
    def loads_rate(self) -> float:
        """Bytes a microsecond that all compute units draw of operands that stay in cache.

        The last-level cache of CDNA 3 and 4 lies behind an L2 on each die, which feeds its units as fast as they draw.
        """
        return max(self.l2_rate, self.units * self.unit_rate if self.device.architecture in BEHIND_L2 else 0.0)

    @cached_property
    def unit_rate(self) -> float:
        """Bytes a microsecond that one compute unit can draw, however idle the others are."""
        if self.cpu or self.device.architecture in ONE_MEMORY:
            return self.l2_rate / self.units
        return SM_BYTES_PER_CLOCK * self.device.clock_mhz

    @cached_property
    def l2_bytes(self) -> float:
        return self.device.l2_mib * 2.0**20

    def resident(self, working_set: Array) -> Array:
        """Share of a working set (bytes) that the last-level cache keeps.

        The slope between all and none stands for hashing, replacement and the two halves of a partitioned L2.
        """
        return np.clip(KEPT - LOST * np.asarray(working_set) / self.l2_bytes, 0.0, 1.0)

    def traffic_us(self, size: Array, working_set: Array | None = None) -> Array:
        """Time to move ``size`` bytes of a working set: from cache as far as it is warm, else from memory."""
        if not self.warm:
            return size / self.memory_rate
        hit = self.resident(size if working_set is None else working_set)
        return size * (hit / self.l2_rate + (1.0 - hit) / self.memory_rate)


@dataclass(frozen=True)
class Terms:
    """What an op's time is made of, in us, one array each. Compute and memory overlap; the rest adds up.

    ``hints`` are figures on the way that a learned model can use (waves, tail, splits): positive numbers.
    """

    compute: Array = 0.0
    memory: Array = 0.0
    overhead: Array = 0.0
    network: Array = 0.0
    host: Array = 0.0
    hints: dict[str, Array] = field(default_factory=dict)

    @property
    def latency(self) -> Array:
        return self.overhead + np.maximum(self.compute, self.memory) + self.network + self.host


def fp32_pj(device: Device) -> float:
    """Energy of a fp32 FLOP of a device's process in pJ; 0 where none is known."""
    return of_architecture(FP32_PJ, device)


def whole_rate(device: Device, dtype: str) -> float:
    """TFLOP/s of products if a device's matrix units were not cut; its own rate where they are not.

    Loads, issue slots and waits are those of the whole chip: they keep units that are cut from less of their peak.
    """
    stated, half = device.tensor_rate(dtype), of_architecture(WHOLE_UNITS, device)
    if dtype in ("fp32", "fp64") or not half:
        return stated
    uncut_rate = half * 16.0 / BITS[dtype] * device.clock_mhz * device.compute_units * 1e-6
    return float(stated * 2.0 ** max(round(np.log2(uncut_rate / stated)), 0))


def of_architecture(values: Mapping[str, float], device: Device) -> float:
    """What a table says of a device's compute capability, else of its architecture; 0 of neither."""
    return values.get(f"{device.architecture} {device.sm:g}", values.get(device.architecture, 0.0))


def shares_slots(device: Device) -> bool:
    """Whether fp32 products of a unit take all issue slots of its schedulers, so that loads take some of theirs."""
    lanes = device.vector_tflops * 1e6 / (2.0 * device.clock_mhz * device.compute_units)
    return device.vendor == "nvidia" and ONE_ISSUE[0] <= device.sm < ONE_ISSUE[1] and lanes > MOST_FREE_LANES


Dims = SimpleNamespace  # one float64 array per dimension of the kind
