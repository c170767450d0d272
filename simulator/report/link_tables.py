"""What a person is shown of the links of a cluster, as tables: transfers, the fullest links, what faults do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...datasets.counts import counted
from .view import ViewColumn, ViewTable


def transfer_table(network: Mapping[str, Any], most: int | None = None) -> ViewTable:
    """Each transfer with its times and bandwidths."""
    names = ("name", "collective", "ranks", "algorithm", "start_us", "end_us", "algbw_gbps", "busbw_gbps")
    columns = (
        *(ViewColumn("transfer", "words"), ViewColumn("collective", "words"), ViewColumn("ranks")),
        *(ViewColumn("algorithm", "words"), ViewColumn("start", "us"), ViewColumn("end", "us")),
        ViewColumn("algbw GB/s", "digits", "GB/s of the buffer"),
        ViewColumn("busbw GB/s", "digits", "GB/s as nccl-tests counts them"),
    )
    rows = [[each[name] for name in names] for each in network.get("transfers", ())[:most]]
    return ViewTable(f"transfers ({network['fidelity']})", columns, rows)


def fullest_table(network: Mapping[str, Any], whole: str) -> ViewTable:
    """The fullest links over the ``whole``."""
    columns = (
        ViewColumn("link", "words"),
        ViewColumn("as full", hint="links of its kind, itself too"),
        ViewColumn("busy", "share", "share of its capacity", bar=True),
        ViewColumn("peak", "share", "in its fullest hundredth of the time"),
    )
    rows = [[link[name] for name in ("link", "alike", "busy", "peak")] for link in network.get("hot_links", ())]
    return ViewTable(f"fullest links over the {whole} ({network.get('fidelity')})", columns, rows)


def slowdown_table(study: Mapping[str, Any], what: str) -> ViewTable:
    """How much longer ``what`` takes with random faults, by share of the samples."""
    rows: list[tuple[str, Any]] = [(name, times(value)) for name, value in study["slowdown"].items()]
    rows += [("cut off", f"{study['partitioned']} of {study['trials']}")] if study["partitioned"] else []
    columns = ViewColumn("", "words"), ViewColumn("slowdown", hint=f"times {what} without these faults")
    return ViewTable(f"{what} with faults, {counted(study['trials'], 'sample')}", columns, rows)


def critical_table(study: Mapping[str, Any]) -> ViewTable:
    """The links and nodes that matter most."""
    rows = [[item["where"], times(item["slowdown"])] for item in study["critical"]]
    columns = ViewColumn("link", "words"), ViewColumn("mean slowdown", hint="mean of its samples")
    return ViewTable("most critical links", columns, rows)


def times(slowdown: float | None) -> str:
    """How many times longer; None is without end."""
    return "cut off" if slowdown is None else f"{slowdown:.4f}x"
