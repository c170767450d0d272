"""The depth of queues, as KEDA has it: ceil(requests that wait / target).

KEDA gives its metric to Kubernetes' Horizontal Pod Autoscaler as an external one of type AverageValue (both
documentations): nothing changes while the metric over target x replicas is within the tolerance of 1. KEDA's own step
from 0 to 1 replica is not simulated.
"""

from __future__ import annotations

from math import ceil

from ...question.fleet import Autoscale
from .signals import FleetSignals


def by_queue(signals: FleetSignals, scale: Autoscale) -> float:
    """As many replicas as have the target of requests that wait for each."""
    target = scale.target or 1.0
    if signals.replicas and abs(signals.waiting / (target * signals.replicas) - 1.0) <= scale.tolerance:
        return signals.replicas
    return ceil(signals.waiting / target)
