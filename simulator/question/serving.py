"""What is asked about a served model: :class:`ServingRequest`, how its engine schedules, and what users expect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...datasets.loading import choice, flag, number, whole
from .canonical import Request, RequestError
from .requests import SimulateRequest
from .traffic import RequestTraffic

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
)
MOST_SEQS = {"vllm": 1024, "trtllm": 2048, "trtllm_max_utilization": 2048, "sglang": 1024, "faster_transformer": 32}
MOST_TOKENS = {"sglang": 16_384, "lightllm": 16_384, "vllm_v0": 4096, "splitwise": 2048}
AUTO = "auto"  # of max_model_len: as long as the model and its KV memory allow
MOST_DRAFTS = 16
MOST_RANKS = 1 << 16  # schedulers, which take some seconds with nothing to do
SEEN = ("weights_gib", "activations_gib", "other_gib", "kv_gib", "kv_tokens")  # what start-up logs say
SWAP_GBPS = 25.0  # of a cache to host memory and back, by PCIe 4


@dataclass(frozen=True)
class Scheduler:
    """How an engine schedules. What is null is as the engine has it.

    ``policy`` is one of POLICIES, or ``module:function`` of your own. ``max_tokens`` is the budget of an iteration,
    ``max_seqs`` what runs at a time, ``chunk`` the prompt tokens of an iteration (sarathi, sglang), ``watermark`` the
    share of blocks that admission leaves free, ``long_prefill_tokens`` the most of one prompt in an iteration (0: no
    limit). ``whole_prompt`` admits a prompt only if all of it fits. ``preemption`` is recompute or swap.
    ``ignore_eos``: clients ask for answers of a given length, as benchmarks do, and sglang counts on where they end.
    ``async_scheduling``: the next iteration is scheduled while one runs. ``wait_iterations``: trtllm holds prompts back
    beside decodes for so many iterations, or until the batch has ``wait_share`` of its tokens; sglang looks for new
    requests every so many decodes alone. ``balance_iterations``: prompts of trtllm's ranks of attention data
    parallelism wait beside decodes until each rank has one, at most so many iterations, and then
    ``gather_iterations`` more (0: they do not wait). ``max_model_len`` null is the model's own length, with which an
    engine may not start; ``auto`` is as much of it as its KV memory holds.
    """

    policy: str = "vllm"
    max_tokens: int | None = None
    max_seqs: int | None = None
    chunk: int | None = None
    max_model_len: int | str | None = AUTO
    watermark: float | None = None
    long_prefill_tokens: int = 0
    whole_prompt: bool = True
    chunked_prefill: bool | None = None
    prefix_caching: bool | None = False
    preemption: str = "recompute"
    mixed_chunk: bool = False
    async_scheduling: bool | None = None
    padded: bool | None = None
    conservativeness: float = 1.0
    ignore_eos: bool = False
    prefill_every: int = 10
    wait_iterations: int = 0
    wait_share: float = 0.0
    balance_iterations: int = 0
    gather_iterations: int = 0
    cuda_graphs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if ":" not in self.policy:
            choice(RequestError, "scheduler.policy", self.policy, POLICIES)
        choice(RequestError, "scheduler.preemption", self.preemption, ("recompute", "swap"))
        for name in ("max_tokens", "max_seqs", "chunk", "max_model_len"):
            if getattr(self, name) not in (None, AUTO if name == "max_model_len" else None):
                whole(RequestError, f"scheduler.{name}", getattr(self, name), 1)
        whole(RequestError, "scheduler.long_prefill_tokens", self.long_prefill_tokens)
        whole(RequestError, "scheduler.prefill_every", self.prefill_every, 1)
        for name in ("wait_iterations", "balance_iterations", "gather_iterations"):
            whole(RequestError, f"scheduler.{name}", getattr(self, name))
        if number(RequestError, "scheduler.wait_share", self.wait_share) > 1:
            raise RequestError(f"scheduler.wait_share={self.wait_share} must be a share, at most 1")
        number(RequestError, "scheduler.conservativeness", self.conservativeness)
        if self.prefix_caching is None:
            object.__setattr__(self, "prefix_caching", False)
        for name in ("whole_prompt", "prefix_caching", "mixed_chunk", "ignore_eos"):
            flag(RequestError, f"scheduler.{name}", getattr(self, name))
        if self.watermark is not None and number(RequestError, "scheduler.watermark", self.watermark) >= 1:
            raise RequestError(f"scheduler.watermark={self.watermark} must be a share below 1")
        for each in self.cuda_graphs:
            whole(RequestError, "scheduler.cuda_graphs", each, 1)

    @property
    def own(self) -> bool:
        """Whether the policy is a user's function."""
        return ":" in self.policy


@dataclass(frozen=True)
class Speculation:
    """Tokens guessed ahead: a draft guesses ``tokens`` in each iteration, which the model checks in one pass.

    ``acceptance`` is how likely a guess is right if those before it were: one number, or one for each position.
    ``draft_share`` is how long one pass of the draft takes, as a share of the model's layers; null: one layer of them,
    as heads for several tokens (MTP, EAGLE) have.
    """

    tokens: int = 0
    acceptance: float | tuple[float, ...] = 0.7
    draft_share: float | None = None

    def __post_init__(self) -> None:
        if whole(RequestError, "speculation.tokens", self.tokens) > MOST_DRAFTS:
            raise RequestError(f"speculation.tokens={self.tokens} must be at most {MOST_DRAFTS}")
        if isinstance(self.acceptance, list):
            object.__setattr__(self, "acceptance", tuple(self.acceptance))
        for each in self.chances:
            if number(RequestError, "speculation.acceptance", each) > 1:
                raise RequestError(f"speculation.acceptance={each} must be a share, at most 1")
        if isinstance(self.acceptance, tuple) and len(self.acceptance) != self.tokens:
            raise RequestError(
                f"speculation.acceptance has {len(self.acceptance)} numbers for speculation.tokens={self.tokens}"
            )
        if self.draft_share is not None:
            number(RequestError, "speculation.draft_share", self.draft_share)

    @property
    def chances(self) -> tuple[float, ...]:
        """The acceptance at each position."""
        return self.acceptance if isinstance(self.acceptance, tuple) else (self.acceptance,) * self.tokens


@dataclass(frozen=True)
class ServingTargets:
    """What users expect, in milliseconds; null: nothing. ``share`` of the requests must meet all of it."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    share: float = 0.9

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
            if getattr(self, name) is not None:
                number(RequestError, f"slo.{name}", getattr(self, name))
        if not 0 < number(RequestError, "slo.share", self.share) <= 1:
            raise RequestError(f"slo.share={self.share} must be a share above 0 and at most 1")

    @property
    def named(self) -> bool:
        """Whether anything is expected."""
        return any(each is not None for each in (self.ttft_ms, self.tpot_ms, self.e2e_ms))


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
        for name, value in vars(self).items():
            number(RequestError, f"law.{name}", value)
        if not any(vars(self).values()):
            raise RequestError("law says that iterations take no time: give law.base_us, or leave law out")


@dataclass(frozen=True)
class KvMemory:
    """KV memory of a rank: ``blocks`` null is what the engine finds free on the device.

    ``fraction`` is the engine's setting of how much of it is for keys and values, ``graphs`` its largest CUDA graph (0:
    none); null: as it has them. ``seen`` is what its start-up log said (:class:`..serving.kv_memory.Overheads`), in
    place of what is simulated.
    """

    blocks: int | None = None
    block_tokens: int | None = None
    bytes_per_token: float = 0.0
    fraction: float | None = None
    graphs: int | None = None
    seen: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("blocks", "block_tokens"):
            if getattr(self, name) is not None:
                whole(RequestError, f"kv.{name}", getattr(self, name), 1)
        number(RequestError, "kv.bytes_per_token", self.bytes_per_token)
        if self.fraction is not None and number(RequestError, "kv.fraction", self.fraction) > 1:
            raise RequestError(f"kv.fraction={self.fraction} must be a share, at most 1")
        if self.graphs is not None:
            whole(RequestError, "kv.graphs", self.graphs)
        for name, value in self.seen.items():
            choice(RequestError, "kv.seen", name, SEEN)
            number(RequestError, f"kv.seen.{name}", value)


@dataclass(frozen=True)
class DecodePool:
    """Replicas that only decode, beside those that then only prefill. ``replicas`` 0: none, all do both. With ``share``
    in place of a number so many of the replicas of a request decode.

    A cache moves at ``link_gbps`` (GB/s of each rank), ``link_us`` after it is ready, null: as the network between
    them has it; ``layers`` above 1: layer by layer, while later ones are computed. ``step`` and ``law`` null are those
    of the others, as is ``attention_dp``. ``first_token`` is sent by the replica that prefills, or by the one that
    decodes when it starts there, as engines of today do.
    """

    replicas: int = 0
    share: float | None = None
    step: SimulateRequest | None = None
    law: IterationLaw | None = None
    kv: KvMemory = field(default_factory=KvMemory)
    max_seqs: int | None = None
    link_gbps: float | None = None
    link_us: float | None = None
    price_per_gpu_hour: float | None = None
    layers: int = 1
    attention_dp: int | None = None
    first_token: str = "decode"

    def __post_init__(self) -> None:
        whole(RequestError, "decode_pool.replicas", self.replicas)
        whole(RequestError, "decode_pool.layers", self.layers, 1)
        for name in ("link_us", "link_gbps", "price_per_gpu_hour"):
            if getattr(self, name) is not None:
                number(RequestError, f"decode_pool.{name}", getattr(self, name))
        if self.attention_dp is not None:
            whole(RequestError, "decode_pool.attention_dp", self.attention_dp, 1)
        choice(RequestError, "decode_pool.first_token", self.first_token, ("prefill", "decode"))
        if self.link_gbps == 0:
            raise RequestError("decode_pool.link_gbps=0 must be more than 0")


@dataclass(frozen=True)
class ServingRequest(Request):
    """Traffic through the replicas of a served model.

    ``step`` says what a replica is: model, device or cluster, layout, framework, precision. ``law`` stands in its place
    where iteration times are given by hand; then ``kv.blocks`` must be too. ``attention_dp`` ranks of a replica have
    schedulers and KV memory of their own and run in lockstep. ``router`` is one of ROUTERS or ``module:function``.
    ``price_per_gpu_hour`` goes before the cluster's. ``intervals`` null: where the run is small.
    """

    step: SimulateRequest | None = None
    law: IterationLaw | None = None
    traffic: RequestTraffic = field(default_factory=RequestTraffic)
    scheduler: Scheduler = field(default_factory=Scheduler)
    kv: KvMemory = field(default_factory=KvMemory)
    slo: ServingTargets = field(default_factory=ServingTargets)
    replicas: int = 1
    attention_dp: int = 1
    router: str = "round_robin"
    decode_pool: DecodePool = field(default_factory=DecodePool)
    speculation: Speculation = field(default_factory=Speculation)
    price_per_gpu_hour: float | None = None
    intervals: bool | None = None

    def __post_init__(self) -> None:
        if self.price_per_gpu_hour is not None:
            number(RequestError, "price_per_gpu_hour", self.price_per_gpu_hour)
        if self.intervals is not None:
            flag(RequestError, "intervals", self.intervals)
        if whole(RequestError, "replicas", self.replicas) == 0:
            raise RequestError("replicas=0 serves nobody: a pool needs one replica at least")
        whole(RequestError, "attention_dp", self.attention_dp, 1)
        if self.ranks > MOST_RANKS:
            more = f", decode_pool.replicas={self.decode_pool.replicas:,}" if self.decode_pool.replicas else ""
            dp = f", attention_dp={self.attention_dp}" if self.attention_dp > 1 else ""
            raise RequestError(
                f"replicas={self.replicas:,}{more}{dp}: at most {MOST_RANKS:,} schedulers are simulated; replicas are "
                "alike, so take a part of them, and the same part of traffic.rate"
            )
        if ":" not in self.router:
            choice(RequestError, "router", self.router, ROUTERS)
        if (self.step is None) == (self.law is None):
            raise RequestError("a replica needs a model to serve (model=llama3_8b), or iteration times given by hand")
        if self.law is not None and self.kv.blocks is None:
            raise RequestError("iteration times given by hand need kv.blocks, the KV memory of a replica")

    @property
    def ranks(self) -> int:
        """Schedulers in all."""
        return self.replicas * self.attention_dp + self.decode_pool.replicas * self.decode_dp

    @property
    def decode_dp(self) -> int:
        """Schedulers of a replica of the pool that decodes."""
        return self.decode_pool.attention_dp or self.attention_dp

    @classmethod
    def named(cls, values: dict[str, Any]) -> dict[str, Any]:
        pool = values.get("decode_pool")
        if isinstance(pool, Mapping):
            values = values | {"decode_pool": {**pool, "step": _step(pool.get("step"))}}
            if pool.get("share") is not None:
                values = _shared_out(values)
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
