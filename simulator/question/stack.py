"""What a framework does with a plan: :class:`Stack`, and the files of ``conf/stack`` that describe known ones.

A file with ``like: NAME`` has what that one has, but for what it says itself: its mappings are merged key by key, its
lists take the place of the other's, and null brings back the usual value. What is known of runs of the other counts for
it, too, unless it names a ``family`` of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...datasets.figure_sources import FigureSource
from ...datasets.loading import check_fields, choice, load, nearest, number
from ...datasets.reading import read_yaml
from .declaration import setting
from .errors import PlanError
from .kernels import KernelChoice, MatVec, ReducedNorm, Unpacking
from .options import ADAPTER_EXCHANGES, EP_MODES, WHOLE, loss_wrong

STACK_DIRECTORY = Path(__file__).resolve().parents[2] / "conf" / "stack"

FUSED = ("fused", "flash2", "flash1", "flash1_triton")  # kernels that keep no scores
ATTENTION = (*FUSED, "unfused", "transposed", "eager")
LAYOUTS = ("qkv", "gate_up")
WINDOWS = ("own", "alike")
INT8_RESULTS = ("int32", "int8")
PRODUCTS = ("current", "cublas_12_1")  # libraries of matrix products
OVERLAPS = ("dp", "dp_gather", "tp", "tp_forward", "cp", "ep", "pp")
GROUPS = ("tp", "cp", "dp", "pp", "ep", "etp", "edp", "dp_cp")
EVERY_TABLE = ("*",)
STATE_DTYPES = ("same", "fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Stack:
    """What a framework does with a plan. Each field says in ``metadata["help"]`` what it means."""

    id: str = setting("torch", "name of its file in conf/stack")
    name: str = setting("PyTorch", "what people call it")
    family: str = setting("", "the framework whose known runs and errors speak for it; empty: its own")

    fusion: tuple[str, ...] = setting((), "rules of passes/fuse.py and passes/serving.py: what runs as one kernel")
    attention: str = setting(
        "fused",
        "fused (the kernel that opcast has times of), flash2, flash1, flash1_triton (older: timing/older_kernels.py), "
        "unfused (two products and a softmax), transposed (the same, between kernels that transpose) or eager (scores "
        "scaled and masked by kernels of their own)",
        choices=ATTENTION,
    )
    products: str = setting(
        "current", "library of matrix products: current (the tables') or cublas_12_1 (older)", choices=PRODUCTS
    )
    all_logits: bool = setting(False, "a prompt gets logits of every position, not of the last one alone")
    loss: str = setting(WHOLE, "how training computes it: whole, or in chunks of tokens: liger, chunks:8")
    master_weights: bool = setting(False, "fp32 copies are kept beside 16-bit weights")
    gradient_dtype: str = setting(
        "same", "format that gradients are kept and reduced in; same: as the weights", choices=STATE_DTYPES
    )
    moment_dtype: str = setting("same", "format of the optimizer's moments; same: as the weights", choices=STATE_DTYPES)
    fused_gradients: bool = setting(False, "products add weight gradients straight into those of gradient_dtype")
    converts_gradients: bool = setting(
        False, "without fused_gradients: what autograd made is copied into gradient_dtype before it is added"
    )
    half_shards: bool = setting(
        False,
        "ZeRO-3 keeps shards of weights in their own dtype beside fp32 masters of the optimizer (DeepSpeed); else the "
        "masters are the shards (FSDP)",
    )
    host_bytes: float = setting(28.0, "bytes that an optimizer on the host reads and writes for each fp32 parameter")
    host_threads: int = setting(
        0, "threads of a process for an optimizer on the host; 0: its share of the node's cores"
    )
    gradient_clipping: bool = setting(False, "gradients are scaled by their norm")
    adapter_exchange: str = setting(
        "",
        "how tensor ranks exchange what adapters add to layers cut by rows: gather, or all_to_all under sequence "
        "parallelism (NeMo's a2a_experimental); empty: every rank makes all of it (passes/sharding/adapters.py)",
    )
    keep_gathered: bool = setting(False, "what sequence parallelism gathered is kept for the backward pass")
    repeats_keys: bool = setting(
        False, "keys and values are repeated for all query heads before context ranks exchange"
    )
    rounds_both: bool = setting(
        False, "one kernel rounds what products read along both dimensions (Transformer Engine)"
    )
    int8_results: str = setting(
        "", "what products of int8 write: int32 | int8; empty: 16 bits (passes/int8_results.py)"
    )
    layouts: tuple[str, ...] = setting(
        (), "tensors that are laid out anew where a traced model has views: qkv, gate_up (passes/layouts.py)"
    )
    overlap: tuple[str, ...] = setting(
        (),
        "groups whose communication runs beside compute: dp, tp, ep, cp, pp; dp_gather: ZeRO-1 gathers weights beside "
        "the next forward; tp_forward: tp in forward passes and what is recomputed of them",
    )
    tensor_chunks: bool = setting(
        True,
        "communication of tensor ranks that overlaps is cut in chunks that pipeline with their products (user "
        "buffers); else a gather runs beside the product of the rank's own rows, a scatter beside that of the weight's "
        "gradient (passes/overlap.py)",
    )
    bucket_mib: float = setting(25.0, "size of the buckets that gradients are reduced in")
    bucket_buffer: bool = setting(False, "buckets of ZeRO-2 and 3 wait in one buffer that is kept for good")
    compute_slowdown: float = setting(
        0.12, "how much longer a kernel takes beside communication (NCCL keeps some 16 of 132 compute units)"
    )
    communication_slowdown: float = setting(0.1, "how much longer communication takes beside kernels")
    cuda_graph: bool = setting(False, "kernels are replayed as CUDA graphs: none waits for the host")
    recompute_early_stop: bool = setting(
        True,
        "full recomputation ends with the last tensor that the backward pass reads (torch's checkpoint), else it runs "
        "whole layers again (Megatron-LM's own)",
    )
    gap_us: float = setting(0.0, "what passes between kernels that no CUDA graph holds")
    eager: bool = setting(False, "a model's Python calls operators one by one, as the host was timed inside a model")
    issue_us: Mapping[str, float] = setting(
        {},
        "what the framework's own Python takes before a kernel, by kind of op, family or *; once more for each expert "
        "of a grouped product that is issued expert by expert (expert_fp8: of that format)",
    )
    prompt_issue_us: float = setting(
        0.0,
        "what the host takes for each kernel of a pass over prompts, where CUDA graphs hold those of decoding alone",
    )
    waits_for_routing: bool = setting(
        False, "the host reads how many tokens each expert got before it issues their products"
    )
    check_us: float = setting(
        0.0,
        "what every rank of a group adds to the host's time before a collective, where each is checked before it is "
        "issued (TORCH_DISTRIBUTED_DEBUG=DETAIL)",
    )
    check_inside_us: float = setting(0.0, "check_us inside a node, if less; 0: the same")
    share_us: float = setting(
        0.0, "what the host takes for each rank's share of each weight where ZeRO-1 cuts them one by one in Python"
    )
    ring_factor: float = setting(
        1.0, "how many times longer gathers and scatters inside a node take than in the tables"
    )
    step_us: Mapping[str, float] = setting(
        {}, "what each step of a ring between nodes takes longer than the law says, by group, all_reduce or *"
    )
    send_us: float = setting(0.0, "what the host adds to a send between pipeline stages, while both wait")
    ep_mode: str = setting("", "how experts' tokens are exchanged: normal, low_latency, alltoall, replicated, gathered")
    backend: str = setting("", "whose predictors answer, of an inference engine; empty: any")
    collectives: str = setting("", "whose predictors answer for communication; empty: any")
    kernels: tuple[KernelChoice, ...] = setting((), "kernels that another engine's table timed, each with its source")
    mat_vecs: tuple[MatVec, ...] = setting((), "kernels of its own for products with few rows, each with its source")
    unpackings: tuple[Unpacking, ...] = setting((), "rates of its kernels that unpack weights, each with its source")
    packs_head: bool = setting(False, "the head of the language model is stored in few bits as other linear layers are")
    reduced_norms: tuple[ReducedNorm, ...] = setting((), "all-reduces that normalise, too, each with its source")
    kv_dtype: Mapping[str, str] = setting({}, "format of the cache by that of the products")
    multiplies: Mapping[str, str] = setting(
        {}, "format that products have by that of a checkpoint's weights, on chips with the units"
    )
    windows: str = setting(
        "own", "alike: layers that see a window have blocks for all tokens; own: for it alone", choices=WINDOWS
    )
    context_gib: float = setting(0.0, "memory of a process beside tensors; 0: what a CUDA context takes")
    fragmentation: float = setting(0.0, "what the allocator reserves beyond what is in use, as a share of it")
    step_overhead_us: float = setting(0.0, "what a step takes beside its kernels and the host's calls")
    scale: Mapping[str, Mapping[str, float]] = setting(
        {},
        "the user's own factors on predicted times, by device id and kind or family of ops or *: in place of the "
        "calibration's",
    )
    sources: Mapping[str, FigureSource] = setting({}, "where each setting is from")

    @property
    def framework(self) -> str:
        """What known runs of it are called in calibrations and errors of memory."""
        return self.family or self.id

    @property
    def figures(self) -> dict[str, Any]:
        """The numbers, and mappings of numbers, that it sets: each other than the usual one has a source."""
        by_name = {field.name: field for field in dataclasses.fields(Stack)}
        return {
            name: value
            for name, value in vars(self).items()
            if name not in ("scale", "sources", "kv_dtype", "multiplies")
            and (type(value) in (int, float) or (isinstance(value, Mapping) and value))
            and value != by_name[name].default
        }

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "stack")
        for name, known in (("fusion", ()), ("overlap", OVERLAPS), ("layouts", LAYOUTS)):
            object.__setattr__(self, name, names(f"stack.{name}", getattr(self, name), known))
        if wrong := loss_wrong(self.loss):
            raise PlanError(f"stack.loss={self.loss!r} {wrong}")
        choice(PlanError, "stack.int8_results", self.int8_results or INT8_RESULTS[0], INT8_RESULTS)
        exchange = self.adapter_exchange or ADAPTER_EXCHANGES[0]
        choice(PlanError, "stack.adapter_exchange", exchange, ADAPTER_EXCHANGES)
        choice(PlanError, "stack.ep_mode", self.ep_mode or EP_MODES[0], EP_MODES)
        for place, value in self.step_us.items() if isinstance(self.step_us, Mapping) else ():
            choice(PlanError, "stack.step_us", place, (*GROUPS, "all_reduce", "*"))
            number(PlanError, f"stack.step_us.{place}", value)
        for device, factors in self.scale.items() if isinstance(self.scale, Mapping) else ():
            for family, factor in factors.items() if isinstance(factors, Mapping) else ():
                number(PlanError, f"stack.scale.{device}.{family}", factor)


def without_figures_of(stack: Stack, tables: Collection[str]) -> Stack:
    """The stack without the settings that were read off some tables (:data:`EVERY_TABLE`: off any), which become usual.

    A setting that also has other evidence goes as a whole: nobody can say which part of it the table settled.
    """
    gone = [
        name for name, source in stack.sources.items() if source.table and {source.table, *EVERY_TABLE} & set(tables)
    ]
    if not gone:
        return stack
    defaults = Stack()
    sources = {name: source for name, source in stack.sources.items() if name not in gone}
    return dataclasses.replace(stack, sources=sources, **{name: getattr(defaults, name) for name in gone})


def stack_from_dict(values: Mapping[str, Any]) -> Stack:
    """A framework's description, with what it has from the one that it is ``like``.

    PlanError names a field that does not exist, or says that nobody knows that one.
    """
    return load(Stack, _inherit(values), PlanError, "stack")


def _inherit(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values over those of the shipped stack that they are ``like``."""
    if not isinstance(values, Mapping):
        return values
    added = {name: value for name, value in values.items() if name != "like"}
    if not values.get("like"):
        return added
    other = str(values["like"])
    merged_values = dict(_inherit(_read(other)))
    merged_values["family"] = merged_values.get("family") or other
    merged_values["sources"] = {
        name: source for name, source in merged_values.get("sources", {}).items() if added.get(name, 0) is not None
    }
    for name, value in added.items():
        below = merged_values.pop(name, None)
        if value is not None:
            merged = isinstance(value, Mapping) and isinstance(below, Mapping)
            merged_values[name] = {**below, **value} if merged else value
    return merged_values


def _read(stack_id: str) -> Mapping[str, Any]:
    """The values of a shipped stack's file; PlanError names the known ones."""
    path = STACK_DIRECTORY / f"{stack_id}.yaml"
    if not path.is_file() or path.parent != STACK_DIRECTORY:
        raise PlanError(f"unknown stack {stack_id!r}; {nearest(stack_id, known_stacks(), 'choose from')}")
    return read_yaml(path, PlanError, f"stack={stack_id}")


@lru_cache
def known_stacks() -> list[str]:
    """Ids of shipped frameworks."""
    return sorted(path.stem for path in STACK_DIRECTORY.glob("*.yaml"))


def load_stack(stack_id: str) -> Stack:
    """A shipped framework by id; PlanError names the known ones."""
    return stack_from_dict(_read(stack_id))


def names(name: str, value: Any, choices: tuple[str, ...] = ()) -> tuple[str, ...]:
    """A list of names without repetitions; PlanError where it is none, or has one that is not known."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        hint = f"take {name}=[{value}]" if isinstance(value, str) else f"none is {name}=[]"
        raise PlanError(f"{name}={value!r} must be a list of names; {hint}")
    for item in value if choices else ():
        choice(PlanError, name, item, choices)
    return tuple(dict.fromkeys(value))
