"""Predictions of a request on a cluster: which devices run each collective, and whom to ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...datasets.clusters import Cluster
from ...datasets.devices import Device
from ...datasets.ops import KINDS, Op
from ..engines import FusedEngine
from ..engines.network import NetworkEngine
from ..network.query import check_algorithm, check_integer, parse_group
from ..question.canonical import RequestError
from ..question.network import shown
from ..question.predictions import PredictRequest
from ..report.answer import OpPrediction
from .links import Links, predict_by_formula, predict_collective, predict_transfers
from .ops import predict_ops

OF_COLLECTIVES = ("group", "stride", "all_groups", "algorithm", "loads")
PER_NODE = next(dim.default for dim in KINDS["all_reduce"].dims if dim.name == "ranks_per_node")


def predict_collectives(
    request: PredictRequest,
    device: Device,
    engine: FusedEngine,
    formula: NetworkEngine,
    ready: Links | None,
    with_flows: Callable[[], FusedEngine],
) -> list[OpPrediction]:
    """Predictions of ops on a cluster: collectives by what its links do, all others as on one device.

    ``ready`` are the links, where these are asked for; ``with_flows`` then gives the engines that know them.
    """
    cluster = request.cluster
    assert cluster is not None
    study: Any = request.network.faults_study
    predictions: list[OpPrediction] = []
    for op in request.ops:
        if KINDS[op.kind].family != "collective":
            for name in OF_COLLECTIVES:
                if getattr(request, name):
                    raise RequestError(
                        f"{name}={shown(getattr(request, name))} is for collectives: leave it out of op={op.kind}"
                    )
            if study:
                raise RequestError(f"faults_study is for collectives: leave it out of op={op.kind}")
            flows = ready is not None and KINDS[op.kind].collective
            predictions += predict_ops([op], device, with_flows() if flows else engine, request.cache)
            continue
        group = members(op, cluster, request)
        check_algorithm(op.kind, request.algorithm)
        if ready is None:
            predictions.append(predict_by_formula(op, group, formula, engine, request.cache))
        else:
            how = request.algorithm, request.all_groups, study, request.cache
            predictions.append(predict_collective(op, group, ready, engine, *how))
    return predictions


def predict_moves(request: PredictRequest, ready: Links) -> OpPrediction:
    """What the transfers of a request do together on the links of its cluster."""
    names = request.names or tuple(f"transfer {place}" for place in range(len(request.transfers)))
    study: Any = request.network.faults_study
    return predict_transfers(request.transfers, names, ready, study)


def members(op: Op, cluster: Cluster, request: PredictRequest) -> tuple[int, ...]:
    """The devices that run an op: ``group``, else ``op.ranks`` of them ``stride`` or ``op.ranks_per_node`` a node."""
    stride, near = request.stride, op.ranks_per_node
    if stride is None:
        fewer = near != PER_NODE and near < min(op.ranks, cluster.devices_per_node)
        stride = cluster.devices_per_node // near if fewer else 1
    return parse_group(request.group, op.ranks, check_integer("stride", stride, 1), cluster.devices)
