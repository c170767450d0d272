"""The Python face of opcast: :func:`predict`, :func:`simulate`, :func:`search`, … as ``opcast.predict`` and so on.

Nothing here needs Hydra. Plain keywords become requests (:mod:`..simulator.question.keywords`); a request made before
is answered as it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from ..datasets.clusters import Cluster, cluster_of_file
from ..datasets.devices import Device, device_of_file, is_file_name
from ..datasets.ops import Op
from ..simulator.network.transfers import Transfer
from ..simulator.question.canonical import RequestError
from ..simulator.question.keywords import clustered, predict_request, simulate_request
from ..simulator.question.network import NetworkChoice
from ..simulator.question.place import THIS_MACHINE
from ..simulator.question.predictions import PredictRequest
from ..simulator.question.sources import HOME, ORDER, Sources
from ..simulator.report.answer import OpPrediction
from ..simulator.workbench import Workbench, workbench
from .resolve import this_machine, this_node

if TYPE_CHECKING:
    from ..simulator.question.plan import Stack
    from ..simulator.question.requests import SimulateRequest
    from ..simulator.question.serving import ServingRequest
    from ..simulator.question.work import Work
    from ..simulator.report.answer import InferenceReport, StepReport
    from ..simulator.report.served import ServingReport
    from ..simulator.report.workload_file import FileReport
    from ..simulator.search.request import SearchRequest
    from ..simulator.search.result import SearchReport
    from ..simulator.search.served.request import ServedSearchRequest, ServedSpace
    from ..simulator.search.space import Space
    from ..simulator.trace import Model
    from ..simulator.validation import Validation


@overload
def predict(op: PredictRequest) -> list[OpPrediction]: ...
@overload
def predict(op: str | Op, device: str | Device = ..., **options: Any) -> OpPrediction: ...
@overload
def predict(op: Sequence[Transfer], device: str | Device = ..., **options: Any) -> OpPrediction: ...
@overload
def predict(op: Sequence[Op], device: str | Device = ..., **options: Any) -> list[OpPrediction]: ...
def predict(
    op: str | Op | Sequence[Op] | Sequence[Transfer] | PredictRequest,
    device: str | Device = "cpu",
    *,
    cache: str = "warm",
    backend: str | None = None,
    engines: Sequence[str] = ORDER,
    home: str | Path | None = None,
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
    an :class:`Op`, or many of them; or a :class:`PredictRequest`, which is answered by a list, with no other argument.
    ``home`` is where measurements and predictors lie, by default ``$OPCAST_HOME``, else ``~/.opcast``. ``power_cap_w``
    and ``sm_clock_mhz`` ask about a device that may draw or clock no more.

    ``device`` and ``cluster`` are names, figures, or files of figures (``my_gpu.yaml``) in the format of ``conf``.

    With a ``cluster`` (its name and ``nodes``) a collective runs on the devices of ``group``, or on the first
    ``ranks`` that are ``stride`` apart, with ``all_groups`` beside all groups like it; ``network`` is analytical, flow
    or packet, and ``faults``, ``fault_draw`` and ``faults_study`` are those of the command line. Instead of an op,
    transfers may be asked about that share the links. ``network`` of the answer says what the links did.

    Raises RequestError, OpError, DeviceError, PowerError, ClusterError, TransferError, TopologyError and the errors of
    the store.
    """
    if isinstance(op, PredictRequest):
        return _bench(op.sources).predict(op)
    asked: dict[str, Any] = {
        "cache": cache,
        "power_cap_w": power_cap_w,
        "sm_clock_mhz": sm_clock_mhz,
        "nodes": nodes,
        "group": group,
    }
    asked |= {"stride": stride, "all_groups": all_groups, "algorithm": algorithm, "network": network}
    asked |= {"faults": faults, "fault_draw": fault_draw, "faults_study": faults_study}
    place = _device(device), _cluster(cluster)
    request = predict_request(op, *place, _sources(home, engines, backend), asked, dims)
    found = _bench(request.sources).predict(request)
    return found[0] if isinstance(op, (str, Op)) or request.transfers else found


def simulate(
    model: Model | SimulateRequest,
    workload: str | Work = "train",
    device: str | Device = THIS_MACHINE,
    *,
    cluster: str | Cluster | None = None,
    stack: str | Stack | None = None,
    precision: str | None = None,
    backend: str | None = None,
    calibration: str = Sources.calibration,
    engines: Sequence[str] = ORDER,
    home: str | Path | None = None,
    **settings: Any,
) -> StepReport | InferenceReport | FileReport:
    """One step of a model on a device, or on a cluster of devices; ``fits`` says whether it fits into memory.

    ``model``: a name in ``conf/model``, a folder or config.json, a hub id, ``module:callable``, a transformers
    configuration as a mapping, or a function that returns an ``nn.Module``; or a :class:`SimulateRequest`, with no
    other argument. ``device`` and ``cluster`` are names, figures, or files of figures (``my_cluster.yaml``).
    ``workload`` is a :class:`Work` or its kind. ``settings`` are plain names:

    - of the workload: ``seq_len``, ``micro_batch``, ``global_batch``, ``batch``, ``input_len``, ``output_len``, …,
    - of the layout: ``tp``, ``pp``, ``vpp``, ``dp``, ``cp``, ``ep``, ``etp``, ``zero_stage``, ``schedule``, …,
    - of the cluster: ``nodes``, ``devices_per_node``, ``nic_gbps``, ``topology``, …,
    - ``recompute``, ``offload``, ``quantization``, ``kv_dtype``, ``passes``, ``options``, ``stragglers``,
      ``power_cap_w``, ``price_per_gpu_hour``,
    - of its links: ``network`` (analytical, flow or packet), ``faults``, ``fault_draw`` and ``faults_study``,

    or a ``plan`` in place of layout, cluster and framework. ``precision`` is a name in ``conf/precision``; it defaults
    to what the model's checkpoint stores, else to bf16, and to fp32 on a CPU. RequestError, with the nearest name, for
    a setting that is none.
    """
    from ..simulator.question.requests import SimulateRequest

    if isinstance(model, SimulateRequest):
        if settings or cluster is not None or stack is not None or precision is not None:
            raise RequestError("a request says all that is asked: change it with dataclasses.replace")
        return _bench(model.sources).simulate(model)
    given = {**settings, "cluster": _cluster(cluster), "stack": stack, "precision": precision}
    request = simulate_request(model, workload, _device(device), _sources(home, engines, backend, calibration), given)
    return _bench(request.sources).simulate(request)


def search(
    model: Model | SearchRequest,
    space: Space | Mapping[str, Any] | None = None,
    *,
    cluster: str | Cluster | None = None,
    device: str | Device = THIS_MACHINE,
    workers: int = 1,
    points: str | Path | None = None,
    objectives: Sequence[str] = ("step_time", "memory"),
    constraints: Sequence[str] = (),
    rules: Sequence[str] = (),
    top: int = 10,
    prune: Sequence[str] = ("memory", "time"),
    noise_floor: float = 0.03,
    sampler: str = "auto",
    trials: int = 1000,
    seed: int = 0,
    home: str | Path | None = None,
    **settings: Any,
) -> SearchReport:
    """The best layouts of a training step on a cluster.

    ``space`` is a :class:`Space` or its axes as a mapping (``{"tp": [4, 8]}``); an axis without values takes natural
    ones. ``settings`` are those of :func:`simulate` that are not searched: ``nodes``, ``seq_len``, ``global_batch``,
    ``stack``, ``precision``, ... ``device`` gives figures of the cluster's devices. ``workers`` are processes: the
    answer is the same for any number. ``points`` is a folder where all points are kept as Parquet. A
    :class:`SearchRequest` has all but ``workers`` and ``points`` in it.

    Raises RequestError for an empty space or rules that contradict each other, and the errors of :func:`simulate`.
    """
    from ..datasets.loading import load
    from ..simulator.search.request import SearchRequest
    from ..simulator.search.space import Space

    if not isinstance(model, SearchRequest):
        base = simulate_request(
            model, "train", _device(device), _sources(home, ORDER, None), {**settings, "cluster": _cluster(cluster)}
        )
        given = {} if space is None else space
        axes = given if isinstance(given, Space) else load(Space, _lists(given), RequestError, "space", "axis")
        model = SearchRequest(
            base=base,
            space=replace(axes, rules=(*axes.rules, *rules)),
            objectives=tuple(objectives),
            constraints=tuple(constraints),
            top=top,
            prune=tuple(prune),
            noise_floor=noise_floor,
            sampler=sampler,
            trials=trials,
            seed=seed,
        )
    return _bench(model.base.sources).search(model, workers, points)


def search_serving(
    model: Model | ServedSearchRequest,
    space: ServedSpace | Mapping[str, Any] | None = None,
    *,
    cluster: str | Cluster | None = None,
    device: str | Device = THIS_MACHINE,
    input_len: int = 1024,
    output_len: int = 256,
    slo: Mapping[str, Any] | None = None,
    workers: int = 1,
    objectives: Sequence[str] = ("tokens_per_s_per_gpu", "tokens_per_s_per_user"),
    constraints: Sequence[str] = (),
    top: int = 10,
    noise_floor: float = 0.03,
    confirm: int = 0,
    link_gbps: float = 50.0,
    link_us: float = 20.0,
    home: str | Path | None = None,
    **settings: Any,
) -> SearchReport:
    """The best ways to serve a model on a cluster, and the front of speed for users against use of GPUs.

    ``space`` is a :class:`ServedSpace` or its axes as a mapping (``{"tp": [4, 8]}``); an axis without values takes
    natural ones. ``slo`` is what users expect (``ttft_ms``, ``tpot_ms``, ``e2e_ms``). ``settings`` are those of
    :func:`simulate` that are not searched: ``nodes``, ``stack``, ``precision``, ... Of the best so many as ``confirm``
    says are played through the event loop of :func:`serving`. A :class:`ServedSearchRequest` has all but ``workers``.

    Raises RequestError for an empty space or rules that contradict each other, and the errors of :func:`simulate`.
    """
    from ..datasets.loading import load
    from ..simulator.question.serving import ServingTargets
    from ..simulator.search.served.request import ServedSearchRequest, ServedSpace

    if not isinstance(model, ServedSearchRequest):
        given = {} if space is None else space
        axes = (
            given if isinstance(given, ServedSpace) else load(ServedSpace, _lists(given), RequestError, "space", "axis")
        )
        model = ServedSearchRequest(
            step=simulate_request(
                model,
                "decode",
                _device(device),
                _sources(home, ORDER, None),
                {**settings, "cluster": _cluster(cluster)},
            ),
            space=axes,
            slo=load(ServingTargets, dict(slo or {}), RequestError, "slo"),
            input_len=input_len,
            output_len=output_len,
            link_gbps=link_gbps,
            link_us=link_us,
            objectives=tuple(objectives),
            constraints=tuple(constraints),
            top=top,
            noise_floor=noise_floor,
            confirm=confirm,
        )
    return _bench(model.step.sources).search_serving(model, workers)


def serving(
    model: Model | ServingRequest | None = None,
    device: str | Device = THIS_MACHINE,
    *,
    traffic: Mapping[str, Any] | None = None,
    scheduler: Mapping[str, Any] | None = None,
    kv: Mapping[str, Any] | None = None,
    slo: Mapping[str, Any] | None = None,
    decode_pool: Mapping[str, Any] | None = None,
    speculation: Mapping[str, Any] | None = None,
    law: Mapping[str, Any] | None = None,
    replicas: int = 1,
    attention_dp: int = 1,
    router: str = "round_robin",
    cluster: str | Cluster | None = None,
    stack: str | Stack | None = None,
    precision: str | None = None,
    engine: str | None = None,
    args: str = "",
    calibrate: str | Path | None = None,
    intervals: bool | None = None,
    price_per_gpu_hour: float | None = None,
    requests: str | Path | None = None,
    home: str | Path | None = None,
    **settings: Any,
) -> ServingReport:
    """What comes of traffic on the replicas of a served model.

    ``traffic``, ``scheduler``, ``kv``, ``slo``, ``decode_pool`` and ``speculation`` are mappings of the settings that
    ``opcast serving --help`` lists; ``law`` gives iteration times by hand, in place of a model. ``settings`` are those
    of :func:`simulate` that say what a replica is: ``tp``, ``pp``, ``nodes``, ... A :class:`ServingRequest` has all.
    ``engine`` is one as it is started, with its own ``args``, and ``calibrate`` its start-up log. ``intervals`` and
    ``price_per_gpu_hour`` are as on the command line. ``requests`` is a file that every request is written to as a row
    of Parquet.

    Raises RequestError, KvError where the model leaves no KV memory, BadInputError for a file that cannot be read or
    written, ServingEngineError for bad arguments, and the errors of :func:`simulate`.
    """
    from ..simulator.question.serving import ServingRequest
    from ..simulator.serving.connect import usual_serving_stack
    from .serving_engine import keywords

    if isinstance(model, ServingRequest):
        sources = model.step.sources if model.step is not None else _sources(home, ORDER, None)
        return _served(model, sources, requests)
    runs_on = {"model": model, "cluster": cluster, "stack": stack, "precision": precision}
    beside = [*settings, *(name for name, value in runs_on.items() if value is not None)]
    beside += ["device"] if device != THIS_MACHINE else []
    beside += ["calibrate"] if calibrate is not None else []
    if law is not None and beside:
        raise RequestError(f"{', '.join(beside)} say what a model runs on: with law there is none")
    given: dict[str, Any] = {"traffic": traffic, "scheduler": scheduler, "kv": kv, "slo": slo}
    given |= {"decode_pool": decode_pool, "speculation": speculation, "law": law}
    given = {name: dict(value) for name, value in given.items() if value is not None}
    given |= {"replicas": replicas, "attention_dp": attention_dp, "router": router}
    given |= {"intervals": intervals, "price_per_gpu_hour": price_per_gpu_hour}
    sources = _sources(home, ORDER, None)
    more = {**settings, "cluster": _cluster(cluster), "stack": stack, "precision": precision}
    if engine or args or calibrate:
        more, given = keywords(model, more, given, engine or "", args, calibrate)
    if law is None and model is not None:
        more["stack"] = more["stack"] or usual_serving_stack(given.get("scheduler", {}).get("policy", "vllm"))
        given["step"] = simulate_request(model, "decode", _device(device), sources, more)
    return _served(ServingRequest.from_dict(given), sources, requests)


def _served(request: ServingRequest, sources: Sources, requests: str | Path | None) -> ServingReport:
    """The report of traffic, its requests written down where a file is named."""
    if requests is None:
        return _bench(sources).serving(request).report
    from ..simulator.serving.serve import Keeping
    from .serving import write_rows
    from .writing import check_place

    check_place("requests", Path(requests))
    served = _bench(sources).serving(request, Keeping(requests=True))
    write_rows(served, Path(requests))
    return served.report


def _device(device: str | Device) -> str | Device:
    """The device itself, or that of a file of its figures."""
    return device_of_file(Path(device)) if isinstance(device, str) and is_file_name(device) else device


def _cluster(cluster: str | Cluster | None) -> str | Cluster | None:
    """The cluster itself, or that of a file of its figures."""
    return cluster_of_file(Path(cluster)) if isinstance(cluster, str) and is_file_name(cluster) else cluster


def _lists(axes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: [value] if isinstance(value, (str, int)) else list(value) for name, value in axes.items()}


def simulate_file(
    path: str | Path,
    cluster: str | Cluster,
    *,
    nodes: int | None = None,
    device: str | Device = THIS_MACHINE,
    busbw: str | Path | None = None,
    vpp: int | None = None,
    backend: str | None = None,
    engines: Sequence[str] = ORDER,
    home: str | Path | None = None,
    network: str = "auto",
    faults: Sequence[Any] = (),
    fault_draw: Mapping[str, Any] | None = None,
    faults_study: Mapping[str, Any] | None = None,
) -> FileReport:
    """One step that a workload file of SimAI describes, on a cluster (its name and ``nodes``) of its devices.

    ``busbw`` is a file of bus bandwidths that go before opcast's own times, ``vpp`` replaces the file's virtual stages.
    Raises FormatError, ClusterError, TopologyError and the errors of the store.
    """
    from ..simulator.question.requests import SimulateRequest
    from . import workload_file

    request = SimulateRequest(
        file=workload_file.read(path, busbw, vpp),
        device=_device(device),
        cluster=clustered(_cluster(cluster), {} if nodes is None else {"nodes": nodes}),
        network=NetworkChoice.of(network, faults, fault_draw, faults_study),
        sources=_sources(home, engines, backend),
    )
    report: Any = _bench(request.sources).simulate(request)
    made: FileReport = report
    return made


def validate(
    truth: str | Path,
    *,
    stack: str | Stack | None = None,
    limit: int | None = None,
    rival: str = "",
    details: bool = False,
    backend: str | None = None,
    engines: Sequence[str] = ORDER,
    home: str | Path | None = None,
) -> Validation:
    """Every row of a table of published results simulated and scored (``opcast validate``).

    Raises TruthError for what is no table, RivalError for a rival that is not there.
    """
    from ..simulator.question.plan import load_stack
    from ..simulator.question.requests import ValidateRequest

    chosen = load_stack(stack) if isinstance(stack, str) else stack
    sources = _sources(home, engines, backend)
    return _bench(sources).validate(ValidateRequest(str(truth), limit, rival, details, stack=chosen, sources=sources))


def _sources(
    home: str | Path | None, engines: Sequence[str], backend: str | None, calibration: str = Sources.calibration
) -> Sources:
    home = home or os.environ.get("OPCAST_HOME") or HOME
    return Sources.at(str(home), tuple(engines), backend, calibration)


def _bench(sources: Sources) -> Workbench:
    return workbench(sources, this_machine, this_node)
