"""How an engine schedules, as numbers that compiled code can read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..question.serving import POLICIES, ROUTERS
from .iteration import IterationTables

MOST_BEHIND_US = 100e3  # of tokens that a server has not sent; judged: longer than iterations with prompts are apart
COUNTED = ROUTERS.index("vllm_dp")  # whose ranks tell how many requests they have
OWN, OWN_ROUTER = len(POLICIES), len(ROUTERS)  # codes of a user's own; ours are places in POLICIES and ROUTERS


class SchedulerRules(NamedTuple):
    """The limits of one scheduler. Fields that a policy does not know are not read by it."""

    policy: int
    max_tokens: int  # of an iteration: its budget
    max_seqs: int  # that run at a time
    chunk: int  # prompt tokens of an iteration (sarathi, sglang)
    max_model_len: int
    blocks: int
    block_tokens: int
    watermark: int  # blocks that admission leaves free
    spare: int  # and those that must stay free beside decodes
    long_prefill: int  # most tokens of one prompt in an iteration; 0: no limit
    whole_prompt: int  # 1: a prompt is admitted only if all of it fits
    chunked: int  # 1: prompts may be cut
    uncut: int  # 1: no prompt may be longer than an iteration
    padded: int  # 1: prompts of a batch count as long as its longest
    mixed: int  # 1: sglang decodes beside prompts
    reserves: int  # 1: blocks for prompt and answer are taken at the start
    lag: int  # 1: the next iteration is scheduled while one runs: who arrives in between waits for one more
    swap_us_per_token: float  # less than 0: who is preempted computes anew
    conservativeness: float  # of sglang's estimate
    ignore_eos: int  # 1: answers are as long as asked, and sglang counts on it
    drafts: int  # tokens guessed ahead, for which a decode has blocks
    prefill_every: int  # lightllm: decode iterations between attempts to admit
    wait_iterations: int  # trtllm: prompts wait so many iterations beside decodes; sglang: decodes between its polls
    balance_iterations: int  # trtllm: prompts of ranks in lockstep wait so many iterations for each other, 0: never,
    gather_iterations: int  # and so many more once each has one
    wait_tokens: float  # or until the batch has so many tokens
    answers: int  # 1: who comes with a cache has its first token sent when it starts here
    lasting: int  # 1: who finds no place finds none until a request ends
    asks: int  # 1: its policy says itself whether a batch may come again
    repeats: int  # 1: batches that only decode may be counted again (:mod:`.repeating`)
    loads: int  # how caches are loaded from tiers (:mod:`.tiers`)
    layer_share: float  # of the model that one layer is


class IterationTiming(NamedTuple):
    """How long an iteration takes, and what the host adds."""

    tables: IterationTables
    graphs: np.ndarray  # batch sizes of CUDA graphs, ascending: decodes are padded up to the next
    host_us: float  # after what the GPU takes
    host_seq_us: float  # for each sequence of the batch
    host_stream_us: float  # for each token that goes to a client, in a process beside the GPU's
    drafts: int  # tokens that are guessed ahead in each iteration
    draft_share: float  # of the model's layers that guessing one takes
    adapter_counts: np.ndarray = np.zeros(0)  # of a batch, and tokens that have one: axes of
    adapter_tokens: np.ndarray = np.zeros(0)
    adapter_us: np.ndarray = np.zeros((0, 0))  # what they add
    adapter_load_us: float = 0.0  # to a GPU, and into host memory
    adapter_read_us: float = 0.0
    imbalance: np.ndarray = np.zeros(0)  # of experts, by block of so many iterations (:mod:`.expert_drift`)
    drift_block: int = 1
    move_us: np.ndarray = np.zeros(0)  # of weights, before the first iteration of a block
    expert_tokens: np.ndarray = np.zeros(0)  # of a rank: the axis of
    expert_us: np.ndarray = np.zeros(0)  # what experts take of an iteration


class ServingSetup(NamedTuple):
    """All that stays as it is during a run. Replicas from ``first_decode`` on only decode, those before only prefill;
    there are none of them where ``first_decode`` is the number of replicas. Where replicas are ``mixed``, those from
    there on do all as the others do, and are of another kind."""

    rules: SchedulerRules
    timing: IterationTiming
    decode_rules: SchedulerRules
    decode_timing: IterationTiming
    router: int
    replicas: int
    ranks_per_replica: int
    decode_ranks: int  # of a replica that only decodes
    stages: int
    decode_stages: int
    first_decode: int
    concurrency: int  # requests that clients keep on their way at most; 0: no limit
    accept: np.ndarray  # how likely the guess at each position is right, if those before it are
    move_us: float  # of every transfer of a cache
    move_token_us: float  # and of every token of it
    move_exposed: float  # the share of it that prefill does not hide
    limited: int  # 1: the server of a replica rejects requests (:mod:`.admission`): limits less than 0 are none
    most_requests: int
    most_prompt_tokens: int
    most_queue: int
    bucket_rate: float  # requests a microsecond that a gateway lets in; 0: all
    bucket_size: float
    mixed: int = 0
    choosy: int = 0  # 1: not every rank takes every request (:func:`.fleet.takes`)
    changing: int = 0  # 1: replicas come and go (:mod:`.fleet`)
    weights: tuple[float, float, float] = (0.0, 0.0, 0.0)  # of scores (:mod:`.scorers`)
    begin_with: int = 0  # replicas that serve from the start
    start_us: float = 0.0  # until a replica that starts takes requests
    tick_us: float = 0.0  # between looks of an autoscaler; 0: there is none
    repair_us: float = 0.0  # until one that failed starts again
    lost: int = 0  # what becomes of the requests of one that fails (:data:`.fleet.LOST`)


def first_decode_rank(setup: ServingSetup) -> int:
    """The first rank that only decodes; the number of ranks where there is none."""
    return setup.first_decode * setup.ranks_per_replica


def prompt_ranks(setup: ServingSetup) -> int:
    """How many ranks, from the first on, take prompts."""
    return first_rank(setup, setup.replicas) if setup.mixed else first_decode_rank(setup)


def rules_of(setup: ServingSetup, rank: int) -> SchedulerRules:
    """The rules of a rank."""
    return setup.decode_rules if rank >= first_decode_rank(setup) else setup.rules


def ranks_of(setup: ServingSetup, replica: int) -> int:
    """How many ranks a replica has."""
    return setup.decode_ranks if replica >= setup.first_decode else setup.ranks_per_replica


def first_rank(setup: ServingSetup, replica: int) -> int:
    """The first rank of a replica; of one behind the last, the number of ranks."""
    decoders = max(replica - setup.first_decode, 0)
    return (replica - decoders) * setup.ranks_per_replica + decoders * setup.decode_ranks


def replica_of(setup: ServingSetup, rank: int) -> int:
    """The replica of a rank."""
    first = first_decode_rank(setup)
    if rank < first:
        return rank // setup.ranks_per_replica
    return setup.first_decode + (rank - first) // setup.decode_ranks
