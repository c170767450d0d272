"""What a search over ways to serve a model is asked, as frozen data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from ....datasets.clusters import Cluster, load_cluster
from ....datasets.loading import check_fields, choice, number
from ...question.canonical import RequestError
from ...question.declaration import setting
from ...question.request_classes import ServingTargets
from ...question.requests import SimulateRequest
from ...question.serving import POLICIES
from ..objectives import OF_SERVING
from ..question import Checks, SearchAxes, SearchQuestion, word
from ..rank import Row

POOLS = ("together", "apart")
FIGURES = (
    *("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms", "transfer_ms", "decode_ms", "prompt_ms"),
    *("tokens_per_s_per_gpu", "tokens_per_s_per_user", "tokens_per_s", "requests_per_s", "goodput"),
    *("kv_share", "concurrency", "cost_per_million_tokens", "hourly_cost", "devices"),
    "replicas",
)
LAYOUT = ("tp", "pp", "dp", "ep")
OF_PREFILL = ("prefill_tp", "prefill_pp", "prefill_dp", "prefill_ep")
OF_POINT = (
    *("cluster", "precision", "pools", "policy", *LAYOUT, "batch", "max_tokens"),
    *("prefill_cluster", *OF_PREFILL, "ratio"),
)


@dataclass(frozen=True)
class ServedSpace(SearchAxes):
    """Axes of a search over ways to serve, each a list of values; without any, what is natural for model and cluster.

    A replica has ``tp`` x ``pp`` x ``dp`` GPUs; ``dp`` ranks of attention share the experts out over ``ep`` ranks.
    """

    WHOLE = ("nodes", *LAYOUT, "batch", "max_tokens")
    CHECKS: ClassVar[Checks] = {
        "pools": lambda name, value: choice(RequestError, name, word(name, value), POOLS),
        "policy": lambda name, value: choice(RequestError, name, word(name, value), POLICIES),
        "ratio": lambda name, value: ratio_of(word(name, value)),
        "prefill_cluster": lambda name, value: load_cluster(word(name, value)),
    }

    pools: tuple[str, ...] = setting((), "together (each replica prefills and decodes) | apart; [] = both")
    policy: tuple[str, ...] = setting((), "of the scheduler, as scheduler.policy of `opcast serving`; [] = vllm")
    tp: tuple[int, ...] = setting(
        (), "tensor parallel; [] = powers of two that divide the attention heads, within a node"
    )
    pp: tuple[int, ...] = setting((), "pipeline stages; [] = 1")
    dp: tuple[int, ...] = setting(
        (), "attention data ranks of a replica; [] = 1, and powers of two where there are experts"
    )
    ep: tuple[int, ...] = setting((), "expert parallel; [] = all ranks of a replica, or 1")
    batch: tuple[int, ...] = setting((), "sequences that a rank decodes at a time; [] = 1, 2, 4 … 512")
    max_tokens: tuple[int, ...] = setting(
        (), "of an iteration, the chunk of a prompt; [] = 2,048, 8,192 and the engine's own"
    )
    ratio: tuple[str, ...] = setting(
        (), 'of pools apart, prefill:decode replicas, such as ["1:3"]; [] = the best that fits'
    )
    prefill_cluster: tuple[str, ...] = setting(
        (), "of pools apart, whose GPUs prefill, with as many nodes as those that decode; [] = the same GPUs"
    )
    rules: tuple[str, ...] = setting((), 'what must hold of a point, such as ["replica_devices <= 8"]')


def ratio_of(text: str) -> tuple[int, int]:
    """Replicas that prefill and that decode, of ``1:3``. RequestError for what is no such thing."""
    prefill, _, decode = text.partition(":")
    if not (prefill.isdecimal() and decode.isdecimal() and int(prefill) and int(decode)) or len(text) > 12:
        raise RequestError(f"space.ratio={text!r} must be replicas that prefill and that decode, as 1:3")
    return int(prefill), int(decode)


NAMES = (*OF_POINT, "devices", "replicas", "prefill_replicas", "replica_devices")
RULE_NAMES = (*(name for name in OF_POINT if name != "ratio"), "replica_devices")


OF_PAIR = ("prefill_cluster", *OF_PREFILL, "ratio")
SETTINGS = ("cluster", "nodes", "precision", "policy", *LAYOUT, "batch", "max_tokens", "pools", *OF_PAIR)

USUAL_OBJECTIVES = ("tokens_per_s_per_gpu", "tokens_per_s_per_user")
CHANCE = "chance"
SIZED_OBJECTIVES = ("gpus", "hourly_cost", "tokens_per_s_per_user")  # where a rate is to be served


@dataclass(frozen=True)
class ServedSearchRequest(SearchQuestion):
    """The best ways to serve a model to many users at a time.

    ``step`` says what is served and where, with all that is not searched.
    """

    step: SimulateRequest = field(default_factory=lambda: SimulateRequest(model="llama3_8b"), metadata={"hidden": True})
    input_len: int = setting(1024, "tokens of a prompt")
    output_len: int = setting(256, "tokens of an answer", least=2)
    slo: ServingTargets = field(default_factory=ServingTargets)
    link_gbps: float = setting(50.0, "between pools, of each rank, in GB/s", positive=True)
    link_us: float = setting(20.0, "until a cache begins to move")
    space: ServedSpace = field(default_factory=ServedSpace)
    objectives: tuple[str, ...] = setting(
        USUAL_OBJECTIVES,
        "…, tokens_per_s | goodput | ttft | tpot | e2e | token_cost | hourly_cost | gpus | "
        "chance (that the 99th percentile of TTFT is within slo.ttft_ms at rate); the first ranks",
    )
    constraints: tuple[str, ...] = setting((), 'what a point must meet, such as ["kv_share <= 0.8", "devices == 32"]')
    top: int = setting(10, "so many of the best are shown")
    noise_floor: float = setting(0.03, "points this close are a tie")
    confirm: int | None = setting(
        None,
        "ways that the event loop of `opcast serving` plays, for the load at which they keep slo; null: those that may "
        "be best, where slo says something",
    )
    rate: float | None = setting(
        None, "requests a second to serve: each way has the fewest GPUs that do; ranked by gpus, then by hourly_cost"
    )
    prices: Mapping[str, float] = setting(
        {},
        "of a GPU and hour by cluster: prices.dgx_h100=2.5; without, price_per_gpu_hour or the cluster's own",
    )

    OBJECTIVES = OF_SERVING
    COUNTS = ("top", "input_len")
    RULED = RULE_NAMES
    READ = (*FIGURES, *NAMES)
    POINT = SETTINGS
    NOUNS = ("setting", "settings", "FILE")

    def check(self) -> None:
        """RequestError for a replica that cannot be searched, and for what both the step and the space say."""
        check_fields(self, RequestError)
        for name, price in self.prices.items():
            number(RequestError, f"prices.{name}", price)
            if name not in (names := self.clusters()):
                raise RequestError(f"prices has {name}, which is not searched: {', '.join(names)} are")
        if self.rate == 0:
            raise RequestError("rate=0 asks for nothing: leave rate out, or give requests a second")
        if self.space.prefill_cluster and self.space.pools == ("together",):
            raise RequestError("space.prefill_cluster is of pools apart: leave space.pools=together out")
        if CHANCE in self.objectives and (self.objectives[0] != CHANCE or not self.rate or not self.slo.ttft_ms):
            raise RequestError("objectives=[chance] stands first, and needs a rate and slo.ttft_ms")
        if self.rate is not None and self.objectives == USUAL_OBJECTIVES:
            object.__setattr__(self, "objectives", SIZED_OBJECTIVES)
        if "goodput" in self.objectives and not self.slo.named:
            raise RequestError("objectives=[goodput] needs what users expect: slo.ttft_ms=500, slo.tpot_ms=30")
        self.check_place()
        self.check_degrees(*LAYOUT, "cp", "vpp", "etp")

    def clusters(self, also: Sequence[str] = ()) -> dict[str, Cluster]:
        return super().clusters((*also, *self.space.prefill_cluster))

    @property
    def size_for(self) -> float | None:
        """Requests a second that each way has the fewest GPUs for; None: all GPUs."""
        return None if self.objectives[0] == CHANCE else self.rate

    @property
    def expected(self) -> dict[str, float]:
        """What users expect at most, by figure."""
        most = {"ttft_ms": self.slo.ttft_ms, "tpot_ms": self.slo.tpot_ms, "e2e_ms": self.slo.e2e_ms}
        return {name: value for name, value in most.items() if value is not None}

    def good(self, rows: Sequence[Row]) -> list[Row]:
        """The rows that meet all constraints, give users what they expect, and serve the rate asked for."""
        least = self.size_for or 0.0
        return [row for row in super().good(rows) if row["meets_slo"] and row["requests_per_s"] >= least]

    def limits(self) -> tuple[str, ...]:
        """What :meth:`good` rows meet, as text."""
        share = f" of {self.slo.share:.0%}"
        rules = [f"{name}{share} <= {most:g}" for name, most in self.expected.items()]
        return (*self.constraints, *rules, *([] if self.size_for is None else [f"requests_per_s >= {self.rate:g}"]))


@dataclass(frozen=True)
class ReplicaLayout:
    """What a replica is made of: a kind of cluster, a format of weights, and degrees."""

    cluster: str
    nodes: int
    precision: str
    tp: int
    pp: int
    dp: int
    ep: int

    @property
    def devices(self) -> int:
        """GPUs of a replica."""
        return self.tp * self.pp * self.dp

    def values(self, prefix: str = "") -> dict[str, int]:
        """Degrees by name."""
        return {f"{prefix}{name}": getattr(self, name) for name in LAYOUT}

    @classmethod
    def of(cls, row: Row, names: Sequence[str]) -> Self:
        """The layout of a row's replicas, whose degrees are called ``names``: :data:`LAYOUT` or :data:`OF_PREFILL`."""
        other = row["prefill_cluster"] if names is OF_PREFILL else ""
        return cls(other or row["cluster"], row["nodes"], row["precision"], *(row[name] for name in names))


def step_of(request: ServedSearchRequest, layout: ReplicaLayout, clusters: Mapping[str, Cluster]) -> SimulateRequest:
    """The step of a replica with a layout, on as many nodes as it needs."""
    cluster = clusters[layout.cluster]
    return request.placed(
        replace(cluster, nodes=-(-layout.devices // cluster.devices_per_node)),
        layout.precision,
        parallel=replace(request.step.parallel, tp=layout.tp, pp=layout.pp, ep=layout.ep),
    )
