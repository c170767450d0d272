"""``opcast simulate``: one step of a model on a device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..datasets.devices import Device
from ..simulator.report import InferenceReport, StepReport
from ..simulator.simulate import Work, WorkloadError, simulate
from . import resolve
from .show import microseconds, print_json, say, table, wants_json

FREE_CHOICE = {"device": "device.id", "model": "+model.path"}


def run(config: dict[str, Any]) -> int:
    """Simulate and print the report; returns the exit code."""
    as_json = wants_json(config)
    target = resolve.device(config)
    asked = work(config["workload"])
    dtype = precision(config, target)
    report = simulate(
        resolve.model(config),
        asked,
        target,
        resolve.engine(config, target),
        dtype,
        Path(config["graphs"]).expanduser(),
        resolve.plan(config, asked.kind, dtype),
    )
    if config["report"]:
        from ..simulator.html import write_step_report

        say(f"report: {write_step_report(report, Path(str(config['report'])), target)}")
    if as_json:
        print_json(report.to_dict())
    else:
        show(report, target)
    return 0


def precision(config: Mapping[str, Any], target: Device) -> str:
    """The dtype of ``precision=…``; ``auto`` is fp32 on a CPU and bf16 (else fp16) elsewhere."""
    chosen = str(config["precision"]["dtype"])
    return resolve.usual_precision(target) if chosen == "auto" else chosen


def work(values: Mapping[str, Any]) -> Work:
    """The workload of the configuration; WorkloadError for what opcast does not simulate."""
    return Work(**{name: value for name, value in values.items() if name != "recompute"})


def show(report: StepReport | InferenceReport, target: Device) -> None:
    """The report as tables."""
    if isinstance(report, StepReport):
        step_s = report.step_time_s
        low, high = report.low_s, report.high_s
        head = [("step time", microseconds(step_s * 1e6))]
    else:
        step_s, low, high = report.e2e_ms / 1e3, report.low_ms / 1e3, report.high_ms / 1e3
        named = (("TTFT", report.ttft_ms), ("TPOT", report.tpot_ms), ("end to end", report.e2e_ms))
        head = [(name, microseconds(value * 1e3)) for name, value in named if value is not None]
    memory = report.memory
    verdict = "fits" if report.fits else "DOES NOT FIT"
    rows = [
        *head,
        (f"{report.coverage:.0%} interval", f"{microseconds(low * 1e6)} to {microseconds(high * 1e6)}"),
        ("tokens/s per device", f"{report.tokens_per_s_per_gpu:,.0f}"),
        ("model TFLOP/s", f"{report.tflops_per_gpu:.4g}  (MFU {report.mfu:.1%}, HFU {report.hfu:.1%})"),
        ("peak memory", f"{memory.peak_gib:.2f} GiB of {target.memory_gib:.0f} GiB, {verdict}"),
        (
            "answered by",
            ", ".join(f"{name} {share:.0%}" for name, share in report.provenance.items() if share >= 0.005),
        ),
    ]
    table(f"{report.model}: {report.workload} in {report.precision} on {target.name}", ("", ""), rows)
    shares: list[tuple[object, ...]] = [
        (s.kind, s.count, microseconds(s.time_s * 1e6), f"{s.share:.1%}", "+".join(s.engines))
        for s in report.breakdown.by_op[:12]
    ]
    shares.append(
        ("host", "", microseconds(report.breakdown.host_s * 1e6), f"{report.breakdown.host_s / step_s:.1%}", "")
    )
    table("where the time goes", ("op", "calls", "time", "share", "answered by"), shares)
    if report.unmapped:
        say(f"costed by bytes alone: {', '.join(report.unmapped)}")
