"""From the name that a driver reports to the id of a device in ``conf/device``."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

# Marketing names as CUDA and HIP report them -> ids of conf/device. The first pattern found wins.
CUDA_IDS: tuple[tuple[str, str], ...] = (
    (r"a800.*pcie", "a800_pcie_80gb"),
    (r"a800.*40gb active", "a800_pcie_40gb"),
    (r"a800", "a800_sxm_80gb"),
    (r"a100.*pcie.*80gb|a100 80gb pcie", "a100_pcie_80gb"),
    (r"a100.*pcie", "a100_pcie_40gb"),
    (r"a100.*80gb", "a100_sxm_80gb"),
    (r"a100.*40gb|a100.*pg509", "a100_sxm_40gb"),
    (r"gh200.*144g", "gh200_144gb"),
    (r"gh200", "gh200"),
    (r"h100.*64gb", "h100_64gb"),
    (r"h100.*nvl", "h100_nvl"),
    (r"h100.*pcie", "h100_pcie"),
    (r"h100", "h100_sxm"),
    (r"h200.*nvl", "h200_nvl"),
    (r"h200", "h200_sxm"),
    (r"h800.*pcie", "h800_pcie"),
    (r"h800", "h800_sxm"),
    (r"\bh20\b.*\b141\b|\bh20 3e\b", "h20_141gb"),
    (r"\bh20\b", "h20_sxm"),
    (r"gb300", "gb300"),
    (r"gb200", "gb200"),
    (r"b300", "b300_sxm"),
    (r"b200", "b200_sxm"),
    (r"\bgb10\b", "gb10"),
    (r"rtx pro 6000.*server", "rtx_pro_6000_server"),
    (r"rtx pro 6000.*max q", "rtx_pro_6000_max_q"),
    (r"rtx pro 6000", "rtx_pro_6000_workstation"),
    (r"rtx pro (5000|4500|4000) blackwell", r"rtx_pro_\1"),
    (r"rtx 6000 ada", "rtx_6000_ada"),
    (r"rtx 5000 ada", "rtx_5000_ada"),
    (r"rtx a(4000|4500|5000|5500|6000)\b", r"rtx_a\1"),
    (r"geforce rtx ((?:30|40|50)[6-9]0(?: ti)?(?: super)?)$", r"rtx_\1"),
    (r"\bl40s\b", "l40s"),
    (r"\bl40\b", "l40"),
    (r"\bl20\b", "l20"),
    (r"\bl4\b", "l4"),
    (r"\ba40\b", "a40"),
    (r"\ba30\b", "a30"),
    (r"\ba10g\b", "a10g"),
    (r"\ba10\b", "a10"),
    (r"v100.*pcie.*16gb", "v100_pcie_16gb"),
    (r"v100.*pcie", "v100_pcie"),
    (r"v100.*16gb", "v100_sxm_16gb"),
    (r"v100", "v100_sxm"),
    (r"p100.*pcie", "p100_pcie"),
    (r"p100.*sxm", "p100_sxm"),
    (r"\bp4\b", "p4"),
    (r"\bt4\b", "t4"),
    (r"mi355x", "mi355x"),
    (r"mi350x", "mi350x"),
    (r"mi325x", "mi325x"),
    (r"mi300x", "mi300x"),
    (r"mi308x", "mi308x"),
    (r"mi210", "mi210"),
    (r"mi250", "mi250"),
    (r"mi100", "mi100"),
)
DEVICE_FILES = Path(__file__).resolve().parent.parent / "conf" / "device"
MEMORY_APART = 0.1  # share by which usable memory may differ from the file's: ECC takes up to 7 %
CACHE_APART = 0.3  # drivers count the L2 of a chip that is partly disabled in different ways


def slug(name: str) -> str:
    """A name as an identifier: trademarks, filler words and clock rates dropped, the rest joined by underscores."""
    name = re.sub(r"@.*|\((r|tm|c)\)|\b(cpu|processor|with|graphics|\d+-core)\b", " ", name.lower())
    return "_".join(re.findall(r"[a-z0-9]+", name)) or "unknown"


def cuda_device_id(name: str) -> str:
    """The id in ``conf/device`` of a GPU by the name CUDA gives it; an unknown one's name as an identifier."""
    plain = re.sub(r"[-_]", " ", name.lower())
    for pattern, device_id in CUDA_IDS:
        if match := re.search(pattern, plain):
            return slug(match.expand(device_id)) if "\\" in device_id else device_id
    return slug(re.sub(r"nvidia|amd|tesla|geforce", "", plain))


def unknown_name(name: str) -> str:
    """What is wrong with a device whose name leads to no file of ``conf/device``, and the way out, in one line."""
    sample = " (an engineering sample)" if "graphics device" in name.lower() else ""
    subject = f"{name!r}{sample}, which opcast does not know"
    return f"the device calls itself {subject}: say device=… (an id, or a file of figures)"


WORDS = re.compile(  # of a driver's name, beside those that tell the GPU
    r"nvidia|amd|instinct|tesla|geforce|gpu|sxm\d?|pcie|nvl|oam|hbm\d?e?|\d+gb?|server|workstation|max|q|edition|3e"
    r"|blackwell|ada|generation|super|ti|rtx|pro"
)


def shipped_device_id(name: str) -> str:
    """The id of a shipped device by the name of a driver or a shop, such as ``H100-SXM5-80GB``; empty for another."""
    device_id = cuda_device_id(name)
    words = re.split(r"[-_\s]+", name.strip().lower())
    explained = all(word in device_id.split("_") or WORDS.fullmatch(word) for word in words)
    return device_id if explained and figures_of_file(device_id) else ""


def seen_device_id(name: str, compute_units: int, memory_gib: float, l2_mib: float = 0.0) -> str:
    """The id of a GPU by its name and by what it says of itself.

    A slice of a GPU (MIG) and variants carry the name of the whole one. Where compute units, memory or (0 = not told)
    cache are not those of the file of that name, the id names the units and the memory that are there instead.
    """
    device_id = cuda_device_id(name)
    figures = figures_of_file(device_id)
    if not figures:
        return device_id
    same = compute_units == figures["compute_units"]
    same &= abs(memory_gib / figures["memory_gib"] - 1) < MEMORY_APART
    same &= not l2_mib or abs(l2_mib / figures["l2_mib"] - 1) < CACHE_APART
    return device_id if same else f"{device_id}_{compute_units}sm_{memory_gib:.0f}gib"


@lru_cache
def figures_of_file(device_id: str) -> dict[str, float]:
    """``compute_units``, ``memory_gib`` and ``l2_mib`` of a file of ``conf/device``; empty where there is none.

    Read without a YAML parser, which a bare node that measures need not have.
    """
    path = DEVICE_FILES / f"{device_id}.yaml"
    if not path.is_file():
        return {}
    pairs = re.findall(r"^(compute_units|memory_gib|l2_mib): *([\d.]+)", path.read_text("utf-8"), re.MULTILINE)
    return {figure: float(value) for figure, value in pairs}
