"""What a search is asked, as frozen data, and what of it one point is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...datasets.clusters import Cluster, load_cluster
from ...datasets.loading import choice, number, whole
from ...datasets.precisions import precision_of
from ..question.canonical import Request, RequestError
from ..question.place import THIS_MACHINE, looked_up
from ..question.plan import Parallel
from ..question.requests import SimulateRequest, usual_stack
from .expressions import Expression, contradiction, parse
from .objectives import OBJECTIVES
from .space import NAMES, Facts, Space, facts_of, natural, overlap_of

FIGURES = (
    *("step_time_s", "low_s", "high_s", "tokens_per_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "hfu"),
    *("peak_gib", "weights_gib", "gradients_gib", "optimizer_gib", "activations_gib", "other_gib"),
    *("compute_s", "exposed_comm_s", "bubble_s", "optimizer_s", "host_s"),
    *("exposed_tp_s", "exposed_cp_s", "exposed_dp_s", "exposed_pp_s", "exposed_ep_s"),
    *("cost", "energy_j", "power_w", "p_oom", "leaning"),
)
SAMPLERS = ("auto", "exhaustive", "tpe", "nsga2")
PRUNING = ("memory", "time")


@dataclass(frozen=True)
class SearchRequest(Request):
    """The best points of a space of layouts of one training step.

    ``base`` is the step, with all that is not searched; its ``parallel`` has no degrees but those that no axis has.
    ``objectives`` (:data:`OBJECTIVES`) come in order of importance: the first ranks, all make the Pareto front.
    ``constraints`` are expressions over a point's figures (:data:`FIGURES`) and axes that a ranked point must meet.
    ``prune`` says which bounds leave points out before they are timed: none is ``[]``. Two points within
    ``noise_floor`` of each other are a tie. ``trials`` and ``seed`` are those of samplers (``tpe``, ``nsga2``);
    ``auto`` samples where more than ``exhaustive_up_to`` points fit together.
    """

    base: SimulateRequest = field(default_factory=lambda: SimulateRequest(model="llama3_8b"))
    space: Space = field(default_factory=Space)
    objectives: tuple[str, ...] = ("step_time", "memory")
    constraints: tuple[str, ...] = ()
    top: int = 10
    prune: tuple[str, ...] = PRUNING
    noise_floor: float = 0.03
    sampler: str = "auto"
    exhaustive_up_to: int = 50_000
    trials: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("objectives", "constraints", "prune"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        for name in self.objectives:
            choice(RequestError, "objectives", name, tuple(OBJECTIVES))
        if not self.objectives:
            raise RequestError("objectives=[] says nothing of what is best; take [step_time]")
        for name in self.prune:
            choice(RequestError, "prune", name, PRUNING)
        choice(RequestError, "sampler", self.sampler, SAMPLERS)
        for name in ("top", "trials", "exhaustive_up_to"):
            whole(RequestError, name, getattr(self, name), 1)
        whole(RequestError, "seed", self.seed)
        number(RequestError, "noise_floor", self.noise_floor)
        self._check_base()
        self.expressions()

    def _check_base(self) -> None:
        """RequestError for a step that cannot be searched, and for what both the step and the space say."""
        base = self.base
        if base.work.kind != "train" or base.file is not None:
            raise RequestError(f"workload={base.work.kind} cannot be searched yet: take workload=train")
        if base.network.fidelity not in ("auto", "analytical") or base.network.named or base.stragglers:
            raise RequestError(
                "a search times collectives by formula on healthy devices: leave network, faults and stragglers out, "
                "and ask `opcast simulate` about its best layouts"
            )
        if base.cluster is None and not self.space.cluster:
            raise RequestError("a search needs a cluster: cluster=dgx_h100 cluster.nodes=8 (`opcast list clusters`)")
        if base.work.global_batch is None:
            raise RequestError("a search needs one batch for all layouts: workload.global_batch=1024")
        usual = Parallel()
        for name in ("tp", "pp", "vpp", "dp", "cp", "ep", "etp", "zero_stage", "sequence_parallel", "schedule"):
            if getattr(base.parallel, name) != getattr(usual, name):
                way = "is what the others leave" if name == "dp" else f"take space.{name}=[…]"
                raise RequestError(f"parallel.{name}={getattr(base.parallel, name)} is an axis of the search: {way}")
        for name, value, other in (("recompute", base.recompute, "none"), ("micro_batch", base.work.micro_batch, 1)):
            if value != other and getattr(self.space, name):
                raise RequestError(f"workload.{name}={value} and space.{name} both say what it is: leave one out")

    def expressions(self) -> tuple[list[Expression], list[Expression]]:
        """Rules and constraints, parsed. RequestError for what is none, and for two that no point can meet."""
        rules = [parse(text, NAMES, "space.rules") for text in self.space.rules]
        met = [parse(text, (*FIGURES, *NAMES), "constraints") for text in self.constraints]
        both = contradiction([*rules, *met])
        if both is not None:
            raise RequestError(
                f"no point can meet both {both[0]!r} and {both[1]!r}: leave one out, or change its number"
            )
        return rules, met

    @classmethod
    def named(cls, values: dict[str, Any]) -> dict[str, Any]:
        if isinstance(values.get("base"), Mapping):
            values = {**values, "base": looked_up(dict(values["base"]))}
        return values


@dataclass(frozen=True)
class Asked:
    """A request made ready: what its names stand for, and the values of every axis."""

    request: SearchRequest
    facts: Facts
    clusters: Mapping[str, Cluster]
    axes: Mapping[str, Sequence[Any]]

    @property
    def base(self) -> SimulateRequest:
        """The step with all that is not searched."""
        return self.request.base


def asked(request: SearchRequest) -> Asked:
    """The request made ready. TraceError and ClusterError for a model or cluster that is not there."""
    base, space = request.base, request.space
    facts = facts_of(base.model, base.work.seq_len, base.work.sequences)
    names = space.cluster or (() if base.cluster is None else (base.cluster.id,))
    clusters = {name: _cluster(name, base.cluster) for name in names}
    stack = base.stack or usual_stack("train", alone=False)
    if base.recompute != "none":
        space = replace(space, recompute=(base.recompute,))
    if base.work.micro_batch != 1:
        space = replace(space, micro_batch=(base.work.micro_batch,))
    sized = [replace(each, nodes=max(space.nodes or (each.nodes,))) for each in clusters.values()]
    axes = natural(space, facts, sized, stack, base.quantization or base.precision)
    if not space.nodes:
        axes["nodes"] = (next(iter(clusters.values())).nodes,)
    axes["cluster"] = tuple(clusters)
    return Asked(request, facts, clusters, axes)


def _cluster(name: str, base: Cluster | None) -> Cluster:
    """A cluster by name: the step's own with its figures, or as shipped with as many nodes as the step's."""
    if base is not None and name == base.id:
        return base
    return replace(load_cluster(name), nodes=1 if base is None else base.nodes)


def request_of(made: Asked, point: Mapping[str, Any]) -> SimulateRequest:
    """The step of one point. The errors of its parts where they do not go together."""
    base = made.base
    cluster = replace(made.clusters[point["cluster"]], nodes=point["nodes"])
    parallel = replace(
        base.parallel,
        **{name: point[name] for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "zero_stage", "schedule")},
        sequence_parallel=point["sequence_parallel"],
    )
    dtype, quantization = base.precision, base.quantization
    if point["precision"] != (quantization or dtype):
        dtype, quantization = precision_of(point["precision"])
    stack = base.stack or usual_stack("train", alone=False)
    stack = replace(stack, overlap=overlap_of(point["overlap"]))
    own = base.cluster is not None and cluster.id == base.cluster.id
    return replace(
        base,
        work=replace(base.work, micro_batch=point["micro_batch"]),
        device=base.device if own else THIS_MACHINE,
        cluster=cluster,
        parallel=parallel,
        stack=stack,
        precision=dtype,
        quantization=quantization,
        recompute=point["recompute"],
    )
