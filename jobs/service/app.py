"""The routes of the service (FastAPI): every answer is that of the command line with ``format=json``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from ...datasets.ops import KINDS
from ...datasets.own_errors import refusal
from ...datasets.version import __version__
from ...datasets.vocabulary import OpKind
from ...models.power import Limits
from ...simulator.question.predictions import PredictRequest
from ...simulator.report.answer import OpPrediction
from .. import listing
from ..questions import usual
from ..show import BadInputError
from .answering import BusyError, DiedError, GoneError, Processes, SlowError, Together, predict_all
from .bodies import (
    BatchBody,
    PredictBody,
    QuestionsBody,
    SearchBody,
    ServedSearchBody,
    placed,
    predict_of,
    question_of,
    questions_of,
    sources,
)
from .encoding import as_json
from .following import followed
from .guard import ARROW, Guard
from .measures import Measured, Measures
from .misshapen import complaint
from .naming import AdmittedRoute
from .pages import calls, index, plotly
from .refusals import Refusals
from .searching import events
from .settings import ServiceSettings
from .step_routes import add_step_routes
from .streaming import begun, taken
from .tables import answer_table, read_stream
from .work import predicted

ARROW_BODY = {"requestBody": {"required": True, "content": {ARROW: {"schema": {"type": "string", "format": "binary"}}}}}
EVENT_STREAM = "text/event-stream"
EVENTS = {"responses": {"200": {"content": {EVENT_STREAM: {"schema": {"type": "string"}}}}}}
UNPACKED = 4  # times the largest body that a table may have once it is unpacked
CLIENT_GONE = 499  # nobody reads it; what logs and metrics call a client that left
LISTS: dict[str, Callable[[Mapping[str, Any]], listing.Rows]] = {
    "devices": listing.devices,
    "clusters": listing.clusters,
    "models": listing.models,
    "predictors": listing.predictors,
    "stacks": listing.stacks,
    "precisions": listing.precisions,
}
Listed = Literal["devices", "clusters", "models", "ops", "predictors", "stacks", "precisions"]
KEPT_TO_OURSELVES = ("folder",)  # columns that tell how the server's disk looks
STATUS: dict[type[Exception], tuple[int, str]] = {
    BusyError: (429, "busy"),
    SlowError: (504, "slow"),
    DiedError: (500, "died"),
    GoneError: (CLIENT_GONE, "gone"),
}


def create_app(settings: ServiceSettings) -> FastAPI:
    """The service as an ASGI application, its limits around it."""
    ops: Together[list[OpPrediction]] = Together(predict_all, settings.connections)
    processes = Processes(settings)
    measures, refusals = Measures(), Refusals(settings)

    @asynccontextmanager
    async def alive(_: FastAPI) -> AsyncIterator[None]:
        async with followed(settings):
            yield
        ops.close()
        processes.close()

    app = FastAPI(
        title="opcast",
        version=__version__,
        description="How long LLM training and inference take, before you pay for the GPUs.",
        lifespan=alive,
        docs_url=None,  # FastAPI's own page brings its script from another site
        redoc_url=None,
    )
    app.state.allow = frozenset(settings.allow)
    app.router.route_class = AdmittedRoute
    app.add_middleware(Guard, settings=settings, refusals=refusals)
    app.add_middleware(Measured, measures=measures)
    _explain_errors(app, refusals)

    _service_routes(app, processes, measures)
    _op_routes(app, settings, ops, processes, measures)
    add_step_routes(app, settings, processes)
    _search_routes(app, settings, processes, refusals)
    return app


def _service_routes(app: FastAPI, processes: Processes, measures: Measures) -> None:
    """The page, and what operators of the service look at."""
    page, charts = index(), plotly()
    all_calls = cache(lambda: calls(app.openapi()))  # once all routes are there

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return Response(page, media_type="text/html")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(all_calls(), media_type="text/html")

    @app.get("/static/plotly.js", include_in_schema=False)
    async def script() -> Response:
        return Response(charts, media_type="text/javascript")

    @app.get("/health", tags=["service"])
    async def health() -> Response:
        """Whether the service answers, and how much it has to do."""
        return as_json({"status": "ok", "version": __version__, "steps_under_way": processes.under_way})

    @app.get("/metrics", tags=["service"])
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(measures.text(), media_type=measures.media_type)


def _op_routes(
    app: FastAPI,
    settings: ServiceSettings,
    ops: Together[list[OpPrediction]],
    processes: Processes,
    measures: Measures,
) -> None:
    """What is known, and latencies of ops."""

    async def answered(call: Request, request: PredictRequest) -> list[OpPrediction]:
        if any(":" in name for name in request.sources.order):  # an engine of one's own
            return await processes.run(predicted, (request,), call.is_disconnected)
        return await ops.ask(request)

    @app.get("/v1/{what}", tags=["what is known"])
    async def known(what: Listed) -> Response:
        """Devices, clusters, models, ops, predictors, stacks or precisions."""
        return as_json({what: await ops.call(listed, what, settings)})

    @app.post("/v1/predict", tags=["predict"])
    async def predict(call: Request, body: PredictBody) -> Response:
        """The latency of one op on a device, or of a collective on a cluster, with its interval and who answered."""
        predictions = await answered(call, predict_of(body, settings))
        measures.ops(1)
        return as_json(predictions[0].to_dict())

    @app.post("/v1/predict/batch", tags=["predict"])
    async def predict_batch(call: Request, body: BatchBody) -> Response:
        """The latency of many ops, in their order. Tables of thousands go faster as Arrow: ``/v1/predict/table``."""
        if not 0 < len(body.ops) <= settings.batch:
            raise BadInputError(f"ops must hold 1 to {settings.batch:,} ops, not {len(body.ops):,}")
        request = await ops.call(predict_of, body, settings)
        predictions = await answered(call, request)
        measures.ops(len(predictions))
        return as_json({"predictions": [prediction.to_dict() for prediction in predictions]})

    @app.post("/v1/predict/table", tags=["predict"], openapi_extra=ARROW_BODY)
    async def predict_table(
        request: Request,
        device: str | None = None,
        kind: str | None = None,
        cache: str | None = None,
        backend: str | None = None,
        power_cap_w: float | None = None,
        sm_clock_mhz: float | None = None,
    ) -> Response:
        """The latency of a table of ops: an Arrow IPC stream with a column per dim in, one with the answers out."""
        most = settings.batch, UNPACKED * settings.body_mib
        table = await ops.call(read_stream, await request.body(), *most)
        placed("a table of ops", {"device": device})
        question = (table, device, kind, cache or usual("predict")["cache"], Limits(power_cap_w, sm_clock_mhz))
        arguments = (*question, sources("predict", {"backend": backend}, settings))
        parts = await ops.call(answer_table, *arguments)
        measures.ops(len(table))
        return await begun(taken(parts, ops.thread), ARROW)


def _search_routes(app: FastAPI, settings: ServiceSettings, processes: Processes, refusals: Refusals) -> None:
    """Searches and sweeps, each in a process of its own, as streams."""

    @app.post("/v1/search", tags=["search"], openapi_extra=EVENTS)
    async def search(body: SearchBody) -> Response:
        """The best layouts of a training step: server-sent events with progress, then the answer."""
        question = question_of("search", body, settings)
        return await begun(events(question, processes, refusals), EVENT_STREAM)

    @app.post("/v1/search/serving", tags=["search"], openapi_extra=EVENTS)
    async def search_serving(body: ServedSearchBody) -> Response:
        """The best ways to serve a model: server-sent events with progress, then the answer."""
        question = question_of("search_serving", body, settings)
        return await begun(events(question, processes, refusals), EVENT_STREAM)

    @app.post("/v1/sweep", tags=["search"], openapi_extra=EVENTS)
    async def sweep(body: QuestionsBody) -> Response:
        """One question many times: server-sent events with progress, then all answers as rows."""
        question = questions_of(body, settings)
        return await begun(events(question, processes, refusals), EVENT_STREAM)


def listed(what: str, settings: ServiceSettings) -> list[dict[str, Any]]:
    """The rows of ``opcast list``, a mapping each; of ops also what each dim may be."""
    if what == "ops":
        return [op_kind(kind) for kind in KINDS.values()]
    sources = settings.sources
    heads, rows = LISTS[what]({"store": sources.store, "predictors": sources.predictors})
    entries = (dict(zip(heads, row, strict=True)) for row in rows)
    return [{name: value for name, value in row.items() if name not in KEPT_TO_OURSELVES} for row in entries]


def op_kind(kind: OpKind) -> dict[str, Any]:
    """What an op of a kind is made of. A dim without a default must be given."""
    dims = [
        {
            "name": dim.name,
            "default": dim.choices[dim.default] if dim.choices and dim.default is not None else dim.default,
            "choices": list(dim.choices),
        }
        for dim in kind.dims
    ]
    return {"kind": kind.name, "family": kind.family, "dims": dims, "is": kind.doc.splitlines()[0]}


def body_of_call(call: Request) -> Any:
    """The class of a call's body; None where it has none."""
    field = getattr(call.scope.get("route"), "body_field", None)
    return None if field is None else field.field_info.annotation


def _explain_errors(app: FastAPI, refusals: Refusals) -> None:
    """Every refusal is one JSON object; what nobody foresaw goes through to :class:`.guard.Guard`."""

    def refused(status: int, code: str, message: str) -> Response:
        return Response(refusals.body(status, code, message), status, media_type="application/json")

    @app.exception_handler(RequestValidationError)
    async def misshapen(call: Request, error: RequestValidationError) -> Response:
        return refused(422, "bad_body", complaint(error.errors(), error.body, body_of_call(call)))

    @app.exception_handler(HTTPException)
    async def no_route(_: Request, error: HTTPException) -> Response:
        words = {404: "there is no such address here", 405: "this address takes another method"}
        return refused(error.status_code, "http", words.get(error.status_code, str(error.detail)) + "; /docs lists all")

    @app.exception_handler(ValueError)
    async def bad_input(_: Request, error: ValueError) -> Response:
        return refused(400, "bad_input", refusal(error))

    for kind, (status, code) in STATUS.items():
        app.add_exception_handler(kind, _stopped(status, code, refused))


def _stopped(status: int, code: str, refused: Callable[[int, str, str], Response]) -> Any:
    async def handler(_: Request, error: Exception) -> Response:
        response = refused(status, code, str(error) or "the client left")
        if status == 429:
            response.headers["retry-after"] = "1"
        return response

    return handler
