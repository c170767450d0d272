"""RolloutReplicas: all responses of a batch on the replicas of an engine, by the event loop of served models.

A batch ends with its longest response. With partial rollouts more prompts are begun, the batch ends when enough of them
are done, and the others go on in the next one: what they have is a longer prompt then, whose keys and values are
computed again (slime's and APRIL's partial rollout).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ...datasets.clusters import Cluster
from ...datasets.precisions import precision_of
from ..question.calibration import NONE
from ..question.canonical import RequestError
from ..question.plan import Parallel
from ..question.requests import SimulateRequest
from ..question.serving import KvMemory, Scheduler, ServingRequest
from ..question.traffic import Lengths, RequestTraffic
from ..question.work import Work
from ..serving.confidence import at_deviation
from ..serving.connect import replica_of, usual_serving_stack
from ..serving.engines import load_serving_engine
from ..serving.kv import KvBudget
from ..serving.kv_memory import usual_fraction
from ..serving.policies import policy_of
from ..serving.replica import ServedReplica
from ..serving.serve import Keeping, serve_once
from ..serving.state import NONE as NOBODY
from ..serving.streams import RequestStream, chunk
from ..timing.sampling import LOG_PROBS
from .groups import GpuGroups
from .lengths import LengthBatch, batch_of
from .request import PostTrainRequest

if TYPE_CHECKING:
    from ..engines.bench import Bench

CHUNK, GRAPHS = 8192, 512  # tokens and largest graph that SGLang's own fraction of memory is reckoned with
SPARE_BLOCKS = 64  # beside those of sequences, so that nothing depends on the last ones
PACKED = ("nf4",)  # formats of weights in training that no engine rolls out in
WARM_UP = 3  # batches until partial rollouts carry as much over as they bring


@dataclass(frozen=True)
class BatchRollout:
    """A batch that was rolled out in ``seconds``; ``ends_s`` of its responses, ascending, and the ``batch`` itself."""

    seconds: float
    ends_s: np.ndarray
    batch: LengthBatch
    preemptions: int
    kv_peak: float
    carried: int = 0  # responses that were begun and go on in the next batch
    gpu_w: float | None = None

    @property
    def tail_share(self) -> float:
        """Share of the time in which less than a tenth of the responses still run."""
        return float(1.0 - np.percentile(self.ends_s, 90) / self.seconds)

    @property
    def running_share(self) -> float:
        """Responses that run in the mean over all, where each begins at once."""
        return float(self.ends_s.mean() / self.seconds)


@dataclass(frozen=True)
class RolloutReplicas:
    """Replicas of an engine that roll out on a part of a cluster."""

    request: ServingRequest
    replica: ServedReplica
    replicas: int
    of_tokens: float = field(default=0.0)
    token_s: float = 0.0  # until the trainer has a token, once all responses of a replica are there

    def at(self, z: float) -> RolloutReplicas:
        """The same with iterations ``z`` standard deviations slower than is likely."""
        return replace(self, replica=at_deviation(self.replica, z))

    def ends_s(
        self, prompt: np.ndarray, response: np.ndarray, group: np.ndarray, shared: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, int, float, float | None]:
        """Seconds until the first and the last token of each response, preemptions, KV memory at its peak, and watts.

        Sequences of a ``group`` have their first ``shared`` tokens in common. Replicas get neighbours, as many each, so
        that responses to a prompt find its keys and values. RequestError where a sequence does not fit.
        """
        count = len(prompt)
        shares = np.array_split(np.arange(count), self.replicas)
        order = np.full((max(map(len, shares)), self.replicas), NOBODY)
        for column, share in enumerate(shares):
            order[: len(share), column] = share
        order = order[order != NOBODY]  # requests go round the replicas
        rows = chunk(np.zeros(count), prompt[order], response[order], group[order], shared[order])
        longest, outputs = int((prompt + response).max()), float(response.sum())
        no_keys = np.zeros(0, np.int64)
        stream = RequestStream(iter([rows]), count, 0, longest, outputs, float(prompt.mean()), True, no_keys)
        blocks = enough_blocks(self.replica.kv, [(prompt + response)[share] for share in shares])
        sized = replace(self.replica, kv=replace(self.replica.kv, blocks=blocks))
        at_once = replace(self.request.traffic, concurrency=count, requests=count)
        request = replace(self.request, replicas=self.replicas, traffic=at_once)
        keeping = Keeping(requests=True)
        served = serve_once(request, stream, sized, None, keeping, None, None, max(self.of_tokens, outputs))
        requests = served.requests
        if (requests["rank"] == NOBODY).any() or len(requests) < count:
            raise RequestError(
                "a response does not fit into the KV memory of a replica: raise rollout.tp or rollout.kv_fraction, or "
                "lower workload.seq_len"
            )
        first, last = np.zeros(count), np.zeros(count)
        first[order], last[order] = requests["first_token_us"] / 1e6, requests["finish_us"] / 1e6
        peak = served.report.kv_peak * blocks / self.replica.kv.blocks
        return first, last, served.report.preemptions, peak, served.report.power_w

    def play(self, batch: LengthBatch) -> BatchRollout:
        """A batch of which every response is waited for."""
        _, ends, preemptions, peak, watts = self.ends_s(batch.prompt, batch.response, batch.group, batch.prompt)
        shares = np.array_split(np.arange(len(ends)), self.replicas)
        read_s = [ends[share].max() + self.token_s * batch.response[share].sum() for share in shares if len(share)]
        return BatchRollout(float(max(read_s)), np.sort(ends), batch, preemptions, peak, gpu_w=watts)


def replica_cluster(cluster: Cluster, gpus: int) -> Cluster:
    """The nodes of one replica: its tables are the same, however many there are."""
    return replace(cluster, nodes=-(-gpus // cluster.devices_per_node))


def enough_blocks(kv: KvBudget, totals: Sequence[np.ndarray]) -> int:
    """Blocks of a replica's KV memory that are simulated: no more than all its sequences could have twice over."""
    most = max(int((-(-total // kv.block_tokens) + 1).sum()) for total in totals)
    return min(kv.blocks, 2 * most + SPARE_BLOCKS)


def roll_out(rollout: RolloutReplicas, request: PostTrainRequest, batches: Sequence[LengthBatch]) -> list[BatchRollout]:
    """Batches one after the other; with partial rollouts each begins with what the one before left."""
    if not request.partial:
        return [rollout.play(batch) for batch in batches]
    return _partly(rollout, request, len(batches))


def _partly(rollout: RolloutReplicas, request: PostTrainRequest, batches: int) -> list[BatchRollout]:
    """Batches that end as soon as ``prompts`` of those begun have all their responses."""
    size, total = request.responses_of_prompt, round(request.prompts * (1.0 + request.partial))
    prompt = np.zeros((0, size), np.int64)
    response, already = prompt.copy(), prompt.copy()  # in all, and of it what was generated before
    rows: list[BatchRollout] = []
    for index in range(WARM_UP + batches):
        fresh = batch_of(request, index, total - len(prompt))
        prompt = np.concatenate([prompt, fresh.prompt.reshape(-1, size)])
        response = np.concatenate([response, fresh.response.reshape(-1, size)])
        already = np.concatenate([already, np.zeros((len(fresh.prompt) // size, size), np.int64)])
        running = already < response
        first, last = np.zeros(response.shape), np.zeros(response.shape)
        remaining = response - already
        group = np.repeat(np.arange(len(prompt)), size).reshape(-1, size)
        sequences = (prompt + already, remaining, group, prompt)
        first_s, last_s, preemptions, peak, watts = rollout.ends_s(*(column[running] for column in sequences))
        first[running], last[running] = first_s, last_s
        group_ends = last.max(axis=1)
        cut_s = float(np.sort(group_ends)[request.prompts - 1])
        complete = np.zeros(len(prompt), bool)
        complete[np.argsort(group_ends, kind="stable")[: request.prompts]] = True
        share = np.clip((cut_s - first) / np.maximum(last - first, 1e-9), 0.0, 1.0)
        new = np.where(running, np.floor(share * remaining), 0).astype(np.int64)
        batch = LengthBatch(prompt[complete].ravel(), response[complete].ravel(), size)
        prompt, response, already = (
            prompt[~complete],
            response[~complete],
            np.minimum((already + new)[~complete], response[~complete]),
        )
        unfinished = int((already < response).sum())
        ends_s = np.sort(np.minimum(last_s, cut_s))
        rows.append(BatchRollout(cut_s, ends_s, batch, preemptions, peak, unfinished, watts))
    return rows[WARM_UP:]


def traffic_of(request: PostTrainRequest, served: SimulateRequest) -> ServingRequest:
    """The responses of a batch as traffic on replicas that serve as a step says."""
    engine = request.rollout
    longest = request.step.work.seq_len
    together = round(request.sequences * (1.0 + request.partial))
    return ServingRequest(
        step=served,
        traffic=RequestTraffic(
            arrival="closed",
            concurrency=together,
            requests=together,
            input=Lengths(mean=1),
            output=Lengths(mean=max(longest - 1, 1)),
        ),
        scheduler=Scheduler(
            policy=engine.engine,
            max_seqs=engine.max_seqs,
            max_tokens=engine.max_tokens,
            prefix_caching=request.responses_of_prompt > 1,
            async_scheduling=engine.async_scheduling,
        ),
        kv=KvMemory(fraction=engine.kv_fraction),
        intervals=False,
    )


def rollout_of(
    request: PostTrainRequest, groups: GpuGroups, bench: Bench, resident_share: float = 0.0
) -> RolloutReplicas:
    """The replicas that roll out. ``resident_share`` of each GPU's memory belongs to training meanwhile.

    KvError where a replica has no KV memory; the errors of a step.
    """
    assert groups.rollout is not None
    engine, step = request.rollout, request.step
    dtype, quantization = step.precision, "" if step.quantization in PACKED else step.quantization
    if engine.precision:
        dtype, quantization = precision_of(engine.precision)
    served = replace(
        step,
        work=Work(kind="decode", expert_load=step.work.expert_load),
        cluster=replica_cluster(groups.rollout, engine.replica_gpus),
        parallel=Parallel(tp=engine.tp, pp=engine.pp, ep=engine.ep),
        stack=usual_serving_stack(engine.engine),
        recompute="none",
        offload=(),
        passes=(),
        options={"sampling": LOG_PROBS} if engine.engine == "vllm" else {},
        stragglers=(),
        sources=replace(step.sources, calibration=NONE),
        precision=dtype,
        quantization=quantization,
    )
    question = traffic_of(request, served)
    if resident_share and engine.kv_fraction is None:
        memory_gib = bench.device(step.device, groups.rollout).memory_gib
        usual = load_serving_engine(policy_of(engine.engine).framework).kv.fraction
        usual = usual or usual_fraction(memory_gib, engine.max_tokens or CHUNK, GRAPHS, engine.replica_gpus)
        question = replace(question, kv=KvMemory(fraction=max(usual - resident_share, 0.01)))
    replica = replica_of(question, served, None, question.kv, bench, 1)
    outputs = sum(batch_of(request, index).response.sum() for index in range(request.batches))
    return RolloutReplicas(
        question,
        replica,
        groups.rollout_gpus // engine.replica_gpus,
        of_tokens=2.0 * float(outputs),
        token_s=engine.token_us / 1e6,
    )
