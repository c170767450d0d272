"""Rows of inference tables: one static batch of fixed lengths. Serving and continuous batching are said to be such."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .cells import Cells, precision_of
from .dimensions import dimensions_of
from .engines import encodes, engine_of, micro_batches
from .hardware import hardware_of
from .rows import Hardware, InferenceRow, PublishedLayout, TrainingRow, TruthError
from .shapes import model_of

GB_IN_GIB = 1e9 / 2**30
QUEUED = {
    "infer_serving": "served requests: needs the serving simulator",
    "infer_max_throughput": "continuous batching at the highest rate: needs the serving simulator",
}


def inference_row(cells: Cells, folder: Path) -> InferenceRow:
    """One static batch; TruthError says what keeps it from being simulated."""
    alone = cells.whole("concurrency", 0) == 1  # one request at a time queues behind none
    if cells.text("kind") in QUEUED and not alone:
        raise TruthError(QUEUED[cells.text("kind")])
    batch = 1 if alone else cells.needed("batch_size")
    input_len, output_len = cells.needed("input_len_tokens"), cells.whole("output_len_tokens", 1)
    devices = cells.needed("num_gpus")
    hardware = hardware_of(cells, devices)
    name, config = model_of(cells, folder, input_len + output_len)
    engine = engine_of(cells, config)
    layout = PublishedLayout(tp=cells.count("tp"), pp=cells.count("pp"), ep=cells.count("ep"), dp=1)
    if layout.tp * layout.pp != devices:
        raise TruthError(f"tp x pp = {layout.tp * layout.pp} does not fill {devices} devices")
    return InferenceRow(
        id=cells.id,
        hardware=hardware,
        measured=measurements(cells, output_len),
        tags=tags(cells, name, config, hardware, layout, engine.framework),
        model=name,
        config=config,
        framework=engine.framework,
        layout=layout,
        precision=engine.precision,
        quantization=engine.quantization,
        memory="device",
        options=engine.options,
        batch=batch,
        input_len=input_len,
        output_len=max(output_len, 1),
        micro_batches=micro_batches(engine.framework, batch, input_len, layout.pp) if encodes(config) else 1,
    )


def measurements(cells: Cells, output_len: int) -> dict[str, float]:
    """What a row measured, by quantity; TruthError where there is nothing to compare with."""
    found: dict[str, float] = {}
    if cells.has("status"):
        found["fits"] = 0.0 if "oom" in cells.text("status").lower() else 1.0
    whole = cells.positive("latency_ms")
    columns = {"ttft": cells.positive("ttft_ms"), "tpot": cells.positive("itl_ms"), "e2e": whole}
    if output_len <= 1 and whole:
        columns = {"ttft": whole}
    found |= {name: value for name, value in columns.items() if value}
    rate = cells.positive("out_tokens_per_s_total")
    if rate and not whole:
        found["throughput"] = rate
    if memory := cells.positive("mem_gb"):
        found["peak_memory"] = memory * GB_IN_GIB
    if not found:
        raise TruthError("neither latency nor throughput is published")
    return found


def tags(
    cells: Cells, name: str, config: Mapping[str, Any], hardware: Hardware, layout: PublishedLayout, framework: str
) -> dict[str, str]:
    """What rows are grouped by in reports."""
    sizes = dimensions_of(config)
    return {
        "framework": framework,
        "gpu": hardware.gpu,
        "precision": cells.text("precision"),
        "model": name,
        "architecture": "MoE" if sizes is not None and sizes.experts else "dense",
        "regime": f"tp{layout.tp}" if layout.tp > 1 else "one device",
    } | ({"engine": cells.text("engine")} if cells.has("engine", "head_dim") else {})


def whole_model_row(cells: Cells, folder: Path) -> InferenceRow | TrainingRow:
    """One eager step of a whole model (``mode`` inf or train, ``e2e_latency_ms``).

    On one device training is forward and backward, without the optimizer; on several it is a step of Megatron-LM.
    """
    compiled = "fusion" in cells.text("option")
    seq_len, batch, devices = cells.needed("seq_len_tokens"), cells.needed("batch_size"), cells.count("num_gpus")
    hardware = hardware_of(cells, devices)
    name, config = model_of(cells, folder, seq_len)
    precision, quantization = precision_of(cells.text("precision") if devices == 1 else "fp32")
    millis = cells.positive("e2e_latency_ms")
    if millis is None:
        raise TruthError("e2e_latency_ms is not published")
    framework = "torch_compile_2023" if compiled else "torch_2023" if devices == 1 else "megatron_fp32"
    layout = PublishedLayout(tp=cells.count("tp"), pp=cells.count("pp"), dp=cells.count("dp"))
    common: dict[str, Any] = {
        "id": cells.id,
        "hardware": hardware,
        "tags": tags(cells, name, config, hardware, layout, framework),
        "model": name,
        "config": config,
        "framework": framework,
        "layout": layout,
        "precision": precision,
        "quantization": quantization,
    }
    if cells.text("mode") != "train":
        return InferenceRow(**common, measured={"ttft": millis}, batch=batch, input_len=seq_len, output_len=1)
    return TrainingRow(
        **common,
        options={"optimizer": "none"} if devices == 1 else {},
        measured={"step_time": millis * 1e-3},
        seq_len=seq_len,
        global_batch=batch,
        micro_batch=batch // layout.dp,
    )
