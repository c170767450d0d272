"""What is asked about a served model: :class:`ServingRequest`, how its engine schedules, and what users expect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...datasets.loading import check_fields, choice, number, whole
from .adapters import ServedAdapters
from .canonical import Request, RequestError
from .declaration import FILES, setting
from .expert_balance import ExpertBalance
from .ffn_apart import FfnApart
from .fleet import Autoscale, ColdStart, ReplicaFailures, ScorerWeights
from .image_requests import ImageRequests
from .kv_tiers import KvTiers
from .request_classes import QUEUES, Admission, ServingTargets
from .requests import SimulateRequest
from .traffic import RequestTraffic
from .unread import changed, refuse_unread

POLICIES = (
    "vllm",
    "vllm_v0",
    "sarathi",
    "orca",
    "faster_transformer",
    "lightllm",
    "sglang",
    "trtllm",
    "trtllm_max_utilization",
    "splitwise",
)
ROUTERS = (
    "round_robin",
    "random",
    "least_outstanding",
    "least_waiting",
    "power_of_two",
    "kv_aware",
    "splitwise",
    "scorers",
    "vllm_dp",
)
AUTO = "auto"  # of max_model_len: as long as the model and its KV memory allow
MOST_DRAFTS = 16
MOST_BLOCKS, MOST_BLOCK_TOKENS = 1 << 40, 1 << 16  # far beyond any memory; their product is counted in 64 bits
MOST_RANKS = 1 << 16  # schedulers, which take some seconds with nothing to do
MOST_HELD = 1 << 24  # adapters of all schedulers: half a GiB of tables
SEEN = ("weights_gib", "activations_gib", "other_gib", "kv_gib", "kv_tokens")  # what start-up logs say
OF_POOL = {  # what a replica of the pool that decodes is, where it is not like the others
    "device": "of their own, as are the next three; null: like the others",
    "cluster": "",
    "parallel": "as {tp: 8}",
    "precision": "",
}
SWAP_GBPS = 25.0  # of a cache to host memory and back, by PCIe 4


@dataclass(frozen=True)
class Scheduler:
    """How an engine schedules. What is null is as the engine has it."""

    policy: str = setting(
        "vllm",
        "vllm | vllm_v0 | sarathi | orca | faster_transformer | lightllm | sglang | trtllm | "
        "trtllm_max_utilization | splitwise | module:function",
    )
    queue: str = setting(
        "fcfs", "fcfs | priority: who waits first, by traffic.classes (vllm: scheduling-policy)", choices=QUEUES
    )
    max_tokens: int | None = setting(None, "of an iteration; null: as the engine has it", least=1)
    max_seqs: int | None = setting(None, "that run at a time", least=1)
    chunk: int | None = setting(None, "prompt tokens of an iteration (sarathi, sglang)", least=1)
    max_model_len: int | str | None = setting(
        AUTO,
        "of prompt and answer; auto: as long as the model and its KV memory allow; null: as the model's "
        "configuration says, as engine=… has it",
    )
    watermark: float | None = setting(None, "share of KV blocks that admission leaves free")
    long_prefill_tokens: int = setting(0, "of one prompt in an iteration; 0: no limit")
    whole_prompt: bool = setting(True, "a prompt is admitted only if all of it fits")
    chunked_prefill: bool | None = setting(None, "a prompt may be cut over iterations")
    prefix_caching: bool | None = setting(None, "null: false; of engine=…: as the engine has it")
    preemption: str = setting("recompute", "recompute | swap", choices=("recompute", "swap"))
    mixed_chunk: bool = setting(False, "sglang: decodes beside prompts")
    async_scheduling: bool | None = setting(None, "the next iteration is scheduled while one runs")
    padded: bool | None = setting(None, "prompts of a batch count as long as its longest")
    conservativeness: float = setting(1.0, "of sglang's estimate")
    ignore_eos: bool = setting(
        False, "sglang: answers are as long as asked, as in benchmarks: who starts is decided by their ends"
    )
    prefill_every: int = setting(10, "lightllm: decodes between attempts to admit", least=1)
    wait_iterations: int = setting(
        0,
        "trtllm: prompts wait so many iterations beside decodes (batch_wait_timeout_iters); sglang: looks for "
        "requests every so many (scheduler-recv-interval)",
    )
    wait_share: float = setting(
        0.0, "trtllm: or until the batch has this share of max_tokens (batch_wait_max_tokens_ratio)", most=1
    )
    balance_iterations: int = setting(
        0,
        "trtllm: prompts of attention-DP ranks wait beside decodes until each rank has one, at most so long "
        "(attention_dp_config.timeout_iters); 0: never",
    )
    gather_iterations: int = setting(0, "and so many iterations more (batching_wait_iters)")
    cuda_graphs: tuple[int, ...] = setting((), "batch sizes that decodes are padded to")

    def __post_init__(self) -> None:
        if ":" not in self.policy:
            choice(RequestError, "scheduler.policy", self.policy, POLICIES)
        check_fields(self, RequestError, "scheduler")
        if self.max_model_len not in (None, AUTO):
            whole(RequestError, "scheduler.max_model_len", self.max_model_len, 1)
        if self.prefix_caching is None:
            object.__setattr__(self, "prefix_caching", False)
        if self.watermark is not None and self.watermark >= 1:
            raise RequestError(f"scheduler.watermark={self.watermark} must be a share below 1")
        for each in self.cuda_graphs:
            whole(RequestError, "scheduler.cuda_graphs", each, 1)

    @property
    def own(self) -> bool:
        """Whether the policy is a user's function."""
        return ":" in self.policy


@dataclass(frozen=True)
class Speculation:
    """Tokens guessed ahead: a draft guesses some in each iteration, which the model checks in one pass."""

    tokens: int = setting(0, "guessed ahead in each iteration", most=MOST_DRAFTS)
    acceptance: float | tuple[float, ...] = setting(0.7, "how likely a guess is right, one number or one a position")
    draft_share: float | None = setting(
        None, "what a guess takes, as a share of the layers; null: one layer, as MTP heads have"
    )

    def __post_init__(self) -> None:
        check_fields(self, RequestError, "speculation")
        if isinstance(self.acceptance, list):
            object.__setattr__(self, "acceptance", tuple(self.acceptance))
        for each in self.chances:
            number(RequestError, "speculation.acceptance", each, most=1)
        if isinstance(self.acceptance, tuple) and len(self.acceptance) != self.tokens:
            raise RequestError(
                f"speculation.acceptance has {len(self.acceptance)} numbers for speculation.tokens={self.tokens}"
            )

    @property
    def chances(self) -> tuple[float, ...]:
        """The acceptance at each position."""
        return self.acceptance if isinstance(self.acceptance, tuple) else (self.acceptance,) * self.tokens


@dataclass(frozen=True)
class IterationLaw:
    """How long an iteration takes, given by hand: ``base_us`` and what each token, pair and sample adds."""

    base_us: float = 0.0
    decode_us: float = 0.0
    decode_context_us: float = 0.0
    prefill_token_us: float = 0.0
    prefill_pair_us: float = 0.0
    prefill_context_us: float = 0.0
    sample_us: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, RequestError, "law")
        if not any(vars(self).values()):
            raise RequestError("law says that iterations take no time: give law.base_us, or leave law out")


@dataclass(frozen=True)
class KvMemory:
    """KV memory of a rank."""

    blocks: int | None = setting(None, "null: what the engine finds free on the device", least=1, most=MOST_BLOCKS)
    block_tokens: int | None = setting(None, "null: as the engine has it", least=1, most=MOST_BLOCK_TOKENS)
    bytes_per_token: float = setting(0.0, "0: as the model has it")
    fraction: float | None = setting(None, "of free memory for keys and values; null: as the engine has it", most=1)
    graphs: int | None = setting(None, "the largest CUDA graph; 0: none")
    seen: Mapping[str, float] = setting({}, "what the engine's start-up log says, in place of what is simulated")

    def __post_init__(self) -> None:
        check_fields(self, RequestError, "kv")
        for name, value in self.seen.items():
            choice(RequestError, "kv.seen", name, SEEN)
            number(RequestError, f"kv.seen.{name}", value)


@dataclass(frozen=True)
class DecodePool:
    """Replicas that only decode, beside those that then only prefill; ``step`` and ``law`` null: like the others."""

    replicas: int = setting(0, "none: all do both")
    share: float | None = setting(None, "in place of a number: this share of all replicas decodes")
    step: SimulateRequest | None = setting(None, hidden=True, words=OF_POOL)
    law: IterationLaw | None = None
    kv: KvMemory = field(default_factory=KvMemory)
    max_seqs: int | None = setting(None, "that run at a time")
    link_gbps: float | None = setting(
        None,
        "GB/s of a cache's way to a replica, and microseconds until it begins; null: of the network",
        positive=True,
    )
    link_us: float | None = setting(None, "until a cache begins to move; null: of the network")
    price_per_gpu_hour: float | None = setting(None, "of their devices")
    layers: int = setting(1, "above 1: caches move layer by layer while later layers are computed", least=1)
    attention_dp: int | None = setting(None, "ranks of a replica", least=1)
    first_token: str = setting(
        "decode", "decode | prefill: which pool sends it to the client", choices=("prefill", "decode")
    )

    def __post_init__(self) -> None:
        check_fields(self, RequestError, "decode_pool")


@dataclass(frozen=True)
class SecondKind:
    """Replicas of another kind in the same pool: on other devices, laid out otherwise, or with other limits; what is
    null is as the others have it."""

    replicas: int = setting(0, "beside the others; 0: all are alike")
    step: SimulateRequest | None = setting(None, hidden=True, words=OF_POOL)
    law: IterationLaw | None = None
    kv: KvMemory = field(default_factory=KvMemory)
    max_seqs: int | None = setting(None, "that run at a time", least=1)
    max_tokens: int | None = setting(None, "of an iteration", least=1)
    chunk: int | None = setting(None, "prompt tokens of an iteration (sarathi, sglang)", least=1)
    attention_dp: int | None = setting(None, "ranks of a replica", least=1)
    price_per_gpu_hour: float | None = setting(None, "of their devices")

    def __post_init__(self) -> None:
        check_fields(self, RequestError, "second_kind")

    @property
    def limits(self) -> dict[str, Any]:
        """The limits of its scheduler that are not those of the others."""
        named = {name: getattr(self, name) for name in ("max_seqs", "max_tokens", "chunk")}
        return {name: limit for name, limit in named.items() if limit is not None}


@dataclass(frozen=True)
class EngineStart:
    """An engine as its users start it: its own arguments, and the start-up log that says what it found."""

    engine: str | None = setting(None, "vllm, sglang or trtllm: started with args", path="engine.serving")
    args: str = setting("", 'as its users start it: "--tensor-parallel-size 4 --max-num-seqs 64"')
    calibrate: str | None = setting(
        None, "the engine's start-up log: what it says of memory goes before what is simulated", http=FILES
    )


@dataclass(frozen=True)
class ServingRequest(Request):
    """Traffic through the replicas of a served model.

    ``step`` says what a replica is: model, device or cluster, layout, framework, precision. ``law`` stands in its place
    where iteration times are given by hand; then ``kv.blocks`` must be too.
    """

    step: SimulateRequest | None = setting(None, hidden=True)
    law: IterationLaw | None = setting(
        None, "iteration times by hand, in place of a model: {base_us: 5000, decode_us: 20, prefill_token_us: 60}"
    )
    traffic: RequestTraffic = field(default_factory=RequestTraffic)
    scheduler: Scheduler = field(default_factory=Scheduler)
    kv: KvMemory = field(default_factory=KvMemory)
    slo: ServingTargets = setting(ServingTargets, "what users expect, and how many of them must have it")
    replicas: int = setting(1, "that serve")
    attention_dp: int = setting(1, "ranks of a replica with KV memory of their own, in lockstep", least=1)
    router: str = setting(
        "round_robin",
        "round_robin | random | least_outstanding | least_waiting | power_of_two | kv_aware | splitwise | scorers | "
        "module:function",
    )
    scorers: ScorerWeights = setting(ScorerWeights, "of router=scorers (llm-d): weights of scores from 0 to 1")
    admission: Admission = setting(Admission, "who is rejected at once: limits of a gateway and of servers")
    tiers: KvTiers = setting(KvTiers, "of the prefix cache below the GPU: host memory, drives, a shared store")
    lora: ServedAdapters = setting(ServedAdapters, "low-rank adapters that requests ask for beside the model")
    afd: FfnApart = setting(FfnApart, "feed-forward layers of the pool that decodes on GPUs of their own")
    images: ImageRequests = setting(ImageRequests, "of requests, and the GPUs that encode them")
    eplb: ExpertBalance = setting(ExpertBalance, "experts whose load drifts, and how they are shared out anew")
    decode_pool: DecodePool = setting(DecodePool, "replicas that only decode, beside those that then only prefill")
    second_kind: SecondKind = setting(SecondKind, "replicas of another kind that serve beside the others")
    autoscale: Autoscale = setting(Autoscale, "how many replicas serve, as traffic comes and goes")
    cold_start: ColdStart = setting(ColdStart, "until a replica that starts serves: of autoscale and failures")
    failures: ReplicaFailures = setting(ReplicaFailures, "replicas that fail and come back")
    speculation: Speculation = field(default_factory=Speculation)
    price_per_gpu_hour: float | None = setting(None, "for the cost of a million tokens; null: the cluster's own")
    intervals: bool | None = setting(
        None, "what errors of step times make of every figure: true | false; null: of runs up to a million tokens"
    )

    def __post_init__(self) -> None:
        check_fields(self, RequestError)
        if self.replicas == 0:
            raise RequestError("replicas=0 serves nobody: a pool needs one replica at least")
        if self.ranks > MOST_RANKS:
            more = f", decode_pool.replicas={self.decode_pool.replicas:,}" if self.decode_pool.replicas else ""
            dp = f", attention_dp={self.attention_dp}" if self.attention_dp > 1 else ""
            raise RequestError(
                f"replicas={self.replicas:,}{more}{dp}: at most {MOST_RANKS:,} schedulers are simulated; replicas are "
                "alike, so take a part of them, and the same part of traffic.rate"
            )
        if self.tiers.exist and not self.scheduler.prefix_caching:
            raise RequestError("tiers keep what the prefix cache forgets: set scheduler.prefix_caching=true")
        if not self.traffic.classes and self.traffic.trace is None:
            refuse_unread(changed(self.scheduler, ("queue",), "scheduler."), "without traffic.classes")
        if self.images.exist and self.images.gpus and (self.traffic.concurrency or self.traffic.turns > 1):
            raise RequestError(
                f"images.gpus={self.images.gpus} needs requests that come at times of their own: leave out "
                "traffic.concurrency and traffic.turns, or take images.gpus=0"
            )
        if self.lora.exist and self.ranks * self.lora.adapters > MOST_HELD:
            raise RequestError(
                f"lora.adapters={self.lora.adapters:,} on {self.ranks:,} schedulers: take fewer replicas, which are "
                "alike, and the same part of traffic.rate"
            )
        if self.afd.exist and (not self.decode_pool.replicas or self.speculation.tokens):
            raise RequestError(
                f"afd.ffn_gpus={self.afd.ffn_gpus} is of replicas that only decode, without guesses: set "
                "decode_pool.replicas, and leave out speculation.tokens"
            )
        if ":" not in self.router:
            choice(RequestError, "router", self.router, ROUTERS)
        self._check_fleet()
        if (self.step is None) == (self.law is None):
            raise RequestError("a replica needs a model to serve (model=llama3_8b), or iteration times given by hand")
        if self.law is not None and self.kv.blocks is None:
            raise RequestError("iteration times given by hand need kv.blocks, the KV memory of a replica")

    def _check_fleet(self) -> None:
        """RequestError for replicas that cannot come, go or stand side by side, and for what none of them reads."""
        without = {
            "second_kind": not self.second_kind.replicas and "second_kind.replicas=0",
            "scorers": self.router != "scorers" and f"router={self.router}",
            "autoscale": self.autoscale.policy is None and "autoscale.policy=null",
            "failures": self.failures.mtbf_h is None and "failures.mtbf_h=null",
            "cold_start": not self.changing and "autoscale.policy=null and failures.mtbf_h=null",
        }
        for group, setting_without in without.items():
            if setting_without:
                refuse_unread(changed(self, (group,)), f"with {setting_without}")
        if self.second_kind.replicas and self.decode_pool.replicas:
            raise RequestError(
                f"second_kind.replicas={self.second_kind.replicas} beside decode_pool.replicas="
                f"{self.decode_pool.replicas}: replicas of two kinds do all, or one pool decodes; leave out one of them"
            )
        if not self.changing:
            return
        if self.decode_pool.replicas:
            raise RequestError(
                "autoscale and failures are simulated where replicas do all: leave them out, or decode_pool.replicas"
            )
        if not self.cold_start.known:
            raise RequestError(
                "a replica that starts takes time until it serves: give cold_start.seconds=90, or cold_start.store_gbps"
            )
        if self.autoscale.policy and not self.autoscale.min_replicas <= self.replicas <= self.most_replicas:
            raise RequestError(
                f"replicas={self.replicas}, those at first, must be from autoscale.min_replicas="
                f"{self.autoscale.min_replicas} to autoscale.max_replicas={self.most_replicas}"
            )

    @property
    def changing(self) -> bool:
        """Whether replicas come and go."""
        return self.autoscale.policy is not None or self.failures.mtbf_h is not None

    @property
    def most_replicas(self) -> int:
        """Replicas of the first kind at most."""
        most = self.autoscale.max_replicas if self.autoscale.policy else None
        return self.replicas if most is None else most

    @property
    def second_pool(self) -> DecodePool | SecondKind:
        """Replicas that are not as the first ones are: those that decode, or those of another kind."""
        return self.second_kind if self.second_kind.replicas else self.decode_pool

    @property
    def targets_named(self) -> bool:
        """Whether users expect anything, all of them or those of a class."""
        return self.slo.named or any(kind.targets_named for kind in self.traffic.classes)

    @property
    def ranks(self) -> int:
        """Schedulers in all."""
        return self.most_replicas * self.attention_dp + self.second_pool.replicas * self.second_dp

    @property
    def second_dp(self) -> int:
        """Schedulers of a replica of the second pool."""
        return self.second_pool.attention_dp or self.attention_dp

    @classmethod
    def named(cls, values: dict[str, Any]) -> dict[str, Any]:
        pool = values.get("decode_pool")
        if isinstance(pool, Mapping):
            values = values | {"decode_pool": {**pool, "step": _step(pool.get("step"))}}
            if pool.get("share") is not None:
                values = _shared_out(values)
        kind = values.get("second_kind")
        if isinstance(kind, Mapping):
            values = values | {"second_kind": {**kind, "step": _step(kind.get("step"))}}
        return values | {"step": _step(values.get("step"))}


def _shared_out(values: dict[str, Any]) -> dict[str, Any]:
    """The values with numbers of replicas in place of the share of them that decodes."""
    pool, share = values["decode_pool"], values["decode_pool"]["share"]
    whole_number = whole(RequestError, "replicas", values.get("replicas", 1))
    if not 0 < number(RequestError, "decode_pool.share", share) < 1 or whole_number < 2:
        raise RequestError(f"decode_pool.share={share} must be between 0 and 1, of replicas=2 or more")
    if pool.get("replicas"):
        raise RequestError("decode_pool.share and decode_pool.replicas say the same: leave out one of them")
    decode = min(max(round(share * whole_number), 1), whole_number - 1)
    return values | {"replicas": whole_number - decode, "decode_pool": {**pool, "replicas": decode, "share": None}}


def _step(values: Any) -> Any:
    return SimulateRequest.named(dict(values)) if isinstance(values, Mapping) else values
