"""The Python face of opcast: :func:`predict`, :func:`simulate`, :func:`search`, … as ``opcast.predict`` and so on.

Nothing here needs Hydra. Plain keywords become requests (:mod:`..simulator.question.keywords`); a request made before
is answered as it is.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, overload

from ..datasets.clusters import Cluster, cluster_of_file
from ..datasets.devices import Device, device_of_file, is_file_name
from ..datasets.ops import Op
from ..datasets.own_warnings import OpcastWarning
from ..simulator.network.transfers import Transfer
from ..simulator.question.canonical import RequestError
from ..simulator.question.keywords import clustered, predict_request
from ..simulator.question.network import NetworkChoice
from ..simulator.question.place import THIS_MACHINE
from ..simulator.question.plan import load_stack
from ..simulator.question.predictions import PredictRequest
from ..simulator.question.sources import HOME, ORDER, Sources
from ..simulator.report.answer import OpPrediction
from ..simulator.workbench import Workbench, silent
from . import questions
from .questions import request_of, sources_of, usual
from .resolve import bench_of

if TYPE_CHECKING:
    from ..simulator.chips.answer import ChipsReport
    from ..simulator.chips.request import CompareRequest
    from ..simulator.job.answer import PlanReport
    from ..simulator.job.request import PlanRequest
    from ..simulator.post_training.answer import PostTrainReport
    from ..simulator.post_training.request import PostTrainRequest
    from ..simulator.question.plan import Stack
    from ..simulator.question.requests import SimulateRequest
    from ..simulator.question.work import Work
    from ..simulator.report.answer import InferenceReport, StepReport
    from ..simulator.report.workload_file import FileReport
    from ..simulator.search.request import SearchRequest
    from ..simulator.search.result import SearchReport
    from ..simulator.search.served.request import ServedSearchRequest, ServedSpace
    from ..simulator.search.space import Space
    from ..simulator.trace import Model
    from ..simulator.upgrade.answer import UpgradeReport
    from ..simulator.upgrade.request import UpgradeRequest
    from ..simulator.validation import Validation
    from .sweeping import SweepReport


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
    device: str | Device | None = None,
    *,
    home: str | Path | None = None,
    **options: Any,
) -> OpPrediction | list[OpPrediction]:
    """How long an op takes on a device, or a collective on the links of a cluster.

    ``op`` is a kind with its dims and dtype (``predict("gemm", "h100_sxm", m=4096, n=4096, k=4096, dtype="bf16")``),
    an :class:`Op`, or many of them; or a :class:`PredictRequest`, which is answered by a list, with no other argument.
    ``home`` is where measurements and predictors lie, by default ``$OPCAST_HOME``, else ``~/.opcast``. Beside dims the
    ``options`` are the settings that ``opcast predict --help`` lists, with the same defaults: ``cache``, ``backend``,
    ``engines`` (``engine.order``), ``power_cap_w`` and ``sm_clock_mhz`` of a device that may draw or clock no more, …

    ``device`` and ``cluster`` are names, figures, or files of figures (``my_gpu.yaml``) in the format of ``conf``.

    With a ``cluster`` (its name and ``nodes``) a collective runs on the devices of ``group``, or on the first
    ``ranks`` that are ``stride`` apart, with ``all_groups`` beside all groups like it; ``network`` is analytical, flow
    or packet, and ``faults``, ``fault_draw`` and ``faults_study`` are those of the command line. Instead of an op,
    transfers may be asked about that share the links. ``network`` of the answer says what the links did.

    Raises RequestError, OpError, DeviceError, PowerError, ClusterError, TransferError, TopologyError and the errors of
    the store.
    """
    if isinstance(op, PredictRequest):
        return bench_of(op.sources).predict(op)
    known = usual("predict")
    dims = {name: value for name, value in options.items() if name not in known}
    said = {name: value for name, value in options.items() if name in known and value is not None}
    sources = sources_of("predict", said, folders_of(home), _home(home))
    place = _device(device or THIS_MACHINE), _cluster(said.get("cluster"))
    request = predict_request(op, *place, sources, {**known, **said}, dims)
    found = bench_of(request.sources).predict(request)
    return found[0] if isinstance(op, (str, Op)) or request.transfers else found


def simulate(
    model: Model | SimulateRequest,
    workload: str | Work | None = None,
    device: str | Device | None = None,
    *,
    home: str | Path | None = None,
    **settings: Any,
) -> StepReport | InferenceReport | FileReport:
    """One step of a model on a device, or on a cluster of devices; ``fits`` says whether it fits into memory.

    ``model``: a name in ``conf/model``, a folder or config.json, a hub id, ``module:callable``, a transformers
    configuration as a mapping, or a function that returns an ``nn.Module``; or a :class:`SimulateRequest`, with no
    other argument. ``device`` and ``cluster`` are names, figures, or files of figures (``my_cluster.yaml``).
    ``workload`` is a :class:`Work` or its kind. ``settings`` are those that ``opcast simulate --help`` lists, with the
    same defaults, by their own names without their group:

    - of the workload: ``seq_len``, ``micro_batch``, ``global_batch``, ``batch``, ``input_len``, ``output_len``, …,
    - of the layout: ``tp``, ``pp``, ``vpp``, ``dp``, ``cp``, ``ep``, ``etp``, ``zero_stage``, ``schedule``, …,
    - of the ``cluster``: ``nodes``, ``devices_per_node``, ``nic_gbps``, ``topology``, …,
    - ``stack``, ``precision``, ``quantization``, ``kv_dtype``, ``recompute``, ``offload``, ``options``,
      ``calibration``, ``engines`` (``engine.order``), …,

    or a ``plan`` in place of layout, cluster and framework. ``precision`` is a name in ``conf/precision``; it defaults
    to what the model's checkpoint stores, else to bf16, and to fp32 on a CPU. RequestError, with the nearest name, for
    a setting that is none.
    """

    given = {"workload": workload, "device": device, **settings}
    bench, request = asked("simulate", model, given, home)
    return bench.simulate(request)


def search(
    model: Model | SearchRequest,
    space: Space | Mapping[str, Any] | None = None,
    *,
    workers: int = 1,
    points: str | Path | None = None,
    rules: Sequence[str] = (),
    home: str | Path | None = None,
    **settings: Any,
) -> SearchReport:
    """The best layouts of a training step on a cluster.

    ``space`` is a :class:`Space` or its axes as a mapping (``{"tp": [4, 8]}``), with ``rules`` beside; an axis without
    values takes natural ones. ``settings`` are those that ``opcast search --help`` lists, with the same defaults
    (``objectives``, ``constraints``, ``top``, …), and those of :func:`simulate` that are not searched: ``cluster``,
    ``nodes``, ``seq_len``, ``global_batch``, ``stack``, ``precision``, … ``device`` gives figures of the cluster's
    devices. ``workers`` are processes: the answer is the same for any number. ``points`` is a folder where all points
    are kept as Parquet. A :class:`SearchRequest` has all but ``workers`` and ``points`` in it.

    Raises RequestError for an empty space or rules that contradict each other, and the errors of :func:`simulate`.
    """
    from ..simulator.search.space import Space

    if isinstance(space, Space):
        space = replace(space, rules=(*space.rules, *rules))
    elif rules:
        space = {**(space or {}), "rules": rules}
    bench, request = asked("search", model, {"space": space, **settings}, home)
    return bench.search(request, workers, points)


def compare_chips(
    model: Model | CompareRequest,
    workload: str | Work | None = None,
    *,
    home: str | Path | None = None,
    **settings: Any,
) -> ChipsReport:
    """One workload on several chips: speed, price, energy, and the price of a GPU-hour at which each is worth it.

    ``cluster`` is what the others are compared with, ``others`` are names of clusters, ``power_caps_w`` watts that each
    GPU is held to in turn, ``prices`` those of a GPU-hour by cluster. The other ``settings`` are those of
    :func:`simulate`. A :class:`CompareRequest` has all.

    Raises RequestError for chips that cannot be compared, and the errors of :func:`simulate`.
    """
    bench, request = asked("compare", model, {"workload": workload, **settings}, home)
    return bench.compare_chips(request)


def upgrade(
    model: Model | UpgradeRequest,
    workload: str | Work | None = None,
    *,
    home: str | Path | None = None,
    **settings: Any,
) -> UpgradeReport:
    """What another engine, driver or library may move in a step, and which few minutes of measuring settle it.

    ``changes`` are names of what gets another version, ``minutes`` what may be measured. The other ``settings`` are
    those of :func:`simulate`. An :class:`UpgradeRequest` has all.

    Raises RequestError for an unknown change, and the errors of :func:`simulate`.
    """
    bench, request = asked("upgrade", model, {"workload": workload, **settings}, home)
    return bench.upgrade(request)


def plan(model: Model | PlanRequest, *, home: str | Path | None = None, **settings: Any) -> PlanReport:
    """A whole training job: days, GPU-hours, price, kWh and CO2, each with what nine lives in ten stay below.

    ``settings`` are those that ``opcast plan --help`` lists, with the same defaults: ``tokens`` or ``steps``,
    ``phases``, ``ramp``, ``evaluation``, ``checkpoint``, ``failures``, ``restart``, ``spares``, ``slow``, ``energy``
    (mappings), ``lives``, ``seed``, ``layout`` and ``space``; and those of :func:`simulate` that say what a step is:
    ``cluster``, ``nodes``, ``seq_len``, ``global_batch``, ``tp``, ``stack``, … A :class:`PlanRequest` has all.

    Raises RequestError for a job that cannot be, and the errors of :func:`simulate`.
    """
    bench, request = asked("plan", model, settings, home)
    return bench.plan(request)


def posttrain(model: Model | PostTrainRequest, *, home: str | Path | None = None, **settings: Any) -> PostTrainReport:
    """Post-training (``method``: sft, dpo, ppo or grpo) phase by phase: rollout, log-probs, training, weight sync.

    ``settings`` are those that ``opcast posttrain --help`` lists, with the same defaults: ``method``, ``prompts``,
    ``responses``, ``prompt_len``, ``response_len``, ``rollout``, ``reward`` (mappings), ``placement``,
    ``asynchronous``, ``partial``, …; and those of :func:`simulate` that say what a training step is: ``cluster``,
    ``nodes``, ``seq_len``, ``global_batch``, ``tp``, ``lora_rank``, ``stack``, … A :class:`PostTrainRequest` has all.

    Raises RequestError for what cannot be, KvError where a replica has no KV memory, and the errors of
    :func:`simulate`.
    """
    bench, request = asked("posttrain", model, settings, home)
    return bench.posttrain(request)


def sweep(
    verb: str,
    model: Model | None = None,
    *,
    axes: Mapping[str, Sequence[Any]],
    workers: int = 1,
    table: str | Path | None = None,
    home: str | Path | None = None,
    **settings: Any,
) -> SweepReport:
    """One question many times (`opcast sweep`): a ``verb`` (plan, posttrain, compare, upgrade, simulate), all points.

    ``axes`` are lists of values by the name of a setting, with a dot for one within a mapping
    (``{"nodes": [4, 8], "checkpoint.every_minutes": [10, 60]}``); all combinations are asked. The other ``settings``
    are those of the verb in Python. ``workers`` are processes: the answer is the same for any number. ``table`` is a
    Parquet file of all answers: points that are in it are not asked again.

    Raises RequestError for a verb or an axis that is none, and where no point has an answer; a point without one has a
    row with its ``error``. BadInputError for a ``table`` that is no table of a sweep.
    """
    from ..simulator.search.spread import Crew
    from .sweeping import place_of_table, sweep_of

    given = settings if model is None else {"model": model, **settings}
    swept = sweep_of(verb, given, axes, lambda values: verb_request(verb, None, values, home))
    return swept.answered(Crew(workers), silent, None if table is None else place_of_table(table))


def search_serving(
    model: Model | ServedSearchRequest,
    space: ServedSpace | Mapping[str, Any] | None = None,
    *,
    workers: int = 1,
    points: str | Path | None = None,
    home: str | Path | None = None,
    **settings: Any,
) -> SearchReport:
    """The best ways to serve a model on a cluster, and the front of speed for users against use of GPUs.

    ``space`` is a :class:`ServedSpace` or its axes as a mapping (``{"tp": [4, 8]}``); an axis without values takes
    natural ones. ``settings`` are those that ``opcast search serving --help`` lists, with the same defaults:
    ``input_len``, ``output_len``, ``slo`` (what users expect: ``ttft_ms``, ``tpot_ms``, ``e2e_ms``), ``objectives``, …;
    and those of :func:`simulate` that are not searched: ``cluster``, ``nodes``, ``stack``, ``precision``, … Of the best
    so many as ``confirm`` says are played through the event loop of :func:`.api_serving.serving`. A
    :class:`ServedSearchRequest` has all but ``workers`` and ``points``, a file for all points as Parquet: a search that
    was ended goes on from what stands beside it.

    Raises RequestError for an empty space or rules that contradict each other, and the errors of :func:`simulate`.
    """
    bench, request = asked("search_serving", model, {"space": space, **settings}, home)
    return bench.search(request, workers, points)


def asked(verb: str, model: Any, given: Mapping[str, Any], home: str | Path | None) -> tuple[Workbench, Any]:
    """The workbench that answers a verb, and the request of its keywords."""
    request, field = verb_request(verb, model, given, home), questions.QUESTIONS[verb].step
    step = getattr(request, field) if field else request
    return bench_of(folders_of(home) if step is None else step.sources), request


def verb_request(verb: str, model: Any, given: Mapping[str, Any], home: str | Path | None) -> Any:
    """The request of a verb's keywords; one that was made before as it is."""
    said = {name: value for name, value in given.items() if value is not None}
    if model is not None and isinstance(model, questions.QUESTIONS[verb].kind_of_request):
        if said:
            raise RequestError("a request says all that is asked: change it with dataclasses.replace")
        return model
    said = said if model is None else {"model": model, **said}
    for name, figures in (("device", _device), ("cluster", _cluster)):
        if name in said:
            said[name] = figures(said[name])
    return request_of(verb, said, sources_of(verb, said, folders_of(home), _home(home)), _warn)


def _warn(text: str) -> None:
    """Warn of the line that asked: the nearest outside of opcast."""
    package, level = __name__.partition(".")[0], 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == package:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, OpcastWarning, stacklevel=level)


def _device(device: str | Device) -> str | Device:
    """The device itself, or that of a file of its figures."""
    return device_of_file(Path(device)) if isinstance(device, str) and is_file_name(device) else device


def _cluster(cluster: str | Cluster | None) -> str | Cluster | None:
    """The cluster itself, or that of a file of its figures."""
    return cluster_of_file(Path(cluster)) if isinstance(cluster, str) and is_file_name(cluster) else cluster


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
    report: Any = bench_of(request.sources).simulate(request)
    return report


def validate(
    truth: str | Path,
    *,
    stack: str | Stack | None = None,
    limit: int | None = None,
    rival: str = "",
    details: bool = False,
    rules: str | Path = "",
    half: str = "",
    backend: str | None = None,
    engines: Sequence[str] = ORDER,
    home: str | Path | None = None,
) -> Validation:
    """Every row of a table of published results simulated and scored (``opcast validate``).

    ``half`` takes ``looked_at`` or ``unseen`` sources alone; of unseen ones it says scores, no rows.

    Raises TruthError for what is no table or no folder of rules, RivalError for a rival that is not there.
    """
    from ..simulator.question.requests import ValidateRequest

    chosen = load_stack(stack) if isinstance(stack, str) else stack
    sources = _sources(home, engines, backend)
    request = ValidateRequest(str(truth), limit, rival, details, str(rules), half, stack=chosen, sources=sources)
    return bench_of(sources).validate(request)


def _home(home: str | Path | None) -> str:
    return str(home or os.environ.get("OPCAST_HOME") or HOME)


def folders_of(home: str | Path | None) -> Sources:
    return Sources.at(_home(home))


def _sources(home: str | Path | None, engines: Sequence[str], backend: str | None) -> Sources:
    return Sources.at(_home(home), tuple(engines), backend)
