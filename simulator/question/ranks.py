"""Which device each rank runs on, and so which devices form each process group of a plan.

Ranks are numbered dimension by dimension, the first one of the order fastest. Megatron-LM's is ``tp-cp-dp-pp``, or
``tp-cp-pp-dp`` with ``--use-tp-pp-dp-mapping``. Experts divide the ranks of one pipeline stage once more, as that
stage's ranks are listed: expert-tensor ranks next to each other, then expert, then expert-data ranks.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...datasets.near import meant
from ..network.mapping import ranks_per_node

DIMENSIONS = ("tp", "cp", "dp", "pp")
ORDER = "-".join(DIMENSIONS)
PLACEMENTS = ("linear", "round_robin")
DENSE = {"tp": ("tp",), "cp": ("cp",), "dp": ("dp",), "dp_cp": ("cp", "dp"), "pp": ("pp",)}
EXPERT = ("edp", "ep", "etp")  # slowest first


class LayoutError(ValueError):
    """An order that does not name each dimension once, or a placement that does not name each device once."""


class Layout(NamedTuple):
    """Degrees of tp, cp, dp and pp, of etp and ep; the order of ranks; and where they run.

    ``placement`` is ``linear`` (rank i on device i), ``round_robin`` (ranks in a row on nodes in a row) or lists the
    device of each rank; devices of a node lie in a row.
    """

    degrees: tuple[int, int, int, int]
    etp: int
    ep: int
    order: str
    placement: str | tuple[int, ...]
    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        """All ranks."""
        return prod(self.degrees)


class GroupPart(NamedTuple):
    """A process group by name, or ``ranks`` of its members (0: all) that are ``apart`` places from each other in it."""

    name: str
    ranks: int = 0
    apart: int = 1


def checked_order(value: Any) -> str:
    """The order itself. LayoutError unless it names each dimension once."""
    if not isinstance(value, str) or sorted(value.split("-")) != sorted(DIMENSIONS):
        raise LayoutError(f"parallel.order={value!r} must name tp, cp, dp and pp once each, such as tp-cp-pp-dp")
    return value


def checked_placement(value: Any) -> str | tuple[int, ...]:
    """A placement by name, or the device of each rank. LayoutError for anything else."""
    if isinstance(value, (list, tuple)) and all(type(device) is int for device in value):
        return tuple(value)
    if value not in PLACEMENTS:
        choices = f"{', '.join(PLACEMENTS)}; or list the device of each rank{meant(value, PLACEMENTS)}"
        raise LayoutError(f"parallel.placement={value!r} is not one of {choices}")
    return str(value)


def check_devices(placement: str | tuple[int, ...], count: int, cluster: str) -> None:
    """LayoutError unless a list of devices names each of ``count`` once."""
    if isinstance(placement, str):
        return
    hint = f"list each device from 0 to {count - 1} once"
    if len(placement) != count:
        raise LayoutError(f"parallel.placement lists {len(placement)} devices, {cluster} has {count}; {hint}")
    uses = np.bincount([device for device in placement if 0 <= device < count], minlength=count)
    for device in placement:
        if not 0 <= device < count:
            raise LayoutError(f"parallel.placement lists device {device}, {cluster} has none of that number; {hint}")
        if uses[device] > 1:
            raise LayoutError(f"parallel.placement lists device {device} twice; {hint}")


def devices(layout: Layout) -> np.ndarray:
    """The device of each rank [ranks]."""
    rank = np.arange(layout.ranks)
    if layout.placement == "linear":
        return rank
    if layout.placement == "round_robin":
        return rank % layout.nodes * layout.per_node + rank // layout.nodes
    return np.array(layout.placement, dtype=np.int64)[: layout.ranks]


@lru_cache(maxsize=8)
def stages(layout: Layout) -> np.ndarray:
    """The devices of each pipeline stage, in the order of ranks; equal places hold equal shards [pp, ranks]."""
    grid = devices(layout).reshape(_shape(layout))
    return _fixed(np.moveaxis(grid, _axes(layout).index("pp"), 0).reshape(layout.degrees[3], -1))


@lru_cache(maxsize=32)
def members(layout: Layout, part: GroupPart) -> np.ndarray:
    """The devices of every group, members in the order of ranks [groups, ranks].

    Members that are left over where ``ranks`` and ``apart`` do not divide a group are in none.
    """
    whole = _whole(layout, part.name)
    ranks = part.ranks or whole.shape[1]
    used = whole.shape[1] // (ranks * part.apart) * ranks * part.apart
    return _fixed(whole[:, :used].reshape(len(whole), -1, ranks, part.apart).swapaxes(2, 3).reshape(-1, ranks))


@lru_cache(maxsize=4096)
def together(layout: Layout, part: GroupPart) -> int:
    """The fewest members that a group has on a node where it has any: through so many NICs its slowest node sends."""
    ranks = members(layout, part)
    return int(ranks_per_node(ranks, layout.per_node).min()) if ranks.size and ranks.shape[1] > 1 else 1


def _whole(layout: Layout, name: str) -> np.ndarray:
    """The devices of every whole group of a dimension [groups, ranks]."""
    if name in EXPERT:
        table, expert_ranks = stages(layout), layout.ep * layout.etp
        grid = table[:, : table.shape[1] // expert_ranks * expert_ranks].reshape(len(table), -1, layout.ep, layout.etp)
        axes = [1 + EXPERT.index(name)]
    else:
        grid = devices(layout).reshape(_shape(layout))
        axes = [axis for axis, dimension in enumerate(_axes(layout)) if dimension in DENSE[name]]
    ranks = prod(grid.shape[axis] for axis in axes)
    return np.moveaxis(grid, axes, range(-len(axes), 0)).reshape(-1, ranks)


def _axes(layout: Layout) -> list[str]:
    """Dimensions, the slowest first."""
    return layout.order.split("-")[::-1]


def _shape(layout: Layout) -> list[int]:
    return [layout.degrees[DIMENSIONS.index(name)] for name in _axes(layout)]


def _fixed(values: np.ndarray) -> np.ndarray:
    values = np.ascontiguousarray(values, dtype=np.int64)
    values.flags.writeable = False
    return values
