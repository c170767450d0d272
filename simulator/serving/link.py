"""The way of a cache from the replica that made it to the one that decodes, as the network between them has it.

The GPUs of a replica send side by side, each over its share of its node's NICs, or over the node's own links where all
replicas stand in one node. One transfer between two GPUs is asked of the engines that answer collectives of steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...datasets.clusters import Cluster
from ...datasets.ops import make_op
from ..engines import Engine, ask
from ..question.serving import ServingRequest
from .replica import ServedReplica

if TYPE_CHECKING:
    from ..engines.bench import Bench

SIZES = 2**22, 2**27  # bytes of a transfer, from which start and rate follow


@dataclass(frozen=True)
class CacheLink:
    """A link of a rank: ``gbps`` (GB/s) of all its GPUs together, ``us`` until the first byte is there."""

    gbps: float
    us: float


def cache_link(
    request: ServingRequest, prefiller: ServedReplica, decoder: ServedReplica, bench: Bench
) -> CacheLink | None:
    """The link between a rank that prefills and one that decodes: the slower end counts. None without a cluster."""
    steps = request.step, request.decode_pool.step or request.step
    if steps[0] is None or steps[1] is None or steps[0].cluster is None or steps[1].cluster is None:
        return None
    devices = request.replicas * prefiller.devices + request.decode_pool.replicas * decoder.devices
    first, second = steps[0].cluster, steps[1].cluster
    near = first.id == second.id and devices <= first.devices_per_node
    links = []
    ranks = (request.attention_dp, request.second_dp)
    for step, replica, dp in zip(steps, (prefiller, decoder), ranks, strict=True):
        assert step is not None
        assert step.cluster is not None
        cluster = replace(step.cluster, nodes=max(step.cluster.nodes, 2))
        engine = bench.engine_with_links(bench.device(step.device, cluster), cluster, step.network)
        pair = between_two(cluster, engine, near)
        links.append(CacheLink(pair.gbps * replica.devices / dp, pair.us))
    return CacheLink(min(link.gbps for link in links), max(link.us for link in links))


def between_two(cluster: Cluster, engine: Engine, near: bool) -> CacheLink:
    """The link between two GPUs of a cluster, in one node or in two."""
    link, together = (cluster.link, 2) if near else (cluster.fabric, 1)
    ops = [make_op("send_recv", size_bytes=size, ranks=2, ranks_per_node=together, link=link) for size in SIZES]
    small, large = ask(engine, ops, "cold").latency_us.tolist()
    us_per_byte = max((large - small) / (SIZES[1] - SIZES[0]), 1e-9)
    return CacheLink(1e-3 / us_per_byte, max(small - SIZES[0] * us_per_byte, 0.0))
