"""``opcast data nodes``: the nodes of a store beside each other; outliers are set aside with ``set_aside=true``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..datasets.store import Store
from ..harness.nodes import compare, set_aside
from .show import BadInputError, print_json, say, table


def run(store: Store, config: Mapping[str, Any], as_json: bool) -> int:
    """Print the comparison; exit code 1 where a node is an outlier that is still handed out."""
    if config["take_back"]:
        if not store.take_back(str(config["take_back"])):
            raise BadInputError(f"take_back={config['take_back']}: no rows of that node were set aside")
        say(f"rows of {config['take_back']} are handed out again")
    reports = compare(store)
    if config["set_aside"]:
        for line in set_aside(store, reports):
            say(f"set aside: {line}")
    aside = store.aside()
    gone = {(mark["node"], mark["gpu"], mark["device"]) for mark in aside}
    if as_json:
        print_json({"store": str(store.path), "nodes": [asdict(report) for report in reports], "aside": aside})
    else:
        rows = []
        for report in reports:
            state = (
                "set aside"
                if (report.node, report.gpu or "", report.device_id) in gone
                else "outlier"
                if report.outlier
                else ""
            )
            rows.append(
                (
                    report.node,
                    report.gpu or "",
                    report.device_id,
                    f"{report.ratio:.3f}",
                    report.canaries,
                    state,
                    "; ".join(report.odd),
                )
            )
        table(f"nodes of {store.path}", ("node", "gpu", "device", "time", "canaries", "", "odd"), rows)
        for entry in aside:
            say(f"set aside on {entry['at'][:10]}: {entry['why']}")
    return int(
        any(report.outlier and (report.node, report.gpu or "", report.device_id) not in gone for report in reports)
    )
