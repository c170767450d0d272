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
    states = [
        "set aside" if (report.node, report.gpu or "", report.device_id) in gone else "outlier" * report.outlier
        for report in reports
    ]
    if as_json:
        print_json({"store": str(store.path), "nodes": [asdict(report) for report in reports], "aside": aside})
    else:
        rows = [
            (node.node, node.gpu, node.device_id, f"{node.ratio:.3f}", node.canaries, state, "; ".join(node.odd))
            for node, state in zip(reports, states, strict=True)
        ]
        table(f"nodes of {store.path}", ("node", "gpu", "device", "time", "canaries", "", "odd"), rows)
        for entry in aside:
            say(f"set aside on {entry['at'][:10]}: {entry['why']}")
    return int("outlier" in states)
