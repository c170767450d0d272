"""Rows of training tables: layout, batch, recomputation; step time from seconds, tokens/s or FLOP/s; peak memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .cells import Cells, precision_of
from .dimensions import dimensions_of, run_tags
from .hardware import hardware_of
from .published import known
from .rows import Hardware, PublishedLayout, TrainingRow, TruthError
from .shapes import model_of

GB_IN_GIB = 1e9 / 2**30
# Columns of peak memory, first what torch's allocator counts.
MEMORY = (
    ("peak_mem_alloc_gib", "allocated"),
    ("peak_mem_gib", "reserved"),
    ("mem_reserved_peak_gb", "reserved"),
    ("peak_mem_alloc_gb", "allocated"),
    ("peak_mem_gb", "reserved"),
)
POLICIES = ("selective", "full", "ops")


def training_row(cells: Cells, folder: Path) -> TrainingRow:
    """One training run; TruthError says what keeps it from being simulated."""
    cells = known(cells, "training")
    devices, seq_len = cells.needed("num_gpus"), cells.needed("seq_len_tokens")
    hardware = hardware_of(cells, devices)
    name, config = model_of(cells, folder, seq_len)
    framework = cells.text("stack")
    layout = layout_of(cells, devices)
    precision, quantization = precision_of(cells.text("precision") or "BF16")
    micro_batch, global_batch = batches(cells, layout)
    recompute = recompute_of(cells.text("recompute"))
    layout = sequence_parallel_of(cells, layout)
    if cells.has("stages") and layout.pp > 1:
        layout = PublishedLayout(**{**vars(layout), "stages": stages_of(cells.text("stages"), config, layout)})
    measured = measurements(cells, config, global_batch, seq_len, devices)
    return TrainingRow(
        id=cells.id,
        hardware=hardware,
        measured=measured,
        peer=peer(cells),
        tags=tags(cells, name, config, hardware, layout, framework),
        model=name,
        config=config,
        framework=framework,
        layout=layout,
        precision=precision,
        quantization=quantization,
        memory=next((counts for column, counts in MEMORY if cells.has(column)), "allocated"),
        options=cells.options,
        seq_len=seq_len,
        global_batch=global_batch,
        micro_batch=micro_batch,
        recompute=recompute,
        lora_rank=lora_rank_of(cells),
        lora_modules=cells.text("lora_modules"),
        lora_dropout=cells.positive("lora_dropout") or 0.0,
        mtp_layers=cells.whole("mtp_layers", 0),
    )


def lora_rank_of(cells: Cells) -> int:
    """The rank of the adapters that a run trains, 0 where it trains all weights; TruthError where it is not known."""
    lora = "lora" in cells.text("kind") or cells.text("task") == "lora"
    if lora and not cells.has("lora_rank"):
        raise TruthError("the rank of the run's adapters (LoRA) is not published")
    return cells.whole("lora_rank", 0)


def layout_of(cells: Cells, devices: int) -> PublishedLayout:
    """Degrees of parallelism; TruthError where they are not published or do not fill the devices."""
    if not cells.has("tp") and not cells.has("pp"):
        raise TruthError("tp and pp are not published")
    tp, pp, cp = cells.count("tp"), cells.count("pp"), cells.count("cp")
    if devices % (tp * pp * cp):
        raise TruthError(f"tp x pp x cp = {tp * pp * cp} does not divide {devices} devices")
    dp = devices // (tp * pp * cp)
    shard = cells.whole("fsdp_shard", 0) * (cp if cells.flag("fsdp_shard_per_cp") else 1)
    stage = re.match(r"\d", cells.text("zero_stage"))
    zero = int(stage[0]) if stage else 0
    if not stage:
        zero = 3 if shard else 1 if "dist" in cells.text("optimizer") else 0
    return PublishedLayout(
        tp=tp,
        pp=pp,
        vpp=(cells.whole("vp") or 1) if pp > 1 else 1,
        cp=cp,
        ep=cells.count("ep"),
        dp=dp,
        zero_stage=zero,
        shard=shard if 0 < shard < dp * cp else 0,
    )


def sequence_parallel_of(cells: Cells, layout: PublishedLayout) -> PublishedLayout:
    """The layout with sequence parallelism as published, else beside tensor parallelism."""
    stated = "+SP" in cells.text("recompute") or cells.flag("sp", True)
    return PublishedLayout(**{**vars(layout), "sequence_parallel": stated and layout.tp > 1})


def stages_of(text: str, config: Mapping[str, Any], layout: PublishedLayout) -> tuple[int, ...]:
    """Layers of each chunk of a pipeline: ``by_cost``, or the one of ``4x15,1|8x7,5`` that has as many chunks.

    Empty (even) where none has.
    """
    if text == "by_cost":
        return stages_by_cost(config, layout.pp)
    for variant in text.split("|"):
        parts = [word.partition("x") for word in variant.split(",")]
        stages = tuple(int(layers) for layers, _, times in parts for _ in range(int(times or 1)))
        if len(stages) == layout.pp * layout.vpp:
            return stages
    return ()


def stages_by_cost(config: Mapping[str, Any], pp: int) -> tuple[int, ...]:
    """Pipeline stages of blocks in order: a stage ends with the block that takes it past its share of weights.

    The logits count as a block of their own behind the layers; empty (even stages) where dimensions are unknown.
    """
    sizes = dimensions_of(config)
    if sizes is None:
        return ()
    layer = sizes.layer_weights(True) / sizes.layers
    share = (sizes.layers * layer + sizes.vocab * sizes.hidden) / pp
    counts, spent = [0] * pp, 0.0
    stage = 0
    for _ in range(sizes.layers):
        counts[stage] += 1
        spent += layer
        if spent > share * (stage + 1) * (1 + 1e-9):
            stage = min(stage + 1, pp - 1)
    for empty in range(pp - 1):  # a stage before the logits that is left empty takes a layer
        fullest = max(range(empty + 1), key=lambda at: (counts[at], at))
        if not counts[empty] and counts[fullest] > 1:
            counts[fullest], counts[empty] = counts[fullest] - 1, 1
    return tuple(counts)


def batches(cells: Cells, layout: PublishedLayout) -> tuple[int, int]:
    """(micro-batch, global batch) in sequences; a batch per data group gives the global one.

    Where no micro-batch is published it is one sequence, or what cuts a group's batch into as many as stages.
    """
    group = cells.whole("lbs_seqs", 0) or cells.whole("batch_per_dp_group", 0)
    global_batch = cells.whole("gbs_seqs", 0) or group * layout.dp
    if not global_batch:
        raise TruthError("the global batch is not published")
    usual = 1 if group or layout.pp > 1 else global_batch // layout.dp
    if cells.text("micro_batches") == "stages" and group and layout.pp > 1:
        usual = max(group // layout.pp, 1)
    micro = cells.whole("mbs_seqs", 0) or usual
    if global_batch % (micro * layout.dp):
        raise TruthError(f"a global batch of {global_batch} is no multiple of {micro} x {layout.dp} data ranks")
    return micro, global_batch


def recompute_of(text: str) -> str:
    """The policy: none, full, full:N (also as Megatron-LM's ``full:block:N``), selective, selective:MODULES, or ops."""
    words = text.lower().split("(")[0].split("/")[0].replace("+sp", "").strip()
    policy, _, modules = words.partition(":")
    modules = modules.removeprefix("block:")  # Megatron-LM's method: the first layers of each chunk
    if policy not in POLICIES or modules == "none":
        return "none"
    return f"{policy}:{modules.replace('+', ',')}" if modules else policy


def measurements(
    cells: Cells, config: Mapping[str, Any], global_batch: int, seq_len: int, devices: int
) -> dict[str, float]:
    """What a row measured, by quantity; TruthError where there is nothing to compare with."""
    figures: dict[str, float] = {}
    status = cells.text("status", "ok").lower()
    if cells.has("status"):
        figures["fits"] = 0.0 if "oom" in status else 1.0
    step = step_time(cells, config, global_batch, seq_len, devices)
    if step:
        figures["step_time"] = step
    for column, _ in MEMORY:
        if value := cells.positive(column):
            binary = column.endswith("gib") or cells.text("gb_means").lower() == "gib"
            figures["peak_memory"] = value * (1.0 if binary else GB_IN_GIB)
            break
    states, activations = cells.positive("param_opt_gib"), cells.positive("activation_gib")
    if states and activations:
        figures["peak_memory"] = states + activations
    if share := cells.positive("activation_pct_of_tp_baseline"):
        figures["activation_share"] = share
    if not figures:
        raise TruthError("neither time nor memory is published")
    return figures


def step_time(cells: Cells, config: Mapping[str, Any], global_batch: int, seq_len: int, devices: int) -> float | None:
    """Seconds of a step: as published, else from tokens/s, sequences/s or FLOP/s; None where nothing is."""
    if step := cells.positive("step_time_s"):
        return step
    if rate := cells.positive("tokens_per_s_per_gpu"):
        return global_batch * seq_len / (rate * devices)
    if rate := cells.positive("seqs_per_s"):
        return global_batch / rate
    sizes = dimensions_of(config)
    rate = cells.positive("model_tflops_per_s_per_gpu")
    if rate and sizes:
        return global_batch * seq_len * sizes.flops_per_token(seq_len) / (rate * 1e12 * devices)
    return None


def peer(cells: Cells) -> dict[str, float]:
    """What another tool predicted, where the table carries it."""
    named = {"step_time": "peer_step_time_s", "peak_memory": "peer_peak_mem_alloc_gib"}
    return {quantity: value for quantity, column in named.items() if (value := cells.positive(column))}


def tags(
    cells: Cells, name: str, config: Mapping[str, Any], hardware: Hardware, layout: PublishedLayout, framework: str
) -> dict[str, str]:
    """What rows are grouped by in reports; ``times`` are ``measured``, or ``composed`` by another tool."""
    per_node = int(hardware.cluster_figures["devices_per_node"])
    regime = "single node" if hardware.devices <= per_node else "multi-node"
    if layout.tp > per_node:
        regime = "TP across nodes"
    values = run_tags(cells.text("precision", "BF16"), name, config, hardware, framework) | {"regime": regime}
    return values | ({"times": cells.text("times")} if cells.has("times") else {})
