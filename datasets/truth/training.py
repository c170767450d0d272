"""Rows of training tables: layout, batch, recomputation; step time from seconds, tokens/s or FLOP/s; peak memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .cells import Cells, precision_of
from .dimensions import dimensions_of
from .frameworks import training_framework
from .hardware import hardware_of
from .rows import Hardware, PublishedLayout, TrainingRow, TruthError
from .shapes import model_of

GB_IN_GIB = 1e9 / 2**30
# Peak memory, first what torch's allocator counts. nanotron's "gb" are GiB, and its reserved peak counts: the allocated
# one is taken between steps (it is the same whatever the micro-batch).
MEMORY = (
    ("peak_mem_alloc_gib", 1.0, "allocated"),
    ("peak_mem_gib", 1.0, "reserved"),
    ("mem_reserved_peak_gb", 1.0, "reserved"),
    ("peak_mem_alloc_gb", GB_IN_GIB, "allocated"),
    ("peak_mem_gb", 1.0, "reserved"),
)
LATENT = ("deepseek-v3", "kimi-k2")
USUAL_CHUNKS = {"llama3": 8}  # a layer each of 126 over 16 stages, where the number of virtual stages is not published
# From these containers on, recipes in block formats (Blackwell's) hold whole iterations in CUDA graphs.
FULL_GRAPHS = re.compile(r"container (26\.(0[6-9]|1\d)|2[7-9]\.)")
BLOCK_FORMATS = {"MXFP8", "NVFP4", "FP8-MX"}
SHARDED_OPTIMIZER = {"megatron", "megatron_core", "nemo"}  # their recipes run the distributed optimizer


def training_row(cells: Cells, folder: Path) -> TrainingRow:
    """One training run; TruthError says what keeps it from being simulated."""
    if "lora" in cells.text("kind") or cells.text("task") == "lora":
        raise TruthError("LoRA: steps with frozen weights are not simulated yet")
    if cells.count("pp") > 1 and cells.text("after_pp_fix").lower() == "false":
        raise TruthError("run before its pipeline engine was repaired (after_pp_fix is false)")
    devices, seq_len = cells.needed("num_gpus"), cells.needed("seq_len_tokens")
    hardware = hardware_of(cells, devices)
    name, config = model_of(cells, folder, seq_len)
    framework = training_framework(cells.said)
    layout = layout_of(cells, devices, framework)
    precision, quantization = precision_of(cells.text("precision") or "BF16")
    micro_batch, global_batch = batches(cells, layout, framework)
    recompute = recompute_of(cells.text("recompute"), framework, name)
    layout = sequence_parallel_of(cells, layout, framework)
    if framework == "nanotron" and layout.pp > 1:
        layout = PublishedLayout(**{**vars(layout), "stages": stages_by_cost(config, layout.pp)})
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
        memory=next((counts for column, _, counts in MEMORY if cells.has(column)), "allocated"),
        options=options(cells, framework),
        seq_len=seq_len,
        global_batch=global_batch,
        micro_batch=micro_batch,
        recompute=recompute,
    )


def layout_of(cells: Cells, devices: int, framework: str) -> PublishedLayout:
    """Degrees of parallelism; TruthError where they are not published or do not fill the devices."""
    if not cells.has("tp") and not cells.has("pp"):
        raise TruthError("tp and pp are not published")
    tp, pp, cp = cells.count("tp"), cells.count("pp"), cells.count("cp")
    if devices % (tp * pp * cp):
        raise TruthError(f"tp x pp x cp = {tp * pp * cp} does not divide {devices} devices")
    dp = devices // (tp * pp * cp)
    shard = cells.whole("fsdp_shard", 0) * (
        cp if framework.startswith("torchtitan") else 1
    )  # its mesh is dp_shard x cp
    stage = re.match(r"\d", cells.text("zero_stage"))
    zero = int(stage[0]) if stage else 0
    if not stage:
        zero = 3 if shard else 1 if framework in SHARDED_OPTIMIZER or "dist" in cells.text("optimizer") else 0
    return PublishedLayout(
        tp=tp,
        pp=pp,
        vpp=(cells.whole("vp", USUAL_CHUNKS.get(framework, 1)) or 1) if pp > 1 else 1,
        cp=cp,
        ep=cells.count("ep") if cells.has("ep") else usual_ep(cells, devices, framework),
        dp=dp,
        zero_stage=zero,
        shard=shard if 0 < shard < dp * cp else 0,
    )


def usual_ep(cells: Cells, devices: int, framework: str) -> int:
    """Expert ranks where a row names DeepEP and no degree: a node's, as NeMo AutoModel's configurations have it."""
    return min(devices, 8) if framework == "nemo_automodel" and "deepep" in cells.text("extra").lower() else 1


def sequence_parallel_of(cells: Cells, layout: PublishedLayout, framework: str) -> PublishedLayout:
    """The layout with sequence parallelism as published, else as the framework's recipes have it beside tp."""
    usual = framework not in ("megatron2021", "megatron2022", "torch")
    said = "+SP" in cells.text("recompute") or cells.flag("sp", usual)
    return PublishedLayout(**{**vars(layout), "sequence_parallel": said and layout.tp > 1})


def stages_by_cost(config: Mapping[str, Any], pp: int) -> tuple[int, ...]:
    """nanotron's pipeline stages: blocks in order, a stage ends with the block that takes it past its share of weights.

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
    for empty in range(pp - 1):  # nanotron leaves stages before the logits empty; here each takes a layer
        fullest = max(range(empty + 1), key=lambda at: (counts[at], at))
        if not counts[empty] and counts[fullest] > 1:
            counts[fullest], counts[empty] = counts[fullest] - 1, 1
    return tuple(counts)


def batches(cells: Cells, layout: PublishedLayout, framework: str) -> tuple[int, int]:
    """(micro-batch, global batch) in sequences; a batch per data group gives the global one.

    Where no micro-batch is published it is one sequence; torchtitan cuts a group's batch into as many as stages.
    """
    group = cells.whole("lbs_seqs", 0) or cells.whole("batch_per_dp_group", 0)
    whole = cells.whole("gbs_seqs", 0) or group * layout.dp
    if not whole:
        raise TruthError("the global batch is not published")
    usual = 1 if group or layout.pp > 1 else whole // layout.dp
    if framework.startswith("torchtitan") and group and layout.pp > 1:
        usual = max(group // layout.pp, 1)
    micro = cells.whole("mbs_seqs", 0) or usual
    if whole % (micro * layout.dp):
        raise TruthError(f"a global batch of {whole} is no multiple of {micro} x {layout.dp} data ranks")
    return micro, whole


def recompute_of(text: str, framework: str, model: str = "") -> str:
    """The policy: none, full, selective or selective:MODULES; torchtitan's selective one goes by ops, by default.

    Where a row is silent, what the framework's published configurations have: NeMo AutoModel's checkpoint activations,
    all but GPT-OSS 20B's; Megatron-Bridge's of latent attention make its wide projections again.
    """
    words = text.lower().split("(")[0].split("/")[0].replace("+sp", "").strip()
    policy, _, modules = words.partition(":")
    if framework == "nemo_automodel" and not words:
        return "none" if "gpt-oss-20b" in model else "full"
    if framework == "megatron" and not words:
        return "selective:mla_up_proj" if model.startswith(LATENT) else "none"
    if framework.startswith("torchtitan") and policy in ("", "selective"):
        return "ops"
    if policy not in ("selective", "full") or modules == "none":
        return "none"
    return f"{policy}:{modules.replace('+', ',')}" if modules else policy


def measurements(
    cells: Cells, config: Mapping[str, Any], global_batch: int, seq_len: int, devices: int
) -> dict[str, float]:
    """What a row measured, by quantity; TruthError where there is nothing to compare with."""
    found: dict[str, float] = {}
    status = cells.text("status", "ok").lower()
    if cells.has("status"):
        found["fits"] = 0.0 if "oom" in status else 1.0
    step = step_time(cells, config, global_batch, seq_len, devices)
    if step:
        found["step_time"] = step
    for column, unit, _ in MEMORY:
        if value := cells.positive(column):
            found["peak_memory"] = value * unit
            break
    states, activations = cells.positive("param_opt_gib"), cells.positive("activation_gib")
    if states and activations:
        found["peak_memory"] = states + activations
    if not found:
        share = cells.has("activation_pct_of_tp_baseline")
        raise TruthError(
            "activations are given as a share of another run's" if share else "neither time nor memory is published"
        )
    return found


def step_time(cells: Cells, config: Mapping[str, Any], global_batch: int, seq_len: int, devices: int) -> float | None:
    """Seconds of a step: as published, else from tokens/s, sequences/s, FLOP/s or MFU; None where nothing is."""
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


def options(cells: Cells, framework: str) -> dict[str, Any]:
    """What a row says beyond the common columns, in the words of frameworks."""
    made: dict[str, Any] = {"flat_parameters": True} if framework == "llm_foundry" else {}
    if cells.text("precision").lower() in ("fp8-cs", "fp8-tensorwise", "fp8-rowwise"):
        made["fp8_scaling"] = "current"
    said = cells.text("extra").lower()
    if "asynctp" in said:
        made["async_tp"] = True
    if "cp by all-to-all" in said:
        made["cp_style"] = "ulysses"
    if "interleaved" in said and cells.count("pp") > 1:
        made["interleaved"] = True
    if "mp=pure" in said:
        made["pure_16_bit"] = True  # Composer's PURE: weights, gradients and their sums in bf16
    for word, name in (("_cg", "cuda_graph"), ("cuda graphs", "cuda_graph"), ("tokendrop", "token_drop")):
        if word in said:
            made[name] = True
    if framework == "megatron" and FULL_GRAPHS.search(cells.said) and cells.text("precision").upper() in BLOCK_FORMATS:
        made["full_graph"] = True
    if "ep overlap on" in said:
        made["ep_overlap"] = True
    return made


def tags(
    cells: Cells, name: str, config: Mapping[str, Any], hardware: Hardware, layout: PublishedLayout, framework: str
) -> dict[str, str]:
    """What rows are grouped by in reports."""
    sizes = dimensions_of(config)
    per_node = int(hardware.cluster_figures["devices_per_node"])
    regime = "single node" if hardware.devices <= per_node else "multi-node"
    if layout.tp > per_node:
        regime = "TP across nodes"
    return {
        "framework": framework,
        "gpu": hardware.gpu,
        "precision": cells.text("precision", "BF16"),
        "model": name,
        "architecture": "MoE" if sizes is not None and sizes.experts else "dense",
        "regime": regime,
    }
