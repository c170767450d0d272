"""What a search is asked, as frozen data, and what of it one point is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...datasets.clusters import Cluster
from ...datasets.loading import choice, whole
from ..question.canonical import RequestError
from ..question.declaration import setting
from ..question.requests import SimulateRequest, usual_stack
from .expressions import Expression
from .objectives import OBJECTIVES
from .question import SearchQuestion
from .space import AXES, NAMES, Facts, Space, facts_of, natural, overlap_of

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
class SearchRequest(SearchQuestion):
    """The best points of a space of layouts of one training step.

    ``base`` is the step, with all that is not searched; its ``parallel`` has no degrees but those that no axis has.
    ``constraints`` are expressions over a point's figures (:data:`FIGURES`) and axes that a ranked point must meet.
    """

    base: SimulateRequest = field(default_factory=lambda: SimulateRequest(model="llama3_8b"), metadata={"hidden": True})
    space: Space = field(default_factory=Space)
    objectives: tuple[str, ...] = setting(
        ("step_time", "memory"),
        "step_time | tokens_per_s | tokens_per_s_per_gpu | mfu | cost | energy | memory | gpus; the first ranks",
    )
    constraints: tuple[str, ...] = setting((), 'what a point must meet, such as ["peak_gib <= 70", "step_time_s < 12"]')
    top: int = setting(10, "so many of the best are shown")
    prune: tuple[str, ...] = setting(PRUNING, "bounds that leave points out before they are timed")
    noise_floor: float = setting(0.03, "points this close are a tie: what repeats of one recipe differ by")
    sampler: str = setting(
        "auto", "exhaustive | tpe | nsga2; auto: exhaustive up to exhaustive_up_to points, else nsga2"
    )
    exhaustive_up_to: int = setting(50_000, "points that sampler=auto asks about all of")
    trials: int = setting(1000, "points that a sampler asks about")
    seed: int = setting(0, "of a sampler")

    STEP = "base"
    OBJECTIVES = OBJECTIVES
    LISTS = ("objectives", "constraints", "prune")
    COUNTS = ("top", "trials", "exhaustive_up_to")
    RULED = NAMES
    READ = (*FIGURES, *NAMES)
    POINT = AXES
    NOUNS = ("axis", "axes", "FOLDER")

    def check(self) -> None:
        """RequestError for a step that cannot be searched, and for what both the step and the space say."""
        for name in self.prune:
            choice(RequestError, "prune", name, PRUNING)
        choice(RequestError, "sampler", self.sampler, SAMPLERS)
        whole(RequestError, "seed", self.seed)
        base = self.base
        if base.work.kind != "train" or base.file is not None:
            raise RequestError(f"workload={base.work.kind} cannot be searched yet: take workload=train")
        self.check_place()
        if base.work.global_batch is None:
            raise RequestError("a search needs one batch for all layouts: workload.global_batch=1024")
        self.check_degrees("tp", "pp", "vpp", "dp", "cp", "ep", "etp", "zero_stage", "sequence_parallel", "schedule")
        for name, value, other in (("recompute", base.recompute, "none"), ("micro_batch", base.work.micro_batch, 1)):
            if value != other and getattr(self.space, name):
                raise RequestError(f"workload.{name}={value} and space.{name} both say what it is: leave one out")

    def before(self) -> list[Expression]:
        """What is known of a point before it is asked about: rules, and constraints that read no more than rules."""
        rules, constraints = self.expressions()
        return [*rules, *(constraint for constraint in constraints if constraint.names <= set(NAMES))]


@dataclass(frozen=True)
class SearchSetup:
    """A request made ready: what its names stand for, and the values of every axis."""

    request: SearchRequest
    facts: Facts
    clusters: Mapping[str, Cluster]
    axes: Mapping[str, Sequence[Any]]

    @property
    def base(self) -> SimulateRequest:
        """The step with all that is not searched."""
        return self.request.base


def set_up(request: SearchRequest) -> SearchSetup:
    """The request made ready. TraceError and ClusterError for a model or cluster that is not there."""
    base, space = request.base, request.space
    facts = facts_of(base.model, base.work.seq_len, base.work.sequences)
    clusters = request.clusters()
    stack = base.stack or usual_stack("train", alone=False)
    if base.recompute != "none":
        space = replace(space, recompute=(base.recompute,))
    if base.work.micro_batch != 1:
        space = replace(space, micro_batch=(base.work.micro_batch,))
    sized = [replace(cluster, nodes=max(space.nodes or (cluster.nodes,))) for cluster in clusters.values()]
    axes = natural(space, facts, sized, stack, base.quantization or base.precision)
    if not space.nodes:
        axes["nodes"] = (next(iter(clusters.values())).nodes,)
    axes["cluster"] = tuple(clusters)
    return SearchSetup(request, facts, clusters, axes)


def request_of(setup: SearchSetup, point: Mapping[str, Any]) -> SimulateRequest:
    """The step of one point. The errors of its parts where they do not go together."""
    base = setup.base
    degrees = {name: point[name] for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "zero_stage", "schedule")}
    stack = base.stack or usual_stack("train", alone=False)
    return setup.request.placed(
        replace(setup.clusters[point["cluster"]], nodes=point["nodes"]),
        point["precision"],
        work=replace(base.work, micro_batch=point["micro_batch"]),
        parallel=replace(base.parallel, **degrees, sequence_parallel=point["sequence_parallel"]),
        stack=replace(stack, overlap=overlap_of(point["overlap"])),
        recompute=point["recompute"],
    )
