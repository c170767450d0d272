"""Questions whose answer takes a process of its own, as a table: one is ``POST path``, its page ``path/report``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response

from .answering import Processes
from .bodies import (
    CapsBody,
    CompareBody,
    PlanBody,
    PostTrainBody,
    PredictBody,
    ServingBody,
    SimulateBody,
    SweepBody,
    UpgradeBody,
    fabric_of,
    question_of,
)
from .encoding import as_json
from .settings import ServiceSettings
from .work import (
    Part,
    answer,
    answer_page,
    pictured,
    reported,
    served,
    served_capped,
    served_often,
)

Arguments = Callable[[Any, ServiceSettings], tuple[Any, ...]]
LONG = "search_s"  # the setting that bounds what simulates many steps


@dataclass(frozen=True)
class StepRoute:
    """``work`` of ``arguments`` of a ``body`` answers as JSON, ``page`` as HTML, within ``limit``."""

    path: str
    body: type
    arguments: Arguments
    work: Callable[..., Any] | None
    summary: str
    page: Callable[..., str] | None = None
    limit: str = LONG  # the setting with the longest time

    @property
    def tag(self) -> str:
        """The group of calls that it is shown in."""
        return self.path.split("/")[2]


def alone(verb: str) -> Arguments:
    """The question that a body asks, as the only argument."""
    return lambda body, settings: (question_of(verb, body, settings),)


def study(name: str) -> Arguments:
    """A study of served traffic and what it is about."""
    return lambda body, settings: (name, question_of("serving", body, settings))


STEP_ROUTES = (
    StepRoute(
        "/v1/simulate",
        SimulateBody,
        alone("simulate"),
        answer,
        "One training or inference step of a model on a device or a cluster, in a process of its own.",
        reported,
        "timeout_s",
    ),
    StepRoute(
        "/v1/compare/chips",
        CompareBody,
        alone("compare"),
        answer,
        "One workload on several chips and power caps: speed, price, energy, break-even price.",
    ),
    StepRoute(
        "/v1/upgrade",
        UpgradeBody,
        alone("upgrade"),
        answer,
        "What another engine, driver or library may move in a step, and what to measure of it.",
        limit="timeout_s",
    ),
    StepRoute(
        "/v1/plan",
        PlanBody,
        alone("plan"),
        answer,
        "A whole training job: days, GPU-hours, price, kWh and CO2 as P10, P50 and P90 of its lives.",
        answer_page,
    ),
    StepRoute(
        "/v1/posttrain",
        PostTrainBody,
        alone("posttrain"),
        answer,
        "Post-training phase by phase: rollout, log-probs, training, weight sync, as P10, P50 and P90.",
        answer_page,
    ),
    StepRoute(
        "/v1/serving",
        ServingBody,
        alone("serving"),
        served,
        "Traffic on the replicas of a served model: TTFT, TPOT, throughput, KV memory, goodput.",
    ),
    StepRoute(
        "/v1/serving/capacity",
        ServingBody,
        study("capacity"),
        served_often,
        "The largest rate of traffic that meets ``slo``, and how sure that is.",
    ),
    StepRoute(
        "/v1/serving/sweep",
        SweepBody,
        lambda body, settings: (*study("sweep")(body, settings), tuple(body.rates)),
        served_often,
        "The same traffic at each of the ``rates``; none: a tenth of its rate to twice it.",
    ),
    StepRoute(
        "/v1/serving/compare",
        ServingBody,
        study("compare"),
        served_often,
        "Replicas that do both beside pools that prefill and decode, the best first.",
    ),
    StepRoute(
        "/v1/serving/caps",
        CapsBody,
        lambda body, settings: (
            question_of("serving", body, settings),
            tuple(body.power_caps_w),
            body.node_w,
            body.pue,
        ),
        served_capped,
        "The same traffic under power caps: joules of an output token against latency, which caps no other beats.",
    ),
    StepRoute(
        "/v1/predict",
        PredictBody,
        lambda body, settings: (fabric_of(body, settings),),
        None,
        "A collective on the links of a cluster: how full which links are, and when.",
        pictured,
        "timeout_s",
    ),
)


def add_step_routes(app: FastAPI, settings: ServiceSettings, processes: Processes) -> None:
    """Add every row of :data:`STEP_ROUTES` to a service."""
    for route in STEP_ROUTES:
        name = route.path.removeprefix("/v1/").replace("/", "_")
        if route.work is not None:
            app.post(route.path, tags=[route.tag], name=name)(answer_of(route, settings, processes))
        if route.page is not None:
            app.post(f"{route.path}/report", tags=[route.tag], name=f"{name}_report")(
                page_of(route, settings, processes)
            )


def answer_of(route: StepRoute, settings: ServiceSettings, processes: Processes) -> Callable[..., Any]:
    """What answers ``route`` as JSON."""

    async def answered(request: Request, body: Any) -> Response:
        arguments = route.arguments(body, settings)
        return as_json(await processes.run(route.work, arguments, request.is_disconnected, route.limit))  # type: ignore[arg-type]

    return described(answered, route, route.summary)


def page_of(route: StepRoute, settings: ServiceSettings, processes: Processes) -> Callable[..., Any]:
    """What answers ``route`` as a page."""

    async def page(request: Request, body: Any, part: Part = "page") -> Response:
        arguments = (*route.arguments(body, settings), part)
        text = await processes.run(route.page, arguments, request.is_disconnected, route.limit)  # type: ignore[arg-type]
        return Response(text, media_type="text/html")

    summary = "as a self-contained HTML page with its pictures; ``part=body``: its cards and sections alone."
    return described(page, route, f"{route.summary.rstrip('.')}, {summary}")


def described(call: Callable[..., Any], route: StepRoute, summary: str) -> Callable[..., Any]:
    """``call`` with the body that FastAPI reads for it, and what the list of calls says of it."""
    call.__annotations__ |= {"request": Request, "body": route.body, "part": Part, "return": Response}
    call.__doc__ = summary
    return call
