"""Files of other simulators: SimAI's workloads and bus bandwidths, ASTRA-sim's network YAML and system JSON.

SimAI (https://github.com/aliyun/SimAI): a header of parallel degrees, the number of layers, then a line a layer with
compute in ns and a collective in bytes for the forward pass, the input gradient and the weight gradient. ASTRA-sim
(https://astra-sim.github.io): one list entry a network dimension, GiB/s and ns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .fabric import Fabric
from .shapes import Dimension, product
from .topology import Topology, TopologyError

COLLECTIVES = {
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "REDUCESCATTER": "reduce_scatter",
    "ALLTOALL": "all_to_all",
}
PHASES = ("forward", "input_gradient", "weight_gradient")
HEADER = {"model_parallel_NPU_group": "tp", "ep": "ep", "pp": "pp", "vpp": "vpp", "ga": "ga", "all_gpus": "gpus"}
KIND = "HYBRID_TRANSFORMER_FWD_IN_BCKWD"
GIB_GB = 2.0**30 / 1e9


class FormatError(ValueError):
    """A file that is not what it should be; the message says where and what was expected."""


class Work(NamedTuple):
    """Compute in ns, then a collective of ``size_bytes`` over the ranks of ``scope`` ("" is the phase's usual one)."""

    compute_ns: int
    collective: str = ""
    size_bytes: int = 0
    scope: str = ""


class Layer(NamedTuple):
    """One line of a SimAI workload."""

    name: str
    forward: Work
    input_gradient: Work
    weight_gradient: Work
    update_ns: int = 0


@dataclass(frozen=True)
class Workload:
    """``degrees``: tp, ep, pp, vpp, ga and gpus; ``pp_bytes`` is sent between pipeline stages."""

    degrees: Mapping[str, int]
    layers: Sequence[Layer]
    pp_bytes: int = 0
    extra: Mapping[str, int] = field(default_factory=dict)


def read_workload(text: str) -> Workload:
    """A SimAI workload. FormatError names the line."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) < 2 or not lines[0].startswith(KIND):
        raise FormatError(f"a SimAI workload starts with {KIND} and a number of layers")
    words = lines[0].replace(":", " ").split()[1:]
    try:
        figures = {name: int(float(value)) for name, value in zip(words[::2], words[1::2], strict=True)}
        count = int(lines[1])
    except ValueError:
        raise FormatError("line 1 must be names and whole numbers, line 2 the number of layers") from None
    if len(lines) - 2 != count:
        raise FormatError(f"line 2 promises {count} layers, {len(lines) - 2} follow")
    degrees = {mine: figures.pop(theirs, 1) for theirs, mine in HEADER.items()}
    pp_bytes = figures.pop("pp_comm", 0)
    return Workload(degrees, [_layer(i + 3, line) for i, line in enumerate(lines[2:])], pp_bytes, figures)


def _layer(number: int, line: str) -> Layer:
    words = line.split()
    if len(words) != 12:
        raise FormatError(f"line {number} has {len(words)} fields, not 12")
    try:
        forward, inputs, weights = (_work(words[at : at + 3]) for at in (2, 5, 8))
        return Layer(words[0], forward, inputs, weights, int(float(words[11])))
    except (KeyError, ValueError) as error:
        raise FormatError(f"line {number}: {error} is no number or collective that SimAI has") from None


def _work(words: Sequence[str]) -> Work:
    name, _, scope = words[1].partition("_")
    if name == "NONE":
        return Work(int(float(words[0])))
    return Work(int(float(words[0])), COLLECTIVES[name], int(float(words[2])), scope)


def write_workload(workload: Workload) -> str:
    """The workload as SimAI reads it."""
    words = [f"{theirs}: {workload.degrees.get(mine, 1)}" for theirs, mine in HEADER.items()]
    words += [f"{name}: {value}" for name, value in workload.extra.items()]
    head = " ".join([KIND, *words, f"pp_comm: {workload.pp_bytes}"])
    names = {mine: theirs for theirs, mine in COLLECTIVES.items()}

    def written(work: Work) -> list[str]:
        name = names[work.collective] + (f"_{work.scope}" if work.scope else "") if work.collective else "NONE"
        return [str(work.compute_ns), name, str(work.size_bytes)]

    rows = [
        [layer.name, "-1", *(word for phase in PHASES for word in written(getattr(layer, phase))), str(layer.update_ns)]
        for layer in workload.layers
    ]
    return "\n".join([head, str(len(rows)), *("\t".join(row) for row in rows)]) + "\n"


def members(workload: Workload, phase: str, work: Work) -> range:
    """The ranks of the first group that a collective joins: tensor ranks are neighbours, then data, then pipeline."""
    tp, ep, pp = (workload.degrees[name] for name in ("tp", "ep", "pp"))
    stage = workload.degrees["gpus"] // pp
    if work.scope == "EP":
        return range(0, tp * ep, tp)
    if work.scope == "DP_EP":
        return range(0, stage, tp * ep)
    return range(0, stage, tp) if phase == "weight_gradient" else range(tp)


def serial_us(workload: Workload, fabric: Fabric) -> float:
    """All layers one after the other, each collective alone on the fabric: SimAI's analytical mode without overlap."""
    total = 0.0
    for layer in workload.layers:
        for phase in PHASES:
            work: Work = getattr(layer, phase)
            total += work.compute_ns / 1e3
            if work.collective and work.size_bytes:
                total += fabric.latency_us(work.collective, members(workload, phase, work), work.size_bytes)
    return total


def read_busbw(text: str) -> dict[str, dict[str, float]]:
    """SimAI's bus bandwidths, GB/s by group (TP, DP, EP, PP) and collective; FormatError names the line."""
    found: dict[str, dict[str, float]] = {}
    group = ""
    for number, line in enumerate(text.splitlines()[1:], 2):
        name, _, value = line.strip().partition(":")
        name, value = name.rstrip(","), value.strip().rstrip(",")
        if name and not value:
            group = name
            found[group] = {}
        elif name and value != "null":
            try:
                found[group][COLLECTIVES.get(name.upper(), name)] = float(value)
            except (KeyError, ValueError):
                raise FormatError(f"line {number} of the bus bandwidths is not `collective,: GB/s`") from None
    return found


def write_busbw(rates: Mapping[str, Mapping[str, float]], title: str = "opcast") -> str:
    """Bus bandwidths as SimAI reads them; what is not given is null."""
    lines = [title]
    for group, each in rates.items():
        lines.append(f"{group}:")
        if group == "PP":
            lines.append(f"  busbw: {each['busbw']:g}")
            continue
        for theirs, mine in COLLECTIVES.items():
            lines.append(f"  {theirs.lower()},: {each[mine]:g}" if mine in each else f"  {theirs.lower()},: null")
    return "\n".join(lines) + "\n"


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


def read_astra_network(text: str) -> Topology:
    """ASTRA-sim's analytical network: a product of dimensions. FormatError for what it lacks."""
    import yaml

    try:
        return astra_network(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise FormatError(f"the ASTRA-sim network is no YAML: {yaml_problem(error)}") from None


def astra_network(values: Any, name: str = "") -> Topology:
    """The fabric of ASTRA-sim's network YAML, already parsed. FormatError for what it lacks."""
    wanted = "an ASTRA-sim network has lists topology, npus_count, bandwidth and latency of one length"
    if not isinstance(values, Mapping):
        raise FormatError(f"{wanted}, not {values!r}"[:200])
    columns = [values.get(each) for each in ASTRA_COLUMNS]
    for column, each in zip(columns, ASTRA_COLUMNS, strict=True):
        if not isinstance(column, list) or len(column) != len(columns[0] or []):
            raise FormatError(f"{wanted}; {each} is {'missing' if column is None else column!r}")
    rows = list(zip(*columns, strict=True))
    unknown = [row[0] for row in rows if row[0] not in tuple(ASTRA_SHAPES)]
    if unknown:
        raise FormatError(f"ASTRA-sim topology {unknown[0]!r} is not one of {', '.join(ASTRA_SHAPES)}")
    for each, column in zip(ASTRA_COLUMNS[1:], columns[1:], strict=True):
        for value in column or []:
            if isinstance(value, bool) or not isinstance(value, int if each == "npus_count" else (int, float)):
                raise FormatError(f"ASTRA-sim network: {each}={value!r} is no number of its kind")
    try:
        return product([Dimension(ASTRA_SHAPES[s], n, gib * GIB_GB, ns / 1e3) for s, n, gib, ns in rows], name)
    except TopologyError as error:
        raise FormatError(f"ASTRA-sim network: {error}") from None


def yaml_problem(error: Exception) -> str:
    """What YAML's parser stumbled over, in one line with the line number."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    text = str(problem or error).splitlines()[0]
    return f"line {mark.line + 1}: {text}" if mark is not None else text


def write_astra_network(dimensions: Sequence[Dimension]) -> str:
    """Dimensions as ASTRA-sim reads them. FormatError for a shape that it lacks."""
    names = {mine: theirs for theirs, mine in ASTRA_SHAPES.items()}
    missing = sorted({each.shape for each in dimensions} - set(names))
    if missing:
        raise FormatError(f"ASTRA-sim has no {missing[0]}; it has {', '.join(ASTRA_SHAPES)}")
    rows: dict[str, list[Any]] = {
        "topology": [names[each.shape] for each in dimensions],
        "npus_count": [each.size for each in dimensions],
        "bandwidth": [round(each.bandwidth_gbps / GIB_GB, 9) for each in dimensions],
        "latency": [round(each.latency_us * 1e3, 6) for each in dimensions],
    }
    return "".join(f"{name}: [ {', '.join(map(str, values))} ]\n" for name, values in rows.items())


def read_astra_system(text: str) -> dict[str, Any]:
    """Algorithm of each collective by dimension, chunks and delays of ASTRA-sim's system JSON, in opcast's names."""
    try:
        values = json.loads(text)
        algorithms = {
            mine: [ASTRA_ALGORITHMS[name] for name in values[f"{theirs}-implementation"]]
            for theirs, mine in (
                ("all-reduce", "all_reduce"),
                ("all-gather", "all_gather"),
                ("reduce-scatter", "reduce_scatter"),
                ("all-to-all", "all_to_all"),
            )
            if f"{theirs}-implementation" in values
        }
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise FormatError(f"ASTRA-sim's system JSON: {' '.join(str(error).split())}") from None
    return {
        "algorithms": algorithms,
        "chunks": int(values.get("preferred-dataset-splits", 1)),
        "active_chunks": int(values.get("active-chunks-per-dimension", 1)),
        "endpoint_delay_us": float(values.get("endpoint-delay", 0)) / 1e3,
        "memory_gbps": float(values.get("local-mem-bw", 0)) * GIB_GB,
    }
