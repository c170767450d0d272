"""What a GPU's last-level cache holds. AMD's properties leave out Infinity Cache, which stands behind the L2."""

from __future__ import annotations

from typing import Any

# MiB by LLVM target: CDNA 3 and 4 white papers (MI300, MI350), AMD's product pages of Radeon cards.
INFINITY_CACHE_MIB = {
    "gfx906": 0,
    "gfx908": 0,
    "gfx90a": 0,
    "gfx942": 256,
    "gfx950": 256,
    "gfx1030": 128,
    "gfx1031": 96,
    "gfx1032": 32,
    "gfx1100": 96,
    "gfx1101": 64,
    "gfx1102": 32,
    "gfx1200": 32,
    "gfx1201": 64,
}
UNKNOWN_AMD_MIB = 256  # the largest known: too much only costs time


def last_level_bytes(properties: Any) -> int:
    """Bytes that stay on chip, by torch's properties of a device: the L2, or an Infinity Cache where that is larger.

    Where torch is built for CUDA, ``gcnArchName`` is the name of the GPU ("NVIDIA H200").
    """
    target = str(getattr(properties, "gcnArchName", "")).partition(":")[0]
    behind = INFINITY_CACHE_MIB.get(target, UNKNOWN_AMD_MIB) if target.startswith("gfx") else 0
    return max(int(properties.L2_cache_size), behind << 20)
