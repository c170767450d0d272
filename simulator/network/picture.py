"""A fabric drawn as rows, from ranks up to the top switches, each cable coloured and widened by its fuller direction.

Large fabrics are drawn in part: the servers with the fullest links and the switches over them (:mod:`.picture_layout`).
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

import numpy as np

from ...datasets.counts import counted
from .link_load import fullest
from .picture_layout import ARC, RIGHT, WIDTH, NodeLayout, place_nodes
from .topology import Topology

COLOUR_STOPS = ((0x9D, 0xB4, 0xCE), (0xE3, 0xA0, 0x2C), (0xC2, 0x25, 0x2B))  # idle, half full, full
NODE_NAMES = {
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
SCALES = (0.05, 0.1, 0.25, 0.5, 1.0)  # the share of a link that red may stand for
SMALL_FONT_PX, FONT_PX = 9, 12  # px of letters


def draw_svg(topology: Topology, load: np.ndarray, title: str = "") -> str:
    """The fabric as SVG. ``load`` [links]: share of each link's capacity that is used, 0 to 1."""
    load = np.clip(np.nan_to_num(load), 0.0, None)
    layout = place_nodes(topology, load)
    scale = next((top for top in SCALES if load.max(initial=0.0) <= top), 1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {layout.height:.0f}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="{FONT_PX}" fill="currentColor">',
        f"<title>{html.escape(title or topology.name)}</title>",
        *_legend(topology, load, layout, title, scale),
        *_frames(layout),
        *_cables(topology, load, layout, scale),
        *_nodes(topology, layout),
        "</svg>",
    ]
    return "\n".join(parts)


def hot_links(topology: Topology, load: np.ndarray, count: int = 10) -> list[tuple[str, float]]:
    """The fullest links that are used at all, by name and share of their capacity."""
    return [(topology.link_name(link), float(load[link])) for link in fullest(load, count).tolist()]


def _legend(topology: Topology, load: np.ndarray, layout: NodeLayout, title: str, scale: float) -> Iterator[str]:
    """What is drawn, the fullest links, the scale of colours, and the name of each row."""
    drawn_ranks = int((~np.isnan(layout.x[: topology.ranks])).sum())
    note = f"{topology.name}: {counted(topology.ranks, 'rank')}, {counted(topology.links, 'link')}"
    yield _text(8, 18, note, weight="600")
    if drawn_ranks < topology.ranks:
        rest = f"{topology.ranks - drawn_ranks} ranks are not drawn"
        note_below = f"drawn: {counted(drawn_ranks, 'rank')}, those with the fullest links first; {rest}"
        yield _text(8, layout.height - 6, note_below, opacity=0.75)
    full = ", ".join(f"{name} {_percent(share)}" for name, share in hot_links(topology, load, 3))
    prefix = f"{title}; " if title else ""
    yield _text(8, 36, f"{prefix}fullest: {full}" if full else f"{prefix}all links are idle", opacity=0.75)
    left = WIDTH - RIGHT - 270.0
    for i in range(60):
        yield f'<rect x="{left + 3 * i:.0f}" y="10" width="3.2" height="8" fill="{_colour(i / 59)}"/>'
    for share, word in ((0.0, "0"), (0.5, f"{50 * scale:.3g}"), (1.0, f"{100 * scale:.3g} % of a link")):
        yield _text(left + 180 * share, 32, word, SMALL_FONT_PX + 1, "middle" if share < 1 else "start", opacity=0.75)
    if len(layout.rows) > 1:
        for row in layout.rows:
            yield _text(8, layout.y[row[0]] + 4, _row_label(topology, row), opacity=0.75)


def _row_label(topology: Topology, row: np.ndarray) -> str:
    stems = {re.sub(r"[\d.]+[ab]?$", "", topology.nodes[node].partition(".")[0]) for node in row.tolist()}
    default = ("rank", "ranks") if row[0] < topology.ranks else NODE_NAMES["switch"]
    singular, plural = NODE_NAMES.get(stems.pop(), default) if len(stems) == 1 else default
    return counted(len(row), singular, plural)


def _frames(layout: NodeLayout) -> Iterator[str]:
    """A light frame round what belongs to one server."""
    for box in layout.boxes:
        x, y = layout.x[box], layout.y[box]
        left, top = x.min() - 7.0, y.min() - 16.0
        width, height = x.max() - x.min() + 14.0, y.max() - y.min() + 34.0
        yield (
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" rx="6" '
            'fill="currentColor" opacity="0.06"/>'
        )


def _cables(topology: Topology, load: np.ndarray, layout: NodeLayout, scale: float) -> Iterator[str]:
    """Both directions of a cable as one line, the fullest drawn last."""
    back = topology.reverse
    links = np.arange(topology.links)
    opposite = np.where(back >= 0, back, links)
    share = np.maximum(load, load[opposite])
    both = ~np.isnan(layout.x[topology.source]) & ~np.isnan(layout.x[topology.target])
    cables = links[both & (links <= opposite)]
    wide = float(np.clip(12.0 / max(len(cables), 1) ** 0.5, 0.4, 1.0))
    for link in sorted(cables.tolist(), key=lambda cable: float(share[cable])):
        tooltip = [
            f"{topology.link_name(way)}: {_percent(load[way])} of {topology.bandwidth_gbps[way]:.4g} GB/s"
            for way in dict.fromkeys((link, int(opposite[link])))
        ]
        full = min(float(share[link]) / scale, 1.0)
        yield (
            f'<path d="{_path(topology, layout, link)}" fill="none" stroke="{_colour(full)}" '
            f'stroke-width="{0.6 + 2.9 * wide * full:.2f}" opacity="{0.45 + 0.55 * full:.2f}">'
            f"<title>{html.escape(', '.join(tooltip))} ({html.escape(topology.kind[link])})</title></path>"
        )


def _path(topology: Topology, layout: NodeLayout, link: int) -> str:
    """A straight line, or an arc where others of the same row stand between."""
    a, b = int(topology.source[link]), int(topology.target[link])
    x1, y1, x2, y2 = (float(value) for value in (layout.x[a], layout.y[a], layout.x[b], layout.y[b]))
    along, down = abs(x1 - x2), abs(y1 - y2)
    level, upright = down < 0.5 and along > 70.0, along < 0.5 and down > 70.0 and len(layout.rows) == 1
    if not layout.arcs or not (level or upright):
        return f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"
    rise = 2.0 * min(6.0 + 0.08 * (along + down), ARC)  # a quadratic curve passes half as high as its point
    middle = ((x1 + x2) / 2, y1 - rise) if level else (x1 - rise, (y1 + y2) / 2)
    return f"M{x1:.1f} {y1:.1f}Q{middle[0]:.1f} {middle[1]:.1f} {x2:.1f} {y2:.1f}"


def _nodes(topology: Topology, layout: NodeLayout) -> Iterator[str]:
    """A square for each rank, a bar for each switch; with its name where there is room."""
    for row in layout.rows:
        room = layout.spacing(row) if len(layout.rows) > 1 else 40.0
        for node in row.tolist():
            yield from _node(topology.nodes[node], node < topology.ranks, layout.x[node], layout.y[node], room)


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
        yield _text(x, y + 3.5, fits, SMALL_FONT_PX + 1, "middle", fill="#fff")


def _text(x: float, y: float, text: str, size: int = FONT_PX, anchor: str = "start", **attributes: object) -> str:
    more = "".join(f' {"font-weight" if name == "weight" else name}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{more}>{html.escape(text)}</text>'


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 or share == 0 else "<1%"


def _colour(share: float) -> str:
    """From idle over half full to full."""
    low, high, fraction = (*COLOUR_STOPS[:2], 2 * share) if share < 0.5 else (*COLOUR_STOPS[1:], 2 * share - 1)
    return "#" + "".join(f"{round(a + (b - a) * fraction):02x}" for a, b in zip(low, high, strict=True))
