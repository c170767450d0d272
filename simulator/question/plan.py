"""How a model is spread over a cluster: degrees of parallelism, process groups, and what the framework does.

A :class:`Plan` is what every pass is given beside the graph. It is plain data: nothing here looks at a graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ...datasets.clusters import Cluster
from ...datasets.counts import counted
from ...datasets.devices import Device, load_device
from ...datasets.loading import check_fields, choice, whole
from ..trace.stored_formats import ModuleRule
from .calibration import NONE, StepCalibration, regime_of
from .declaration import setting
from .errors import DegreeError
from .errors import PlanError as PlanError
from .options import CHECKS, KV_FORMATS, PlanOptions, complaint
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
from .stack import GROUPS as GROUPS
from .stack import Stack as Stack
from .stack import load_stack as load_stack
from .stack import names

CONTEXT_STYLES = ("ring", "ring_allgather", "allgather", "ulysses", "dynamic")
OFFLOAD = ("optimizer", "activations", "kv")
OPTIONS = tuple(CHECKS)  # what passes look up in ``Plan.options``; a pass of one's own may look up more


@dataclass(frozen=True)
class Parallel:
    """Degrees and styles of parallelism. ``dp`` 0 means whatever the cluster leaves.

    ``order`` numbers the ranks, as in Megatron-LM unless told otherwise: tensor ranks next to each other, then context,
    then data, then pipeline; ``placement`` says on which device each of them runs (:mod:`.ranks`).
    Experts divide the ranks of one pipeline stage once more: expert-tensor, expert, then expert-data ranks.
    ``zero_stage`` 1 shards optimizer state over data ranks, 2 gradients too, 3 weights too (FSDP);
    ``shard`` is the number of ranks that share one copy in HSDP (0: all data ranks).
    """

    tp: int = setting(1, "tensor parallel: heads and hidden widths are shared", least=1)
    pp: int = setting(1, "pipeline stages", least=1)
    vpp: int = setting(1, "virtual stages a device (interleaved 1F1B)", least=1)
    dp: int = setting(0, "data parallel; 0 = whatever the cluster leaves")
    cp: int = setting(1, "context parallel: tokens of a sequence are shared", least=1)
    ep: int = setting(1, "expert parallel: experts are shared over the ranks of a pipeline stage", least=1)
    etp: int = setting(1, "tensor parallel inside an expert", least=1)
    zero_stage: int = setting(0, "1 shards optimizer state, 2 gradients too, 3 weights too (FSDP)")
    shard: int = setting(0, "ranks that share one copy under ZeRO (HSDP); 0 = all data ranks")
    sequence_parallel: bool = setting(False, "norms and residuals share tokens over the tensor ranks")
    schedule: str = setting("1f1b", "gpipe | 1f1b | interleaved | zb-h1 | dualpipe")
    cp_style: str = setting(
        "ring",
        "ring | ring_allgather | allgather | ulysses | dynamic: by sequence (options.sequence_lengths)",
        choices=CONTEXT_STYLES,
    )
    stages: tuple[int, ...] = setting((), "layers of each of pp x vpp chunks; empty = even")
    order: str = setting(
        ORDER, "how ranks are numbered, the first dimension fastest; tp-cp-pp-dp: --use-tp-pp-dp-mapping"
    )
    placement: str | tuple[int, ...] = setting(
        PLACEMENTS[0], "rank i on device i | round_robin: ranks in a row on nodes in a row | [devices of the ranks]"
    )

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "parallel")
        choice(PlanError, "parallel.schedule", self.schedule, tuple(SCHEDULES))
        choice(PlanError, "parallel.zero_stage", self.zero_stage, (0, 1, 2, 3))
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
    def shards_optimizer(self) -> bool:
        """ZeRO-1 and beyond: each data rank updates its part of the weights, and keeps its part of the states."""
        return self.zero_stage >= 1

    @property
    def shards_gradients(self) -> bool:
        """ZeRO-2 and beyond: a gradient is reduced and let go of as soon as it is there."""
        return self.zero_stage >= 2

    @property
    def shards_weights(self) -> bool:
        """ZeRO-3 (FSDP): a layer's weights are gathered before it runs."""
        return self.zero_stage >= 3

    @property
    def gathers_updated_weights(self) -> bool:
        """ZeRO-1 and 2: weights are gathered once a step from the ranks that updated them."""
        return self.shards_optimizer and not self.shards_weights

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

    ``options`` are settings that few need as they were given, ``settings`` all of them with their types and defaults
    (:class:`.options.PlanOptions`). ``quantization`` is the format of linear layers; where a checkpoint has several,
    ``weight_rules`` say which modules have which, and those that no rule names stay in ``precision``. ``notes`` say
    what was chosen for the user (:mod:`.as_stored`).
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
    settings: PlanOptions = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, choices in (("offload", OFFLOAD), ("passes", ())):
            object.__setattr__(self, name, names(name, getattr(self, name), choices))
        if not isinstance(self.options, Mapping):
            raise PlanError(f"options={self.options!r} must be a mapping, such as {{fp8_scaling: current}}")
        for name in self.options if not self.passes else ():
            choice(PlanError, "options", name, OPTIONS)
        for name, value in self.options.items():
            if wrong := complaint(name, value):
                raise PlanError(wrong)
        object.__setattr__(self, "settings", PlanOptions.of(self.options))
        kv_dtype = self.settings.kv_dtype
        if kv_dtype and self.kv_dtype not in ("", kv_dtype):
            raise PlanError(
                f"options.kv_dtype={kv_dtype} and precision.kv_dtype={self.kv_dtype} disagree: give one of them"
            )
        object.__setattr__(self, "kv_dtype", self.kv_dtype or kv_dtype)
        choice(PlanError, "kv_dtype", self.kv_dtype or "same", ("same", *KV_FORMATS))

    @property
    def reshards_after_forward(self) -> bool:
        """ZeRO-3: gathered weights are let go of between forward and backward; without pipeline stages unless told."""
        setting = self.settings.reshard_after_forward
        return self.parallel.pp == 1 if setting is None else setting

    @property
    def reduces_every_micro_batch(self) -> bool:
        """ZeRO-2 and 3: each micro-batch's gradients are reduced; without pipeline stages unless told.

        Else whole ones are summed in the stack's dtype, as FSDP2 does (``unsharded_accumulated_grad``).
        """
        setting = self.settings.reduce_every_micro_batch
        return self.parallel.pp == 1 if setting is None else setting

    @property
    def sums_whole_gradients(self) -> bool:
        """Whole gradients are kept over the micro-batches of a step: DDP, ZeRO-1, and ZeRO-2 and 3 that reduce last."""
        last = self.micro_batches > 1 and not self.reduces_every_micro_batch
        return not self.parallel.shards_gradients or last

    @property
    def masters_are_shards(self) -> bool:
        """ZeRO-3 as FSDP does it: the fp32 masters are the shards that weights are gathered from."""
        return self.parallel.shards_weights and not self.stack.half_shards

    def scales(self, device_id: str, regime: str) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """What multiplies times by kind or family of ops: the stack's own constants, then the calibration's factors."""
        return self.stack.scale.get(device_id, {}), self.calibrated.get(regime, StepCalibration()).factors

    @property
    def prompt_issue_us(self) -> float:
        """What the host takes for each kernel of a pass over prompts; 0 where CUDA graphs are asked for, or left out.

        So a pass is no shorter than the sum of its kernels' (:func:`..timing.hosts.issue_prompts`), nor is an iteration
        with a prompt (:mod:`..serving.iteration`).
        """
        hidden = bool(self.settings.cuda_graph) or "prompt_issue" in self.settings.without
        return 0.0 if hidden else self.stack.prompt_issue_us

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
        return stages(self.layout)[stage]

    def neighbours(self, stage: int, other: int) -> bool:
        """Whether every device of a stage shares its node with its like on another."""
        size = self.cluster.devices_per_node
        return bool((self.stage_devices(stage) // size == self.stage_devices(other) // size).all())

    @property
    def groups(self) -> tuple[Group, ...]:
        """Every process group that a collective of the step may run in; :meth:`members` has the devices of each."""
        p = self.parallel
        groups = [self.group(name) for name in GROUPS if name != "pp"]
        for every in (self.group("dp_cp"), self.group("edp")) if p.shard else ():
            shard = min(p.shard, every.ranks)
            groups += [self.group(every.name, shard), self.group(every.name, every.ranks // shard, shard)]
        if p.tp > p.etp:
            groups.append(self.group("tp", p.tp // p.etp, p.etp))
        return tuple(dict.fromkeys(groups))

    def _ranks(self, name: str) -> int:
        p, dp = self.parallel, self.dp
        derived = {"dp": dp, "dp_cp": dp * p.cp, "edp": p.tp * p.cp * dp // (p.ep * p.etp)}
        return derived[name] if name in derived else int(getattr(p, name))


def check_plan(plan: Plan) -> Plan:
    """The plan itself; PlanError when degrees do not fill the cluster or do not divide each other.

    LayoutError when ranks are not placed on each device once.
    """
    p, devices = plan.parallel, plan.cluster.devices
    if devices % p.model_ranks:
        raise DegreeError(
            f"tp x cp x pp = {p.tp} x {p.cp} x {p.pp} = {p.model_ranks} does not divide the "
            f"{counted(devices, 'device')} of "
            f"{plan.cluster.id}",
            *_nearest_degree(p, devices),
        )
    if p.dp and p.dp * p.model_ranks != devices:
        raise PlanError(
            f"tp x cp x pp x dp = {p.model_ranks * p.dp}, but {plan.cluster.id} with "
            f"{counted(plan.cluster.nodes, 'node')} has "
            f"{counted(devices, 'device')}; take parallel.dp={devices // p.model_ranks}"
        )
    stage = devices // p.pp
    if stage % (p.ep * p.etp):
        raise DegreeError(
            f"parallel.ep x etp = {p.ep * p.etp} does not divide the {counted(stage, 'rank')} of a pipeline stage",
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


def _nearest(name: str, value: int, whole: int) -> tuple[str, int, int]:
    """The degree, what it is, and the nearest value that divides."""
    valid = [d for d in range(1, max(whole, 1) + 1) if whole % d == 0]
    return name, value, min(valid, key=lambda d: (abs(d - value), d))


def _nearest_degree(parallel: Parallel, devices: int) -> tuple[str, int, int]:
    """What to take instead of the degree that does not fit: the first one beyond what the others leave."""
    remaining = devices
    for name in ("tp", "cp", "pp"):
        value = getattr(parallel, name)
        if remaining % value:
            return _nearest(name, value, remaining)
        remaining //= value
    return _nearest("tp", parallel.tp, devices)
