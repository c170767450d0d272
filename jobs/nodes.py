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
    found = compare(store)
    if config["set_aside"]:
        for line in set_aside(store, found):
            say(f"set aside: {line}")
    aside = store.aside()
    gone = {(each["node"], each["gpu"], each["device"]) for each in aside}
    if as_json:
        print_json({"store": str(store.path), "nodes": [asdict(each) for each in found], "aside": aside})
    else:
        rows = []
        for each in found:
            state = (
                "set aside"
                if (each.node, each.gpu or "", each.device_id) in gone
                else "outlier"
                if each.outlier
                else ""
            )
            rows.append(
                (
                    each.node,
                    each.gpu or "",
                    each.device_id,
                    f"{each.ratio:.3f}",
                    each.canaries,
                    state,
                    "; ".join(each.odd),
                )
            )
        table(f"nodes of {store.path}", ("node", "gpu", "device", "time", "canaries", "", "odd"), rows)
        for entry in aside:
            say(f"set aside on {entry['at'][:10]}: {entry['why']}")
    return int(any(each.outlier and (each.node, each.gpu or "", each.device_id) not in gone for each in found))
