"""Plain keywords of Python become requests: ``simulate(model=…, cluster="dgx_h100", nodes=8, tp=8)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ...datasets.clusters import Cluster, load_cluster
from ...datasets.devices import Device
from ...datasets.loading import load
from ...datasets.ops import Op, make_op
from ...datasets.precisions import precision_of
from ...models.power import Limits
from ..network.transfers import Transfer
from .canonical import RequestError
from .network import NetworkChoice, needs_cluster, shown
from .predictions import PredictRequest
from .sources import Sources

OF_CLUSTER = (
    *("nodes", "devices_per_node", "link", "fabric", "nics_per_node", "nic_gbps", "nic_latency_us", "topology"),
    *("host_gbps", "host_cores", "nccl"),
)
NETWORK = ("network", "faults", "fault_draw", "faults_study")
OF_STEP = (
    "quantization",
    "kv_dtype",
    "recompute",
    "offload",
    "passes",
    "options",
    "micro_batches",
    "price_per_gpu_hour",
    "power_cap_w",
)


def predict_request(
    op: str | Op | Sequence[Op] | Sequence[Transfer] | Path,
    device: str | Device,
    cluster: str | Cluster | None,
    sources: Sources,
    asked: Mapping[str, Any],
    dims: Mapping[str, Any],
) -> PredictRequest:
    """The request about an op by kind and ``dims``, an op, many of them, transfers, or a file of transfers.

    ``asked`` are the other settings of `predict`, with their defaults where none were set. RequestError for what is
    neither op nor transfer.
    """
    joined = clustered(cluster, {"nodes": asked["nodes"]} if asked["nodes"] is not None else {})
    group = tuple(asked["group"]) if isinstance(asked["group"], (list, tuple)) else asked["group"]
    ops: tuple[Op, ...] = ()
    moved: tuple[Transfer, ...] = ()
    names: tuple[str, ...] = ()
    if isinstance(op, str):
        ops = (make_op(op, **given_dims(dims, group)),)
    elif dims:
        name = next(iter(dims))
        raise RequestError(f"{name}={dims[name]!r} is for an op by its name, as predict('gemm', m=1, n=2, k=3)")
    elif isinstance(op, Op):
        ops = (op,)
    elif isinstance(op, Path) or any(isinstance(each, (Transfer, Mapping)) for each in op):
        moved, names = _transfers(op, joined)
    else:
        for place, each in enumerate(op):
            if not isinstance(each, Op):
                raise RequestError(f"ops[{place}]={each!r} is no op: make one with opcast.make_op")
        ops = tuple(each for each in op if isinstance(each, Op))
    return PredictRequest(
        ops=ops,
        device=device,
        cluster=joined,
        cache=asked["cache"],
        limits=Limits(asked["power_cap_w"], asked["sm_clock_mhz"]),
        group=group,
        stride=asked["stride"],
        all_groups=asked["all_groups"],
        algorithm=asked["algorithm"],
        transfers=moved,
        names=names,
        network=_network(asked, joined),
        sources=sources,
    )


def simulate_request(
    model: Any,
    workload: Any,
    device: str | Device,
    sources: Sources,
    keywords: Mapping[str, Any],
) -> Any:
    """The request about a step. ``keywords``: a cluster, and fields of :class:`.work.Work` and :class:`.plan.Parallel`.

    With a ``plan`` its layout and cluster are taken; ``precision`` goes before its own. The errors of its parts.
    """
    from .plan import Parallel, PlanError
    from .requests import SimulateRequest
    from .stragglers import stragglers
    from .work import Work

    works = [each.name for each in fields(Work) if each.name != "kind"]
    layouts = [each.name for each in fields(Parallel)]
    given = {name: value for name, value in keywords.items() if value is not None}
    of_work = {name: given[name] for name in works if name in given}
    work = replace(workload, **of_work) if isinstance(workload, Work) else Work(kind=workload, **of_work)
    network = _network(given, given.get("plan") or given.get("cluster"))
    common = {"model": model, "work": work, "device": device, "network": network, "sources": sources}
    if "plan" in given:
        return _planned(given, common, (*layouts, *OF_CLUSTER, "cluster", "stack"))
    if "precision" in given:
        dtype, quantization = precision_of(given["precision"])
        common |= {"precision": dtype, "quantization": quantization}
    return SimulateRequest(
        **common
        | {name: given[name] for name in OF_STEP if name in given}
        | {
            "cluster": clustered(given.get("cluster"), {n: given[n] for n in OF_CLUSTER if n in given}),
            "parallel": load(Parallel, {n: given[n] for n in layouts if n in given}, PlanError, "parallel"),
            "stack": framework(given.get("stack")),
            "stragglers": stragglers(given.get("stragglers", ())),
        }
    )


def _planned(given: Mapping[str, Any], common: dict[str, Any], of_plan: Sequence[str]) -> Any:
    """The request of a plan, with the few settings that may go before its own."""
    from .requests import SimulateRequest
    from .stragglers import Straggler, stragglers

    plan = given["plan"]
    for name in of_plan:
        if name in given:
            raise RequestError(f"{name}={shown(given[name])} is part of the plan: leave it or plan=… out")
    dtype, quantization = plan.precision, plan.quantization
    if "precision" in given:
        dtype, named = precision_of(given["precision"])
        quantization = named or quantization
    slow = tuple(Straggler(slowdown, device=at) for at, slowdown in plan.slow_devices.items())
    own = {
        name: getattr(plan, name) for name in ("kv_dtype", "recompute", "offload", "passes", "options", "micro_batches")
    }
    own |= {"quantization": quantization} | {name: given[name] for name in OF_STEP if name in given}
    layout = {"cluster": plan.cluster, "parallel": plan.parallel, "stack": plan.stack, "precision": dtype}
    late = stragglers(given["stragglers"]) if given.get("stragglers") else slow
    return SimulateRequest(**common, **layout, **own, stragglers=late)


def framework(stack: Any) -> Any:
    """A framework by name or as it is, or none. RequestError for what is neither."""
    from .plan import Stack, load_stack

    if not isinstance(stack, (str, Stack, type(None))):
        raise RequestError(f"stack={stack!r} must be a name, such as vllm, or a Stack")
    return load_stack(stack) if isinstance(stack, str) else stack


def clustered(cluster: str | Cluster | None, figures: Mapping[str, Any]) -> Cluster | None:
    """A cluster by name or as it is, with figures changed. RequestError for figures without one."""
    if cluster is None:
        for name, value in figures.items():
            raise needs_cluster(f"{name}={value!r}")
        return None
    found = load_cluster(cluster) if isinstance(cluster, str) else cluster
    return replace(found, **figures)


def _network(given: Mapping[str, Any], cluster: object) -> NetworkChoice:
    """What is asked of links. RequestError for faults without a cluster."""
    for name in NETWORK[1:] if cluster is None else ():
        if given.get(name):
            raise needs_cluster(f"{name}={given[name]}")
    return NetworkChoice.of(given.get("network", "auto"), *(given.get(name) for name in NETWORK[1:]))


def given_dims(dims: Mapping[str, Any], group: Sequence[int] | None) -> dict[str, Any]:
    """The dims of an op; sizes may have units, and a group says how many ranks there are."""
    made = dict(dims)
    if isinstance(made.get("size_bytes"), str):
        from ..network.query import parse_size

        made["size_bytes"] = parse_size(made["size_bytes"])
    if group is not None:
        if made.get("ranks") not in (None, len(group)):
            raise RequestError(
                f"ranks={made['ranks']}, but group={list(group)} has {len(group)}: leave one of them out"
            )
        made["ranks"] = len(group)
    return made


def _transfers(many: Sequence[Any] | Path, cluster: Cluster | None) -> tuple[tuple[Transfer, ...], tuple[str, ...]]:
    for place, each in enumerate(() if isinstance(many, Path) else many):
        if not isinstance(each, (Transfer, Mapping)):
            raise RequestError(f"transfers[{place}]={each!r} is no transfer: make one with opcast.Transfer")
    if cluster is None:
        raise RequestError("transfers need a cluster: name one with cluster=… (`opcast list clusters`)")
    from ..network.query import parse_transfers, read_transfers

    devices = cluster.devices
    transfers, names = read_transfers(many, devices) if isinstance(many, Path) else parse_transfers(many, devices)
    return tuple(transfers), tuple(names)
