"""From the layout that trains to the one that rolls out: what of the weights goes over which links, and how long.

Each GPU of a replica is handed whole tensors and keeps its own part of them (veRL's, OpenRLHF's and NeMo-RL's way,
which any two layouts can take). So the ranks that share the weights out gather them first. Where rollout has GPUs of
its own, one rank that trains then broadcasts them to all of these. Adapters are sent alone. Trainers hand each tensor
of the checkpoint over in Python, experts one by one, while the network brings the next: the longer of both counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...datasets.clusters import Cluster
from ...datasets.ops import KINDS, make_op
from ..question.calibration import EXPERTS
from ..question.predictions import PredictRequest
from ..report.answer import StepReport
from .groups import GpuGroups, cluster_of
from .request import PostTrainRequest

if TYPE_CHECKING:
    from ..engines.bench import Bench

BYTES = 2  # of a weight, as trainers send them whatever engines keep them in
TENSOR_US = {True: 760.0, False: 360.0}
"""Of a tensor that is handed over. Where GPUs are colocated: DeepSeek V3's 45,000 in 55 s, 20 s of copies among them
(NVIDIA-NeMo/RL pull request 638); veRL takes 1.4 ms for those of Qwen3 30B (issue 7060). Apart: Qwen3 235B's 36,000 in
13 s (NVIDIA-NeMo/RL pull request 1379)."""
OF_EXPERTS = 1.5  # tensors of an expert that a stacked product stands for: gate and up are one here, two in checkpoints


@dataclass(frozen=True)
class WeightSync:
    """Weights of ``size_bytes`` that go to the engines: gathered over so many ranks, then broadcast to others.

    Meanwhile all ``tensors`` are handed over.
    """

    size_bytes: int
    tensors: int
    hand_over_s: float
    gather_ranks: int
    gather_s: float
    broadcast_ranks: int
    broadcast_s: float

    @property
    def seconds(self) -> float:
        """Gathering and broadcasting, one after the other, or handing over."""
        return max(self.gather_s + self.broadcast_s, self.hand_over_s)


def trained_parameters(report: StepReport) -> int:
    """Parameters of the whole model that are trained, tied ones once."""
    assert report.state is not None
    return report.state.steps[0].graph.parameters


def checkpoint_tensors(report: StepReport) -> int:
    """Tensors of the model's checkpoint, those of each expert apart."""
    assert report.state is not None
    graph = report.state.steps[0].graph
    tensors = float(sum(tensor.count for tensor in graph.tensors if tensor.role == "weight"))
    for node, repeat in graph.weighted():
        if node.kind in EXPERTS and node.phase == "forward":
            experts = dict(zip(KINDS[node.kind].names, node.work.dims, strict=True))["experts"]
            tensors += (experts * OF_EXPERTS - 1) * repeat
    return round(tensors)


def weight_sync(request: PostTrainRequest, report: StepReport, groups: GpuGroups, bench: Bench) -> WeightSync:
    """What a weight sync takes. The errors of the network."""
    size = trained_parameters(report) * BYTES
    layout, training = request.step.parallel, groups.training
    inner = max(layout.tp, layout.ep * layout.etp)
    ranks = training.devices if layout.zero_stage == 3 else min(inner * layout.pp, training.devices)
    per_node = training.devices_per_node
    far = layout.pp > 1 and layout.zero_stage != 3 and training.devices // layout.pp >= per_node
    near = min(inner, per_node) if far else min(ranks, per_node)
    gather_s = _seconds("all_gather", size, ranks, near, None, training, request, bench)
    others, broadcast_s = 0, 0.0
    if not groups.colocated:
        cluster = cluster_of(request)
        others = groups.rollout_gpus
        group = tuple(range(cluster.devices - others - 1, cluster.devices))
        near = min(others + 1, cluster.devices_per_node)
        broadcast_s = _seconds("broadcast", size, others + 1, near, group, cluster, request, bench)
    tensors = 0 if request.step.work.lora_rank else checkpoint_tensors(report)
    tensor_us = TENSOR_US[groups.colocated] if request.sync_tensor_us is None else request.sync_tensor_us
    return WeightSync(size, tensors, tensors * tensor_us / 1e6, ranks, gather_s, others, broadcast_s)


def _seconds(
    kind: str,
    size: int,
    ranks: int,
    near: int,
    group: Sequence[int] | None,
    cluster: Cluster,
    request: PostTrainRequest,
    bench: Bench,
) -> float:
    """Seconds of a collective of so many ranks, ``near`` of them in a node; none for a rank alone."""
    if ranks == 1 or size == 0:
        return 0.0
    step = request.step
    question = PredictRequest(
        ops=(make_op(kind, size_bytes=size, ranks=ranks, ranks_per_node=near),),
        device=step.device,
        cluster=cluster,
        group=None if group is None else tuple(group),
        network=step.network,
        sources=step.sources,
    )
    return bench.predict(question)[0].latency_us / 1e6
