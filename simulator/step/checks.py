"""What a plan can be asked for: refuses what does not go together, and fills in what the work decides."""

from __future__ import annotations

from dataclasses import replace

from ...datasets.devices import Device, DeviceError
from ..passes.serving import OTHERS, STEPS
from ..question.as_stored import WEIGHTS_ALONE
from ..question.calibration import StepCalibration, calibrated, chip_of, load_calibration, of_chip, run_kind
from ..question.options import OF_INFERENCE, OF_TRAINING
from ..question.plan import Parallel, Plan, PlanError, check_plan
from ..question.stack import FUSED, Stack, known_stacks, load_stack
from ..question.work import Work

MOST_MICRO_BATCHES = 2**16
FILLING = 4  # micro-batches of each data rank for each stage of a pipeline, where no batch is given


def prepared(plan: Plan, work: Work, device: Device) -> Plan:
    """The plan as the work runs it: micro-batches, the experts' load, the format of the cache.

    PlanError for what does not go together, DeviceError for a dtype that the device lacks.
    """
    _check_kind(plan, work)
    check_plan(plan)
    if work.kind == "batch":
        _check_batch(plan)
    if work.kind == "train":
        check_trains(plan.stack)
        plan = _training(plan, work)
    else:
        plan = _serving(plan, work, device)
    for dtype in (plan.precision, plan.quantization, *(rule.weights.name for rule in plan.weight_rules)):
        if dtype and not device.supports(dtype):
            raise _lacks_units(device, dtype, work)
    return replace(plan, calibrated=_calibrations_of(plan, work, device), device=device)


def _lacks_units(device: Device, dtype: str, work: Work) -> DeviceError:
    """What a device has in place of the units of a format; engines unpack such weights there."""
    packed = WEIGHTS_ALONE.get(dtype)
    way_out = ""
    if packed is not None and device.supports(packed.name) and work.kind != "train":
        way_out = f"; engines unpack such weights there: take precision={packed.name}"
    return DeviceError(f"{device.name} has no {dtype} matrix units; it has {', '.join(device.tensor_tflops)}{way_out}")


def _calibrations_of(plan: Plan, work: Work, device: Device) -> dict[str, StepCalibration]:
    """What the plan's calibration says of each kind of step that the work has.

    Known runs are of GPUs: to a processor only what its own runs say applies.
    """
    calibrations = load_calibration(plan.calibration)
    if device.synchronous:
        calibrations = of_chip(calibrations, chip_of(device))
    kinds = ("prefill", "decode") if work.kind == "generate" else (work.kind,)
    like = {kind: "prefill" if kind == "batch" else kind for kind in kinds}
    settings = {kind: run_kind(plan.stack.framework, device, plan.regime(regime)) for kind, regime in like.items()}
    return {kind: calibrated(calibrations, setting) for kind, setting in settings.items()}


def filled(work: Work, plan: Plan) -> Work:
    """The work with a ``global_batch`` that fills the layout where none was given.

    One micro-batch for each data rank; under a pipeline :data:`FILLING` for each of its stages, so that it is busy for
    most of the step (a bubble of at most 1 in 5 of the time without virtual stages).
    """
    if work.kind != "train" or work.global_batch is not None or not plan.dp:  # what does not fit is refused later
        return work
    stages = plan.parallel.pp
    return replace(work, global_batch=work.micro_batch * plan.dp * (FILLING * stages if stages > 1 else 1))


def _check_kind(plan: Plan, work: Work) -> None:
    """PlanError for what only training, or only inference, can do."""
    p, train = plan.parallel, work.kind == "train"
    if not train and p.vpp > 1:
        raise PlanError("inference has no virtual stages; take parallel.vpp=1")
    amiss = [f"offload={choice}" for choice in plan.offload if (choice == "kv") == train]
    others = OF_INFERENCE if train else OF_TRAINING
    amiss += [f"options.{name}={value}" for name, value in plan.options.items() if name in others and value is not None]
    amiss += [f"kv_dtype={plan.kv_dtype}"] if train and plan.kv_dtype and "kv_dtype" not in plan.options else []
    if not train:
        amiss += [f"parallel.zero_stage={p.zero_stage}"] if p.zero_stage else []
        amiss += [f"parallel.schedule={p.schedule}"] if p.schedule != Parallel.schedule else []
        amiss += [f"workload.data_loading_ms={work.data_loading_ms}"] if work.data_loading_ms else []
        amiss += [f"workload.recompute={plan.recompute}"] if plan.recompute != "none" else []
    if amiss:
        raise PlanError(
            f"{', '.join(amiss)} is for {'inference' if train else 'training'}: leave it out of workload={work.kind}"
        )


def _check_batch(plan: Plan) -> None:
    """PlanError for what a batch of chunks and decoding sequences cannot be combined with."""
    if "paged_attention" not in plan.stack.fusion:
        engines = ", ".join(sorted(name for name, stack in _stacks().items() if "paged_attention" in stack.fusion))
        raise PlanError(f"stack={plan.stack.id} has no pass over prompts and decodes together; take one of {engines}")
    if plan.stack.attention not in FUSED:
        raise PlanError(f"stack.attention={plan.stack.attention} has no kernel of mixed batches; take fused")
    amiss = [f"parallel.cp={plan.parallel.cp}"] if plan.parallel.cp > 1 else []
    amiss += [f"micro_batches={plan.micro_batches}"] if plan.micro_batches > 1 else []
    amiss += ["offload=kv"] if "kv" in plan.offload else []
    amiss += [f"options.{name}" for name in ("real_tokens", "sequence_lengths") if plan.options.get(name)]
    if amiss:
        raise PlanError(f"{', '.join(amiss)} does not go with a batch of prompts and decodes: leave it out")


def _stacks() -> dict[str, Stack]:
    return {name: load_stack(name) for name in known_stacks()}


def _training(plan: Plan, work: Work) -> Plan:
    """The plan with its number of micro-batches and its experts' load; PlanError when the batch does not divide."""
    together = work.micro_batch * plan.dp
    if work.sequences % together:
        nearest = max(round(work.sequences / together), 1) * together
        raise PlanError(
            f"workload.global_batch={work.sequences} is no multiple of micro_batch x dp = {work.micro_batch} x "
            f"{plan.dp}; take workload.global_batch={nearest}"
        )
    if work.sequences // together > MOST_MICRO_BATCHES:
        raise PlanError(
            f"workload.global_batch={work.sequences} is {work.sequences // together} micro-batches for each data rank, "
            f"more than the {MOST_MICRO_BATCHES:,} that are simulated; take a larger workload.micro_batch"
        )
    options = {"expert_load": work.routing, **plan.options}
    return replace(plan, micro_batches=work.sequences // together, options=options)


def _serving(plan: Plan, work: Work, device: Device) -> Plan:
    """The plan with the format of the cache and the kernels of the device."""
    options = {"expert_load": work.routing, **plan.options}
    if work.kind != "batch" and work.batch % plan.micro_batches:
        nearest = next(m for m in range(plan.micro_batches, 0, -1) if work.batch % m == 0)
        raise PlanError(
            f"workload.batch={work.batch} does not divide into {plan.micro_batches} micro-batches; take {nearest}"
        )
    reduced = tuple(choice for choice in plan.stack.reduced_norms if choice.sm in (0, device.sm))
    return replace(
        plan,
        options=options,
        kv_dtype=_kv_dtype(plan),
        stack=replace(plan.stack, reduced_norms=reduced),
    )


def _kv_dtype(plan: Plan) -> str:
    """The format of keys and values: what is asked or the checkpoint says, else what the framework has with such
    products, else that of activations."""
    return plan.kv_dtype or plan.stack.kv_dtype.get(plan.quantization, "same")


def check_trains(stack: Stack) -> None:
    """PlanError for a framework that serves: its kernels have no backward pass."""
    serving = {*STEPS, *OTHERS}
    if not serving.isdisjoint(stack.fusion):
        train = [name for name, each in _stacks().items() if serving.isdisjoint(each.fusion)]
        raise PlanError(
            f"stack={stack.id} serves, it does not train: take one of {', '.join(train)}, or workload=prefill, decode "
            "or generate"
        )
