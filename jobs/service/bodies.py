"""What may be asked over HTTP: bodies in the words of ``opcast.predict`` and ``opcast.simulate``, and their requests.

A body names what ships with opcast or lies in the server's store (:mod:`.naming` sees to it before one is made).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from ...datasets.loading import load
from ...datasets.ops import KINDS, kind
from ...simulator.network.faults import SHORT, Fault
from ...simulator.question.canonical import RequestError
from ...simulator.question.keywords import given_dims, predict_request, simulate_request
from ...simulator.question.options import CHECKS
from ...simulator.question.place import THIS_MACHINE
from ...simulator.question.plan import Parallel
from ...simulator.question.predictions import PredictRequest
from ...simulator.question.requests import SimulateRequest
from ...simulator.question.serving import DecodePool, KvMemory, Scheduler, ServingRequest, ServingTargets
from ...simulator.question.sources import Sources
from ...simulator.question.stragglers import Straggler
from ...simulator.question.traffic import RequestTraffic
from ...simulator.question.work import Work
from ...simulator.search.request import SearchRequest
from ...simulator.search.served.request import ServedSearchRequest, ServedSpace
from ...simulator.search.space import Space
from .settings import ServiceSettings

LONGEST_NAME = 200
MOST_LISTED = 100_000
Name = Annotated[str, Field(max_length=LONGEST_NAME)]
Count = Annotated[int, Field(ge=-(2**53), le=2**53)]


class Body(BaseModel):
    """Unknown fields are refused, and so are numbers that are none."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class SourceBody(Body):
    """Which measurements and predictors answer, among the server's own."""

    backend: Name | None = None
    engines: list[Name] | None = Field(None, max_length=10, description="engines in the order they are asked")

    def sources(self, usual: Sources) -> Sources:
        """The server's sources as this body wants them."""
        order = tuple(self.engines) if self.engines is not None else usual.order
        return replace(usual, backend=self.backend or usual.backend, order=order)


class OpBody(BaseModel):
    """An op: its kind, dims by name, dtype and out_dtype."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={"examples": [{"kind": "gemm", "m": 4096, "n": 4096, "k": 4096, "dtype": "bf16"}]},
    )
    kind: Name


class PlaceBody(SourceBody):
    """Where ops run: a device, or the links of a cluster of them."""

    device: Name = Field("h100_sxm", description="an id of GET /v1/devices")
    cluster: Name | None = Field(None, description="an id of GET /v1/clusters, for collectives")
    nodes: Count | None = None
    cache: Name = "warm"
    network: Name = "auto"
    power_cap_w: float | None = None
    sm_clock_mhz: float | None = None


class PredictBody(PlaceBody):
    """One op, as ``opcast.predict`` takes it."""

    op: OpBody
    group: list[Count] | None = Field(None, max_length=MOST_LISTED)
    stride: Count | None = None
    all_groups: bool = False
    algorithm: Name | None = None


class BatchBody(PlaceBody):
    """Many ops on one device or cluster."""

    ops: list[OpBody]


def predict_of(body: PredictBody | BatchBody, usual: Sources) -> PredictRequest:
    """The request of a body. Raises the errors of :func:`opcast.predict`."""
    many = body.ops if isinstance(body, BatchBody) else [body.op]
    asked: dict[str, Any] = {"group": None, "stride": None, "all_groups": False, "algorithm": None}
    asked |= {name: getattr(body, name) for name in asked if hasattr(body, name)}
    ops = [kind(each.kind).op(**given_dims(each.model_extra or {}, asked["group"])) for each in many]
    asked |= {name: getattr(body, name) for name in ("nodes", "cache", "network", "power_cap_w", "sm_clock_mhz")}
    return predict_request(ops, body.device, body.cluster, body.sources(usual), asked, {})


def fabric_of(body: PredictBody, usual: Sources) -> PredictRequest:
    """The request about a collective whose links are shown. RequestError for what runs on no links."""
    if body.cluster is None:
        raise RequestError("a picture of links needs a cluster: name one of GET /v1/clusters")
    made = predict_of(body.model_copy(update={"network": "flow"}), usual)
    if KINDS[made.ops[0].kind].family != "collective":
        raise RequestError(f"op.kind={body.op.kind} runs on no links: take a collective, such as all_reduce")
    return replace(made, loads=True)


def _fields_of(kind: type, left_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of a dataclass as those of a body: of the same types, none of them required."""
    types = get_type_hints(kind)
    made: dict[str, Any] = {}
    for each in fields(kind):
        if each.name not in left_out:
            usual = each.default if each.default is not MISSING else None
            made[each.name] = (_plainly(types[each.name]) | None, Field(None, description=f"default: {usual}"))
    return made


def _plainly(kind: Any) -> Any:
    """The type, its whole numbers within what JSON keeps exactly."""
    return Count if kind is int else kind


def _settings(kind: type, more: Sequence[str] = ()) -> dict[str, Any]:
    """The schema of a mapping of a dataclass's settings: their names, and those of the dataclasses among them."""
    types = get_type_hints(kind)
    made = {each.name: _setting(types[each.name]) for each in fields(kind)} | {name: {} for name in more}
    return {"properties": made}


def _setting(kind: Any) -> dict[str, Any]:
    inner = next((each for each in (kind, *get_args(kind)) if isinstance(each, type) and is_dataclass(each)), None)
    return {} if inner is None or inner is SimulateRequest else _settings(inner)


def _each(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a list of mappings."""
    return {"items": schema}


WORK = _fields_of(Work, ("kind",))
LAYOUT = _fields_of(Parallel)


class LaidOutBody(SourceBody):
    """A model on a device or a cluster, and how it runs there."""

    model: Name | dict[str, Any] = Field(description="an id of GET /v1/models, or a transformers configuration")
    device: Name | None = Field(None, description="an id of GET /v1/devices; that of the cluster where there is one")
    cluster: Name | None = Field(None, description="an id of GET /v1/clusters")
    nodes: Count | None = None
    stack: Name | None = Field(None, description="an id of GET /v1/stacks")
    precision: Name | None = Field(None, description="an id of GET /v1/precisions")
    quantization: Name | None = None
    kv_dtype: Name | None = Field(None, description="format of keys and values: same, fp8 or int8")
    recompute: Name | None = None
    offload: list[Name] | None = Field(None, max_length=10)
    micro_batches: Count | None = None
    options: dict[str, Any] | None = Field(None, json_schema_extra={"properties": {name: {} for name in CHECKS}})
    stragglers: list[dict[str, Any]] | None = Field(
        None, max_length=1000, json_schema_extra=_each(_settings(Straggler))
    )
    network: Name | None = None
    faults: list[dict[str, Any]] | None = Field(
        None, max_length=10_000, json_schema_extra=_each(_settings(Fault, tuple(SHORT)))
    )
    price_per_gpu_hour: float | None = None
    power_cap_w: float | None = None


class StepBody(LaidOutBody):
    """A step as ``opcast.simulate`` takes it: model, workload, and device or cluster."""

    workload: Name = "train"


SimulateBody = create_model(
    "SimulateBody",
    __base__=StepBody,
    __doc__="A step as ``opcast.simulate`` takes it: model, workload, device or cluster, layout.",
    **WORK,
    **LAYOUT,
)


def _axis(kind: Any) -> Any:
    """The field of an axis of so many values of a kind."""
    value = get_args(kind)[0]
    return list[value] | None, Field(None, max_length=1000)  # type: ignore[valid-type]


SPACE = {name: _axis(kind) for name, kind in get_type_hints(Space).items()}
SpaceBody = create_model("SpaceBody", __base__=Body, __doc__="Axes of a search; one left out is natural.", **SPACE)


class SearchBody(SourceBody):
    """The best layouts of a training step on a cluster, as ``opcast.search`` takes it."""

    model: Name | dict[str, Any] = Field(description="an id of GET /v1/models, or a transformers configuration")
    cluster: Name = Field("dgx_h100", description="an id of GET /v1/clusters")
    nodes: Count | None = None
    seq_len: Count | None = None
    global_batch: Count
    stack: Name | None = None
    precision: Name | None = None
    price_per_gpu_hour: float | None = None
    space: SpaceBody | None = None  # type: ignore[valid-type]
    objectives: list[Name] = Field(["step_time", "memory"], max_length=10)
    constraints: list[Name] = Field([], max_length=100)
    top: Count = 10
    sampler: Name = "auto"
    trials: Count = 1000
    seed: Count = 0


OF_SEARCH = ("objectives", "constraints", "top", "sampler", "trials", "seed")


def search_of(body: SearchBody, usual: Sources) -> SearchRequest:
    """The request of a body. RequestError for what cannot be searched."""
    left_out = {"model", "space", "backend", "engines", *OF_SEARCH}
    given = body.model_dump(exclude_none=True, exclude=left_out)
    base = simulate_request(body.model, "train", THIS_MACHINE, body.sources(usual), given)
    axes: BaseModel | None = body.space
    space = {} if axes is None else {name: tuple(value) for name, value in axes.model_dump(exclude_none=True).items()}
    own = {name: getattr(body, name) for name in OF_SEARCH}
    lists = {name: tuple(value) for name, value in own.items() if isinstance(value, list)}
    return SearchRequest(base=base, space=Space(**space), **own | lists)


SERVED_SPACE = {name: _axis(kind) for name, kind in get_type_hints(ServedSpace).items()}
ServedSpaceBody = create_model(
    "ServedSpaceBody",
    __base__=Body,
    __doc__="Axes of a search over ways to serve; one left out is natural.",
    **SERVED_SPACE,
)


class ServedSearchBody(SourceBody):
    """The best ways to serve a model on a cluster, as ``opcast.search_serving`` takes it."""

    model: Name | dict[str, Any] = Field(description="an id of GET /v1/models, or a transformers configuration")
    cluster: Name = Field("dgx_h100", description="an id of GET /v1/clusters")
    nodes: Count | None = None
    input_len: Count = 1024
    output_len: Count = 256
    slo: dict[str, float | None] = Field({}, max_length=10, description="ttft_ms, tpot_ms, e2e_ms")
    stack: Name | None = None
    precision: Name | None = None
    kv_dtype: Name | None = Field(None, description="format of keys and values: same, fp8 or int8")
    price_per_gpu_hour: float | None = None
    link_gbps: float = 50.0
    space: ServedSpaceBody | None = None  # type: ignore[valid-type]
    objectives: list[Name] = Field(["tokens_per_s_per_gpu", "tokens_per_s_per_user"], max_length=10)
    constraints: list[Name] = Field([], max_length=100)
    top: Count = 10


OF_SERVED_SEARCH = ("input_len", "output_len", "link_gbps", "objectives", "constraints", "top")


def served_search_of(body: ServedSearchBody, usual: Sources) -> ServedSearchRequest:
    """The request of a body. RequestError for what cannot be searched."""
    left_out = {"model", "space", "slo", "backend", "engines", *OF_SERVED_SEARCH}
    given = body.model_dump(exclude_none=True, exclude=left_out)
    step = simulate_request(body.model, "decode", THIS_MACHINE, body.sources(usual), given)
    axes: BaseModel | None = body.space
    space = {} if axes is None else {name: tuple(value) for name, value in axes.model_dump(exclude_none=True).items()}
    own = {name: getattr(body, name) for name in OF_SERVED_SEARCH}
    lists = {name: tuple(value) for name, value in own.items() if isinstance(value, list)}
    slo = load(ServingTargets, _given(body.slo), RequestError, "slo")
    return ServedSearchRequest(step=step, space=ServedSpace(**space), slo=slo, **own | lists)


class ServingBody(LaidOutBody):
    """Traffic on a served model, as ``opcast.serving`` takes it; what a replica is says the step's own fields."""

    traffic: dict[str, Any] = Field({}, description="what comes", json_schema_extra=_settings(RequestTraffic))
    scheduler: dict[str, Any] = Field({}, description="how it is scheduled", json_schema_extra=_settings(Scheduler))
    kv: dict[str, Any] = Field(
        {}, description="blocks null: what the engine finds free", json_schema_extra=_settings(KvMemory)
    )
    slo: dict[str, Any] = Field({}, description="what users expect", json_schema_extra=_settings(ServingTargets))
    decode_pool: dict[str, Any] = Field(
        {}, description="replicas that only decode; step is not taken here", json_schema_extra=_settings(DecodePool)
    )
    replicas: Count = 1
    attention_dp: Count = 1
    router: Name = "round_robin"


ReplicaBody = create_model("ReplicaBody", __base__=ServingBody, __doc__=ServingBody.__doc__, **LAYOUT)
OF_TRAFFIC = ("traffic", "scheduler", "kv", "slo", "decode_pool", "replicas", "attention_dp", "router")


def serving_of(body: ServingBody, settings: ServiceSettings) -> ServingRequest:
    """The request of a body. RequestError for a question within a question, or more requests than are taken."""
    from ...simulator.serving.connect import usual_serving_stack

    own = {name: getattr(body, name) for name in OF_TRAFFIC}
    policy = str(body.scheduler.get("policy", "vllm"))
    if body.decode_pool.get("step") is not None:
        raise RequestError("decode_pool.step is not taken over HTTP: use `opcast serving` or Python")
    made = ServingRequest.from_dict({**own, "law": {"base_us": 1.0}, "kv": {"blocks": 1, **_given(body.kv)}})
    if made.traffic.requests > settings.batch:
        raise RequestError(f"traffic.requests={made.traffic.requests:,} is more than the {settings.batch:,} taken here")
    left_out = {"model", "device", "backend", "engines", *OF_TRAFFIC}
    given = body.model_dump(exclude_none=True, exclude=left_out)
    given.setdefault("stack", usual_serving_stack(policy))
    sources = body.sources(settings.sources)
    step = simulate_request(body.model, "decode", body.device or THIS_MACHINE, sources, given)
    if body.device is None and step.cluster is None:
        raise RequestError("a replica needs a device or a cluster: name one of GET /v1/devices or GET /v1/clusters")
    return replace(made, step=step, law=None, kv=KvMemory(**_given(body.kv)))


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def simulate_of(body: StepBody, usual: Sources) -> SimulateRequest:
    """The request of a body. RequestError for a step that needs a file, or has no place to run on."""
    given = body.model_dump(exclude_none=True, exclude={"model", "workload", "device", "backend", "engines"})
    if body.workload == "simai":
        raise RequestError("workload=simai needs a file, which is not taken over HTTP: use `opcast simulate`")
    made: SimulateRequest = simulate_request(
        body.model, body.workload, body.device or THIS_MACHINE, body.sources(usual), given
    )
    if body.device is None and made.cluster is None:
        raise RequestError("a step needs a device or a cluster: name one of GET /v1/devices or GET /v1/clusters")
    return made
