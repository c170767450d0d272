"""An autoscaler beside the event loop: at each of its looks it sees the fleet, asks its scaler, and says how many
replicas there should be.

Between scaler and fleet stand the rules of Kubernetes' Horizontal Pod Autoscaler (its page in the documentation:
stabilization windows, default behavior): of looks in a window the least counts for more replicas, the most for fewer;
no more than twice as many, or four more, at a time. Dynamo's planner has neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..question.canonical import RequestError
from ..question.serving import ServingRequest
from .fleet import DOWN, DRAINING, OFF, READY, STARTING
from .replica import ServedReplica
from .rules import ServingSetup, first_decode_rank
from .scalers import scaler_of
from .scalers.signals import FleetSignals
from .state import LoopState

TWICE, MORE = 2, 4  # of HPA's usual policies for scaling up: 100 % and 4 pods


class Autoscaler:
    """What an autoscaler remembers. ``looks`` are what it saw, ``rows`` what a picture shows of it."""

    def __init__(self, request: ServingRequest, setup: ServingSetup, replica: ServedReplica) -> None:
        self.scale, self.most, self.setup = request.autoscale, request.most_replicas, setup
        self.scaler = scaler_of(request.autoscale, request.slo, replica, setup.rules)
        self.free = request.autoscale.policy == "sla"  # of HPA's rules
        self.looks: list[tuple[float, int]] = []
        self.rows: list[Mapping[str, float]] = []
        self.seen, self.arrived = 0, 0
        self.ended: list[np.ndarray] = []
        self.busy_us = np.zeros(0)

    def add(self, ended: np.ndarray) -> None:
        """Requests that ended since it last looked, before they are forgotten."""
        self.ended.append(ended[self.seen :].copy())
        self.seen = 0

    def look(self, state: LoopState) -> int:
        """How many replicas there should be. RequestError where a user's own scaler returns no number."""
        signals = self.signals(state)
        wish = self.scaler(signals)
        if not isinstance(wish, (int, float, np.integer, np.floating)) or wish != wish:
            raise RequestError(f"autoscale.policy={self.scale.policy} returned {wish!r}, not a number of replicas")
        desired = int(min(max(wish, self.scale.min_replicas), self.most))
        if not self.free:
            desired = self.steadied(signals, desired)
        self.rows.append(row_of(state, signals, desired))
        return desired

    def steadied(self, signals: FleetSignals, wish: int) -> int:
        """A wish as windows and steps allow it."""
        now_s, current = signals.time_s, signals.replicas
        self.looks.append((now_s, wish))
        longest_s = max(self.scale.up_window_s, self.scale.down_window_s)
        self.looks = [look for look in self.looks if look[0] > now_s - longest_s or look[0] == now_s]
        least = min(count for at_s, count in self.looks if at_s > now_s - self.scale.up_window_s or at_s == now_s)
        most = max(count for at_s, count in self.looks if at_s > now_s - self.scale.down_window_s or at_s == now_s)
        if least > current:
            return min(least, max(TWICE * current, current + MORE))
        return max(min(current, most), self.scale.min_replicas)

    def signals(self, state: LoopState) -> FleetSignals:
        """What is seen now, of replicas of the first kind."""
        totals, ranks = state.totals[0], state.ranks[: first_decode_rank(self.setup)]
        status = state.fleet["status"][: self.setup.first_decode]
        serving = np.repeat(status == READY, self.setup.ranks_per_replica)
        replicas = max(int((status == READY).sum()), 1)
        before = self.busy_us if len(self.busy_us) else np.zeros(len(ranks))
        busy_us = (ranks["busy_us"] - before)[serving]
        self.busy_us = ranks["busy_us"].copy()
        self.ended.append(state.left[self.seen : totals["left"]].copy())
        self.seen = int(totals["left"])
        ended = np.concatenate(self.ended)
        ended, self.ended = ended[ended["rank"] >= 0], []
        arrived, self.arrived = int(totals["arrived"]) - self.arrived, int(totals["arrived"])
        tokens = float(ended["input_tokens"].sum())
        return FleetSignals(
            time_s=float(totals["now_us"]) / 1e6,
            interval_s=self.setup.tick_us / 1e6,
            replicas=int(np.isin(status, (STARTING, READY, DOWN)).sum()),
            ready=int((status == READY).sum()),
            starting=int(np.isin(status, (STARTING, DOWN)).sum()),
            requests=float(ranks["outstanding"][serving].sum()) / replicas,
            kv=1.0 - float(ranks["free"][serving].mean()) / self.setup.rules.blocks if serving.any() else 0.0,
            busy=min(float(busy_us.mean()) / self.setup.tick_us, 1.0) if serving.any() else 0.0,
            waiting=int(ranks["waiting"].sum() + totals["held"]),
            arrived=arrived,
            input_tokens=tokens / len(ended) if len(ended) else float("nan"),
            output_tokens=float(ended["output_tokens"].mean()) if len(ended) else float("nan"),
            hit_share=float(ended["hit_tokens"].sum()) / tokens if tokens else 0.0,
        )


def row_of(state: LoopState, signals: FleetSignals, desired: int) -> Mapping[str, float]:
    """What a picture shows of a look: all replicas by what they do, and the load."""
    status = state.fleet["status"]
    counts = {"ready": READY, "starting": STARTING, "draining": DRAINING, "down": DOWN}
    return {
        "s": signals.time_s,
        **{name: float((status == code).sum()) for name, code in counts.items()},
        "desired": float(desired),
        "requests_per_s": signals.arrived / signals.interval_s,
        "waiting": float(signals.waiting),
        "outstanding": float(state.ranks["outstanding"].sum()),
    }


def set_up_fleet(state: LoopState, request: ServingRequest, devices: tuple[int, int]) -> None:
    """Give each replica its rate of failures, by its ``devices``, and random numbers of its own."""
    failures, first = request.failures, request.most_replicas
    count = np.where(np.arange(len(state.fleet)) < first, *devices)
    state.fleet["rate"] = 0.0 if failures.mtbf_h is None else count / (failures.mtbf_h * 3600e6)
    seeds = np.random.default_rng(failures.seed).integers(1, 2147483646, len(state.fleet))
    state.fleet["seed"] = seeds
    state.ranks["shut"] = 1


def fleet_figures(
    state: LoopState, devices: tuple[int, int], prices: tuple[float, float], first: int
) -> dict[str, Any]:
    """Hours of GPUs and their price, starts, failures and what was lost in them; empty where nobody comes or goes."""
    fleet, totals = state.fleet, state.totals[0]
    if not len(fleet):
        return {}
    now_us = float(totals["now_us"])
    on_us = fleet["on_us"] + np.where(fleet["status"] == OFF, 0.0, now_us - fleet["since_us"])
    down_us = fleet["down_us"] + np.where(fleet["status"] == DOWN, now_us - fleet["down_since_us"], 0.0)
    kinds = np.arange(len(fleet)) < first
    gpu_hours = on_us * np.where(kinds, *devices) / 3600e6
    return {
        "gpu_hours": float(gpu_hours.sum()),
        "price": float((gpu_hours * np.where(kinds, *prices)).sum()),
        "mean_replicas": float(on_us.sum()) / max(now_us, 1e-9),
        "starts": int(fleet["starts"].sum()),
        "failures": int(fleet["failures"].sum()),
        "down_share": float(down_us.sum() / max(on_us.sum(), 1e-9)),
        "lost_requests": int(totals["lost_requests"]),
        "lost_tokens": int(totals["lost_tokens"]),
    }
