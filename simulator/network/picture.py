"""A fabric drawn as rows, from ranks up to the top switches, each cable coloured and widened by its fuller direction.

Large fabrics are drawn in part: the servers with the fullest links and the switches over them (:mod:`.places`).
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

import numpy as np

from .load import fullest
from .places import ARC, RIGHT, WIDTH, Places, places
from .topology import Topology

STOPS = ((0x9D, 0xB4, 0xCE), (0xE3, 0xA0, 0x2C), (0xC2, 0x25, 0x2B))  # idle, half full, full
NAMES = {
    "gpu": ("GPU", "GPUs"),
    "nic": ("NIC", "NICs"),
    "nvswitch": ("NVSwitch", "NVSwitches"),
    "root": ("PCIe root", "PCIe roots"),
    "leaf": ("leaf", "leaves"),
    "spine": ("spine", "spines"),
    "core": ("core", "cores"),
    "router": ("router", "routers"),
    "switch": ("switch", "switches"),
}
SMALL, USUAL = 9, 12  # px of letters


def svg(topology: Topology, load: np.ndarray, title: str = "") -> str:
    """The fabric as SVG. ``load`` [links]: share of each link's capacity that is used, 0 to 1."""
    load = np.clip(np.nan_to_num(load), 0.0, None)
    where = places(topology, load)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {where.height:.0f}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="{USUAL}" fill="currentColor">',
        f"<title>{html.escape(title or topology.name)}</title>",
        *_legend(topology, load, where, title),
        *_frames(where),
        *_cables(topology, load, where),
        *_nodes(topology, where),
        "</svg>",
    ]
    return "\n".join(parts)


def hot_links(topology: Topology, load: np.ndarray, count: int = 10) -> list[tuple[str, float]]:
    """The fullest links that are used at all, by name and share of their capacity."""
    return [(topology.link_name(link), float(load[link])) for link in fullest(load, count).tolist()]


def _legend(topology: Topology, load: np.ndarray, where: Places, title: str) -> Iterator[str]:
    """What is drawn, the fullest links, the scale of colours, and the name of each row."""
    shown = int((~np.isnan(where.x[: topology.ranks])).sum())
    note = f"{topology.name}: {topology.ranks} ranks, {topology.links} links"
    yield _text(8, 18, note, weight="600")
    if shown < topology.ranks:
        hidden = (
            f"drawn: {shown} ranks, those with the fullest links first; {topology.ranks - shown} ranks are not drawn"
        )
        yield _text(8, where.height - 6, hidden, opacity=0.75)
    full = ", ".join(f"{name} {_percent(share)}" for name, share in hot_links(topology, load, 3))
    said = f"{title}; " if title else ""
    yield _text(8, 36, f"{said}fullest: {full}" if full else f"{said}all links are idle", opacity=0.75)
    left = WIDTH - RIGHT - 270.0
    for i in range(60):
        yield f'<rect x="{left + 3 * i:.0f}" y="10" width="3.2" height="8" fill="{_colour(i / 59)}"/>'
    for share, word in ((0.0, "0"), (0.5, "50"), (1.0, "100 % of a link")):
        yield _text(left + 180 * share, 32, word, SMALL + 1, "middle" if share < 1 else "start", opacity=0.75)
    if len(where.rows) > 1:
        for row in where.rows:
            yield _text(8, where.y[row[0]] + 4, _called(topology, row), opacity=0.75)


def _called(topology: Topology, row: np.ndarray) -> str:
    stems = {re.sub(r"[\d.]+[ab]?$", "", topology.nodes[node].partition(".")[0]) for node in row.tolist()}
    usual = ("rank", "ranks") if row[0] < topology.ranks else NAMES["switch"]
    one, many = NAMES.get(stems.pop(), usual) if len(stems) == 1 else usual
    return f"{len(row)} {one if len(row) == 1 else many}"


def _frames(where: Places) -> Iterator[str]:
    """A light frame round what belongs to one server."""
    for box in where.boxes:
        x, y = where.x[box], where.y[box]
        left, top = x.min() - 7.0, y.min() - 16.0
        width, height = x.max() - x.min() + 14.0, y.max() - y.min() + 34.0
        yield (
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" rx="6" '
            'fill="currentColor" opacity="0.06"/>'
        )


def _cables(topology: Topology, load: np.ndarray, where: Places) -> Iterator[str]:
    """Both directions of a cable as one line, the fullest drawn last."""
    back = topology.reverse
    links = np.arange(topology.links)
    other = np.where(back >= 0, back, links)
    share = np.maximum(load, load[other])
    both = ~np.isnan(where.x[topology.source]) & ~np.isnan(where.x[topology.target])
    chosen = links[both & (links <= other)]
    wide = float(np.clip(12.0 / max(len(chosen), 1) ** 0.5, 0.4, 1.0))
    for link in sorted(chosen.tolist(), key=lambda each: float(share[each])):
        said = [
            f"{topology.link_name(each)}: {_percent(load[each])} of {topology.bandwidth_gbps[each]:.4g} GB/s"
            for each in dict.fromkeys((link, int(other[link])))
        ]
        full = min(float(share[link]), 1.0)
        yield (
            f'<path d="{_path(topology, where, link)}" fill="none" stroke="{_colour(full)}" '
            f'stroke-width="{0.6 + 2.9 * wide * full:.2f}" opacity="{0.45 + 0.55 * full:.2f}">'
            f"<title>{html.escape(', '.join(said))} ({html.escape(topology.kind[link])})</title></path>"
        )


def _path(topology: Topology, where: Places, link: int) -> str:
    """A straight line, or an arc where others of the same row stand between."""
    a, b = int(topology.source[link]), int(topology.target[link])
    x1, y1, x2, y2 = (float(value) for value in (where.x[a], where.y[a], where.x[b], where.y[b]))
    along, down = abs(x1 - x2), abs(y1 - y2)
    level, upright = down < 0.5 and along > 70.0, along < 0.5 and down > 70.0 and len(where.rows) == 1
    if not where.arcs or not (level or upright):
        return f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"
    rise = 2.0 * min(6.0 + 0.08 * (along + down), ARC)  # a quadratic curve passes half as high as its point
    middle = ((x1 + x2) / 2, y1 - rise) if level else (x1 - rise, (y1 + y2) / 2)
    return f"M{x1:.1f} {y1:.1f}Q{middle[0]:.1f} {middle[1]:.1f} {x2:.1f} {y2:.1f}"


def _nodes(topology: Topology, where: Places) -> Iterator[str]:
    """A square for each rank, a bar for each switch; with its name where there is room."""
    for row in where.rows:
        room = where.spacing(row) if len(where.rows) > 1 else 40.0
        for node in row.tolist():
            yield from _node(topology.nodes[node], node < topology.ranks, where.x[node], where.y[node], room)


def _node(name: str, rank: bool, x: float, y: float, room: float) -> Iterator[str]:
    number = re.sub(r"^\D+", "", name)
    width = float(np.clip(room - 3.0, 4.0, 22.0 if rank else 64.0))
    fits = name if len(name) * 6.2 < width - 4.0 else number if len(number) * 6.0 < width - 2.0 else ""
    height = 16.0 if fits else min(width, 9.0)
    yield (
        f'<rect x="{x - width / 2:.1f}" y="{y - height / 2:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3" '
        f'fill="{"#4a6fa5" if rank else "#5d6673"}"><title>{html.escape(name)}</title></rect>'
    )
    if fits:
        yield _text(x, y + 3.5, fits, SMALL + 1, "middle", fill="#fff")


def _text(x: float, y: float, text: str, size: int = USUAL, anchor: str = "start", **more: object) -> str:
    said = "".join(f' {"font-weight" if name == "weight" else name}="{value}"' for name, value in more.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{said}>{html.escape(text)}</text>'


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 or share == 0 else "<1%"


def _colour(share: float) -> str:
    """From idle over half full to full."""
    low, high, part = (*STOPS[:2], 2 * share) if share < 0.5 else (*STOPS[1:], 2 * share - 1)
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(low, high, strict=True))
