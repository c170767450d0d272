"""What a person is shown of an execution trace, as tables: classes of work, communication, late ranks, memory."""

from __future__ import annotations

from collections.abc import Sequence

from ..report.view import PAGE, ViewColumn, ViewTable
from .analysis import LateRank, RankAccount, SizeShare
from .usage import Imbalance, TraceMemory

CLASS, NODES, TIME = ViewColumn("class", "words"), ViewColumn("nodes", "count"), ViewColumn("time", "us")


def class_table(first: RankAccount, caption: str) -> ViewTable:
    """Nodes of a rank by what they do, and how long one takes."""
    quantiles = [ViewColumn(name, "us") for name in ("10 %", "median", "90 %", "99 %")]
    rows = [
        (share.name, share.count, share.total_us, *share.quantiles_us, share.size_bytes or None)
        for share in first.classes
    ]
    return ViewTable(caption, (CLASS, NODES, TIME, *quantiles, ViewColumn("bytes", "count", only=PAGE)), rows)


def size_table(sizes: Sequence[SizeShare]) -> ViewTable:
    """Communication by its size."""
    columns = ViewColumn("collective", "words"), ViewColumn("bytes up to", "count"), ViewColumn("calls", "count"), TIME
    rows = [(each.name, each.size_bytes, each.count, each.total_us) for each in sizes]
    return ViewTable("communication by size, of all ranks", columns, rows)


def late_table(late: Sequence[LateRank]) -> ViewTable:
    """Who arrived last at collectives, and how long the others waited for it in all."""
    columns = ViewColumn("rank"), ViewColumn("last to arrive", "count"), ViewColumn("the others waited", "us")
    return ViewTable("stragglers", columns, [(each.rank, each.calls, each.waited_us) for each in late])


def memory_table(memories: Sequence[TraceMemory]) -> ViewTable:
    """The most that the tensors of a rank's devices hold."""
    columns = ViewColumn("rank"), ViewColumn("device", "words"), ViewColumn("storages", "count")
    rows = [(each.rank, each.device, each.storages, each.peak_bytes, each.peak_node) for each in memories]
    return ViewTable("tensors", (*columns, ViewColumn("peak", "bytes"), ViewColumn("at node")), rows)


def imbalance_table(imbalances: Sequence[Imbalance]) -> ViewTable:
    """Time of each class of work over the ranks."""
    rows = [(each.name, each.mean_us, each.most_us, each.rank) for each in imbalances]
    columns = CLASS, ViewColumn("mean", "us"), ViewColumn("most", "us"), ViewColumn("rank")
    return ViewTable("how unequal ranks are", columns, rows)


def compared_table(classes: Sequence[tuple[str, int, float, int, float]], other: object) -> ViewTable:
    """Classes of work beside those of another run."""
    there = ViewColumn("nodes there", "count"), ViewColumn("time there", "us")
    return ViewTable(f"beside {other}, means over ranks", (CLASS, NODES, TIME, *there), classes)
