"""The page of an execution trace, or of two side by side: what each rank did, by class, by size, who came late."""

from __future__ import annotations

from collections.abc import Sequence

from ..execution import tables
from ..execution.analysis import CDF_SHARES, LateRank, RankAccount, SizeShare
from ..execution.usage import Imbalance, TraceMemory
from ..report.view import ViewColumn, ViewTable
from . import units
from .charts import figure
from .page import Card, Figure, Page, PageSection, Piece, StackedBar, drawn_table

MAX_RANKS = 64  # ranks on the page
MAX_CURVES = 8  # classes that have a curve of durations
TIME_PARTS = (("compute", "blue"), ("communication alone", "orange"), ("idle", "grey"))


def page(
    name: str,
    accounts: Sequence[RankAccount],
    sizes: Sequence[SizeShare],
    late: Sequence[LateRank],
    compared: Sequence[tuple[str, int, float, int, float]] = (),
    other_name: str = "",
    memory: Sequence[TraceMemory] = (),
    imbalance: Sequence[Imbalance] = (),
    others: Sequence[RankAccount] = (),
) -> Page:
    """The page of a run as recorded; ``compared`` by class with ``other_name``, whose accounts are ``others``."""
    total = max((account.total_us for account in accounts), default=0.0)
    nodes = sum(account.nodes for account in accounts)
    headline = (("time", units.duration(total)), ("ranks", f"{len(accounts):,}"), ("nodes", f"{nodes:,}"))
    sections = [_ranks(accounts), _classes(accounts[0]), _durations(accounts[0], others[:1])]
    if sizes:
        sections.append(_sizes(sizes))
    if any(late_rank.waited_us > 0 for late_rank in late):
        sections.append(_late(late))
    if imbalance:
        sections.append(_imbalance(imbalance))
    if memory:
        sections.append(_memory(memory))
    if compared:
        sections.append(_comparison(compared, other_name))
        sections.append(_rank_comparison(accounts, others, other_name))
    return Page(f"Execution trace {name}", "what was recorded", (), (Card(name, headline),), tuple(sections))


def _ranks(accounts: Sequence[RankAccount]) -> PageSection:
    bars = []
    for account in accounts[:MAX_RANKS]:
        account_us = account.total_us or 1.0
        values = (0.0, 0.0, 0.0) if account.blind else (account.compute_us, account.exposed_us, account.idle_us)
        pieces = [Piece(part_name, units.duration(us), us / account_us, colour)
                  for (part_name, colour), us in zip(TIME_PARTS, values, strict=True) if us > 0]  # fmt: skip
        bars.append(StackedBar(f"rank {account.rank}: {units.duration(account.total_us)}", tuple(pieces)))
    text = "Time in which a rank's device computes, in which it only communicates, and in which it does neither."
    text += "".join(f" Rank {account.rank}: {account.note}." for account in accounts[:MAX_RANKS] if account.note)
    return PageSection("ranks", "Ranks", text, tuple(bars))


def _classes(first: RankAccount) -> PageSection:
    table = drawn_table(tables.class_table(first, f"rank {first.rank}"))
    mean_parents, most_parents = first.parents
    text = (
        f"Nodes by what they do, and how long one takes. A node waits for {mean_parents:.2f} others on average, "
        f"{most_parents} at most."
    )
    return PageSection("classes", "Classes of work", text, (table,))


def _durations(first: RankAccount, others: Sequence[RankAccount]) -> PageSection:
    lines = []
    for name, account, dash in (("", first, "solid"), *((" there", account, "dot") for account in others)):
        shares = [share for share in account.classes if share.name != "metadata" and share.total_us > 0][:MAX_CURVES]
        lines += [
            {"type": "scatter", "mode": "lines", "name": share.name + name, "line": {"shape": "hv", "dash": dash},
             "x": [max(us, 1e-3) for us in share.cdf_us], "y": list(CDF_SHARES)}
            for share in shares
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
    text = "Communication of all ranks; the time of a call holds the wait for the other ranks."
    return PageSection("sizes", "Communication by size", text, (drawn_table(tables.size_table(sizes), ""),))


def _late(late: Sequence[LateRank]) -> PageSection:
    text = "Who arrived last at collectives, and how long the other ranks waited for it in all."
    return PageSection("late", "Stragglers", text, (drawn_table(tables.late_table(late[:MAX_RANKS]), ""),))


def _imbalance(imbalances: Sequence[Imbalance]) -> PageSection:
    text = "Time of each class of work over the ranks: the mean, and the rank that has most."
    table = drawn_table(tables.imbalance_table(imbalances[:MAX_RANKS]), "")
    return PageSection("imbalance", "How unequal ranks are", text, (table,))


def _memory(memories: Sequence[TraceMemory]) -> PageSection:
    text = "Tensors that the trace names, each held from the first node that names its storage to the last."
    lines = [
        {"type": "scatter", "mode": "lines", "name": f"rank {e.rank} {e.device}", "line": {"shape": "hv"},
         "x": [us / 1e3 for us, _ in e.curve], "y": [held_bytes / 2**30 for _, held_bytes in e.curve]}
        for e in memories[:8]
    ]  # fmt: skip
    picture = figure(
        lines, 300, showlegend=len(lines) > 1, xaxis={"title": {"text": "ms"}}, yaxis={"title": {"text": "GiB"}}
    )
    curves = Figure("Memory over time", {"": picture})
    return PageSection("memory", "Memory", text, (curves, drawn_table(tables.memory_table(memories[:MAX_RANKS]), "")))


def _comparison(class_rows: Sequence[tuple[str, int, float, int, float]], other_name: str) -> PageSection:
    text = "Means over ranks; the largest difference first."
    return PageSection(
        "compared", f"Beside {other_name}", text, (drawn_table(tables.compared_table(class_rows, other_name), ""),)
    )


def _rank_comparison(accounts: Sequence[RankAccount], others: Sequence[RankAccount], other_name: str) -> PageSection:
    account_there = {account.rank: account for account in others}
    titles = [name + there for name in ("time", "compute", "communication alone", "idle") for there in ("", " there")]
    rows = []
    for account in [account for account in accounts if account.rank in account_there][:MAX_RANKS]:
        pairs = [(getattr(account, name), getattr(account_there[account.rank], name)) for name in
                 ("total_us", "compute_us", "exposed_us", "idle_us")]  # fmt: skip
        rows.append([account.rank, *(us for pair in pairs for us in pair)])
    table = ViewTable("", [ViewColumn("rank"), *(ViewColumn(title, "us") for title in titles)], rows)
    text = f"The time of each rank here and in {other_name}."
    return PageSection("besides", "Ranks of both", text, (drawn_table(table),))
