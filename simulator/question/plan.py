"""How a model is spread over a cluster: degrees of parallelism, process groups, and what the framework does.

A :class:`Plan` is what every pass is given beside the graph. It is plain data: nothing here looks at a graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...datasets.clusters import Cluster
from ...datasets.devices import Device, load_device
from ...datasets.loading import choice, flag, load, nearest, number, whole
from ...datasets.ops import KINDS
from ...datasets.reading import read_yaml
from ..trace.stored import ModuleRule
from .calibration import NONE, StepCalibration, regime_of
from .errors import DegreeError
from .errors import PlanError as PlanError
from .options import CHECKS, EP_MODES, KV_FORMATS, WHOLE, complaint, loss_wrong
from .orders import SCHEDULES
from .ranks import (
    ORDER,
    PLACEMENTS,
    GroupPart,
    Layout,
    check_devices,
    checked_order,
    checked_placement,
    members,
    stages,
    together,
)

STACK_DIRECTORY = Path(__file__).resolve().parents[2] / "conf" / "stack"

CONTEXT_STYLES = ("ring", "ring_allgather", "allgather", "ulysses", "dynamic")
OFFLOAD = ("optimizer", "activations", "kv")
FUSED = ("fused", "flash2", "flash1", "flash1_triton")  # kernels that keep no scores
ATTENTION = (*FUSED, "unfused", "transposed", "eager")
LAYOUTS = ("qkv", "gate_up")
WINDOWS = ("own", "alike")
PRODUCTS = ("current", "cublas_12_1")  # libraries of matrix products
OVERLAPS = ("dp", "dp_gather", "tp", "tp_forward", "cp", "ep", "pp")
OPTIONS = tuple(CHECKS)  # what passes look up in ``Plan.options``; a pass of one's own may look up more
GROUPS = ("tp", "cp", "dp", "pp", "ep", "etp", "edp", "dp_cp")


@dataclass(frozen=True)
class Parallel:
    """Degrees and styles of parallelism. ``dp`` 0 means whatever the cluster leaves.

    ``order`` numbers the ranks, as in Megatron-LM unless told otherwise: tensor ranks next to each other, then context,
    then data, then pipeline; ``placement`` says on which device each of them runs (:mod:`.ranks`).
    Experts divide the ranks of one pipeline stage once more: expert-tensor, expert, then expert-data ranks.
    ``zero_stage`` 1 shards optimizer state over data ranks, 2 gradients too, 3 weights too (FSDP);
    ``shard`` is the number of ranks that share one copy in HSDP (0: all data ranks).
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 0
    cp: int = 1
    ep: int = 1
    etp: int = 1
    zero_stage: int = 0
    shard: int = 0
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    cp_style: str = "ring"
    stages: tuple[int, ...] = ()  # layers of each of pp x vpp chunks, first to last (empty: as even as can be)
    order: str = ORDER
    placement: str | tuple[int, ...] = PLACEMENTS[0]

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "cp", "ep", "etp"):
            whole(PlanError, f"parallel.{name}", getattr(self, name), 1)
        for name in ("dp", "shard"):
            whole(PlanError, f"parallel.{name}", getattr(self, name), 0)
        choice(PlanError, "parallel.schedule", self.schedule, tuple(SCHEDULES))
        choice(PlanError, "parallel.cp_style", self.cp_style, CONTEXT_STYLES)
        whole(PlanError, "parallel.zero_stage", self.zero_stage, 0)
        choice(PlanError, "parallel.zero_stage", self.zero_stage, (0, 1, 2, 3))
        flag(PlanError, "parallel.sequence_parallel", self.sequence_parallel)
        if not isinstance(self.stages, (list, tuple)):
            raise PlanError(f"parallel.stages={self.stages!r} must be a list of layers, such as [7,9,9,7]")
        object.__setattr__(self, "stages", tuple(self.stages))
        for layers in self.stages:
            whole(PlanError, "parallel.stages", layers, 0)
        object.__setattr__(self, "order", checked_order(self.order))
        object.__setattr__(self, "placement", checked_placement(self.placement))
        if self.sequence_parallel and self.tp == 1:
            object.__setattr__(self, "sequence_parallel", False)  # nothing to share
        if self.vpp > 1 and self.schedule == "1f1b":
            object.__setattr__(self, "schedule", "interleaved")
        if self.vpp > 1 and self.pp == 1:
            raise PlanError(f"parallel.vpp={self.vpp} needs parallel.pp of at least 2; take vpp=1")
        if self.vpp > 1 and not SCHEDULES[self.schedule].virtual:
            raise PlanError(f"parallel.schedule={self.schedule} has no virtual stages; take vpp=1 or interleaved")

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tp * self.cp * self.pp


class Group(NamedTuple):
    """The ranks that one collective joins: their number, the fewest that share a node, the slowest link.

    Where they are but some of the ranks of a dimension, they lie ``apart`` places from each other in it.
    """

    name: str
    ranks: int
    ranks_per_node: int
    link: str
    apart: int = 1


@dataclass(frozen=True)
class KernelChoice:
    """Whose reading answers for ops of a ``kind`` and format where a framework's own table timed another kernel.

    ``backend`` is ``framework:words``, words of the kernel's name. ``architecture`` empty: on all. ``least_tokens`` and
    ``most_tokens`` are the rows that it is for (0: any), ``most_ep`` the expert ranks (0: any). ``without`` is
    ``quantize`` where that table timed the rounding of the input too and the framework does not run it: the time of its
    tables of that is taken off.
    """

    kind: str
    dtype: str
    backend: str
    source: str
    architecture: str = ""
    without: str = ""
    most_tokens: int = 0
    least_tokens: int = 0
    most_ep: int = 0

    def __post_init__(self) -> None:
        choice(PlanError, "stack.kernels.kind", self.kind, tuple(KINDS))
        choice(PlanError, "stack.kernels.without", self.without, ("", "quantize"))
        whole(PlanError, "stack.kernels.most_tokens", self.most_tokens)
        whole(PlanError, "stack.kernels.least_tokens", self.least_tokens)
        whole(PlanError, "stack.kernels.most_ep", self.most_ep)


@dataclass(frozen=True)
class ReducedNorm:
    """All-reduces of tensor ranks in an inference engine that add the residual and normalise in the same kernel.

    They are those of ``ranks`` ranks on devices of the compute capability ``sm``, of at most ``most_mib`` and
    ``most_tokens`` tokens (0: any, each), and in models with experts alone where ``mixtures`` says so.
    """

    source: str
    sm: float = 0.0
    ranks: int = 0
    most_mib: float = 0.0
    most_tokens: int = 0
    mixtures: bool = False

    def __post_init__(self) -> None:
        for name in ("sm", "most_mib"):
            number(PlanError, f"stack.reduced_norms.{name}", getattr(self, name))
        for name in ("ranks", "most_tokens"):
            whole(PlanError, f"stack.reduced_norms.{name}", getattr(self, name))
        flag(PlanError, "stack.reduced_norms.mixtures", self.mixtures)


@dataclass(frozen=True)
class Stack:
    """What a framework does with a plan. One YAML per framework in ``conf/stack``; figures are bytes and flags.

    ``like`` is the framework whose known runs and errors speak for it (empty: its own).

    ``fusion`` names rules of :mod:`..passes.fuse` and :mod:`..passes.serving`; ``attention`` is ``fused`` (the kernel
    that opcast has times of), ``flash2``, ``flash1``, ``flash1_triton`` (older: :mod:`..timing.attention`),
    ``unfused`` (two products and a softmax) or ``eager`` (scores scaled and masked by kernels of their own);
    ``products`` is the library of matrix products: ``current`` (the tables') or an older one
    (:mod:`..timing.products`); with ``all_logits`` a prompt gets logits of every position; ``loss`` is how training
    computes it: ``whole``, or in chunks of tokens, ``liger`` or ``chunks:N`` (:mod:`..passes.chunked_loss`).
    ``master_weights`` keeps fp32 copies beside 16-bit weights; ``gradient_dtype`` and ``moment_dtype`` are ``same``
    (as the weights) or a dtype; with ``fused_gradients`` products add weight gradients straight into those of that
    dtype. With ``half_shards`` ZeRO-3 keeps shards of the weights in their own dtype, beside fp32 masters among the
    optimizer's states (DeepSpeed), else the masters are the shards (FSDP). ``host_bytes`` is what an optimizer that
    runs on the host reads and writes there for each fp32 parameter, with ``host_threads`` threads a process (0: its
    share of the node's cores; :mod:`..passes.host_update`). ``gradient_clipping`` scales by the norm,
    ``keep_gathered`` keeps for the backward pass what sequence parallelism gathered; with ``repeats_keys`` keys and
    values are repeated for all query heads before attention, so that context ranks exchange as many; with
    ``rounds_both`` one kernel rounds what products read along both dimensions (Transformer Engine). ``layouts`` names
    tensors that are laid out anew where a traced model has views: ``qkv``, ``gate_up`` (:mod:`..passes.layouts`).
    ``overlap`` names the groups whose communication runs beside compute (``dp``, ``tp``, ``ep``, ``cp``, ``pp``;
    ``dp_gather``: ZeRO-1 gathers weights beside the next forward; ``tp_forward``: in forward passes and what is
    recomputed of them); with ``tensor_chunks`` those of tensor ranks are cut in chunks that pipeline with their
    products (user buffers), else a gather runs beside the product of the rank's own rows alone, and a scatter beside
    that of the weight's gradient (:mod:`..passes.overlap`). Gradients are summed in buckets of ``bucket_mib``; with
    ``bucket_buffer`` those of ZeRO-2 and 3 wait in one buffer that is kept for good. ``compute_slowdown`` is how much
    longer a kernel takes beside communication (NCCL keeps some 16 of 132 compute units), ``communication_slowdown``
    the reverse. ``scale`` multiplies predicted times by device id and kind or family of ops (or ``*``): constants of
    a user's own, in place of the calibration's factors (:mod:`.calibration`). ``issue_us`` is what the framework's
    own Python takes before a kernel, by kind of op, family or ``*``, and once more for each ``expert`` of a grouped
    product that is issued expert by expert (``expert_fp8``: of that format); with ``waits_for_routing`` the host
    reads how many tokens each expert got before it issues their products. ``check_us`` is what every rank of a group
    adds to the host's time before a collective, where each is checked before it is issued
    (``TORCH_DISTRIBUTED_DEBUG=DETAIL``), ``check_inside_us`` that inside a node, if less. ``share_us`` is what the
    host takes for each rank's share of each weight where ZeRO-1 cuts them one by one in Python
    (:mod:`..timing.hosts`). ``ring_factor`` is how many times longer gathers and scatters inside a node take than the
    tables' NCCL has them, ``step_us`` what each step of a ring between nodes takes longer than the network's law
    says, by group (``*``: any), of ``all_reduce`` by its own name. ``send_us`` is what the host adds to a send
    between pipeline stages, while both wait; ``ep_mode`` is how it exchanges them (:mod:`..passes.expert`). With
    ``recompute_early_stop`` full recomputation ends with the last tensor that the backward pass reads (torch's
    checkpoint), else it runs whole layers again (Megatron-LM's own). Of an inference engine, ``backend`` names whose
    predictors answer and ``collectives`` whose for communication (empty: any); ``kernels`` are those that another
    table timed (:class:`KernelChoice`), ``reduced_norms`` the all-reduces that normalise, too (:class:`ReducedNorm`),
    ``gap_us`` passes between kernels that no CUDA graph holds; ``kv_dtype`` is the format of the cache by that of the
    products; with ``windows`` ``alike`` layers that see a window have blocks for all tokens, else for its own alone.
    """

    id: str = "torch"
    name: str = "PyTorch"
    like: str = ""
    fusion: tuple[str, ...] = ()
    attention: str = "fused"
    products: str = "current"
    all_logits: bool = False
    loss: str = WHOLE
    master_weights: bool = False
    gradient_dtype: str = "same"
    moment_dtype: str = "same"
    fused_gradients: bool = False
    half_shards: bool = False
    host_bytes: float = 28.0
    host_threads: int = 0
    gradient_clipping: bool = False
    keep_gathered: bool = False
    repeats_keys: bool = False
    rounds_both: bool = False
    layouts: tuple[str, ...] = ()
    overlap: tuple[str, ...] = ()
    tensor_chunks: bool = True
    bucket_mib: float = 25.0
    bucket_buffer: bool = False
    compute_slowdown: float = 0.12
    communication_slowdown: float = 0.1
    cuda_graph: bool = False
    recompute_early_stop: bool = True
    gap_us: float = 0.0
    issue_us: Mapping[str, float] = field(default_factory=dict)
    waits_for_routing: bool = False
    check_us: float = 0.0
    check_inside_us: float = 0.0
    share_us: float = 0.0
    ring_factor: float = 1.0
    step_us: Mapping[str, float] = field(default_factory=dict)
    send_us: float = 0.0
    ep_mode: str = ""
    backend: str = ""
    collectives: str = ""
    kernels: tuple[KernelChoice, ...] = ()
    reduced_norms: tuple[ReducedNorm, ...] = ()
    kv_dtype: Mapping[str, str] = field(default_factory=dict)
    windows: str = "own"
    context_gib: float = 0.0
    fragmentation: float = 0.0
    step_overhead_us: float = 0.0
    scale: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def framework(self) -> str:
        """What known runs of it are called in calibrations and errors of memory."""
        return self.like or self.id

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            name, value = f"stack.{each.name}", getattr(self, each.name)
            if isinstance(each.default, bool):
                flag(PlanError, name, value)
            elif isinstance(each.default, float):
                number(PlanError, name, value)
        whole(PlanError, "stack.host_threads", self.host_threads, 0)
        for name, known in (("fusion", ()), ("overlap", OVERLAPS), ("layouts", LAYOUTS)):
            object.__setattr__(self, name, _names(f"stack.{name}", getattr(self, name), known))
        choice(PlanError, "stack.attention", self.attention, ATTENTION)
        if wrong := loss_wrong(self.loss):
            raise PlanError(f"stack.loss={self.loss!r} {wrong}")
        choice(PlanError, "stack.products", self.products, PRODUCTS)
        choice(PlanError, "stack.windows", self.windows, WINDOWS)
        choice(PlanError, "stack.ep_mode", self.ep_mode or EP_MODES[0], EP_MODES)
        for name in ("gradient_dtype", "moment_dtype"):
            choice(PlanError, f"stack.{name}", getattr(self, name), ("same", "fp32", "bf16", "fp16"))
        for place, value in self.step_us.items() if isinstance(self.step_us, Mapping) else ():
            choice(PlanError, "stack.step_us", place, (*GROUPS, "all_reduce", "*"))
            number(PlanError, f"stack.step_us.{place}", value)
        for device, factors in self.scale.items() if isinstance(self.scale, Mapping) else ():
            for family, factor in factors.items() if isinstance(factors, Mapping) else ():
                number(PlanError, f"stack.scale.{device}.{family}", factor)


@dataclass(frozen=True)
class Plan:
    """A checked way to run one step: layout, framework, cluster and how the batch is cut.

    ``micro_batches`` are run one after the other by each data rank. ``kv_dtype`` is the format of keys and values
    (empty: :func:`..step.checks.prepared` finds it), ``context`` the tokens of a sequence that are cached after a step.
    ``recompute`` is a policy or the layers it names; ``offload`` what lives in host memory; ``passes`` are the user's
    own (``module:function``). Compute on ``slow_devices`` takes so many times longer (:mod:`.stragglers`). With
    ``explicit_links`` communications wait for each other on the links of the fabric alone
    (:mod:`..contention.fixed_point`). ``calibration`` names what known runs say of predicted times
    (:mod:`.calibration`), ``calibrated`` is that for this plan, by regime, ``device`` what the cluster's devices are
    (:func:`..step.checks.prepared`).
    ``quantization`` is the format of linear layers; where a checkpoint has several, ``weight_rules`` say which modules
    have which, and those that no rule names stay in ``precision``. ``notes`` say what was chosen for the user
    (:mod:`.as_stored`).
    """

    parallel: Parallel
    cluster: Cluster
    stack: Stack = field(default_factory=Stack)
    micro_batches: int = 1
    recompute: str = "none"
    offload: tuple[str, ...] = ()
    precision: str = "bf16"
    quantization: str = ""
    weight_rules: tuple[ModuleRule, ...] = ()
    kv_dtype: str = ""
    context: int = 0
    passes: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    slow_devices: Mapping[int, float] = field(default_factory=dict)
    explicit_links: bool = False
    calibration: str = NONE
    calibrated: Mapping[str, StepCalibration] = field(default_factory=dict)
    device: Device | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, known in (("offload", OFFLOAD), ("passes", ())):
            object.__setattr__(self, name, _names(name, getattr(self, name), known))
        if not isinstance(self.options, Mapping):
            raise PlanError(f"options={self.options!r} must be a mapping, such as {{fp8_scaling: current}}")
        for name in self.options if not self.passes else ():
            choice(PlanError, "options", name, OPTIONS)
        for name, value in self.options.items():
            if wrong := complaint(name, value):
                raise PlanError(wrong)
        object.__setattr__(self, "kv_dtype", self.kv_dtype or str(self.options.get("kv_dtype") or ""))
        choice(PlanError, "kv_dtype", self.kv_dtype or "same", ("same", *KV_FORMATS))

    def scales(self, device_id: str, regime: str) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """What multiplies times by kind or family of ops: the stack's own constants, then the calibration's factors."""
        return self.stack.scale.get(device_id, {}), self.calibrated.get(regime, StepCalibration()).factors

    def regime(self, kind: str) -> str:
        """What effects of calibrations call a kind of step under this layout (:func:`.calibration.regime_of`)."""
        return regime_of(kind, self.parallel.tp, self.cluster.devices_per_node)

    @property
    def figures(self) -> Device:
        """What the devices can do: as asked about, else as the file of their name says. DeviceError without one."""
        return self.device or load_device(self.cluster.device)

    @property
    def dp(self) -> int:
        """Data-parallel degree."""
        return self.parallel.dp or self.cluster.devices // self.parallel.model_ranks

    @property
    def layout(self) -> Layout:
        """Ranks, their order, and the devices that they run on."""
        p, cluster = self.parallel, self.cluster
        degrees = p.tp, p.cp, self.dp, p.pp
        return Layout(degrees, p.etp, p.ep, p.order, p.placement, cluster.nodes, cluster.devices_per_node)

    def group(self, name: str, ranks: int = 0, apart: int = 1) -> Group:
        """The process group of a dimension: see ``GROUPS``; ``dp_cp`` is the group that gradients are summed over.

        With ``ranks`` so many of its members, ``apart`` places from each other: the shards and replicas of HSDP.
        """
        ranks = ranks or self._ranks(name)
        near = together(self.layout, GroupPart(name, ranks, apart))
        return Group(name, ranks, near, self.cluster.link if near == ranks else self.cluster.fabric, apart)

    def members(self, name: str, ranks: int = 0, apart: int = 1) -> np.ndarray:
        """The devices of every process group of a dimension, or of those of :meth:`group` [groups, ranks]."""
        return members(self.layout, GroupPart(name, ranks, apart))

    def stage_devices(self, stage: int) -> np.ndarray:
        """The devices of a pipeline stage; equal places of two stages hold equal shards [devices]."""
        found: np.ndarray = stages(self.layout)[stage]
        return found

    def neighbours(self, stage: int, other: int) -> bool:
        """Whether every device of a stage shares its node with its like on another."""
        size = self.cluster.devices_per_node
        return bool((self.stage_devices(stage) // size == self.stage_devices(other) // size).all())

    @property
    def groups(self) -> tuple[Group, ...]:
        """Every process group that a collective of the step may run in; :meth:`members` has the devices of each."""
        p = self.parallel
        found = [self.group(name) for name in GROUPS if name != "pp"]
        for every in (self.group("dp_cp"), self.group("edp")) if p.shard else ():
            shard = min(p.shard, every.ranks)
            found += [self.group(every.name, shard), self.group(every.name, every.ranks // shard, shard)]
        if p.tp > p.etp:
            found.append(self.group("tp", p.tp // p.etp, p.etp))
        return tuple(dict.fromkeys(found))

    def _ranks(self, name: str) -> int:
        p, dp = self.parallel, self.dp
        own = {"dp": dp, "dp_cp": dp * p.cp, "edp": p.tp * p.cp * dp // (p.ep * p.etp)}
        return own[name] if name in own else int(getattr(p, name))


def check_plan(plan: Plan) -> Plan:
    """The plan itself; PlanError when degrees do not fill the cluster or do not divide each other.

    LayoutError when ranks are not placed on each device once.
    """
    p, devices = plan.parallel, plan.cluster.devices
    if devices % p.model_ranks:
        raise DegreeError(
            f"tp x cp x pp = {p.tp} x {p.cp} x {p.pp} = {p.model_ranks} does not divide the {devices} devices of "
            f"{plan.cluster.id}",
            *_nearest_degree(p, devices),
        )
    if p.dp and p.dp * p.model_ranks != devices:
        raise PlanError(
            f"tp x cp x pp x dp = {p.model_ranks * p.dp}, but {plan.cluster.id} with {plan.cluster.nodes} nodes has "
            f"{devices} devices; take parallel.dp={devices // p.model_ranks}"
        )
    stage = devices // p.pp
    if stage % (p.ep * p.etp):
        raise DegreeError(
            f"parallel.ep x etp = {p.ep * p.etp} does not divide the {stage} ranks of a pipeline stage",
            *_nearest("ep", p.ep, stage // p.etp),
        )
    check_devices(p.placement, devices, plan.cluster.id)
    if p.shard and not p.zero_stage:
        raise PlanError(f"parallel.shard={p.shard} shards nothing; take parallel.zero_stage=3, or 1 or 2")
    if p.shard and plan.dp * p.cp % p.shard:
        ranks = plan.dp * p.cp
        raise DegreeError(
            f"parallel.shard={p.shard} does not divide the {ranks} data ranks", *_nearest("shard", p.shard, ranks)
        )
    return plan


def stack_from_dict(values: Mapping[str, Any]) -> Stack:
    """A framework's description; PlanError names a field that does not exist."""
    return load(Stack, values, PlanError, "stack")


@lru_cache
def known_stacks() -> list[str]:
    """Ids of shipped frameworks."""
    return sorted(path.stem for path in STACK_DIRECTORY.glob("*.yaml"))


def load_stack(stack_id: str) -> Stack:
    """A shipped framework by id; PlanError names the known ones."""
    path = STACK_DIRECTORY / f"{stack_id}.yaml"
    if not path.is_file() or path.parent != STACK_DIRECTORY:
        raise PlanError(f"unknown stack {stack_id!r}; {nearest(stack_id, known_stacks(), 'choose from')}")
    return stack_from_dict(read_yaml(path, PlanError, f"stack={stack_id}"))


def _nearest(name: str, value: int, whole: int) -> tuple[str, int, int]:
    """The degree, what it is, and the nearest value that divides."""
    valid = [d for d in range(1, max(whole, 1) + 1) if whole % d == 0]
    return name, value, min(valid, key=lambda d: (abs(d - value), d))


def _nearest_degree(parallel: Parallel, devices: int) -> tuple[str, int, int]:
    """What to take instead of the degree that does not fit: the first one beyond what the others leave."""
    left = devices
    for name in ("tp", "cp", "pp"):
        value = getattr(parallel, name)
        if left % value:
            return _nearest(name, value, left)
        left //= value
    return _nearest("tp", parallel.tp, devices)


def _names(name: str, value: Any, known: tuple[str, ...] = ()) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
        hint = f"take {name}=[{value}]" if isinstance(value, str) else f"none is {name}=[]"
        raise PlanError(f"{name}={value!r} must be a list of names; {hint}")
    for each in value if known else ():
        choice(PlanError, name, each, known)
    return tuple(dict.fromkeys(value))
