"""What the power limit does to the nodes of a step: the clock that it leaves, which short tables do not know.

A step that keeps a device busy for longer than the limiter takes to settle runs its products at steady clocks
(:func:`....models.clocks.steady_rate`). A cap below the data sheet's limit holds from the start, and for every op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...datasets.devices import Device
from ...datasets.ops import KINDS, Op, iterate_groups
from ...datasets.vocabulary import OpColumns
from ...models import power
from ...models.busy import parts
from ...models.clocks import anchor, rate_name
from .costs import Costs

SETTLING_MS = 30.0, 100.0  # of busy time in which the limiter takes hold: ratios of tables timed for 2 ms to 1 s
# What the law of clocks may be off by in the time that long products compute, in ln units below and above: on chips
# that somebody timed for long (bf16 of H200 and B200 for a second over a burst of it: 0.96 to 1.03 times the law), and
# where nobody did, who are taken to keep their clock (between 1.0 and 1.2 times the burst on both, docs/findings.md).
KNOWN, UNKNOWN = (0.04, 0.04), (0.02, 0.15)
MATRIX_UNITS = (*power.PRODUCTS, "attention")  # families that compute on them


def limit_power(costs: Sequence[Costs], device: Device, busy_us: Sequence[float]) -> list[Costs]:
    """The costs of graphs under the device's power limit, which steps of each keep busy for ``busy_us`` [graphs]."""
    capped = power.Limits().of(device).asked
    settled = [1.0 if capped else _settle_clock(busy) for busy in busy_us]
    if not costs or not device.tdp_w or max(settled) <= 0.0:
        return list(costs)
    ends = np.cumsum([len(costs_of_graph.nodes) for costs_of_graph in costs])
    slower = np.split(_slower(costs, device, capped), ends[:-1])
    return [
        unsure(_hold_clock(costs_of_graph, 1.0 + share * (factor - 1.0), capped), device, share)
        if share
        else costs_of_graph
        for costs_of_graph, factor, share in zip(costs, slower, settled, strict=True)
    ]


def unsure(costs: Costs, device: Device, settled: float) -> Costs:
    """The costs with bounds that hold what the law of clocks may be off by where the limiter has settled so far.

    Memory keeps its clock: bounds of an op widen by the share of its time that computes. Attention computes on the same
    units: where this very device did not run it for long, it is taken to keep its clock.
    """
    ops = [
        node.op if node.op is not None and KINDS[node.op.kind].family in MATRIX_UNITS else None for node in costs.nodes
    ]
    timed = {
        (op.kind, op.dtype)
        for op in set(ops)
        if op is not None and anchor(device, rate_name(op.kind, op.dtype)) is not None
    }
    off = [(0.0, 0.0) if op is None else KNOWN if (op.kind, op.dtype) in timed else UNKNOWN for op in ops]
    below, above = settled * _computing_share(ops, device) * np.array(off, dtype=float).reshape(-1, 2).T
    low = np.exp(-np.hypot(np.log(costs.low), below))
    return replace(costs, low=low, high=np.exp(np.hypot(np.log(costs.high), above)))


def _computing_share(ops: Sequence[Op | None], device: Device) -> np.ndarray:
    """Which share of their time ops compute [n], by the analytical law; 0 without an op."""
    share = np.zeros(len(ops))
    places = np.array([at for at, op in enumerate(ops) if op is not None], dtype=np.int64)
    for kind, dtype, out_dtype, positions, columns in iterate_groups([op for op in ops if op is not None]):
        busy = parts(OpColumns(kind, columns, dtype, out_dtype, "cold"), device)
        share[places[positions]] = busy.compute / busy.whole
    return share


def _settle_clock(busy: float) -> float:
    start, end = (1e3 * limit for limit in SETTLING_MS)
    return float(np.clip((busy - start) / (end - start), 0.0, 1.0))


def _slower(costs: Sequence[Costs], device: Device, capped: bool) -> np.ndarray:
    """How many times longer each node of all takes at the clock that the limit leaves [nodes]."""
    nodes = [node for graph_costs in costs for node in graph_costs.nodes]
    latency = np.concatenate([graph_costs.kernel_us for graph_costs in costs])
    slower, limits = np.ones(len(nodes)), power.Limits(device.tdp_w)
    slower_ops = {op for op in {node.op for node in nodes} if op is not None and _draws(op, device, capped)}
    places = [at for at, node in enumerate(nodes) if node.op in slower_ops]
    ops = [op for at in places if (op := nodes[at].op) is not None]
    for kind, dtype, out_dtype, positions, columns in iterate_groups(ops):
        at = np.array(places)[positions]
        watts = power.drawn(None, OpColumns(kind, columns, dtype, out_dtype, "cold"), device, limits, latency[at])
        slower[at] = watts.slower
    return slower


def _draws(op: Op, device: Device, capped: bool) -> bool:
    return power.is_held(op.kind, op.dtype, device) or (capped and KINDS[op.kind].family not in power.WITHOUT_POWER)


def _hold_clock(costs: Costs, factor: np.ndarray, capped: bool) -> Costs:
    inside = costs.in_envelope & (factor == 1.0) if capped else costs.in_envelope
    return replace(costs, kernel_us=costs.kernel_us * factor, in_envelope=inside)
