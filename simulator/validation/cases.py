"""From a row of a table to what the simulator is asked: model, work, plan, device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ...datasets.clusters import Cluster, ClusterError, known_clusters, load_cluster
from ...datasets.devices import Device, DeviceError, load_device, overridden
from ...datasets.truth import Hardware, InferenceRow, ServingRow, TrainingRow
from ...datasets.truth.hardware import spread, usual_cluster
from ..engines import Engine
from ..question.calibration import USUAL
from ..question.plan import Parallel, Plan, PlanError, Stack, load_stack
from ..question.work import Work
from ..trace.workload import LORA_MODULES

OVERLAPS = {"async_tp": "tp_forward"}  # what a row says of its framework -> communication beside compute
POSITIONS = ("max_position_embeddings", "n_positions")
NO_FRAMEWORK = (
    "the framework is not told: a column stack names one (`opcast list stacks`), or stack=NAME for all rows; "
    "rules=FOLDER says what is known of published runs"
)
PRACTICES = (*OVERLAPS, "optimizer", "kv_cache", "prompt")  # the framework's affair, or what was timed; not the passes'


@dataclass(frozen=True)
class ValidationSettings:
    """What the user chose for all rows: engines, figures of devices and clusters that differ, a framework for all.

    ``engine`` makes the engines of a device in a cluster (None: alone); ``stamp`` changes when what they know does.
    ``rules`` is the folder that says what is known of published tables (None: that of a checkout).
    """

    engine: Callable[[Device, Cluster | None], Engine]
    cache_dir: Path | None = None
    device: Mapping[str, Any] = field(default_factory=dict)
    cluster: Mapping[str, Any] = field(default_factory=dict)
    stack: Stack | None = None
    calibration: str = USUAL
    stamp: tuple[int, ...] = ()
    rules: Path | None = None

    def __post_init__(self) -> None:
        for figures, cls, error in ((self.device, Device, DeviceError), (self.cluster, Cluster, ClusterError)):
            unknown = sorted(set(figures) - {f.name for f in fields(cls)})
            if unknown:
                raise error(f"{cls.__name__.lower()} has no figure {unknown[0]!r}")


@dataclass(frozen=True)
class Question:
    """One question to the simulator."""

    config: Mapping[str, Any]
    work: Work
    plan: Plan
    device: Device


def training_case(row: TrainingRow, setting: ValidationSettings) -> Question:
    """A training row as a step; the errors of what it names, PlanError and WorkloadError."""
    layout, cluster = row.layout, cluster_of(row.hardware, setting)
    options = {name: value for name, value in row.options.items() if name not in PRACTICES}
    interleaved = options.pop("interleaved", False)
    stack = stack_of(row, setting)
    if options.pop("async_tp", False):
        stack = replace(stack, overlap=(*stack.overlap, OVERLAPS["async_tp"]))
    degrees = {**vars(layout), "vpp": max(layout.vpp, 2 if interleaved else 1)}
    degrees["stages"] = layout.stages if len(layout.stages) == layout.pp * layout.vpp else ()
    parallel = Parallel(**degrees, cp_style=options.pop("cp_style", "ring"))
    plan = Plan(
        parallel=parallel,
        cluster=cluster,
        stack=stack,
        recompute=row.recompute,
        precision=row.precision,
        quantization=row.quantization,
        options=options,
        calibration=setting.calibration,
    )
    work = Work(
        "train",
        seq_len=row.seq_len,
        micro_batch=row.micro_batch,
        global_batch=row.global_batch,
        lora_rank=row.lora_rank,
        lora_modules=row.lora_modules or LORA_MODULES,
        lora_dropout=row.lora_dropout,
        mtp_layers=row.mtp_layers,
    )
    return Question(row.config, work, plan, device_of(row.hardware, setting))


def inference_case(row: InferenceRow, setting: ValidationSettings) -> Question:
    """An inference row as a prompt or a generation; the errors of what it names, PlanError and WorkloadError."""
    parallel = Parallel(tp=row.layout.tp, pp=row.layout.pp, ep=row.layout.ep, dp=1)
    plan = Plan(
        parallel=parallel,
        cluster=cluster_of(row.hardware, setting),
        stack=stack_of(row, setting),
        micro_batches=row.micro_batches,
        precision=row.precision,
        quantization=row.quantization,
        options={name: value for name, value in row.options.items() if name not in PRACTICES},
        calibration=setting.calibration,
    )
    kind, cache = "generate" if row.output_len > 1 else "prefill", str(row.options.get("kv_cache", "static"))
    work = Work(kind, batch=row.batch, input_len=row.input_len, output_len=row.output_len, cache=cache)
    config = with_positions(row.config, row.input_len + row.output_len)
    return Question(config, work, plan, device_of(row.hardware, setting))


def with_positions(config: Mapping[str, Any], tokens: int) -> Mapping[str, Any]:
    """A configuration with as many positions as a run has tokens: benchmarks of random weights go beyond a model's."""
    few = {name for name in POSITIONS if isinstance(config.get(name), int) and config[name] < tokens}
    return {**config, **dict.fromkeys(few, tokens)} if few else config


def device_of(hardware: Hardware, setting: ValidationSettings) -> Device:
    """The device of a row with the row's figures, then the user's."""
    figures = {**hardware.device_figures, **setting.device}
    device = load_device(hardware.device)
    return overridden(device, figures) if figures else device


def cluster_of(hardware: Hardware, setting: ValidationSettings) -> Cluster:
    """The cluster of a row with the row's figures, then the user's; a plain server where none is shipped."""
    if {"id", "device"} <= setting.cluster.keys():
        chosen = Cluster.from_dict(setting.cluster)
        return replace(chosen, **spread(chosen, hardware.devices))
    figures = {**hardware.cluster_figures, **setting.cluster}
    if hardware.cluster in known_clusters():
        return replace(load_cluster(hardware.cluster), **figures)
    link = usual_cluster(load_device(hardware.device)).link
    return replace(Cluster(hardware.cluster, hardware.cluster, hardware.device, link=link), **figures)


def stack_of(row: TrainingRow | InferenceRow | ServingRow, setting: ValidationSettings) -> Stack:
    """The user's framework, else the row's, with what the row says that it did otherwise."""
    if not (setting.stack or row.framework):
        raise PlanError(NO_FRAMEWORK)
    stack = setting.stack or load_stack(row.framework)
    overlap = tuple(group for name, group in OVERLAPS.items() if row.options.get(name) and group not in stack.overlap)
    return replace(stack, overlap=(*stack.overlap, *overlap)) if overlap else stack
