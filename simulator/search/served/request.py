"""What a search over ways to serve a model is asked, as frozen data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ....datasets.clusters import Cluster, load_cluster
from ....datasets.loading import choice, number, whole
from ....datasets.precisions import precision_of
from ...question.canonical import Request, RequestError
from ...question.place import looked_up
from ...question.plan import Parallel
from ...question.requests import SimulateRequest
from ...question.serving import POLICIES, ServingTargets
from ..expressions import Expression, contradiction, parse
from ..objectives import OF_SERVING

POOLS = ("together", "apart")
FIGURES = (
    *("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms", "transfer_ms", "decode_ms", "prompt_ms"),
    *("tokens_per_s_per_gpu", "tokens_per_s_per_user", "tokens_per_s", "requests_per_s", "goodput"),
    *("kv_share", "concurrency", "cost_per_million_tokens", "devices", "replicas"),
)
LAYOUT = ("tp", "pp", "dp", "ep")
OF_PREFILL = ("prefill_tp", "prefill_pp", "prefill_dp", "prefill_ep")
OF_POINT = ("cluster", "precision", "pools", "policy", *LAYOUT, "batch", "max_tokens", *OF_PREFILL, "ratio")


@dataclass(frozen=True)
class ServedSpace:
    """Axes of a search over ways to serve, each a list of values; without any, what is natural for model and cluster.

    ``cluster``, ``nodes`` and ``precision`` are as in a search over training. A replica has ``tp`` x ``pp`` x ``dp``
    GPUs; ``dp`` ranks of attention share the experts out over ``ep`` ranks. ``batch`` sequences decode at a time on
    each rank, ``max_tokens`` are those of an iteration (the chunk of a prompt). ``pools`` is ``together`` (each replica
    prefills and decodes) and ``apart`` (some only prefill, the others only decode); a ``ratio`` is then
    ``prefill:decode`` replicas, as ``1:3``; without any the best one of all that fit. ``rules`` must hold of a point.
    """

    cluster: tuple[str, ...] = ()
    nodes: tuple[int, ...] = ()
    precision: tuple[str, ...] = ()
    pools: tuple[str, ...] = ()
    policy: tuple[str, ...] = ()
    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    dp: tuple[int, ...] = ()
    ep: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()
    max_tokens: tuple[int, ...] = ()
    ratio: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for each in fields(self):
            values = getattr(self, each.name)
            values = (values,) if isinstance(values, (str, int)) else tuple(values or ())
            object.__setattr__(self, each.name, tuple(dict.fromkeys(values)))
            for value in values:
                _check(each.name, value)


def _check(name: str, value: Any) -> None:
    """RequestError for a value that an axis cannot have."""
    setting = f"space.{name}"
    if name in ("nodes", *LAYOUT, "batch", "max_tokens"):
        whole(RequestError, setting, value, 1)
    elif not isinstance(value, str):
        raise RequestError(f"{setting}={value!r} must be a word")
    elif name == "pools":
        choice(RequestError, setting, value, POOLS)
    elif name == "policy":
        choice(RequestError, setting, value, POLICIES)
    elif name == "precision":
        precision_of(value)
    elif name == "cluster":
        load_cluster(value)
    elif name == "ratio":
        ratio_of(value)


def ratio_of(text: str) -> tuple[int, int]:
    """Replicas that prefill and that decode, of ``1:3``. RequestError for what is no such thing."""
    prefill, _, decode = text.partition(":")
    if not (prefill.isdecimal() and decode.isdecimal() and int(prefill) and int(decode)) or len(text) > 12:
        raise RequestError(f"space.ratio={text!r} must be replicas that prefill and that decode, as 1:3")
    return int(prefill), int(decode)


NAMES = (*OF_POINT, "devices", "replicas", "prefill_replicas", "replica_devices")
RULE_NAMES = (*(name for name in OF_POINT if name != "ratio"), "replica_devices")


@dataclass(frozen=True)
class ServedSearchRequest(Request):
    """The best ways to serve a model to many users at a time.

    ``step`` says what is served and where, with all that is not searched. Requests have ``input_len`` tokens and get
    ``output_len``; ``slo`` is what users expect. Between pools caches move at ``link_gbps`` (GB/s of a rank).
    ``objectives`` (:data:`..objectives.OF_SERVING`), ``constraints``, ``top`` and ``noise_floor`` are those of a search
    over training. So many of the best as ``confirm`` says are played through the event loop of ``opcast serving``.
    """

    step: SimulateRequest = field(default_factory=lambda: SimulateRequest(model="llama3_8b"))
    input_len: int = 1024
    output_len: int = 256
    slo: ServingTargets = field(default_factory=ServingTargets)
    link_gbps: float = 50.0
    link_us: float = 20.0
    space: ServedSpace = field(default_factory=ServedSpace)
    objectives: tuple[str, ...] = ("tokens_per_s_per_gpu", "tokens_per_s_per_user")
    constraints: tuple[str, ...] = ()
    top: int = 10
    noise_floor: float = 0.03
    confirm: int = 0

    def __post_init__(self) -> None:
        for name in ("objectives", "constraints"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        for name in self.objectives:
            choice(RequestError, "objectives", name, tuple(OF_SERVING))
        if not self.objectives:
            raise RequestError("objectives=[] says nothing of what is best; take [tokens_per_s_per_gpu]")
        for name in ("top", "input_len"):
            whole(RequestError, name, getattr(self, name), 1)
        whole(RequestError, "output_len", self.output_len, 2)
        whole(RequestError, "confirm", self.confirm)
        for name in ("noise_floor", "link_us"):
            number(RequestError, name, getattr(self, name))
        if number(RequestError, "link_gbps", self.link_gbps) == 0:
            raise RequestError("link_gbps=0 must be more than 0")
        if "goodput" in self.objectives and not self.slo.named:
            raise RequestError("objectives=[goodput] needs what users expect: slo.ttft_ms=500, slo.tpot_ms=30")
        self._check_step()
        self.expressions()

    def _check_step(self) -> None:
        """RequestError for a replica that cannot be searched, and for what both the step and the space say."""
        step, usual = self.step, Parallel()
        if step.cluster is None and not self.space.cluster:
            raise RequestError("a search needs a cluster: cluster=dgx_h100 cluster.nodes=4 (`opcast list clusters`)")
        for name in (*LAYOUT, "cp", "vpp", "etp"):
            if getattr(step.parallel, name) != getattr(usual, name):
                raise RequestError(
                    f"parallel.{name}={getattr(step.parallel, name)} is said by the search: space.{name}"
                )
        if step.network.fidelity not in ("auto", "analytical") or step.network.named or step.stragglers:
            raise RequestError("a search times collectives by formula on healthy devices: leave network and faults out")

    def expressions(self) -> tuple[list[Expression], list[Expression]]:
        """Rules and constraints, parsed. RequestError for what is none, and for two that no point can meet."""
        rules = [parse(text, RULE_NAMES, "space.rules") for text in self.space.rules]
        met = [parse(text, tuple(dict.fromkeys((*FIGURES, *NAMES))), "constraints") for text in self.constraints]
        both = contradiction([*rules, *met])
        if both is not None:
            raise RequestError(
                f"no point can meet both {both[0]!r} and {both[1]!r}: leave one out, or change its number"
            )
        return rules, met

    @classmethod
    def named(cls, values: dict[str, Any]) -> dict[str, Any]:
        if isinstance(values.get("step"), Mapping):
            values = {**values, "step": looked_up(dict(values["step"]))}
        return values


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


def step_of(request: ServedSearchRequest, layout: ReplicaLayout, clusters: Mapping[str, Cluster]) -> SimulateRequest:
    """The step of a replica with a layout, on as many nodes as it needs."""
    step = request.step
    whole_cluster = clusters[layout.cluster]
    nodes = -(-layout.devices // whole_cluster.devices_per_node)
    cluster = replace(whole_cluster, nodes=nodes)
    dtype, quantization = step.precision, step.quantization
    if layout.precision != (quantization or dtype):
        dtype, quantization = precision_of(layout.precision)
    return replace(
        step,
        cluster=cluster,
        device=step.device if step.cluster is not None and step.cluster.id == layout.cluster else "cpu",
        parallel=replace(step.parallel, tp=layout.tp, pp=layout.pp, ep=layout.ep),
        precision=dtype,
        quantization=quantization,
    )


def clusters_of(request: ServedSearchRequest) -> dict[str, Cluster]:
    """The clusters that are asked about, by name."""
    own = request.step.cluster
    names: Sequence[str] = request.space.cluster or (() if own is None else (own.id,))
    nodes = 1 if own is None else own.nodes
    return {
        name: own if own is not None and name == own.id else replace(load_cluster(name), nodes=nodes) for name in names
    }
