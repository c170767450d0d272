"""Rows of inference tables: one static batch of fixed lengths. Serving and continuous batching are said to be such."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .cells import Cells, precision_of
from .dimensions import run_tags
from .hardware import hardware_of
from .published import known
from .rows import Hardware, InferenceRow, PublishedLayout, TrainingRow, TruthError
from .shapes import model_of

GB_IN_GIB = 1e9 / 2**30
KEPT_FORMATS = {  # of keys and values, by what tables call them
    **dict.fromkeys(("same", "bf16", "fp16", "bfloat16", "float16"), "same"),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), "fp8"),
    "int8": "int8",
}
QUEUED = {
    "infer_serving": "served requests: `opcast serving` simulates one load of them",
    "infer_max_throughput": "continuous batching at the highest rate: `opcast serving capacity` finds it for a replica",
}


def inference_row(cells: Cells, folder: Path) -> InferenceRow:
    """One static batch; TruthError says what keeps it from being simulated."""
    cells = known(cells, "inference")
    alone = cells.whole("concurrency", 0) == 1  # one request at a time queues behind none
    if cells.text("kind") in QUEUED and not alone:
        raise TruthError(QUEUED[cells.text("kind")])
    batch = 1 if alone else cells.needed("batch_size")
    input_len, output_len = cells.needed("input_len_tokens"), cells.whole("output_len_tokens", 1)
    devices = cells.needed("num_gpus")
    hardware = hardware_of(cells, devices)
    name, config = model_of(cells, folder, input_len + output_len)
    typed, cells = cells, known(cells, "encoder") if encodes(config) else cells
    framework, (precision, quantization) = cells.text("stack"), precision_of(cells.text("precision"))
    layout = PublishedLayout(tp=cells.count("tp"), pp=cells.count("pp"), ep=cells.count("ep"), dp=1)
    if layout.tp * layout.pp != devices:
        raise TruthError(f"tp x pp = {layout.tp * layout.pp} does not fill {devices} devices")
    return InferenceRow(
        id=cells.id,
        hardware=hardware,
        measured=measurements(cells, output_len),
        tags=tags(typed, name, config, hardware, layout, framework),
        model=name,
        config=config,
        framework=framework,
        layout=layout,
        precision=precision,
        quantization=quantization,
        memory="device",
        options=options(cells),
        batch=batch,
        input_len=input_len,
        output_len=max(output_len, 1),
        micro_batches=micro_batches(batch, input_len, layout.pp, cells.whole("tokens_at_once", 0)),
    )


def encodes(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is an encoder's."""
    return config.get("model_type") == "bert"


def options(cells: Cells) -> dict[str, Any]:
    """The simulator's options of a row: what is known of it, the cache's format where the table says it, and whether
    the cache grows by copying (``kv_cache`` dynamic)."""
    grows = {"kv_cache": "dynamic"} if cells.text("kv_cache") == "dynamic" else {}
    return {**cells.options, **grows, **kept_format(cells.text("kv_dtype").lower())}


def kept_format(name: str) -> dict[str, str]:
    """The option for keys and values of a format; none for ``auto``, which leaves it to the framework."""
    if name in ("", "auto"):
        return {}
    if name not in KEPT_FORMATS:
        raise TruthError(f"kv_dtype={name!r} is not known; take {', '.join(KEPT_FORMATS)} or auto")
    return {"kv_dtype": KEPT_FORMATS[name]}


def micro_batches(batch: int, tokens: int, stages: int, at_once: int) -> int:
    """Parts in which a batch of sequences goes through pipeline stages that take ``at_once`` tokens (0: any number)."""
    if stages == 1 or not at_once:
        return 1
    size = batch // stages if batch % stages == 0 else batch
    while size * tokens > at_once and size % 2 == 0:
        size //= 2
    return batch // size


def measurements(cells: Cells, output_len: int) -> dict[str, float]:
    """What a row measured, by quantity; TruthError where there is nothing to compare with."""
    figures: dict[str, float] = {}
    if cells.has("status"):
        figures["fits"] = 0.0 if "oom" in cells.text("status").lower() else 1.0
    latency_ms = cells.positive("latency_ms")
    columns = {"ttft": cells.positive("ttft_ms"), "tpot": cells.positive("itl_ms"), "e2e": latency_ms}
    if output_len <= 1 and latency_ms:
        columns = {"ttft": latency_ms}
    figures |= {name: value for name, value in columns.items() if value}
    rate = cells.positive("out_tokens_per_s_total")
    if rate and not latency_ms:
        figures["throughput"] = rate
    if memory := cells.positive("mem_gb"):
        figures["peak_memory"] = memory * GB_IN_GIB
    if not figures:
        columns_named = "latency_ms, ttft_ms, itl_ms or out_tokens_per_s_total"
        raise TruthError(f"neither latency nor throughput is published: its columns are {columns_named}")
    return figures


def tags(
    cells: Cells, name: str, config: Mapping[str, Any], hardware: Hardware, layout: PublishedLayout, framework: str
) -> dict[str, str]:
    """What rows are grouped by in reports."""
    values = run_tags(cells.text("precision"), name, config, hardware, framework)
    values["regime"] = f"tp{layout.tp}" if layout.tp > 1 else "one device"
    return values | ({"engine": cells.text("engine")} if cells.has("engine", "head_dim") else {})


def whole_model_row(cells: Cells, folder: Path) -> InferenceRow | TrainingRow:
    """One eager step of a whole model (``mode`` inf or train, ``e2e_latency_ms``).

    What a training pass holds beside forward and backward is known of its publication.
    """
    typed, cells = cells, known(cells, "passes")
    seq_len, batch, devices = cells.needed("seq_len_tokens"), cells.needed("batch_size"), cells.count("num_gpus")
    hardware = hardware_of(cells, devices)
    name, config = model_of(cells, folder, seq_len)
    precision, quantization = precision_of(cells.text("precision"))
    millis = cells.positive("e2e_latency_ms")
    if millis is None:
        raise TruthError("e2e_latency_ms is not published")
    framework = cells.text("stack")
    layout = PublishedLayout(tp=cells.count("tp"), pp=cells.count("pp"), dp=cells.count("dp"))
    common: dict[str, Any] = {
        "id": cells.id,
        "hardware": hardware,
        "tags": tags(typed, name, config, hardware, layout, framework),
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
        options=cells.options,
        measured={"step_time": millis * 1e-3},
        seq_len=seq_len,
        global_batch=batch,
        micro_batch=batch // layout.dp,
    )
