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
    *("host_gbps", "host_cores", "host_maker", "nccl"),
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
    settings: Mapping[str, Any],
    dims: Mapping[str, Any],
) -> PredictRequest:
    """The request about an op by kind and ``dims``, an op, many of them, transfers, or a file of transfers.

    ``settings`` are the other settings of `predict`, with their defaults where none were set. RequestError for what is
    neither op nor transfer.
    """
    whole_cluster = clustered(cluster, {"nodes": settings["nodes"]} if settings["nodes"] is not None else {})
    group = tuple(settings["group"]) if isinstance(settings["group"], (list, tuple)) else settings["group"]
    ops: tuple[Op, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    names: tuple[str, ...] = ()
    if isinstance(op, str):
        ops = (make_op(op, **given_dims(dims, group)),)
    elif dims:
        name = next(iter(dims))
        raise RequestError(f"{name}={dims[name]!r} is for an op by its name, as predict('gemm', m=1, n=2, k=3)")
    elif isinstance(op, Op):
        ops = (op,)
    elif isinstance(op, Path) or any(isinstance(item, (Transfer, Mapping)) for item in op):
        transfers, names = _transfers(op, whole_cluster)
    else:
        for position, item in enumerate(op):
            if not isinstance(item, Op):
                raise RequestError(f"ops[{position}]={item!r} is no op: make one with opcast.make_op")
        ops = tuple(item for item in op if isinstance(item, Op))
    return PredictRequest(
        ops=ops,
        device=device,
        cluster=whole_cluster,
        cache=settings["cache"],
        limits=Limits(settings["power_cap_w"], settings["sm_clock_mhz"]),
        group=group,
        stride=settings["stride"],
        all_groups=settings["all_groups"],
        algorithm=settings["algorithm"],
        transfers=transfers,
        names=names,
        network=_network(settings, whole_cluster),
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

    works = [field.name for field in fields(Work) if field.name != "kind"]
    layouts = [field.name for field in fields(Parallel)]
    settings = {name: value for name, value in keywords.items() if value is not None}
    of_work = {name: settings[name] for name in works if name in settings}
    work = replace(workload, **of_work) if isinstance(workload, Work) else Work(kind=workload, **of_work)
    network = _network(settings, settings.get("plan") or settings.get("cluster"))
    common = {"model": model, "work": work, "device": device, "network": network, "sources": sources}
    if "plan" in settings:
        return _planned(settings, common, (*layouts, *OF_CLUSTER, "cluster", "stack"))
    if "precision" in settings:
        dtype, quantization = precision_of(settings["precision"])
        common |= {"precision": dtype, "quantization": quantization}
    return SimulateRequest(
        **common
        | {name: settings[name] for name in OF_STEP if name in settings}
        | {
            "cluster": clustered(settings.get("cluster"), {n: settings[n] for n in OF_CLUSTER if n in settings}),
            "parallel": load(Parallel, {n: settings[n] for n in layouts if n in settings}, PlanError, "parallel"),
            "stack": framework(settings.get("stack")),
            "stragglers": stragglers(settings.get("stragglers", ())),
        }
    )


def _planned(settings: Mapping[str, Any], common: dict[str, Any], of_plan: Sequence[str]) -> Any:
    """The request of a plan, with the few settings that may go before its own."""
    from .requests import SimulateRequest
    from .stragglers import Straggler, stragglers

    plan = settings["plan"]
    for name in of_plan:
        if name in settings:
            raise RequestError(f"{name}={shown(settings[name])} is part of the plan: leave it or plan=… out")
    dtype, quantization = plan.precision, plan.quantization
    if "precision" in settings:
        dtype, named = precision_of(settings["precision"])
        quantization = named or quantization
    slow = tuple(Straggler(slowdown, device=at) for at, slowdown in plan.slow_devices.items())
    overrides = {
        name: getattr(plan, name) for name in ("kv_dtype", "recompute", "offload", "passes", "options", "micro_batches")
    }
    overrides |= {"quantization": quantization} | {name: settings[name] for name in OF_STEP if name in settings}
    layout = {"cluster": plan.cluster, "parallel": plan.parallel, "stack": plan.stack, "precision": dtype}
    late = stragglers(settings["stragglers"]) if settings.get("stragglers") else slow
    return SimulateRequest(**common, **layout, **overrides, stragglers=late)


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
    base = load_cluster(cluster) if isinstance(cluster, str) else cluster
    return replace(base, **figures)


def _network(settings: Mapping[str, Any], cluster: object) -> NetworkChoice:
    """What is asked of links. RequestError for faults without a cluster."""
    for name in NETWORK[1:] if cluster is None else ():
        if settings.get(name):
            raise needs_cluster(f"{name}={settings[name]}")
    return NetworkChoice.of(settings.get("network", "auto"), *(settings.get(name) for name in NETWORK[1:]))


def given_dims(dims: Mapping[str, Any], group: Sequence[int] | None) -> dict[str, Any]:
    """The dims of an op; sizes may have units, and a group says how many ranks there are."""
    values = dict(dims)
    if isinstance(values.get("size_bytes"), str):
        from ..network.query import parse_size

        values["size_bytes"] = parse_size(values["size_bytes"])
    if group is not None:
        if values.get("ranks") not in (None, len(group)):
            raise RequestError(
                f"ranks={values['ranks']}, but group={list(group)} has {len(group)}: leave one of them out"
            )
        values["ranks"] = len(group)
    return values


def _transfers(many: Sequence[Any] | Path, cluster: Cluster | None) -> tuple[tuple[Transfer, ...], tuple[str, ...]]:
    for position, item in enumerate(() if isinstance(many, Path) else many):
        if not isinstance(item, (Transfer, Mapping)):
            raise RequestError(f"transfers[{position}]={item!r} is no transfer: make one with opcast.Transfer")
    if cluster is None:
        raise RequestError("transfers need a cluster: name one with cluster=… (`opcast list clusters`)")
    from ..network.query import parse_transfers, read_transfers

    devices = cluster.devices
    transfers, names = read_transfers(many, devices) if isinstance(many, Path) else parse_transfers(many, devices)
    return tuple(transfers), tuple(names)
