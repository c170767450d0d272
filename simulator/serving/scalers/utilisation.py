"""A target of a metric, as Kubernetes' Horizontal Pod Autoscaler has it: ceil(replicas x metric / target).

As the "algorithm details" of its page in Kubernetes' documentation say: nothing changes while metric over target is
within the tolerance of 1; where there should be more, replicas that start count with a metric of 0.
"""

from __future__ import annotations

from math import ceil

from ...question.fleet import Autoscale
from .signals import FleetSignals


def by_utilisation(signals: FleetSignals, scale: Autoscale) -> float:
    """As many replicas as have the target of the metric, on average."""
    if not signals.ready or not scale.target:
        return signals.replicas
    counted = signals.ready
    ratio = getattr(signals, scale.metric) / scale.target
    if ratio > 1.0 and signals.starting:
        counted = signals.ready + signals.starting
        ratio *= signals.ready / counted
        if ratio < 1.0:  # those that start are enough
            return signals.replicas
    if abs(ratio - 1.0) <= scale.tolerance:
        return signals.replicas
    return ceil(ratio * counted)
