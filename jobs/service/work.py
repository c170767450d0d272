"""What the service does in processes of its own: a request in, plain values or a page out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from ...simulator.chips.request import CompareRequest
from ...simulator.job.request import PlanRequest
from ...simulator.post_training.request import PostTrainRequest
from ...simulator.question.predictions import PredictRequest
from ...simulator.question.requests import SimulateRequest
from ...simulator.question.serving import ServingRequest
from ...simulator.question.sources import Sources
from ...simulator.report.answer import OpPrediction
from ...simulator.upgrade.request import UpgradeRequest
from ...simulator.workbench import Workbench
from .. import resolve

Part = Literal["page", "body"]
METHODS: dict[type, Callable[[Workbench, Any], Any]] = {  # what answers a request
    SimulateRequest: Workbench.simulate,
    CompareRequest: Workbench.compare_chips,
    UpgradeRequest: Workbench.upgrade,
    PlanRequest: Workbench.plan,
    PostTrainRequest: Workbench.posttrain,
}


def bench_of(request: Any) -> Workbench:
    """The workbench of the sources of a request, or of the step that it is about."""
    step = getattr(request, "step", getattr(request, "base", request))
    return resolve.bench_of(Sources() if step is None else step.sources)


def predicted(request: PredictRequest) -> list[OpPrediction]:
    """The answer to a request about ops."""
    return bench_of(request).predict(request)


def answer(request: Any) -> dict[str, Any]:
    """The answer to a request of :data:`METHODS`, as plain values."""
    return METHODS[type(request)](bench_of(request), request).to_dict()


def answer_page(request: PlanRequest | PostTrainRequest, part: Part = "page") -> str:
    """The HTML page of a job or of post-training, or its body alone."""
    from ...simulator.html.page import render, render_body
    from ...simulator.job.page import page as page_of_job
    from ...simulator.post_training.page import page as page_of_phases

    write, bench = render if part == "page" else render_body, bench_of(request)
    if isinstance(request, PlanRequest):
        return write(page_of_job(bench.plan(request)))
    return write(page_of_phases(bench.posttrain(request)))


def served(request: ServingRequest) -> dict[str, Any]:
    """The answer about a served model."""
    return bench_of(request).serving(request).report.to_dict()


def served_often(what: str, request: ServingRequest, rates: tuple[float, ...] = ()) -> dict[str, Any]:
    """The answer to ``opcast serving capacity``, ``sweep`` or ``compare``."""
    from ...simulator.search.spread import Crew
    from ...simulator.serving import studies
    from ..serving import checked_rates

    bench, apply = bench_of(request), Crew().apply
    if what == "capacity":
        return studies.serving_capacity(request, bench, apply).to_dict()
    if what == "sweep":
        return studies.sweep_values(studies.serving_sweep(request, checked_rates(list(rates)), bench, apply))
    return studies.ways_values(studies.serving_ways(request, bench, apply))


def served_capped(
    request: ServingRequest, power_caps_w: tuple[float, ...], node_w: float, pue: float
) -> dict[str, Any]:
    """The answer to ``opcast serving caps``."""
    from ...simulator.search.spread import Crew
    from ...simulator.serving.caps import caps_values, serving_caps

    caps = serving_caps(request, power_caps_w, node_w, pue, bench_of(request), Crew().apply)
    return caps_values(caps, node_w, pue)


def pictured(request: PredictRequest, part: Part = "page") -> str:
    """The HTML page of a collective on links, or its body alone."""
    from ...simulator.html import network, render, render_body

    return (render if part == "page" else render_body)(network.page(bench_of(request).predict(request)[0]))


def reported(request: SimulateRequest, part: Part = "page") -> str:
    """The HTML page of a step, or its body alone."""
    from ...simulator.html import render, render_body
    from ...simulator.report.workload_file import FileReport
    from ..simulate import page_of

    answered = bench_of(request).answered(request)
    assert not isinstance(answered.report, FileReport)
    page = page_of(answered.report, answered.device, answered.engine)
    return (render if part == "page" else render_body)(page)
