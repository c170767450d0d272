"""ASTRA-sim's analytical networks (https://astra-sim.github.io): one list entry a dimension, GiB/s and ns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .shapes import Dimension, product
from .topology import Topology, TopologyError

GIB_GB = 2.0**30 / 1e9  # GB of a GiB, which its bandwidths are in
ASTRA_COLUMNS = ("topology", "npus_count", "bandwidth", "latency")
ASTRA_SHAPES = {"Ring": "ring", "FullyConnected": "fully_connected", "Switch": "switch"}


class FormatError(ValueError):
    """A file that is not what it should be; the message says where and what was expected."""


def astra_network(values: Any, name: str = "") -> Topology:
    """The fabric of ASTRA-sim's network YAML, already parsed. FormatError for what it lacks."""
    expected = "an ASTRA-sim network has lists topology, npus_count, bandwidth and latency of one length"
    if not isinstance(values, Mapping):
        raise FormatError(f"{expected}, not {values!r}"[:200])
    columns = [values.get(key) for key in ASTRA_COLUMNS]
    for column, key in zip(columns, ASTRA_COLUMNS, strict=True):
        if not isinstance(column, list) or len(column) != len(columns[0] or []):
            raise FormatError(f"{expected}; {key} is {'missing' if column is None else column!r}")
    rows = list(zip(*columns, strict=True))
    unknown = [row[0] for row in rows if row[0] not in tuple(ASTRA_SHAPES)]
    if unknown:
        raise FormatError(f"ASTRA-sim topology {unknown[0]!r} is not one of {', '.join(ASTRA_SHAPES)}")
    for key, column in zip(ASTRA_COLUMNS[1:], columns[1:], strict=True):
        for value in column or []:
            if isinstance(value, bool) or not isinstance(value, int if key == "npus_count" else (int, float)):
                raise FormatError(f"ASTRA-sim network: {key}={value!r} is no number of its kind")
    try:
        return product([Dimension(ASTRA_SHAPES[s], n, gib * GIB_GB, ns / 1e3) for s, n, gib, ns in rows], name)
    except TopologyError as error:
        raise FormatError(f"ASTRA-sim network: {error}") from None
