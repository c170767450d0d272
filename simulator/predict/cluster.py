"""Predictions of a request on a cluster: which devices run each collective, and whom to ask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...datasets.clusters import Cluster
from ...datasets.devices import Device
from ...datasets.ops import KINDS, Op
from ..network.query import check_algorithm, group_of, whole
from ..question.canonical import RequestError
from ..question.network import shown
from ..question.predictions import PredictRequest
from ..report.answer import OpPrediction
from .links import predict_by_formula, predict_collective, predict_transfers
from .ops import predict_ops

if TYPE_CHECKING:
    from ..workbench import Workbench

OF_COLLECTIVES = ("group", "stride", "all_groups", "algorithm", "loads")
PER_NODE = next(dim.default for dim in KINDS["all_reduce"].dims if dim.name == "ranks_per_node")


def predict_collectives(request: PredictRequest, device: Device, bench: Workbench) -> list[OpPrediction]:
    """Predictions of ops on a cluster: collectives by what its links do, all others as on one device."""
    cluster = request.cluster
    assert cluster is not None
    engine = bench.engine(device, cluster)
    ready = bench.links(device, cluster, request.network) if request.of_links() else None
    formula = ready.formula if ready else bench.formula(device, cluster)
    study: Any = request.network.faults_study
    made: list[OpPrediction] = []
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
            other = bench.engine_with_links(device, cluster, request.network) if flows else engine
            made += predict_ops([op], device, other, request.cache)
            continue
        group = members(op, cluster, request)
        check_algorithm(op.kind, request.algorithm)
        if ready is None:
            made.append(predict_by_formula(op, group, formula, engine, request.cache))
        else:
            asked = request.algorithm, request.all_groups, study, request.cache
            made.append(predict_collective(op, group, ready, engine, *asked))
    return made


def predict_moves(request: PredictRequest, device: Device, bench: Workbench) -> OpPrediction:
    """What the transfers of a request do together on its cluster."""
    assert request.cluster is not None
    ready = bench.links(device, request.cluster, request.network)
    names = request.names or tuple(f"transfer {place}" for place in range(len(request.transfers)))
    study: Any = request.network.faults_study
    return predict_transfers(request.transfers, names, ready, study)


def members(op: Op, cluster: Cluster, request: PredictRequest) -> tuple[int, ...]:
    """The devices that run an op: ``group``, else ``op.ranks`` of them ``stride`` or ``op.ranks_per_node`` a node."""
    stride, near = request.stride, op.ranks_per_node
    if stride is None:
        fewer = near != PER_NODE and near < min(op.ranks, cluster.devices_per_node)
        stride = cluster.devices_per_node // near if fewer else 1
    return group_of(request.group, op.ranks, whole("stride", stride, 1), cluster.devices)
