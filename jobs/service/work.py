"""What the service does in processes of its own: a request in, plain values or a page out."""

from __future__ import annotations

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

Part = Literal["page", "body"]


def predicted(request: PredictRequest) -> list[OpPrediction]:
    """The answer to a request about ops."""
    from ...simulator.workbench import workbench
    from ..resolve import this_machine

    return workbench(request.sources, this_machine).predict(request)


def simulated(request: SimulateRequest) -> dict[str, Any]:
    """The answer to a request about a step, as plain values."""
    from ...simulator.workbench import workbench
    from ..resolve import this_machine

    return workbench(request.sources, this_machine).simulate(request).to_dict()


def compared(request: CompareRequest) -> dict[str, Any]:
    """The answer about several chips."""
    from ...simulator.workbench import workbench
    from ..resolve import this_machine

    return workbench(request.step.sources, this_machine).compare_chips(request).to_dict()


def upgraded(request: UpgradeRequest) -> dict[str, Any]:
    """The answer about an upgrade."""
    from ...simulator.workbench import workbench
    from ..resolve import this_machine

    return workbench(request.step.sources, this_machine).upgrade(request).to_dict()


def planned(request: PlanRequest) -> dict[str, Any]:
    """The answer about a job."""
    from ...simulator.workbench import workbench
    from ..resolve import this_machine

    return workbench(request.step.sources, this_machine).plan(request).to_dict()


def planned_page(request: PlanRequest, part: Part = "page") -> str:
    """The HTML page of a job, or its body alone."""
    from ...simulator.html.page import render, render_body
    from ...simulator.job.page import page
    from ...simulator.workbench import workbench
    from ..resolve import this_machine

    write = render if part == "page" else render_body
    return write(page(workbench(request.step.sources, this_machine).plan(request)))


def post_trained(request: PostTrainRequest) -> dict[str, Any]:
    """The answer about post-training."""
    from ...simulator.workbench import workbench
    from ..resolve import this_machine

    return workbench(request.step.sources, this_machine).posttrain(request).to_dict()


def post_trained_page(request: PostTrainRequest, part: Part = "page") -> str:
    """The HTML page of post-training, or its body alone."""
    from ...simulator.html.page import render, render_body
    from ...simulator.post_training.page import page
    from ...simulator.workbench import workbench
    from ..resolve import this_machine

    write = render if part == "page" else render_body
    return write(page(workbench(request.step.sources, this_machine).posttrain(request)))


def served(request: ServingRequest) -> dict[str, Any]:
    """The answer about a served model."""
    from ...simulator.workbench import workbench
    from ..resolve import this_machine

    sources = Sources() if request.step is None else request.step.sources
    return workbench(sources, this_machine).serving(request).report.to_dict()


def served_often(what: str, request: ServingRequest, rates: tuple[float, ...] = ()) -> dict[str, Any]:
    """The answer to ``opcast serving capacity``, ``sweep`` or ``compare``."""
    from ...simulator.search.spread import Crew
    from ...simulator.serving import studies
    from ...simulator.workbench import workbench
    from ..resolve import this_machine
    from ..serving import checked_rates

    bench, apply = workbench(Sources() if request.step is None else request.step.sources, this_machine), Crew().apply
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
    from ...simulator.workbench import workbench
    from ..resolve import this_machine

    bench = workbench(Sources() if request.step is None else request.step.sources, this_machine)
    return caps_values(serving_caps(request, power_caps_w, node_w, pue, bench, Crew().apply), node_w, pue)


def pictured(request: PredictRequest, part: Part = "page") -> str:
    """The HTML page of a collective on links, or its body alone."""
    from ...simulator.html import network_body, network_page
    from ...simulator.workbench import workbench
    from ..resolve import this_machine

    write = network_page if part == "page" else network_body
    return write(workbench(request.sources, this_machine).predict(request)[0])


def reported(request: SimulateRequest, part: Part = "page") -> str:
    """The HTML page of a step, or its body alone."""
    from ...simulator.html import step_body, step_page
    from ...simulator.report.workload_file import FileReport
    from ...simulator.workbench import workbench
    from ..resolve import this_machine
    from ..simulate import shown_step

    answered = workbench(request.sources, this_machine).answered(request)
    assert not isinstance(answered.report, FileReport)
    write = step_page if part == "page" else step_body
    return write(*shown_step(answered.report, answered.device, answered.engine))
