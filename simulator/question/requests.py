"""The questions that opcast answers, as frozen data: built by the command line and by Python users alike.

A request has no file handles, engines or reports; it says what is asked, with every default filled in. It becomes JSON
and comes back (:mod:`.canonical`), so that a search, a service and caches can know it by its
:meth:`~.canonical.Request.key`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from ...datasets.clusters import Cluster, one_device
from ...datasets.devices import Device
from ...datasets.loading import choice, number, whole
from ...datasets.truth.halves import HALVES, UNSEEN
from ...models.power import Limits
from ..formats.simai import SimaiWorkload, read_busbw, read_workload
from ..network.astra import FormatError
from ..network.build import check_settings
from .as_stored import as_stored
from .canonical import Request, RequestError
from .declaration import setting
from .model_notes import model_notes
from .network import NetworkChoice, needs_cluster
from .options import KV_FORMATS
from .place import THIS_MACHINE, looked_up, shipped
from .plan import Parallel, Plan, Stack, load_stack
from .sources import Sources
from .stragglers import Straggler, slow_devices
from .work import Work


@dataclass(frozen=True)
class WorkloadFile:
    """A workload of SimAI as the text of its file, with bus bandwidths that go before opcast's own times, as YAML."""

    text: str
    name: str = "simai"
    busbw: str = ""
    vpp: int | None = None

    def __post_init__(self) -> None:
        if self.vpp is not None:
            whole(RequestError, "workload.vpp", self.vpp, 1)

    def read(self) -> tuple[SimaiWorkload, Mapping[str, Mapping[str, float]]]:
        """The workload and the bandwidths in GB/s. FormatError, with the name, for what is no such file."""
        try:
            return read_workload(self.text), read_busbw(self.busbw) if self.busbw else {}
        except FormatError as error:
            raise FormatError(f"{self.name}: {error}") from None


@dataclass(frozen=True)
class SimulateRequest(Request):
    """A step of a model: training, a prompt, a token or a generation; or the step that a workload ``file`` describes.

    ``model`` is a name in ``conf/model``, a path, a hub id, ``module:callable``, a transformers configuration as a
    mapping, or a function (which has no JSON). Without a ``cluster`` one ``device`` runs it. Without a ``stack``
    PyTorch runs on one device, on a cluster Megatron-LM trains and TensorRT-LLM serves. ``precision`` ``auto`` is what
    the model's checkpoint stores, else what is usual on the device; ``quantization`` the format of linear layers,
    ``kv_dtype`` that of keys and values (``same``, ``fp8`` or ``int8``; empty: as the checkpoint says). ``power_cap_w``
    is what a device may draw. The other fields are those of :class:`Plan`.
    """

    model: Any = setting("", "what is simulated: a name of `opcast list models`, or a configuration", chosen=True)
    work: Work = setting(Work, group="workload")
    device: Device | str = setting(THIS_MACHINE, "what runs it; that of the cluster where there is one", chosen=True)
    cluster: Cluster | None = setting(None, "the devices and their links", chosen=True)
    parallel: Parallel = setting(Parallel, group="parallel")
    stack: Stack | None = setting(None, "the framework", chosen=True)
    precision: str = setting("auto", "a name of conf/precision", path="precision.dtype", chosen=True)
    quantization: str = setting("", "the format of linear layers", path="precision.quantization", chosen=True)
    kv_dtype: str = setting(
        "", "the format of keys and values: same | fp8 | int8", path="precision.kv_dtype", chosen=True
    )
    recompute: str = setting(
        "none",
        "none | selective | full | full:N | selective:MODULES | layers:A-B (docs/passes.md)",
        path="workload.recompute",
        of=("train",),
    )
    offload: tuple[str, ...] = setting((), "optimizer | activations | kv: what lives in host memory")
    passes: tuple[str, ...] = setting((), "your own rewrites of the graph, each module:function")
    options: Mapping[str, Any] = setting({}, "settings of passes that few need (docs/passes.md)")
    micro_batches: int = setting(1, "of prompts and tokens: parts that a batch goes through pipeline stages in")
    stragglers: tuple[Straggler, ...] = setting(
        (), "slow compute: [{node: 3, slowdown: 1.2}, {device: 17, slowdown: 1.5}]"
    )
    price_per_gpu_hour: float | None = setting(
        None, "for cost per step and per million tokens; default: the cluster's own"
    )
    power_cap_w: float | None = setting(
        None, "the watts a device may draw at most: ops that would draw more take longer"
    )
    unpacked_by: str = setting("", hidden=True)
    file: WorkloadFile | None = setting(None, hidden=True)
    network: NetworkChoice = setting(NetworkChoice, group="")
    sources: Sources = setting(Sources, group="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", shipped(self.device))
        whole(RequestError, "micro_batches", self.micro_batches, 1)
        choice(RequestError, "kv_dtype", self.kv_dtype or "same", ("same", *KV_FORMATS))
        if not isinstance(self.recompute, str):
            raise RequestError(f"recompute={self.recompute!r} must be a word, such as none, full or selective")
        for name in ("precision", "quantization"):
            if not isinstance(getattr(self, name) or "", str):
                raise RequestError(f"{name}={getattr(self, name)!r} must be a format, such as bf16 or fp8")
        if self.price_per_gpu_hour is not None:
            number(RequestError, "price_per_gpu_hour", self.price_per_gpu_hour)
        Limits(self.power_cap_w)
        for name in ("offload", "passes"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.network.fidelity == "analytical" and self.network.named:
            raise RequestError(f"{self.network.named[0]} needs links that are simulated: take network=flow")
        if self.cluster is not None:
            check_settings(self.cluster.topology)
        if self.file is not None:
            return self._check_file()
        if not isinstance(self.model, (str, Mapping)) and not callable(self.model):
            raise RequestError(f"model={self.model!r} must be a name, a path, module:callable or a configuration")
        if self.model == "":
            raise RequestError("a step needs a model: model=llama3_8b (`opcast list models`)")
        self._check_alone()

    def _check_file(self) -> None:
        if self.cluster is None:
            raise needs_cluster("workload=simai")
        for name in ("stragglers", "offload", "passes", "options", "power_cap_w"):
            if getattr(self, name):
                raise RequestError(
                    f"{name}={getattr(self, name)} is for steps of a model: leave it out of workload=simai"
                )

    def _check_alone(self) -> None:
        """PlanError and RequestError for what means nothing on one device, as it was given."""
        if self.cluster is not None:
            return
        defaults, layout = Parallel(), self.parallel
        values = {field.name: getattr(layout, field.name) for field in fields(Parallel)}
        spread = [f"parallel.{name}={value}" for name, value in values.items() if value != getattr(defaults, name)]
        spread = [text for text in spread if text != "parallel.dp=1"]
        cluster_settings = [*spread, *self.network.said(None)]
        if cluster_settings:
            raise needs_cluster(" ".join(cluster_settings))

    @classmethod
    def named(cls, values: dict[str, Any]) -> dict[str, Any]:
        return looked_up(values)


@dataclass(frozen=True)
class StepQuestion(Request):
    """A question about a step, which is the field that ``STEP`` names."""

    STEP: ClassVar[str] = "step"

    @classmethod
    def named(cls, values: dict[str, Any]) -> dict[str, Any]:
        if isinstance(values.get(cls.STEP), Mapping):
            values = {**values, cls.STEP: looked_up(dict(values[cls.STEP]))}
        return values


@dataclass(frozen=True)
class ValidateRequest(Request):
    """Every row of a table of published results, simulated and scored; figures of ``device`` and ``cluster`` go before
    the rows' own, a ``stack`` before their frameworks. ``rules`` is a folder that says what is known of published
    tables (empty: that of a checkout). ``rival`` names another tool on the same rows. ``half`` is that of the sources
    (``looked_at`` or ``unseen``, empty: both); of unseen ones nothing but scores is said."""

    truth: str = ""
    limit: int | None = None
    rival: str = ""
    details: bool = False
    rules: str = ""
    half: str = ""
    device: Mapping[str, Any] = field(default_factory=dict)
    cluster: Mapping[str, Any] = field(default_factory=dict)
    stack: Stack | None = None
    sources: Sources = field(default_factory=Sources)

    def __post_init__(self) -> None:
        choice(RequestError, "half", self.half or HALVES[0], HALVES)
        for name, value in (("details", self.details), ("limit", self.limit)) if self.half == UNSEEN else ():
            if value:
                raise RequestError(
                    f"half={UNSEEN} {name}={value}: of these rows nobody sees more than scores; leave {name} out"
                )
        if not self.truth:
            raise RequestError("name a table: `opcast validate truth=FILE.csv`")
        if self.limit is not None:
            whole(RequestError, "limit", self.limit, 1)

    @classmethod
    def named(cls, values: dict[str, Any]) -> dict[str, Any]:
        return looked_up(values, ("stack",))


@dataclass(frozen=True)
class CalibrateRequest(Request):
    """Effects on the times of steps, fitted on at most so many ``rows`` of each table of published results.

    ``start`` is the calibration that they join: ``none``, ``shipped`` or a file. ``rules`` is a folder that says what
    is known of published tables (empty: that of a checkout).
    """

    tables: tuple[str, ...] = ()
    rows: int = 160
    start: str = "none"
    rules: str = ""
    sources: Sources = field(default_factory=Sources)

    def __post_init__(self) -> None:
        if not self.tables:
            raise RequestError("name tables of known runs: `opcast calibrate tables=[FILE.csv,…]`")
        whole(RequestError, "rows", self.rows, 8)


def plan_of(request: SimulateRequest, device: Device) -> Plan:
    """How a request's model is spread: over its cluster, or on the device alone, which is a cluster of one.

    Formats that the request leaves open are those of the model's checkpoint. PlanError for a straggler that is not
    there, TraceError for a model that is not, or whose checkpoint has a format that nobody knows.
    """
    cluster = request.cluster or one_device(device)
    if request.price_per_gpu_hour is not None:
        cluster = replace(cluster, price_per_device_hour=request.price_per_gpu_hour)
    plan = Plan(
        parallel=request.parallel,
        cluster=cluster,
        stack=request.stack
        or usual_stack(request.work.kind, alone=request.cluster is None and request.work.kind != "batch"),
        micro_batches=request.micro_batches,
        recompute=request.recompute,
        offload=request.offload,
        precision=usual_precision(device) if request.precision == "auto" else request.precision,
        quantization=request.quantization,
        kv_dtype=request.kv_dtype,
        passes=request.passes,
        options=request.options,
        slow_devices=slow_devices(request.stragglers, cluster) if request.stragglers else {},
        calibration=request.sources.calibration,
    )
    named = request.quantization or ("" if request.precision == "auto" else request.precision)
    plan = as_stored(plan, request.model, request.work, named, device, request.unpacked_by)
    return replace(plan, notes=(*plan.notes, *model_notes(request.model, request.work)))


def usual_stack(work_kind: str, alone: bool) -> Stack:
    """The framework where none is named: a device alone runs PyTorch; Megatron-LM trains and TensorRT-LLM serves.

    Batches of an engine's iteration are TensorRT-LLM's on one device too.
    """
    if work_kind == "batch":
        return load_stack("trtllm")
    return load_stack("torch" if alone else "megatron" if work_kind == "train" else "trtllm")


def usual_precision(device: Device) -> str:
    """fp32 on a CPU; elsewhere bf16, or fp16 where the device has no bf16."""
    if device.synchronous:
        return "fp32"
    return "bf16" if device.supports("bf16") else "fp16"
