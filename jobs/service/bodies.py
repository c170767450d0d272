"""What may be asked over HTTP: bodies generated from the settings that each verb declares, and their requests.

A body names what ships with opcast or lies in the server's store (:mod:`.naming` sees to it before one is made).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic_core import PydanticCustomError

from ...datasets.ops import KINDS, kind
from ...simulator.network.faults import ALIASES, Fault
from ...simulator.question.canonical import RequestError
from ...simulator.question.declaration import RequestSetting, dataclass_in, plain_default
from ...simulator.question.keywords import given_dims, predict_request
from ...simulator.question.options import CHECKS
from ...simulator.question.place import THIS_MACHINE
from ...simulator.question.predictions import PredictRequest
from ...simulator.question.sources import Sources
from ...simulator.serving.trace_formats.drawn import drawn_names
from ..questions import request_of, settings, sources_of, usual
from ..sweeping import ANSWERS, QuestionSweep, sweep_of
from .misshapen import complaint
from .naming import admit
from .settings import ServiceSettings

LONGEST_NAME = 2000
MOST_LISTED = 100_000
MOST_RATES = 100
Name = Annotated[str, Field(max_length=LONGEST_NAME)]


def _no_flag(value: Any) -> Any:
    """The value; an error for true and false, which pydantic would take for 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "true and false are no numbers")
    return value


Count = Annotated[int, Field(ge=-(2**53), le=2**53), BeforeValidator(_no_flag)]
Number = Annotated[float, BeforeValidator(_no_flag)]
PLAIN = {str: Name, int: Count, float: Number}  # types as JSON has them
NOT_HERE = "is not taken over HTTP"
PLACED = {  # verb -> what runs somewhere: its body names a device or a cluster
    "simulate": "a step",
    "upgrade": "a step",
    "plan": "a job",
    "posttrain": "post-training",
    "serving": "a replica",
}
COUNTS: dict[str, dict[str, Callable[[Any], int]]] = {  # verb -> what a request has no more of than a batch has ops
    "plan": {"lives": lambda request: request.lives},
    "posttrain": {
        "prompts x responses x batches": lambda request: request.sequences * request.batches,
        "lives": lambda request: request.lives,
    },
    "serving": {"traffic.requests": lambda request: request.traffic.requests},
}
OF_AN_OP = ("group", "stride", "all_groups", "algorithm")  # settings of a prediction of one op, not of many


class Body(BaseModel):
    """Unknown fields are refused, and so are numbers that are none."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    refused: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def without_refused(cls, values: Any) -> Any:
        """The values; an error for a setting of the verb that HTTP does not take, with the reason."""
        for name in values if isinstance(values, Mapping) else ():
            if name in cls.refused and values[name] is not None:
                raise ValueError(f"{name} {NOT_HERE}: {cls.refused[name]}")
        return values


class OpBody(BaseModel):
    """An op: its kind, dims by name, dtype and out_dtype."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={"examples": [{"kind": "gemm", "m": 4096, "n": 4096, "k": 4096, "dtype": "bf16"}]},
    )
    kind: Name


def body_of(verb: str, name: str, doc: str, left_out: Sequence[str] = (), **more: Any) -> Any:
    """The body of a verb: a field for each of its settings, none of them required, and ``more``."""
    return _body([setting for setting in settings(verb) if setting.name not in left_out], name, doc, more)


def _body(declared: Collection[RequestSetting], name: str, doc: str, more: Mapping[str, Any]) -> Any:
    own_fields = {setting.name: _field(setting) for setting in declared if not setting.http}
    body = create_model(name, __base__=Body, __doc__=doc, **own_fields, **more)
    body.refused = {setting.name: setting.http for setting in declared if setting.http}
    return body


def _field(setting: RequestSetting) -> Any:
    """The field of a setting: its type or null, and in the description its help and default."""
    default = plain_default(setting.default)
    schema: dict[str, Any] = {"default": default}
    if setting.inside and not setting.chosen:
        if setting.name == "space":
            axes = {axis.name: _field(axis) for axis in setting.inside}
            kind: Any = create_model(f"{dataclass_in(setting.kind).__name__}Body", __base__=Body, **axes)  # type: ignore[union-attr]
            return kind | None, Field(None, description="axes of the search; one left out is natural")
        schema |= _schema(setting.inside)
    inner = [argument for argument in get_args(setting.kind) if isinstance(argument, type) and is_dataclass(argument)]
    if get_origin(setting.kind) is tuple and inner:
        more = tuple(ALIASES) if inner[0] is Fault else ()
        schema["items"] = {"properties": {name: {} for name in (*(f.name for f in fields(inner[0])), *more)}}
    if setting.name == "options":
        schema["properties"] = {name: {} for name in CHECKS}
    most = MOST_LISTED if get_origin(setting.kind) is tuple else None
    accepted = Name | dict[str, Any] if setting.name == "model" else Name if _named(setting) else _plainly(setting.kind)
    return accepted | None, Field(None, description=setting.help or None, json_schema_extra=schema, max_length=most)


def _named(setting: RequestSetting) -> bool:
    """Whether a setting is chosen by its name alone over HTTP."""
    return setting.chosen and dataclass_in(setting.kind) is not None


def _schema(inside: Sequence[RequestSetting]) -> dict[str, Any]:
    """The schema of a mapping of settings: their names, and those of the mappings among them."""
    return {"properties": {setting.name: _schema(setting.inside) if setting.inside else {} for setting in inside}}


def _plainly(kind: Any) -> Any:
    """A type as JSON has it, its whole numbers within what JSON keeps exactly."""
    if kind in PLAIN:
        return PLAIN[kind]
    origin, parts = get_origin(kind), [argument for argument in get_args(kind) if argument is not Ellipsis]
    if origin in (Union, types.UnionType):
        union = _plainly(parts[0])
        for part in parts[1:]:
            union = union | _plainly(part)
        return union
    if origin is tuple:
        return list[_plainly(parts[0])]  # type: ignore[misc]
    return dict[str, Any] if origin is not None or (isinstance(kind, type) and is_dataclass(kind)) else kind


PredictBody = body_of("predict", "PredictBody", "One op, as ``opcast.predict`` takes it.", op=(OpBody, ...))
BatchBody = body_of("predict", "BatchBody", "Many ops on one device or cluster.", OF_AN_OP, ops=(list[OpBody], ...))
SimulateBody = body_of(
    "simulate", "SimulateBody", "A step as ``opcast.simulate`` takes it: model, workload, device or cluster, layout."
)
SearchBody = body_of(
    "search", "SearchBody", "The best layouts of a training step on a cluster, as ``opcast.search`` takes it."
)
ServedSearchBody = body_of(
    "search_serving",
    "ServedSearchBody",
    "The best ways to serve a model on a cluster, as ``opcast.search_serving`` takes it.",
)
CompareBody = body_of("compare", "CompareBody", "One workload on several chips, as ``opcast.compare_chips`` takes it.")
UpgradeBody = body_of("upgrade", "UpgradeBody", "What new releases may move, as ``opcast.upgrade`` takes it.")
PlanBody = body_of("plan", "PlanBody", "A whole training job, as ``opcast.plan`` takes it.")
PostTrainBody = body_of("posttrain", "PostTrainBody", "Post-training, as ``opcast.posttrain`` takes it.")
ServingBody = body_of("serving", "ServingBody", "Traffic on a served model, as ``opcast.serving`` takes it.")
CapsBody = body_of(
    "serving",
    "CapsBody",
    "Traffic under power caps, as ``opcast.serving_caps`` takes it.",
    power_caps_w=(list[float], Field(max_length=MOST_RATES, description="watts that each GPU is held to in turn")),
    node_w=(float, Field(0.0, description="what a node draws beside its GPUs")),
    pue=(float, Field(1.0, description="of the building: all power over that of the machines")),
)
SweepBody = body_of(
    "serving",
    "SweepBody",
    "Traffic at several rates, as ``opcast.serving_sweep`` takes it.",
    rates=(list[float], Field([], max_length=MOST_RATES, description="requests a second, or the speed of a trace")),
)


def sweep_body() -> Any:
    """The body of a sweep: the settings of all verbs that may be swept, which of them it is, and the axes."""
    declared = {setting.name: setting for verb in reversed(ANSWERS) for setting in settings(verb)}
    own_fields: dict[str, Any] = {
        "verb": (
            Literal[tuple(ANSWERS)],
            Field(description="what is asked: its settings stand beside it, as in its own call"),
        ),
        "axes": (
            dict[Name, Annotated[list[Any], Field(min_length=1, max_length=MOST_LISTED)]],
            Field(description="values by the name of a setting, with a dot for one within a mapping; all are combined"),
        ),
    }
    doc = "One question many times, as ``opcast.sweep`` takes it."
    return _body(declared.values(), "QuestionsBody", doc, own_fields)


QuestionsBody = sweep_body()


def given_of(verb: str, body: BaseModel) -> dict[str, Any]:
    """What a body says, by the names of settings. RequestError for what within it is not taken over HTTP."""
    declared = {setting.name for setting in settings(verb)}
    values = {name: value for name, value in body.model_dump(exclude_none=True).items() if name in declared}
    if isinstance(values.get("space"), dict):
        values["space"] = {name: value for name, value in values["space"].items() if value is not None}
    for setting in settings(verb):
        value, kind = values.get(setting.name), dataclass_in(setting.kind)
        if setting.chosen or kind is None or not isinstance(value, Mapping):
            continue
        within = {inner.name: inner.http for inner in setting.inside}
        for name in (field_.name for field_ in fields(kind) if value.get(field_.name) is not None):
            if name == "trace" and value[name] in drawn_names():
                continue
            if reason := within.get(name, "use `opcast serving` or Python"):
                raise RequestError(f"{setting.name}.{name} {NOT_HERE}: {reason}")
    return values


def sources(verb: str, values: Mapping[str, Any], server: ServiceSettings) -> Sources:
    """The server's own sources as a body wants them."""
    return sources_of(verb, {"calibration": server.calibration} | dict(values), server.sources, server.home)


def predict_of(body: Any, server: ServiceSettings) -> PredictRequest:
    """The request of a body about one op or many. Raises the errors of :func:`opcast.predict`."""
    many = body.ops if hasattr(body, "ops") else [body.op]
    values = given_of("predict", body)
    question = usual("predict") | values
    ops = [kind(op_body.kind).op(**given_dims(op_body.model_extra or {}, question["group"])) for op_body in many]
    device = values.get("device") or THIS_MACHINE
    request = predict_request(ops, device, values.get("cluster"), sources("predict", values, server), question, {})
    placed("a prediction", values)
    return request


def fabric_of(body: Any, server: ServiceSettings) -> PredictRequest:
    """The request about a collective whose links are shown. RequestError for what runs on no links."""
    if body.cluster is None:
        raise RequestError("a picture of links needs a cluster: name one of GET /v1/clusters")
    request = predict_of(body.model_copy(update={"network": "flow"}), server)
    if KINDS[request.ops[0].kind].family != "collective":
        raise RequestError(f"op.kind={body.op.kind} runs on no links: take a collective, such as all_reduce")
    return replace(request, loads=True)


def placed(what: str, values: Mapping[str, Any]) -> None:
    """RequestError for a question about no place: the machine that the service runs on is nobody's question."""
    if values.get("device") is None and values.get("cluster") is None:
        raise RequestError(f"{what} needs a device or a cluster: name one of GET /v1/devices or GET /v1/clusters")


def _not_simulated(text: str) -> None:
    raise RequestError(f"{text}: leave them out")


def question_of(verb: str, body: Any, server: ServiceSettings) -> Any:
    """The request of a body. RequestError for what needs a file or a place, and for more than is taken here."""
    values = given_of(verb, body)
    if verb == "simulate" and values.get("workload") == "simai":
        raise RequestError("workload=simai needs a file, which is not taken over HTTP: use `opcast simulate`")
    if verb in PLACED and "law" not in values:
        placed(PLACED[verb], values)
    request = request_of(verb, values, sources(verb, values, server), _not_simulated)
    for name, count_of in COUNTS.get(verb, {}).items():
        if (count := count_of(request)) > server.batch:
            raise RequestError(f"{name}={count:,} is more than the {server.batch:,} taken here")
    return request


def questions_of(body: Any, server: ServiceSettings) -> QuestionSweep:
    """The points of a body, each taken as its own call is. RequestError for what no point may say."""

    def request_of_point(values: dict[str, Any]) -> Any:
        admit(values, server.allow)
        point_body = SWEPT[body.verb]
        try:
            return question_of(body.verb, point_body(**values), server)
        except ValidationError as error:
            raise RequestError(complaint(error.errors(), values, point_body)) from None

    given = body.model_dump(exclude_none=True, exclude={"verb", "axes"})
    return sweep_of(body.verb, given, body.axes, request_of_point, server.batch)


SWEPT: dict[str, Any] = {  # verb of a sweep -> the body of a point
    "plan": PlanBody,
    "posttrain": PostTrainBody,
    "compare": CompareBody,
    "upgrade": UpgradeBody,
    "simulate": SimulateBody,
}
