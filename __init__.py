"""opcast: how long will it take? For an operator, a training step, an inference step, on hardware you may not have yet.

``opcast.predict`` and ``opcast.simulate`` answer; ``opcast.make_op`` builds the op they are asked about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .datasets.version import __version__

__all__ = [
    "ChipsReport",
    "Cluster",
    "CompareRequest",
    "Device",
    "Fault",
    "NetworkChoice",
    "Op",
    "Parallel",
    "Plan",
    "PlanReport",
    "PlanRequest",
    "PostTrainReport",
    "PostTrainRequest",
    "PredictRequest",
    "SearchReport",
    "SearchRequest",
    "ServedSearchRequest",
    "ServedSpace",
    "ServingRequest",
    "SimulateRequest",
    "Sources",
    "Space",
    "Stack",
    "Straggler",
    "SweepReport",
    "Transfer",
    "UpgradeReport",
    "UpgradeRequest",
    "ValidateRequest",
    "Work",
    "Workbench",
    "WorkloadFile",
    "__version__",
    "compare_chips",
    "load_cluster",
    "load_device",
    "load_stack",
    "make_op",
    "plan",
    "posttrain",
    "predict",
    "search",
    "search_serving",
    "serving",
    "serving_capacity",
    "serving_caps",
    "serving_sweep",
    "serving_ways",
    "simulate",
    "simulate_file",
    "step_latency",
    "sweep",
    "upgrade",
    "validate",
]

if TYPE_CHECKING:
    from .datasets.clusters import Cluster, load_cluster
    from .datasets.devices import Device, load_device
    from .datasets.ops import Op, make_op
    from .jobs.api import (
        compare_chips,
        plan,
        posttrain,
        predict,
        search,
        search_serving,
        simulate,
        simulate_file,
        sweep,
        upgrade,
        validate,
    )
    from .jobs.api_serving import serving, serving_capacity, serving_caps, serving_sweep, serving_ways, step_latency
    from .jobs.sweeping import SweepReport
    from .simulator.chips.answer import ChipsReport
    from .simulator.chips.request import CompareRequest
    from .simulator.job.answer import PlanReport
    from .simulator.job.request import PlanRequest
    from .simulator.network.faults import Fault
    from .simulator.network.transfers import Transfer
    from .simulator.post_training.answer import PostTrainReport
    from .simulator.post_training.request import PostTrainRequest
    from .simulator.question.network import NetworkChoice
    from .simulator.question.plan import Parallel, Plan, Stack, load_stack
    from .simulator.question.predictions import PredictRequest
    from .simulator.question.requests import SimulateRequest, ValidateRequest, WorkloadFile
    from .simulator.question.serving import ServingRequest
    from .simulator.question.sources import Sources
    from .simulator.question.stragglers import Straggler
    from .simulator.question.work import Work
    from .simulator.search.request import SearchRequest
    from .simulator.search.result import SearchReport
    from .simulator.search.served.request import ServedSearchRequest, ServedSpace
    from .simulator.search.space import Space
    from .simulator.upgrade.answer import UpgradeReport
    from .simulator.upgrade.request import UpgradeRequest
    from .simulator.workbench import Workbench

_HOMES = {
    ".datasets.clusters": ("Cluster", "load_cluster"),
    ".datasets.devices": ("Device", "load_device"),
    ".datasets.ops": ("Op", "make_op"),
    ".jobs.api": (
        "compare_chips",
        "plan",
        "posttrain",
        "predict",
        "search",
        "search_serving",
        "simulate",
        "simulate_file",
        "sweep",
        "upgrade",
        "validate",
    ),
    ".jobs.api_serving": (
        "serving",
        "serving_capacity",
        "serving_caps",
        "serving_sweep",
        "serving_ways",
        "step_latency",
    ),
    ".jobs.sweeping": ("SweepReport",),
    ".simulator.chips.answer": ("ChipsReport",),
    ".simulator.chips.request": ("CompareRequest",),
    ".simulator.job.answer": ("PlanReport",),
    ".simulator.job.request": ("PlanRequest",),
    ".simulator.network.faults": ("Fault",),
    ".simulator.network.transfers": ("Transfer",),
    ".simulator.post_training.answer": ("PostTrainReport",),
    ".simulator.post_training.request": ("PostTrainRequest",),
    ".simulator.question.network": ("NetworkChoice",),
    ".simulator.question.plan": ("Parallel", "Plan", "Stack", "load_stack"),
    ".simulator.question.predictions": ("PredictRequest",),
    ".simulator.question.requests": ("SimulateRequest", "ValidateRequest", "WorkloadFile"),
    ".simulator.question.sources": ("Sources",),
    ".simulator.question.stragglers": ("Straggler",),
    ".simulator.question.work": ("Work",),
    ".simulator.question.serving": ("ServingRequest",),
    ".simulator.search.request": ("SearchRequest",),
    ".simulator.search.result": ("SearchReport",),
    ".simulator.search.served.request": ("ServedSearchRequest", "ServedSpace"),
    ".simulator.search.space": ("Space",),
    ".simulator.upgrade.answer": ("UpgradeReport",),
    ".simulator.upgrade.request": ("UpgradeRequest",),
    ".simulator.workbench": ("Workbench",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Public names, imported when first used, so that ``import opcast`` costs nothing."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME_OF[name], __name__), name)
