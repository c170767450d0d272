"""From the name that a driver reports to the id of a device in ``conf/device``."""

from __future__ import annotations

import re

# Marketing names as CUDA and HIP report them -> ids of conf/device. The first pattern found wins.
CUDA_IDS: tuple[tuple[str, str], ...] = (
    (r"a100.*pcie.*80gb|a100 80gb pcie", "a100_pcie_80gb"),
    (r"a100.*pcie", "a100_pcie_40gb"),
    (r"a100.*80gb", "a100_sxm_80gb"),
    (r"a100.*40gb|a100.*pg509", "a100_sxm_40gb"),
    (r"gh200", "gh200"),
    (r"h100.*nvl", "h100_nvl"),
    (r"h100.*pcie", "h100_pcie"),
    (r"h100", "h100_sxm"),
    (r"h200.*nvl", "h200_nvl"),
    (r"h200", "h200_sxm"),
    (r"h800", "h800_sxm"),
    (r"\bh20\b", "h20_sxm"),
    (r"gb300", "gb300"),
    (r"gb200", "gb200"),
    (r"b300", "b300_sxm"),
    (r"b200", "b200_sxm"),
    (r"rtx pro 6000.*server", "rtx_pro_6000_server"),
    (r"\bl40s\b", "l40s"),
    (r"\bl40\b", "l40"),
    (r"\bl20\b", "l20"),
    (r"\bl4\b", "l4"),
    (r"\ba40\b", "a40"),
    (r"\ba10\b", "a10"),
    (r"v100.*pcie", "v100_pcie"),
    (r"v100", "v100_sxm"),
    (r"p100.*pcie", "p100_pcie"),
    (r"\bp4\b", "p4"),
    (r"\bt4\b", "t4"),
    (r"mi300x", "mi300x"),
    (r"mi210", "mi210"),
    (r"mi250", "mi250"),
    (r"mi100", "mi100"),
)


def slug(name: str) -> str:
    """A name as an identifier: trademarks, filler words and clock rates dropped, the rest joined by underscores."""
    name = re.sub(r"@.*|\((r|tm|c)\)|\b(cpu|processor|with|graphics|\d+-core)\b", " ", name.lower())
    return "_".join(re.findall(r"[a-z0-9]+", name)) or "unknown"


def cuda_device_id(name: str) -> str:
    """The id in ``conf/device`` of a GPU by the name CUDA gives it; an unknown one's name as an identifier."""
    plain = name.lower().replace("-", " ")
    for pattern, device_id in CUDA_IDS:
        if re.search(pattern, plain):
            return device_id
    return slug(re.sub(r"nvidia|amd|tesla|geforce", "", plain))
