"""A plan as a model's checkpoint has it: the format of its weights, keys and values, where the user leaves that open.

Inference keeps what a checkpoint stores. What was chosen, and what is not as the checkpoint has it, is said in
``Plan.notes``: a format is never dropped in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...datasets.devices import Device
from ..trace.checkpoints import stored_format
from ..trace.models import Source, resolve
from ..trace.stored_formats import EVERY_MODULE, ModuleRule, StoredFormat, WeightFormat
from ..trace.weight_formats import BLOCK, NVFP4_WEIGHTS, PER_CHANNEL
from ..trace.workload import TraceError
from .plan import Plan
from .work import Work

BESIDE_ADAPTERS = ("bitsandbytes", "gptq", "awq", "hqq", "auto-round")  # libraries that peft trains adapters with
KBIT = ("nf4", "w4a16", "w8a16")  # weights that are unpacked for each product
MOST_SHOWN = 3  # entries of the list of what stays in 16 bits
WEIGHTS_ALONE = {  # format that a device may have no units for -> the same weights, unpacked for products in 16 bits
    "fp8": WeightFormat("w8a16", PER_CHANNEL),
    "fp8_block": WeightFormat("w8a16", BLOCK * BLOCK, 4.0),
    "mxfp8": WeightFormat("w8a16", 32, 1.0),
    "int8": WeightFormat("w8a16", PER_CHANNEL),
    "nvfp4": NVFP4_WEIGHTS,
    "mxfp4a8": WeightFormat("mxfp4a16"),
    "w4a8": WeightFormat("w4a16"),
}


def as_stored(plan: Plan, model: Any, work: Work, precision: str, device: Device, unpacked_by: str = "") -> Plan:
    """The plan with what the checkpoint of a ``model`` says of formats, for some work.

    ``precision`` is what the user named, empty for ``auto``; ``unpacked_by`` an engine that was told it, and keeps such
    weights packed where the device lacks the units. TraceError for a model that is not there, and under ``auto`` for a
    format that nobody knows.
    """
    source = resolve(model)
    if unpacked_by and not device.supports(precision):
        weights = WEIGHTS_ALONE[precision]
        plan = replace(plan, quantization=weights.name, weight_rules=(ModuleRule(weights, patterns=EVERY_MODULE),))
        kept = f"{unpacked_by} keeps such weights packed and multiplies in {plan.precision} ({weights.name})"
        return _said(plan, f"{device.name} has no {precision} units: {kept}")
    if work.kind == "train" and not device.synchronous and not precision:
        return _trained(plan, source, work, device)
    if work.kind == "train" or device.synchronous:
        return _unpacked(plan, source, precision, work.kind)
    if not precision and source.dtype == "float16" and device.supports("fp16"):
        plan = replace(plan, precision="fp16")
    stored = _read(source, strict=not precision)
    if stored is None:
        return plan
    if isinstance(stored, str) or (precision and stored.precision and precision not in _alike(plan, stored)):
        return _said(plan, f"the checkpoint stores {_format(stored)}; simulated in {precision}, as asked")
    return _packed(plan, stored, precision, device)


def _read(source: Source, strict: bool) -> StoredFormat | str | None:
    """What a checkpoint stores: a format, words that nobody knows (TraceError where it is ``strict``), or nothing."""
    try:
        return stored_format(source.quantization, source.quantized_in, source.name)
    except TraceError:
        if strict:
            raise
    method = (source.quantization or {}).get("quant_method")
    return f"weights in a format that opcast does not know (quant_method={method!r})"


def _format(stored: StoredFormat | str) -> str:
    return stored if isinstance(stored, str) else stored.precision or "keys and values in few bits"


def _trained(plan: Plan, source: Source, work: Work, device: Device) -> Plan:
    """The plan of a training step: adapters leave weights packed where a library trains them so (QLoRA).

    TraceError for 8 bits of bitsandbytes, which it multiplies forward in another format than backward.
    """
    stored = _read(source, strict=False) if work.lora_rank else None
    if not isinstance(stored, StoredFormat) or _method(source) not in BESIDE_ADAPTERS:
        return _unpacked(plan, source, "", work.kind)
    if stored.precision not in KBIT:
        raise TraceError(
            f"model {source.name}: adapters beside weights in {stored.precision} of {_method(source)} are not "
            f"simulated; take precision={' or '.join(KBIT)}, or bf16"
        )
    return replace(_packed(plan, stored, "", device), kv_dtype=plan.kv_dtype)  # there is no cache


def _method(source: Source) -> str:
    """Which library packed a checkpoint, in its own word."""
    settings = source.quantization or {}
    return str(settings.get("quant_method") or ("bitsandbytes" if settings.get("load_in_4bit") else "")).lower()


def _unpacked(plan: Plan, source: Source, precision: str, kind: str) -> Plan:
    """The plan of work that does not take weights as a checkpoint stores them, with a note that says so."""
    stored = _read(source, strict=False)
    if stored is None or precision:
        return plan
    where = "training" if kind == "train" else "a CPU"
    more = "" if isinstance(stored, str) else f" (precision={stored.precision} names it)"
    return _said(plan, f"the checkpoint stores {_format(stored)}; {where} is simulated in {plan.precision}{more}")


def _packed(plan: Plan, stored: StoredFormat, precision: str, device: Device) -> Plan:
    """The plan with the formats of a checkpoint, as far as the device has units for them."""
    rules, lacking = stored.rules, []
    if not precision:
        lacking = sorted({r.weights.name for r in rules if r.weights.name and not device.supports(r.weights.name)})
        rules = tuple(
            replace(r, weights=WEIGHTS_ALONE[r.weights.name]) if r.weights.name in lacking else r for r in rules
        )
    main = WEIGHTS_ALONE[stored.precision].name if stored.precision in lacking else stored.precision
    rounding = {} if precision == stored.precision else _roundings(plan, device)
    rules = tuple(
        replace(r, weights=replace(r.weights, name=rounding.get(r.weights.name, r.weights.name))) for r in rules
    )
    rounded = sorted(rounding[name] for name in {main, *(r.weights.name for r in stored.rules)} if name in rounding)
    main = rounding.get(main, main)
    plan = replace(
        plan,
        quantization=main,
        weight_rules=() if rules == (ModuleRule(WeightFormat(main), patterns=EVERY_MODULE),) else rules,
        kv_dtype=plan.kv_dtype or stored.kv_dtype or "same",
    )
    notes = [_chosen(stored, main)] if main else []
    notes += [
        f"{device.name} has no {name} units: such weights stay packed, products are in {plan.precision}"
        for name in lacking
    ]
    notes += [f"{plan.stack.name} rounds what such weights are multiplied by ({name})" for name in rounded]
    if stored.kv_dtype and plan.kv_dtype == stored.kv_dtype:
        notes.append(f"keys and values in {stored.kv_dtype}, as the checkpoint says ({stored.where})")
    return _said(plan, *notes, *stored.remarks)


def _alike(plan: Plan, stored: StoredFormat) -> tuple[str, ...]:
    """What a user may call the format of a checkpoint: its own name, and what the framework multiplies it in."""
    return stored.precision, plan.stack.multiplies.get(stored.precision, stored.precision)


def _roundings(plan: Plan, device: Device) -> dict[str, str]:
    """The formats that the framework multiplies weights in, by that of the weights, which the device has units for."""
    return {name: rounded for name, rounded in plan.stack.multiplies.items() if device.supports(rounded)}


def _chosen(stored: StoredFormat, main: str) -> str:
    others = {rule.weights.name for rule in stored.rules} - {"", stored.precision}
    also = f" and {', '.join(sorted(others))}" if others else ""
    return f"weights in {main}{also}, as the checkpoint stores them ({stored.where}){_staying(stored.kept)}"


def _staying(layers: Sequence[str]) -> str:
    if not layers:
        return ""
    more = f" and {len(layers) - MOST_SHOWN:,} more" if len(layers) > MOST_SHOWN else ""
    return f"; in 16 bits stay {', '.join(layers[:MOST_SHOWN])}{more}"


def _said(plan: Plan, *notes: str) -> Plan:
    return replace(plan, notes=(*plan.notes, *notes))
