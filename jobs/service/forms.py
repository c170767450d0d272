"""The forms of the page, as data: which settings a tab shows first, and all others from the one declaration.

What a setting is, its default, help and who takes it comes from :func:`..questions.settings`; here stand only the order
of the fields that are shown first, the words beside them, and the values of the example.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union, get_args, get_origin

from ...simulator.question.declaration import RequestSetting, dataclass_in, plain_default
from ..questions import CHOSEN_BY_NAME, settings

LISTS = {"model": "models", "device": "devices", "cluster": "clusters", "stack": "stacks", "precision": "precisions"}
CHOICES = re.compile(r"(?:^|: )([\w-]+(?: \| [\w-]+)+)(?![\w|])")  # as helps spell what a text may be
UNIONS = (Union, types.UnionType)
PLAIN = {int: "integer", float: "number", bool: "flag", str: "text"}
LABELS = {
    "seq_len": "sequence length, tokens",
    "micro_batch": "micro-batch, sequences",
    "global_batch": "global batch, sequences",
    "batch": "batch of a data rank",
    "input_len": "input, tokens",
    "output_len": "output, tokens",
    "tp": "tensor parallel (TP)",
    "pp": "pipeline stages (PP)",
    "vpp": "virtual stages (VPP)",
    "dp": "data parallel (DP)",
    "cp": "context parallel (CP)",
    "ep": "expert parallel (EP)",
    "etp": "expert tensor parallel",
    "zero_stage": "ZeRO stage",
    "stack": "framework",
    "price_per_gpu_hour": "price of a GPU hour",
    "power_cap_w": "power cap, W",
    "sm_clock_mhz": "clock of compute units, MHz",
    "scheduler.policy": "engine",
    "traffic.arrival": "arrivals",
    "traffic.rate": "requests a second",
    "traffic.concurrency": "clients (of a closed loop)",
    "traffic.requests": "requests",
    "traffic.input.mean": "input, tokens in the mean",
    "traffic.output.mean": "output, tokens in the mean",
    "slo.ttft_ms": "first token (TTFT), ms",
    "slo.tpot_ms": "next tokens (TPOT), ms",
    "objectives": "the best has the least or most",
    "constraints": "what must hold",
    "space.policy": "engine",
    "space.batch": "batch",
    "space.max_tokens": "tokens of an iteration",
    "space.pools": "pools",
    "cache": "cache",
    "devices_per_node": "GPUs of a node",
    "tokens": "tokens to train on",
    "prompts": "prompts of a batch",
    "responses": "responses to each prompt",
    "prompt_len.mean": "prompts, tokens in the mean",
    "response_len.mean": "responses, tokens in the mean",
    "response_len.std": "their standard deviation",
    "asynchronous": "one step off (asynchronous)",
    "rollout.tp": "tensor parallel of a replica",
    "rollout.gpus": "GPUs that roll out (empty: searched)",
    "partial": "partial rollouts, share begun in addition",
    "kl": "KL weight (0: no reference model)",
    "lora_rank": "rank of LoRA (0: all weights)",
    "failures.fleet": "failures as in the fleet",
    "restart.minutes": "minutes to restart",
    "spares": "spare nodes",
    "checkpoint.every_minutes": "minutes between checkpoints (empty: best)",
    "checkpoint.store_gbps": "store, GB/s",
    "checkpoint.asynchronous": "asynchronous checkpoints",
    "energy.pue": "PUE",
    "others": "with which clusters",
    "power_caps_w": "power caps in turn, W",
    "prices": "price of a GPU hour of each",
    "price_per_kwh": "price of a kWh",
    "pue": "PUE",
    "energy.grid_g_per_kwh": "CO2, g a kWh",
}


@dataclass(frozen=True)
class FormGroup:
    """Fields under a heading, by the names of their settings."""

    legend: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Form:
    """A tab: the verb that it asks, what it says above, the fields shown first, and the values of its example."""

    id: str
    verb: str
    tab: str
    title: str
    lead: str
    groups: tuple[FormGroup, ...]
    example: Mapping[str, Any] = field(default_factory=dict)


FORMS = (
    Form(
        "op",
        "predict",
        "Operator",
        "One operator",
        "How long one operator or collective takes on a device, with its interval and who answered.",
        (FormGroup("Where", ("device", "cluster", "nodes", "cache", "power_cap_w")),),
        {"device": "h100_sxm", "cache": "warm"},
    ),
    Form(
        "step",
        "simulate",
        "Step",
        "One step of a model",
        "A training step, a prompt, a token or a generation on a device or a cluster: time, memory, and where the time "
        "goes.",
        (
            FormGroup(
                "Model",
                ("model", "workload", "seq_len", "micro_batch", "global_batch", "batch", "input_len", "output_len"),
            ),
            FormGroup("Where", ("cluster", "nodes", "device")),
            FormGroup("Layout", ("tp", "pp", "vpp", "dp", "cp", "ep", "zero_stage", "sequence_parallel")),
            FormGroup("How", ("stack", "precision", "recompute", "price_per_gpu_hour")),
        ),
        {"model": "llama3_8b", "workload": "train", "cluster": "dgx_h100", "nodes": 1, "seq_len": 4096, "tp": 8},
    ),
    Form(
        "job",
        "plan",
        "Job",
        "A whole training job",
        "Days, GPU-hours, price and energy of a training job, with checkpoints, failures and restarts: 10,000 lives of "
        "it.",
        (
            FormGroup("Model", ("model", "seq_len", "global_batch", "tokens")),
            FormGroup("Where", ("cluster", "nodes", "stack")),
            FormGroup("Layout", ("tp", "pp", "zero_stage", "micro_batch")),
            FormGroup("Failures", ("failures.fleet", "restart.minutes", "spares")),
            FormGroup("Checkpoints", ("checkpoint.every_minutes", "checkpoint.store_gbps", "checkpoint.asynchronous")),
            FormGroup("Price and energy", ("price_per_gpu_hour", "energy.pue", "energy.grid_g_per_kwh")),
        ),
        {
            "model": "llama3_8b",
            "cluster": "dgx_h100",
            "nodes": 4,
            "seq_len": 4096,
            "global_batch": 256,
            "tokens": 1_000_000_000_000,
            "tp": 2,
            "zero_stage": 1,
        },
    ),
    Form(
        "sweep",
        "plan",
        "Many jobs",
        "One training job, many times",
        "Days and price of a training job for every combination of some settings, such as nodes and failures. The "
        "command line, Python and HTTP sweep post-training, steps and chips, too.",
        (
            FormGroup("Model", ("model", "seq_len", "global_batch", "tokens")),
            FormGroup("Where", ("cluster", "nodes")),
            FormGroup("Layout", ("tp", "pp", "zero_stage")),
            FormGroup("Price", ("price_per_gpu_hour",)),
        ),
        {
            "model": "llama3_8b",
            "cluster": "dgx_h100",
            "seq_len": 4096,
            "global_batch": 256,
            "tokens": 1_000_000_000_000,
            "tp": 2,
            "zero_stage": 1,
        },
    ),
    Form(
        "posttrain",
        "posttrain",
        "Post-training",
        "Post-training, phase by phase",
        "SFT, LoRA, DPO, PPO or GRPO: how long rollout, log-probs, training and weight sync take, and which GPUs wait. "
        "The first answer for a model takes a minute.",
        (
            FormGroup("Model", ("model", "method", "prompts", "responses", "lora_rank")),
            FormGroup("Lengths", ("prompt_len.mean", "response_len.mean", "response_len.std", "seq_len")),
            FormGroup("Where", ("cluster", "nodes", "placement", "asynchronous")),
            FormGroup("Training", ("tp", "pp", "zero_stage", "global_batch", "recompute", "stack")),
            FormGroup("Rollout", ("rollout.engine", "rollout.tp", "rollout.gpus", "partial", "kl")),
        ),
        {
            "model": "llama3_8b",
            "cluster": "dgx_h100",
            "nodes": 2,
            "prompts": 64,
            "responses": 8,
            "seq_len": 4096,
            "tp": 2,
            "zero_stage": 1,
        },
    ),
    Form(
        "chips",
        "compare",
        "Chips",
        "One workload on several chips",
        "Speed, price and energy of one workload on several clusters with as many GPUs, and under power caps.",
        (
            FormGroup("Compared", ("cluster", "nodes", "others", "power_caps_w")),
            FormGroup(
                "Model",
                ("model", "workload", "seq_len", "micro_batch", "global_batch", "batch", "input_len", "output_len"),
            ),
            FormGroup("Layout", ("tp", "pp", "ep", "zero_stage", "stack", "precision")),
            FormGroup("Price and energy", ("prices", "price_per_kwh", "pue")),
        ),
        {
            "cluster": "dgx_h100",
            "nodes": 1,
            "others": ["dgx_h200", "dgx_b200"],
            "model": "llama3_8b",
            "workload": "train",
            "seq_len": 4096,
            "global_batch": 64,
            "tp": 2,
            "zero_stage": 1,
        },
    ),
    Form(
        "serving",
        "serving",
        "Serving",
        "A served model",
        "What users wait for under their traffic: first token, next tokens, whole answers; and how much a replica "
        "serves. The first answer for a model takes some ten seconds.",
        (
            FormGroup("Model", ("model", "scheduler.policy")),
            FormGroup("A replica", ("device", "cluster", "tp", "pp", "ep", "replicas")),
            FormGroup(
                "Traffic",
                (
                    "traffic.arrival",
                    "traffic.rate",
                    "traffic.concurrency",
                    "traffic.requests",
                    "traffic.input.mean",
                    "traffic.output.mean",
                ),
            ),
            FormGroup("Users expect", ("slo.ttft_ms", "slo.tpot_ms")),
        ),
        {
            "model": "llama3_8b",
            "device": "h100_sxm",
            "traffic.rate": 4,
            "traffic.requests": 400,
            "traffic.input.mean": 1000,
            "traffic.output.mean": 200,
            "slo.ttft_ms": 500,
            "slo.tpot_ms": 40,
        },
    ),
    Form(
        "search",
        "search",
        "Search",
        "The best layout",
        "Every layout of a training step that fits together, and which of them is best. A click on a point shows its "
        "step.",
        (
            FormGroup("Model", ("model", "seq_len", "global_batch")),
            FormGroup("Where", ("cluster", "nodes", "stack")),
            FormGroup(
                "Values to try, as 4, 8",
                tuple(
                    f"space.{name}"
                    for name in ("tp", "pp", "vpp", "cp", "ep", "zero_stage", "micro_batch", "recompute")
                ),
            ),
            FormGroup("Best is", ("objectives", "constraints")),
        ),
        {"model": "llama3_8b", "cluster": "dgx_h100", "nodes": 1, "seq_len": 4096, "global_batch": 64},
    ),
    Form(
        "ways",
        "search_serving",
        "Search serving",
        "The best way to serve",
        "Every layout, batch and split into pools on so many GPUs: speed for users against use of GPUs. A click on a "
        "point plays its traffic. The first answer for a model takes a minute.",
        (
            FormGroup("Model", ("model", "input_len", "output_len", "precision")),
            FormGroup("Where", ("cluster", "nodes")),
            FormGroup("Users expect", ("slo.ttft_ms", "slo.tpot_ms")),
            FormGroup(
                "Values to try, as 4, 8",
                tuple(f"space.{name}" for name in ("tp", "dp", "ep", "batch", "max_tokens", "pools", "policy")),
            ),
        ),
        {
            "model": "llama3_8b",
            "cluster": "dgx_h100",
            "nodes": 1,
            "input_len": 1000,
            "output_len": 200,
            "slo.ttft_ms": 1000,
            "slo.tpot_ms": 50,
        },
    ),
    Form(
        "fabric",
        "predict",
        "Fabric",
        "The fabric",
        "A collective on the links of a cluster, flow by flow: how long it takes, which links are full, and when.",
        (FormGroup("Where", ("cluster", "nodes", "stride", "all_groups")),),
        {"cluster": "dgx_h100", "nodes": 2},
    ),
)


def forms() -> list[dict[str, Any]]:
    """All forms as the page's script reads them: fields shown first by group, then all other settings of the verb."""
    return [_form(form) for form in FORMS]


def _form(form: Form) -> dict[str, Any]:
    entries = {entry["name"]: entry for entry in fields_of(settings(form.verb))}
    first_names = [name for group in form.groups for name in group.names]
    for name in first_names:
        if name in form.example:
            entries[name]["usual"] = form.example[name]
    groups = [{"legend": group.legend, "fields": [entries[name] for name in group.names]} for group in form.groups]
    more = [entry for name, entry in entries.items() if name not in first_names]
    plain = {"id": form.id, "verb": form.verb, "title": form.title, "lead": form.lead}
    return {**plain, "groups": groups, "more": more}


def fields_of(declared: Sequence[RequestSetting], name: str = "", path: str = "") -> Iterator[dict[str, Any]]:
    """A field for each setting that HTTP takes, those within a mapping by names with dots."""
    for setting in declared:
        if setting.http:
            continue
        full = f"{name}.{setting.name}" if name else setting.name
        at = f"{path}.{setting.path}" if path else CHOSEN_BY_NAME.get(setting.name, setting.path)
        single = get_origin(setting.kind) is not tuple
        if setting.inside and single and not setting.chosen and not _optional(setting.kind):
            yield from fields_of(setting.inside, full, at)
            continue
        kind, listed = ("text", False) if full in LISTS else kind_of(setting.kind)
        yield {
            "name": full,
            "path": at,
            "label": LABELS.get(full)
            or LABELS.get(setting.name)
            or full.removeprefix("space.").replace(".", " ").replace("_", " "),
            "help": setting.help,
            "kind": kind,
            "list": listed,
            "names": LISTS.get(full),
            "choices": choices_of(setting.help) if kind == "text" else [],
            "default": plain_default(setting.default),
            "of": list(setting.of),
        }


def _optional(kind: Any) -> bool:
    return dataclass_in(kind) is not None and type(None) in get_args(kind)


def kind_of(kind: Any) -> tuple[str, bool]:
    """What a field takes (``integer``, ``number``, ``flag``, ``text`` or ``json``), and whether a list of it."""
    if kind is Any:
        return "text", False
    if kind in PLAIN:
        return PLAIN[kind], False
    inner = [argument for argument in get_args(kind) if argument not in (type(None), Ellipsis)]
    if get_origin(kind) is tuple:
        return (PLAIN[inner[0]], True) if inner[0] in PLAIN else ("json", False)
    if str in inner and get_origin(kind) in UNIONS:
        return "text", False
    return kind_of(inner[0]) if len(inner) == 1 and get_origin(kind) in UNIONS else ("json", False)


def choices_of(text: str) -> list[str]:
    """What a text may be, where its help lists that."""
    match = CHOICES.search(text)
    return match[1].split(" | ") if match else []
