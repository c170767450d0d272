"""The Python face of opcast: :func:`predict` and :func:`simulate`, as ``opcast.predict`` and ``opcast.simulate``.

Nothing here needs Hydra: ops, workloads and answers are plain dataclasses.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from ..datasets.clusters import Cluster, load_cluster
from ..datasets.devices import Device
from ..datasets.ops import Op, make_op
from ..simulator.engines import ORDER, FusedEngine
from ..simulator.network.fabric import Transfer
from ..simulator.predict.ops import predict_ops, with_power
from ..simulator.question.plan import Plan
from ..simulator.question.work import Work
from ..simulator.report.answer import InferenceReport, OpPrediction, StepReport
from ..simulator.simulate import alone
from ..simulator.simulate import simulate as simulate_work
from ..simulator.step.workload_file import FileReport
from ..simulator.trace import Model
from . import links, resolve, workload_file

HOME = "~/.opcast"
MAX_ENGINES = 32  # kept from call to call
_ENGINES: dict[Any, tuple[Device, FusedEngine]] = {}


@overload
def predict(op: str | Op, device: str | Device = ..., **options: Any) -> OpPrediction: ...
@overload
def predict(op: Sequence[Transfer], device: str | Device = ..., **options: Any) -> OpPrediction: ...
@overload
def predict(op: Sequence[Op], device: str | Device = ..., **options: Any) -> list[OpPrediction]: ...
def predict(
    op: str | Op | Sequence[Op] | Sequence[Transfer],
    device: str | Device = "cpu",
    *,
    cache: str = "warm",
    backend: str | None = None,
    engines: Sequence[str] = ORDER,
    home: str | Path = HOME,
    power_cap_w: float | None = None,
    sm_clock_mhz: float | None = None,
    cluster: str | Cluster | None = None,
    nodes: int | None = None,
    network: str = "auto",
    group: Sequence[int] | None = None,
    stride: int | None = None,
    all_groups: bool = False,
    algorithm: str | None = None,
    faults: Sequence[Mapping[str, Any]] = (),
    fault_draw: Mapping[str, Any] | None = None,
    faults_study: Mapping[str, Any] | None = None,
    **dims: Any,
) -> OpPrediction | list[OpPrediction]:
    """How long an op takes on a device, or a collective on the links of a cluster.

    ``op`` is a kind with its dims and dtype (``predict("gemm", "h100_sxm", m=4096, n=4096, k=4096, dtype="bf16")``),
    an :class:`Op`, or many of them. ``home`` is where measurements and predictors lie. ``power_cap_w`` and
    ``sm_clock_mhz`` ask about a device that may draw or clock no more.

    With a ``cluster`` (its name and ``nodes``) a collective runs on the devices of ``group``, or on the first
    ``ranks`` that are ``stride`` apart, with ``all_groups`` beside all groups like it; ``network`` is analytical, flow
    or packet, and ``faults``, ``fault_draw`` and ``faults_study`` are those of the command line. Instead of an op,
    transfers may be asked about that share the links. ``network`` of the answer says what the links did.

    Raises OpError, DeviceError, PowerError, ClusterError, TransferError, TopologyError and the errors of the store.
    """
    config = _config(device, home, engines, backend)
    limits = resolve.limits({"power_cap_w": power_cap_w, "sm_clock_mhz": sm_clock_mhz})
    asked: dict[str, Any] = {"network": network, "stride": stride, "all_groups": all_groups, "algorithm": algorithm}
    asked |= {"faults": list(faults), "fault_draw": fault_draw, "faults_study": faults_study, "cache": cache}
    config |= {**asked, "group": None if group is None else list(group), "cluster": _cluster(cluster, nodes)}
    links.check(config)
    many = [] if isinstance(op, (str, Op)) else list(op)
    if many and isinstance(many[0], Transfer):
        config |= {"transfers": many}
        links.check(config)
        return links.transfers(config, device if isinstance(device, Device) else resolve.device(config))
    single = [make_op(op, **_dims(dims, config))] if isinstance(op, str) else [op] if isinstance(op, Op) else []
    ops = single or [each for each in many if isinstance(each, Op)]
    if cluster is None:
        target, engine = _engine(device, config)
        found = predict_ops(ops, target, engine, cache)
    else:
        target = device if isinstance(device, Device) else resolve.device(config)
        found = links.predict(ops, target, config)
    found = with_power(found, ops, target, resolve.registries(config), limits, backend)
    return found[0] if single else found


def _dims(dims: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The dims of an op; sizes may have units, and a group says how many ranks there are."""
    ranks = {"ranks": "???"} if config["group"] and "ranks" not in dims else {}
    return links.with_ranks(links.with_bytes({**ranks, **dims}), config)


def _cluster(cluster: str | Cluster | None, nodes: int | None) -> dict[str, Any] | None:
    if cluster is None:
        return None
    found = load_cluster(cluster) if isinstance(cluster, str) else cluster
    return (found if nodes is None else replace(found, nodes=nodes)).to_dict()


def simulate(
    model: Model,
    workload: str | Work = "train",
    device: str | Device = "cpu",
    *,
    precision: str | None = None,
    backend: str | None = None,
    engines: Sequence[str] = ORDER,
    home: str | Path = HOME,
    plan: Plan | None = None,
    network: str = "auto",
    faults: Sequence[Mapping[str, Any]] = (),
    fault_draw: Mapping[str, Any] | None = None,
    faults_study: Mapping[str, Any] | None = None,
    stragglers: Sequence[Mapping[str, Any]] = (),
    **fields: Any,
) -> StepReport | InferenceReport:
    """One step of a model on a device, or on the cluster of a ``plan`` of such devices.

    ``model``: a name in ``conf/model``, a folder or config.json, a hub id, ``module:callable``, a transformers
    configuration as a mapping, or a function that returns an ``nn.Module``. ``workload`` is a :class:`Work` or its
    kind with ``fields`` (``simulate("llama3_8b", "prefill", "h200_sxm", batch=1, input_len=4096)``). ``precision``
    defaults to fp32 on a CPU and bf16 elsewhere. On the links of a plan's cluster: ``network`` is analytical, flow or
    packet; ``faults``, ``fault_draw``, ``faults_study`` and ``stragglers`` are those of the command line, and
    ``network`` of the report says what the links did.
    """
    config = _config(device, home, engines, backend)
    config |= {"network": network, "faults": list(faults), "fault_draw": fault_draw, "faults_study": faults_study}
    config |= {"cluster": plan.cluster.to_dict() if plan else None, "stragglers": list(stragglers)}
    target = device if isinstance(device, Device) else resolve.device(config)
    work = workload if isinstance(workload, Work) else Work(kind=workload, **fields)
    graphs = Path(home).expanduser() / "graphs"
    dtype = precision or (plan.precision if plan else resolve.usual_precision(target))
    resolve.network_fidelity(config)
    wanted = [*links.asked(config), *([f"stragglers={stragglers}"] if stragglers else [])]
    if plan is None and wanted:
        raise resolve.BadInputError(f"{wanted[0]} needs a cluster: give a plan with one")
    plan = alone(target, dtype) if plan is None else replace(plan, precision=dtype)
    if stragglers:
        plan = replace(plan, slow_devices=resolve.stragglers(config, plan.cluster))
    engine = resolve.engine(config, target, plan)
    return simulate_work(model, work, plan, target, engine, graphs, faults_study)


def simulate_file(
    path: str | Path,
    cluster: str | Cluster,
    *,
    nodes: int | None = None,
    device: str | Device = "cpu",
    busbw: str | Path | None = None,
    vpp: int | None = None,
    backend: str | None = None,
    engines: Sequence[str] = ORDER,
    home: str | Path = HOME,
    network: str = "auto",
    faults: Sequence[Mapping[str, Any]] = (),
    fault_draw: Mapping[str, Any] | None = None,
    faults_study: Mapping[str, Any] | None = None,
) -> FileReport:
    """One step that a workload file of SimAI describes, on a cluster (its name and ``nodes``) of its devices.

    ``busbw`` is a file of bus bandwidths that go before opcast's own times, ``vpp`` replaces the file's virtual stages.
    Raises FormatError, ClusterError, TopologyError and the errors of the store.
    """
    config = _config(device, home, engines, backend)
    config |= {"network": network, "faults": list(faults), "fault_draw": fault_draw, "faults_study": faults_study}
    config |= {"workload": {"kind": "simai", "file": path, "busbw": busbw, "vpp": vpp}}
    return workload_file.simulated(config | {"cluster": _cluster(cluster, nodes)})


def _engine(device: str | Device, config: dict[str, Any]) -> tuple[Device, FusedEngine]:
    """The device and its engine, kept from call to call while no measurement or predictor is added."""
    key = (repr(device), repr(config), _stamp(config))
    if key not in _ENGINES:
        target = device if isinstance(device, Device) else resolve.device(config)
        if len(_ENGINES) >= MAX_ENGINES:
            _ENGINES.clear()
        _ENGINES[key] = target, resolve.engine(config, target)
    return _ENGINES[key]


def _stamp(config: dict[str, Any]) -> tuple[int, ...]:
    """When each folder last changed in which a measurement or a predictor would appear."""
    changed = []
    for root in (config["store"], config["predictors"]):
        changed.append(_changed(root))
        for folder in _inside(root):
            changed.append(_changed(folder))
            changed.extend(_changed(inner) for inner in _inside(folder))
    return tuple(changed)


def _inside(folder: str) -> list[str]:
    try:
        return sorted(entry.path for entry in os.scandir(folder) if entry.is_dir())
    except OSError:
        return []


def _changed(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


def _config(device: str | Device, home: str | Path, engines: Sequence[str], backend: str | None) -> dict[str, Any]:
    root = Path(home).expanduser()
    return {
        "device": {"id": device if isinstance(device, str) else device.id},
        "store": str(root / "store"),
        "predictors": str(root / "predictors"),
        "engine": {"order": list(engines)},
        "backend": backend,
    }
