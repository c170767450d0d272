"""Traces to look at: the graph of a window of nodes, a timeline, and the order in which nodes can run.

The graph is text for Graphviz (``.dot``) or for networkx, Gephi and yEd (``.graphml``), as the reference visualiser
writes them. The order is the reconstructor's: each node behind all that it waits for, with the times that a simulation
gives it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from ...datasets.traces.classes import CLASSES, class_codes, is_network, is_work
from ...datasets.traces.dependencies import dependency_edges
from ...datasets.traces.groups import RankedTraces
from ...datasets.traces.schema import TraceFileError
from ...datasets.traces.table import ExecutionTrace
from ..formats.kineto import KernelSpan
from ..formats.tracks import RankTrack, TrackSpan
from .analysis import recorded_times
from .feeder import lane_keys
from .run import SimulatedRun

MAX_GRAPH_NODES = 20_000  # nodes of a graph; no program lays out more
COLOURS = {"gemm": "lightblue", "attention": "lightblue", "elementwise": "lightgrey", "memory": "khaki",
           "host": "white", "gap": "white"}  # fmt: skip
NETWORK_COLOUR, OTHER_COLOUR = "orange", "lightgrey"


class WindowGraph(NamedTuple):
    """Nodes of a window, and edges between them: (parent, child, whether data gates the child)."""

    rows: np.ndarray
    edges: list[tuple[int, int, bool]]


class ScheduledNode(NamedTuple):
    """A node in the order in which nodes begin; times in us."""

    rank: int
    node: int
    name: str
    sort: str
    ready_us: float
    start_us: float
    end_us: float


def window_graph(trace: ExecutionTrace, name: str, nodes: tuple[int, int] | None = None) -> WindowGraph:
    """The nodes with ids in a window, and their edges. TraceFileError for none, or more than can be shown."""
    first, last = nodes if nodes is not None else (0, int(trace.ids.max(initial=0)))
    rows = np.flatnonzero((trace.ids >= first) & (trace.ids <= last))
    if not len(rows):
        raise TraceFileError(f"{name} has no node from {first} to {last}")
    if len(rows) > MAX_GRAPH_NODES:
        raise TraceFileError(f"{name}: {len(rows):,} nodes are more than the {MAX_GRAPH_NODES:,} that a graph shows: "
                             "choose some, nodes=[first,last]")  # fmt: skip
    inside = np.zeros(len(trace), bool)
    inside[rows] = True
    edges = dependency_edges(trace)
    is_inside = inside[edges.parent] & inside[edges.child]
    columns = (edges.parent[is_inside].tolist(), edges.child[is_inside].tolist(), edges.data[is_inside].tolist())
    return WindowGraph(rows, list(zip(*columns, strict=True)))


def dot(trace: ExecutionTrace, graph: WindowGraph) -> str:
    """The graph for Graphviz; control dependencies are dashed."""
    codes = class_codes(trace)
    network = is_network(codes)
    lines = ["digraph trace {", '  node [shape=box, style="filled,rounded", fontsize=10];']
    for row in graph.rows.tolist():
        colour = NETWORK_COLOUR if network[row] else COLOURS.get(CLASSES[codes[row]], OTHER_COLOUR)
        label = json.dumps(f"{trace.ids[row]} {trace.name_of(row)}\n{trace.exact_us[row]:.6g} us", ensure_ascii=False)
        lines.append(f"  n{trace.ids[row]} [label={label}, fillcolor={colour}];")
    for parent, child, data in graph.edges:
        lines.append(f"  n{trace.ids[parent]} -> n{trace.ids[child]}{'' if data else ' [style=dashed]'};")
    return "\n".join([*lines, "}", ""])


def graphml(trace: ExecutionTrace, graph: WindowGraph) -> str:
    """The graph as GraphML: names, classes and times of nodes, kinds of edges."""
    codes = class_codes(trace)
    lines = ['<?xml version="1.0" encoding="UTF-8"?>', '<graphml xmlns="http://graphml.graphdrawing.org/xmlns">']
    for key, of, kind in (("name", "node", "string"), ("class", "node", "string"), ("start_us", "node", "double"),
                          ("duration_us", "node", "double"), ("dependency", "edge", "string")):  # fmt: skip
        lines.append(f'<key id="{key}" for="{of}" attr.name="{key}" attr.type="{kind}"/>')
    lines.append('<graph id="trace" edgedefault="directed">')
    for row in graph.rows.tolist():
        begins, lasts = float(trace.exact_start_us[row]), float(trace.exact_us[row])
        fields = {"name": printable(trace.name_of(row)), "class": CLASSES[codes[row]], "start_us": repr(begins),
                "duration_us": repr(lasts)}  # fmt: skip
        data = "".join(f"<data key={quoteattr(key)}>{escape(text)}</data>" for key, text in fields.items())
        lines.append(f'<node id="{trace.ids[row]}">{data}</node>')
    for parent, child, data_edge in graph.edges:
        kind = "data" if data_edge else "control"
        ends = f'source="{trace.ids[parent]}" target="{trace.ids[child]}"'
        lines.append(f'<edge {ends}><data key="dependency">{kind}</data></edge>')
    return "\n".join([*lines, "</graph>", "</graphml>", ""])


def printable(text: str) -> str:
    """A text without what XML cannot hold."""
    return "".join(character if character.isprintable() else " " for character in text)


def schedule(simulated: SimulatedRun) -> Iterator[ScheduledNode]:
    """All nodes in the order in which they begin, parents before children; of a collective one line for each rank."""
    executions = simulated.executions
    nodes, ranks, rows = [], [], []
    for rank in simulated.run.traces:
        rank_nodes = simulated.joint.node[rank]
        nodes.append(rank_nodes)
        ranks.append(np.full(len(rank_nodes), rank))
        rows.append(np.arange(len(rank_nodes)))
    node, rank_of, row_of = np.concatenate(nodes), np.concatenate(ranks), np.concatenate(rows)
    codes_of_rank = {rank: class_codes(trace) for rank, trace in simulated.run.traces.items()}
    order = np.lexsort((row_of, rank_of, executions.end_us[node], executions.start_us[node]))
    for index in order.tolist():
        rank, row, node_at = int(rank_of[index]), int(row_of[index]), int(node[index])
        trace = simulated.run.traces[rank]
        yield ScheduledNode(rank, int(trace.ids[row]), trace.name_of(row), CLASSES[codes_of_rank[rank][row]],
                            float(executions.ready_us[node_at]), float(executions.start_us[node_at]),
                            float(executions.end_us[node_at]))  # fmt: skip


# --- timelines -------------------------------------------------------------------------------------------


def lane_names(trace: ExecutionTrace) -> Mapping[int, str]:
    """What to call the lanes of a trace."""
    keys = np.unique(lane_keys(trace)).tolist()
    names = {0: "compute", 1: "communication", -1: "messages"}
    return {key: names.get(key, f"stream {key - 2}" if key >= 2 else f"thread {-2 - key}") for key in keys}


def tracks(run: RankedTraces) -> list[RankTrack]:
    """The nodes of each rank as recorded, for Perfetto; gaps are left out."""
    rank_tracks = []
    for rank, trace in run.traces.items():
        codes, lanes, names = class_codes(trace), lane_keys(trace), lane_names(trace)
        start, end = recorded_times(trace)
        spans = [
            TrackSpan(trace.name_of(row), float(start[row]), float(end[row] - start[row]), names[int(lanes[row])],
                      CLASSES[codes[row]], {"node": int(trace.ids[row])})
            for row in np.argsort(start, kind="stable").tolist()
            if CLASSES[codes[row]] not in ("gap", "metadata") and end[row] > start[row]
        ]  # fmt: skip
        rank_tracks.append(RankTrack(f"rank {rank}", spans))
    return rank_tracks


def kernels(trace: ExecutionTrace) -> tuple[list[KernelSpan], float]:
    """What ran on the device of a rank, for HTA, and when the last of it ended (us, from the first)."""
    codes = class_codes(trace)
    work, network = is_work(trace, codes), is_network(codes)
    memory = codes == CLASSES.index("memory")
    start, end = recorded_times(trace)
    rows = np.flatnonzero(work | network)
    rows = rows[np.argsort(start[rows], kind="stable")]
    begin = float(start[rows].min(initial=np.inf)) if len(rows) else 0.0
    streams = np.maximum(lane_keys(trace) + 5, 1)  # stream 0 is of no step to HTA
    kernel_spans = [
        KernelSpan(CLASSES[codes[row]] if network[row] else trace.name_of(row),
                   "network" if network[row] else "memory" if memory[row] else "compute", int(streams[row]),
                   float(start[row]) - begin, float(end[row]) - begin)
        for row in rows.tolist()
    ]  # fmt: skip
    return kernel_spans, max((span.end_us for span in kernel_spans), default=0.0)
