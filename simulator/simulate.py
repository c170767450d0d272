"""Simulate a workload: question, state, what its communication finds on the links, report.

There is one path for every question. One device is a cluster of one; training, prefill, decode and a generation differ
in what is traced, in their passes and in the order of their tasks, and in nothing after that.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..datasets.clusters import one_device
from ..datasets.devices import Device
from .contention import fault_study as studies
from .contention.fixed_point import share_links
from .engines import Engine, FusedEngine, ask_ahead
from .engines.flow import flow_engine
from .formats.simai import SimaiWorkload
from .memory.breakdown import Memory
from .question.errors import DegreeError
from .question.plan import Parallel, Plan, load_stack
from .question.work import Work, plainest
from .report.account import report_of
from .report.answer import InferenceReport, StepReport
from .report.network import links_report
from .report.notes import notes
from .report.workload_file import FileReport, file_report
from .step.advice import Attempt, fitting, other_degree
from .step.build import LaidOut, build, engine_of, lay_out
from .step.checks import filled, prepared
from .step.images import with_images
from .step.state import State
from .step.workload_file import run_file, study
from .trace import Model


def simulate(
    model: Model,
    work: Work,
    plan: Plan,
    device: Device,
    engine: Engine,
    cache_dir: Path | None = None,
    faults_study: Mapping[str, Any] | None = None,
    advice: bool = True,
) -> StepReport | InferenceReport:
    """The report of ``work`` for a model under a plan; one device is the plan of :func:`alone`.

    ``model``: a name in ``conf/model``, a folder or config.json, a hub id, or a factory of an ``nn.Module``.
    ``work.batch`` of inference counts the sequences of one data rank. ``faults_study`` asks what faults at random
    places do to the answer (:mod:`.contention.fault_study`). ``advice`` tries what would make a step fit.
    Raises WorkloadError, PlanError, DeviceError (a dtype the device lacks), TopologyError and the errors of
    :func:`.trace.trace`.
    """
    return simulate_all(model, [work], plan, device, engine, cache_dir, faults_study, advice)[0]


def simulate_all(
    model: Model,
    works: Sequence[Work],
    plan: Plan,
    device: Device,
    engine: Engine,
    cache_dir: Path | None = None,
    faults_study: Mapping[str, Any] | None = None,
    advice: bool = True,
) -> list[StepReport | InferenceReport]:
    """The reports of several workloads, for whose kernels engines are asked at once."""
    started, works = time.perf_counter(), [plainest(work) for work in works]
    states = all_simulated(model, works, plan, device, engine, cache_dir)
    reports = []
    for work, state in zip(works, states, strict=True):
        if advice:
            state = replace(state, memories=advised(state, model, work, plan, device, cache_dir))
        report = report_of(state, started, links_of(state, engine, faults_study))
        reports.append(replace(report, notes=(*report.notes, *notes(report, work, state))))
    return reports


def links_of(state: State, engine: Engine, faults_study: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What is said of the links of a state's cluster, and of faults on them."""
    engines = engine_of(state.plan.stack, engine)
    flows = flow_engine(engines) if state.plan.cluster.devices > 1 else None
    if flows is None or not isinstance(engines, FusedEngine):
        return {}
    trials = studies.study_faults(state, engines, faults_study) if faults_study else None
    return links_report(flows, state.main.shared, trials)


def simulated(
    model: Model, work: Work, plan: Plan, device: Device, engine: Engine, cache_dir: Path | None = None
) -> State:
    """The state of a workload, its communication as long as the links make it where they are simulated."""
    return all_simulated(model, [work], plan, device, engine, cache_dir)[0]


def all_simulated(
    model: Model, works: Sequence[Work], plan: Plan, device: Device, engine: Engine, cache_dir: Path | None = None
) -> list[State]:
    """The states of several workloads, for whose kernels engines are asked at once, which is faster."""
    layouts = [laid_out_or_else(model, work, plan, device, cache_dir) for work in works]
    if len(layouts) > 1:
        ask_ahead(engine_of(layouts[0].plan.stack, engine), [op for layout in layouts for op in layout.ops])
    return [timed_state(layout, engine) for layout in layouts]


def advised(
    state: State, model: Model, work: Work, plan: Plan, device: Device, cache_dir: Path | None
) -> tuple[Memory, ...]:
    """The memory of the stages, the fullest with what would make it fit where it does not."""
    fullest = max(state.memories, key=lambda memory: memory.peak_gib)
    if fullest.peak_gib <= device.memory_gib:
        return state.memories
    with_advice = replace(fullest, advice=fitting(fullest, work, plan, device, attempt(model, device, cache_dir)))
    return tuple(with_advice if memory is fullest else memory for memory in state.memories)


def attempt(model: Model, device: Device, cache_dir: Path | None) -> Attempt:
    """A function that lays a question about a model out, for what its fullest device needs in GiB."""

    def peak_gib(work: Work, plan: Plan) -> float:
        return laid_out(model, work, plan, device, cache_dir).peak_gib

    return peak_gib


def laid_out(model: Model, work: Work, plan: Plan, device: Device, cache_dir: Path | None = None) -> LaidOut:
    """A workload as the plan cuts it and what it needs of memory, before anything is timed."""
    work = with_images(model, filled(plainest(work), plan))
    return lay_out(model, work, prepared(plan, work, device), device, cache_dir)


def laid_out_or_else(model: Model, work: Work, plan: Plan, device: Device, cache_dir: Path | None = None) -> LaidOut:
    """The same; the error of a degree that does not go with the model says which would."""
    try:
        return laid_out(model, work, plan, device, cache_dir)
    except DegreeError as error:
        raise other_degree(error, work, plan, device, attempt(model, device, cache_dir)) from None


def timed_state(laid: LaidOut, engine: Engine) -> State:
    """The state of a workload that was cut before."""
    state = build(laid, engine)
    flows = flow_engine(engine_of(laid.plan.stack, engine))
    return state if flows is None or laid.plan.cluster.devices == 1 else share_links(state, flows)


def simulate_workload(
    workload: SimaiWorkload,
    plan: Plan,
    engine: Engine,
    name: str = "simai",
    busbw: Mapping[str, Mapping[str, float]] | None = None,
    vpp: int | None = None,
    faults_study: Mapping[str, Any] | None = None,
) -> FileReport:
    """The report of one step that a workload file of SimAI describes (:mod:`.step.workload_file`).

    ``busbw`` (GB/s by group and collective) goes before the engine's answers; ``vpp`` replaces the file's virtual
    stages. TopologyError for a study that cannot be.
    """
    started = time.perf_counter()
    step = run_file(workload, plan, engine, busbw, vpp)
    flows = flow_engine(engine)
    network: Mapping[str, Any] = {"fidelity": "analytical"}
    if flows is not None and isinstance(engine, FusedEngine):
        settings = {"busbw": busbw, "vpp": vpp}
        trials = study(workload, plan, flows, engine.engines, faults_study, **settings) if faults_study else None
        network = links_report(flows, None, trials)
    return file_report(step, name, started, network)


def alone(device: Device, precision: str, stack: str = "torch") -> Plan:
    """The plan of a single device: a cluster of one, with PyTorch's own kernels unless told otherwise."""
    return Plan(Parallel(), one_device(device), load_stack(stack), precision=precision)
