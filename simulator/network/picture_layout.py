"""Where the nodes of a fabric stand in its picture, and which of a large one are drawn.

Switches stand in rows above the ranks by their distance from them, what joins a server inside (NVSwitches, PCIe roots)
below; a fabric of ranks alone stands on a circle, or on the grid of its dimensions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .next_hops import SERVER_LINK_KINDS
from .topology import Topology, connected_labels

MAX_DRAWN_RANKS = 144  # ranks drawn
DRAWN_HOT_LINKS = 12  # links whose ends are drawn in any case
WIDTH, LEFT, RIGHT = 1100.0, 120.0, 20.0
TOP, ROW_HEIGHT, BOTTOM, ARC = 74.0, 92.0, 40.0, 30.0  # ARC: how high links of one row rise at most
SERVER_KINDS = (*SERVER_LINK_KINDS, "nic")  # kinds of link that belong to one server


class NodeLayout(NamedTuple):
    """``x``, ``y`` [nodes] (nan where a node is not drawn), the nodes of each row, and the whole height.

    ``boxes`` are nodes that a frame goes round; with ``arcs`` links of a row go round what stands between their ends.
    """

    x: np.ndarray
    y: np.ndarray
    rows: list[np.ndarray]
    boxes: list[np.ndarray]
    height: float
    arcs: bool = True

    def spacing(self, row: np.ndarray) -> float:
        """The least distance of neighbours in a row, px."""
        x = np.sort(self.x[row])
        return float(np.diff(x).min()) if len(x) > 1 else WIDTH


def place_nodes(topology: Topology, load: np.ndarray) -> NodeLayout:
    """Places of all nodes that are drawn. ``load`` [links] says which parts of a large fabric matter."""
    level = number_levels(topology)
    shown = choose_nodes(topology, load, level)
    if (level[shown] == 0).all():
        return _flat(topology, shown)
    return _rows(topology, shown, level)


def number_levels(topology: Topology) -> np.ndarray:
    """Rows above the ranks [nodes]: ranks 0, their NICs or switches 1, and so on; switches inside a server -1."""
    ranks = np.arange(len(topology.nodes)) < topology.ranks
    level = np.where(ranks, 0, -2)
    inside = topology.of_kind(SERVER_LINK_KINDS)
    outside = np.zeros(len(topology.nodes), dtype=bool)
    outside[topology.source[~inside]] = True
    level[~outside & ~ranks] = -1
    for row in range(len(topology.nodes)):
        reached = topology.target[(level[topology.source] == row) & ~inside]
        fresh = reached[level[reached] == -2]
        if not len(fresh):
            break
        level[fresh] = row + 1
    return np.where(level == -2, 1, level)


def number_servers(topology: Topology) -> np.ndarray:
    """A number for each node [nodes]: equal for what links inside a server join."""
    own = topology.of_kind(SERVER_KINDS)
    return connected_labels(topology.source[own], topology.target[own], len(topology.nodes), directed=False)


def choose_nodes(topology: Topology, load: np.ndarray, level: np.ndarray) -> np.ndarray:
    """Which nodes are drawn [nodes]: all, or whole servers, the fullest first, and the switches over them."""
    if topology.ranks <= MAX_DRAWN_RANKS:
        return np.ones(len(topology.nodes), dtype=bool)
    server = number_servers(topology)
    heat = np.zeros(server.max() + 1)
    for ends in (topology.source, topology.target):
        np.maximum.at(heat, server[ends], np.round(load, 2))
    homes, count = np.unique(server[: topology.ranks], return_counts=True)
    order = np.lexsort((homes, -heat[homes]))
    fits = np.cumsum(count[order]) <= max(MAX_DRAWN_RANKS, count[order[0]])
    shown = np.isin(server, homes[order[fits]])
    shown[topology.ranks :] &= np.isin(server[topology.ranks :], homes)
    hottest = np.argsort(-load, kind="stable")[:DRAWN_HOT_LINKS]
    for ends in (topology.source, topology.target):
        shown[ends[hottest[load[hottest] > 0]]] |= level[ends[hottest[load[hottest] > 0]]] > 0
    for row in range(int(level.max(initial=0))):
        up = shown[topology.source] & (level[topology.source] == row) & (level[topology.target] == row + 1)
        shown[topology.target[up]] = True
    return shown


def _rows(topology: Topology, shown: np.ndarray, level: np.ndarray) -> NodeLayout:
    x, y = np.full(len(topology.nodes), np.nan), np.full(len(topology.nodes), np.nan)
    ranks = np.flatnonzero(shown[: topology.ranks])
    server = number_servers(topology)
    homes = np.unique(server[ranks], return_inverse=True)[1]
    several = len(np.unique(homes)) > 1 and len(np.unique(homes)) < len(ranks)
    slot = np.arange(len(ranks)) + (0.8 * homes if several else 0.0)
    x[ranks] = LEFT + (WIDTH - LEFT - RIGHT) * (slot + 0.5) / (slot.max() + 1.0)
    rows = [np.flatnonzero(shown & (level == number)) for number in range(int(level.max()), -2, -1)]
    rows = [row for row in rows if len(row)]
    level_links = level[topology.source] == level[topology.target]
    top = TOP + (ARC if (level_links & np.isin(topology.source, rows[0])).any() else 0.0)
    for position, row in enumerate(rows):
        y[row] = top + ROW_HEIGHT * position
    for row in sorted(rows, key=lambda row: abs(int(level[row[0]]))):
        if level[row[0]] and (len(row) == len(ranks) or (server[row][:, None] == server[ranks]).any(axis=1).all()):
            x[row] = _mean_position(topology, x, row)
        elif level[row[0]]:
            x[row] = LEFT + (WIDTH - LEFT - RIGHT) * (np.arange(len(row)) + 0.5) / len(row)
    boxes = [np.flatnonzero(shown & (server == home)) for home in np.unique(server[ranks])]
    height = top + ROW_HEIGHT * (len(rows) - 1) + BOTTOM
    return NodeLayout(x, y, rows, [box for box in boxes if len(box) > 1], height)


def _mean_position(topology: Topology, x: np.ndarray, row: np.ndarray) -> np.ndarray:
    """The middle of what each node of a row is linked with and already has a place."""
    total, count = np.zeros(len(x)), np.zeros(len(x))
    placed = ~np.isnan(x[topology.source])
    np.add.at(total, topology.target[placed], x[topology.source[placed]])
    np.add.at(count, topology.target[placed], 1.0)
    return total[row] / np.maximum(count[row], 1.0)


def _flat(topology: Topology, shown: np.ndarray) -> NodeLayout:
    """Ranks alone: on the grid of their dimensions, or on a circle."""
    x, y = np.full(len(topology.nodes), np.nan), np.full(len(topology.nodes), np.nan)
    ranks = np.flatnonzero(shown)
    grid = _grid(topology)
    if grid is None:
        turn = 2.0 * np.pi * np.arange(len(ranks)) / max(len(ranks), 1)
        radius = float(np.clip(8.0 * len(ranks), 90.0, 260.0))
        x[ranks] = (WIDTH + LEFT) / 2 - LEFT / 2 + radius * np.sin(turn)
        y[ranks] = TOP + 20.0 + radius * (1.0 - np.cos(turn))
        return NodeLayout(x, y, [ranks], [], TOP + 2 * radius + BOTTOM + 20.0, arcs=False)
    column, line = grid[:, 0].astype(float), grid[:, 1].astype(float)
    for axis in range(2, grid.shape[1]):  # further dimensions set whole grids side by side and below each other
        across = axis % 2 == 0
        extent = (column if across else line).max() + 2.0
        if across:
            column = column + extent * grid[:, axis]
        else:
            line = line + extent * grid[:, axis]
    step = float(np.clip((WIDTH - LEFT - RIGHT) / (column.max() + 1.0), 12.0, 64.0))
    left = LEFT + (WIDTH - LEFT - RIGHT - step * column.max()) / 2.0
    x[ranks], y[ranks] = (left + step * column)[ranks], (TOP + 30.0 + step * line)[ranks]
    return NodeLayout(x, y, [ranks], [], TOP + 30.0 + step * line.max() + BOTTOM + 10.0)


def _grid(topology: Topology) -> np.ndarray | None:
    """Coordinates of at least two dimensions, of a king's mesh too; None for what has none."""
    coordinates = topology.coordinates
    if coordinates is None:
        return None
    wide = coordinates[:, coordinates.max(axis=0) > 0]
    if wide.shape[1] > 1:
        return wide
    side = round(topology.ranks**0.5)
    if side * side != topology.ranks or side < 3:
        return None
    position = np.arange(topology.ranks)
    square = np.stack([position % side, position // side], axis=1)
    offset = np.abs(square[topology.source] - square[topology.target])
    near = ((offset <= 1) | (offset == side - 1)).all() and len(topology.source) > 2 * topology.ranks
    return square if near else None
