"""ASTRA-sim's files (https://astra-sim.github.io): networks (one list entry a dimension, GiB/s and ns) and systems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...datasets.reading import read_json, read_yaml
from .shapes import Dimension, product
from .topology import Topology, TopologyError

GIB_GB = 2.0**30 / 1e9  # GB of a GiB, which its bandwidths are in
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ASTRA_COLUMNS = ("topology", "npus_count", "bandwidth", "latency")
ASTRA_SHAPES = {"Ring": "ring", "FullyConnected": "fully_connected", "Switch": "switch"}
ASTRA_ALGORITHMS = {
    "ring": "ring",
    "direct": "direct",
    "halvingDoubling": "halving_doubling",
    "doubleBinaryTree": "tree",
    "oneRing": "ring",
    "oneDirect": "direct",
    "oneHalvingDoubling": "halving_doubling",
}


ASTRA_FIGURES = {
    "preferred-dataset-splits": ("chunks", 1),
    "active-chunks-per-dimension": ("active_chunks", 1),
    "endpoint-delay": ("endpoint_delay", 0),
    "local-mem-bw": ("memory", 0),
}


class FormatError(ValueError):
    """A file that is not what it should be; the message says where and what was expected."""


def read_astra_network(text: str) -> Topology:
    """ASTRA-sim's analytical network: a product of dimensions. FormatError for what it lacks."""
    return astra_network(read_yaml(text, FormatError, "the ASTRA-sim network"))


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


def write_astra_network(dimensions: Sequence[Dimension]) -> str:
    """Dimensions as ASTRA-sim reads them. FormatError for a shape that it lacks."""
    names = {mine: theirs for theirs, mine in ASTRA_SHAPES.items()}
    missing = sorted({dimension.shape for dimension in dimensions} - set(names))
    if missing:
        raise FormatError(f"ASTRA-sim has no {missing[0]}; it has {', '.join(ASTRA_SHAPES)}")
    rows: dict[str, list[Any]] = {
        "topology": [names[dimension.shape] for dimension in dimensions],
        "npus_count": [dimension.size for dimension in dimensions],
        "bandwidth": [round(dimension.bandwidth_gbps / GIB_GB, 9) for dimension in dimensions],
        "latency": [round(dimension.latency_us * 1e3, 6) for dimension in dimensions],
    }
    return "".join(f"{name}: [ {', '.join(map(str, values))} ]\n" for name, values in rows.items())


def read_astra_system(text: str) -> dict[str, Any]:
    """Algorithm of each collective by dimension, chunks and delays of ASTRA-sim's system JSON, in opcast's names.

    ``unread`` lists its other settings. FormatError for an algorithm or figure that it cannot have.
    """
    values = read_json(text, FormatError, "ASTRA-sim's system file")
    if not isinstance(values, dict):
        raise FormatError("ASTRA-sim's system JSON must hold settings, such as all-reduce-implementation")
    collectives = {f"{mine.replace('_', '-')}-implementation": mine for mine in COLLECTIVES}
    algorithms = {mine: _astra_algorithms(name, values[name]) for name, mine in collectives.items() if name in values}
    figures = {mine: _astra_figure(name, values.get(name, usual)) for name, (mine, usual) in ASTRA_FIGURES.items()}
    return {
        "algorithms": algorithms,
        "chunks": int(figures["chunks"]),
        "active_chunks": int(figures["active_chunks"]),
        "endpoint_delay_us": figures["endpoint_delay"] / 1e3,
        "memory_gbps": figures["memory"] * GIB_GB,
        "unread": sorted(set(values) - set(collectives) - set(ASTRA_FIGURES)),
    }


def _astra_algorithms(name: str, value: Any) -> list[str]:
    if not isinstance(value, list):
        raise FormatError(f"ASTRA-sim's system JSON: {name} is {value!r}, no list with an algorithm a dimension")
    for algorithm in value:
        if str(algorithm).rstrip("0123456789") not in ASTRA_ALGORITHMS:
            raise FormatError(
                f"ASTRA-sim's system JSON: {name} {algorithm!r} is not one of {', '.join(ASTRA_ALGORITHMS)}"
            )
    return [ASTRA_ALGORITHMS[algorithm.rstrip("0123456789")] for algorithm in value]


def _astra_figure(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise FormatError(f"ASTRA-sim's system JSON: {name}={value!r} is no number of at least 0")
    return float(value)
