"""The page of an execution trace, or of two side by side: what each rank did, by class, by size, who came late."""

from __future__ import annotations

from collections.abc import Sequence

from ..execution.analysis import CDF_SHARES, ClassShare, LateRank, RankAccount, SizeShare
from ..execution.usage import Imbalance, TraceMemory
from . import units
from .charts import figure
from .page import Card, Cell, Column, Figure, Page, PageSection, Piece, StackedBar, Table

SHOWN = 64  # ranks on the page
CURVES = 8  # classes that have a curve of durations
PARTS = (("compute", "blue"), ("communication alone", "orange"), ("idle", "grey"))


def page(
    name: str,
    accounts: Sequence[RankAccount],
    sizes: Sequence[SizeShare],
    late: Sequence[LateRank],
    compared: Sequence[tuple[str, int, float, int, float]] = (),
    other: str = "",
    memory: Sequence[TraceMemory] = (),
    imbalance: Sequence[Imbalance] = (),
    others: Sequence[RankAccount] = (),
) -> Page:
    """The page of a run as recorded; ``compared`` by class with that of ``other``, whose accounts are ``others``."""
    total = max((each.total_us for each in accounts), default=0.0)
    nodes = sum(each.nodes for each in accounts)
    headline = (("time", units.duration(total)), ("ranks", f"{len(accounts):,}"), ("nodes", f"{nodes:,}"))
    sections = [_ranks(accounts), _classes(accounts[0]), _durations(accounts[0], others[:1])]
    if sizes:
        sections.append(_sizes(sizes))
    if any(each.waited_us > 0 for each in late):
        sections.append(_late(late))
    if imbalance:
        sections.append(_imbalance(imbalance))
    if memory:
        sections.append(_memory(memory))
    if compared:
        sections.append(_compared(compared, other))
        sections.append(_beside(accounts, others, other))
    return Page(f"Execution trace {name}", "what was recorded", (), (Card(name, headline),), tuple(sections))


def _ranks(accounts: Sequence[RankAccount]) -> PageSection:
    bars = []
    for each in accounts[:SHOWN]:
        whole = each.total_us or 1.0
        values = (0.0, 0.0, 0.0) if each.blind else (each.compute_us, each.exposed_us, each.idle_us)
        pieces = [Piece(part, units.duration(us), us / whole, colour)
                  for (part, colour), us in zip(PARTS, values, strict=True) if us > 0]  # fmt: skip
        bars.append(StackedBar(f"rank {each.rank}: {units.duration(each.total_us)}", tuple(pieces)))
    text = "Time in which a rank's device computes, in which it only communicates, and in which it does neither."
    text += "".join(f" Rank {each.rank}: {each.note}." for each in accounts[:SHOWN] if each.note)
    return PageSection("ranks", "Ranks", text, tuple(bars))


def _classes(first: RankAccount) -> PageSection:
    columns = ("class", "nodes", "time", "10 %", "median", "90 %", "99 %", "bytes")
    rows = [_class_row(share) for share in first.classes]
    table = Table(f"rank {first.rank}", tuple(Column(each, words=each == "class") for each in columns), rows)
    mean, most = first.parents
    text = (
        f"Nodes by what they do, and how long one takes. A node waits for {mean:.2f} others on average, {most} at most."
    )
    return PageSection("classes", "Classes of work", text, (table,))


def _class_row(share: ClassShare) -> list[Cell]:
    quantiles = [Cell(units.duration(us)) for us in share.quantiles_us]
    size = Cell(f"{share.size_bytes:,}" if share.size_bytes else "")
    return [Cell(share.name), Cell(f"{share.count:,}"), Cell(units.duration(share.total_us)), *quantiles, size]


def _durations(first: RankAccount, others: Sequence[RankAccount]) -> PageSection:
    lines = []
    for name, account, dash in (("", first, "solid"), *((" there", each, "dot") for each in others)):
        shown = [share for share in account.classes if share.name != "metadata" and share.total_us > 0][:CURVES]
        lines += [
            {"type": "scatter", "mode": "lines", "name": share.name + name, "line": {"shape": "hv", "dash": dash},
             "x": [max(us, 1e-3) for us in share.cdf_us], "y": list(CDF_SHARES)}
            for share in shown
        ]  # fmt: skip
    share = {"title": {"text": "share of nodes"}, "tickformat": ".0%", "range": [0, 1.02]}
    durations = figure(lines, 340, showlegend=True, xaxis={"title": {"text": "us"}, "type": "log"}, yaxis=share)
    waits = [{"type": "scatter", "mode": "lines", "name": "nodes", "line": {"shape": "hv"},
              "x": list(first.parents_cdf), "y": list(CDF_SHARES)}]  # fmt: skip
    waits_for = {"title": {"text": "nodes that it waits for"}}
    degrees = figure(waits, 240, xaxis=waits_for, yaxis=share, showlegend=False)
    text = "Which share of the nodes of a class takes at most so long, and waits for at most so many others."
    figures = (Figure("How long nodes take", {"": durations}), Figure("Dependencies of a node", {"": degrees}))
    return PageSection("durations", "Durations and dependencies", text, figures)


def _sizes(sizes: Sequence[SizeShare]) -> PageSection:
    columns = (Column("collective", words=True), Column("bytes up to"), Column("calls"), Column("time"))
    rows = [
        [Cell(s.name), Cell(f"{s.size_bytes:,}"), Cell(f"{s.count:,}"), Cell(units.duration(s.total_us))] for s in sizes
    ]
    text = "Communication of all ranks; the time of a call holds the wait for the other ranks."
    return PageSection("sizes", "Communication by size", text, (Table("", columns, rows),))


def _late(late: Sequence[LateRank]) -> PageSection:
    columns = (Column("rank"), Column("last to arrive"), Column("the others waited"))
    rows = [[Cell(f"{e.rank}"), Cell(f"{e.calls:,}"), Cell(units.duration(e.waited_us))] for e in late[:SHOWN]]
    text = "Who arrived last at collectives, and how long the other ranks waited for it in all."
    return PageSection("late", "Stragglers", text, (Table("", columns, rows),))


def _imbalance(found: Sequence[Imbalance]) -> PageSection:
    columns = (Column("class", words=True), Column("mean"), Column("most"), Column("rank"))
    rows = [[Cell(e.name), Cell(units.duration(e.mean_us)), Cell(units.duration(e.most_us)), Cell(f"{e.rank}")]
            for e in found[:SHOWN]]  # fmt: skip
    text = "Time of each class of work over the ranks: the mean, and the rank that has most."
    return PageSection("imbalance", "How unequal ranks are", text, (Table("", columns, rows),))


def _memory(found: Sequence[TraceMemory]) -> PageSection:
    columns = (Column("rank"), Column("device", words=True), Column("storages"), Column("most held"), Column("at node"))
    rows = [[Cell(f"{e.rank}"), Cell(e.device), Cell(f"{e.storages:,}"), Cell(units.gib(e.peak_bytes / 2**30)),
             Cell(f"{e.peak_node}")] for e in found[:SHOWN]]  # fmt: skip
    text = "Tensors that the trace names, each held from the first node that names its storage to the last."
    lines = [
        {"type": "scatter", "mode": "lines", "name": f"rank {e.rank} {e.device}", "line": {"shape": "hv"},
         "x": [us / 1e3 for us, _ in e.curve], "y": [held / 2**30 for _, held in e.curve]}
        for e in found[:8]
    ]  # fmt: skip
    shown = figure(
        lines, 300, showlegend=len(lines) > 1, xaxis={"title": {"text": "ms"}}, yaxis={"title": {"text": "GiB"}}
    )
    curves = Figure("Memory over time", {"": shown})
    return PageSection("memory", "Memory", text, (curves, Table("", columns, rows)))


def _compared(found: Sequence[tuple[str, int, float, int, float]], other: str) -> PageSection:
    columns = (
        Column("class", words=True),
        Column("nodes"),
        Column("time"),
        Column("nodes there"),
        Column("time there"),
    )
    rows = [
        [
            Cell(name),
            Cell(f"{count:,}"),
            Cell(units.duration(us)),
            Cell(f"{count_there:,}"),
            Cell(units.duration(us_there)),
        ]
        for name, count, us, count_there, us_there in found
    ]
    text = "Means over ranks; the largest difference first."
    return PageSection("compared", f"Beside {other}", text, (Table("", columns, rows),))


def _beside(accounts: Sequence[RankAccount], others: Sequence[RankAccount], other: str) -> PageSection:
    there = {each.rank: each for each in others}
    columns = ("rank", "time", "time there", "compute", "compute there", "communication alone", "alone there", "idle",
               "idle there")  # fmt: skip
    rows = []
    for each in [account for account in accounts if account.rank in there][:SHOWN]:
        pairs = [(getattr(each, name), getattr(there[each.rank], name)) for name in
                 ("total_us", "compute_us", "exposed_us", "idle_us")]  # fmt: skip
        rows.append([Cell(f"{each.rank}"), *(Cell(units.duration(us)) for pair in pairs for us in pair)])
    table = Table("", tuple(Column(each) for each in columns), rows)
    return PageSection("besides", "Ranks of both", f"The time of each rank here and in {other}.", (table,))
