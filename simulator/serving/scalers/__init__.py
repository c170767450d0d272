"""Who says how many replicas serve: one module with one function for each of :data:`...question.fleet.SCALERS`.

A scaler looks at what was seen since it last looked (:class:`.signals.FleetSignals`) and returns how many replicas it
wants; :mod:`..autoscale` asks it, and does the rest.
"""

from __future__ import annotations

from collections.abc import Callable

from ...question.fleet import Autoscale
from ...question.request_classes import ServingTargets
from ..own import guard, load_function
from ..replica import ServedReplica
from ..rules import SchedulerRules
from .queue import by_queue
from .signals import FleetSignals
from .sla import sla_planner
from .utilisation import by_utilisation

Scaler = Callable[[FleetSignals], float]


def scaler_of(scale: Autoscale, slo: ServingTargets, replica: ServedReplica, rules: SchedulerRules) -> Scaler:
    """The scaler of a policy, or a user's own, ``module:function``. RequestError where there is no such thing."""
    if scale.policy == "utilisation":
        return lambda signals: by_utilisation(signals, scale)
    if scale.policy == "queue":
        return lambda signals: by_queue(signals, scale)
    if scale.policy == "sla":
        return sla_planner(slo, replica, rules)
    name = str(scale.policy)
    return guard("autoscale.policy", name, load_function("autoscale.policy", name))
