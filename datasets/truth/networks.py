"""Rows of tables of simulated networks: a collective over dimensions of given shape, bandwidth and latency.

They are another simulator's answers, not measurements. Those that follow from its conventions rather than from physics
are left out: several transfers at once, products of dimensions, chunks that its congestion-unaware backend divides by,
and messages over several hops, which its congestion-aware backend stores and forwards.
"""

from __future__ import annotations

from pathlib import Path

from .cells import Cells
from .rows import Hardware, NetworkRow, TruthError

SHAPES = {"Ring": "ring", "FullyConnected": "fully_connected", "Switch": "switch"}
ALGORITHMS = {"ring": "ring", "direct": "direct", "halvingDoubling": "halving_doubling"}
GIB_PER_GB = 2**30 / 1e9  # bandwidths are written GB/s and meant GiB/s


def network_row(cells: Cells, folder: Path) -> NetworkRow:
    """One collective on one dimension; TruthError says why its answer is no physics."""
    if cells.text("pattern") != "single_collective":
        raise TruthError("several transfers at once: that simulator stores and forwards them chunk by chunk")
    shape, algorithm = SHAPES.get(cells.text("topology")), ALGORITHMS.get(cells.text("algorithm_per_dim"))
    if shape is None or algorithm is None:
        raise TruthError(f"{cells.text('topology')} with {cells.text('algorithm_per_dim')}: dimensions or a tree")
    nanos = cells.positive("simulated_ns")
    if nanos is None:
        raise TruthError("it did not finish")
    collective, ranks = cells.text("collective"), cells.needed("npus")
    unaware = cells.text("backend") == "congestion_unaware"
    if unaware and (algorithm == "direct" or cells.whole("active_chunks") > 1):
        raise TruthError("congestion unaware: exchanges that share a port, or chunks, are taken to be free")
    hops = shape == "switch" or (shape == "ring" and collective == "all_to_all")
    if hops and not (unaware and shape == "switch" and algorithm == "halving_doubling"):
        raise TruthError("messages over several hops are stored and forwarded, which no network does")
    size = cells.needed("size_bytes") * (ranks if collective == "all_gather" else 1)  # it counts a rank's shard there
    return NetworkRow(
        id=f"{cells.text('backend')} {cells.line}",
        hardware=Hardware(gpu="", device="", cluster="", devices=ranks),
        measured={"latency": nanos * 1e-6},
        tags={"op": collective, "shape": shape, "algorithm": algorithm, "backend": cells.text("backend")},
        collective=collective,
        size_bytes=size,
        shape=shape,
        algorithm=algorithm,
        bandwidth_gbps=(cells.positive("bandwidth_GBps_per_dim") or 0.0) * GIB_PER_GB,
        latency_us=(cells.positive("latency_ns_per_dim") or 0.0) * 1e-3,
    )
