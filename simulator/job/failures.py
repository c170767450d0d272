"""How often a job is interrupted and by what: rates of causes on a cluster, drawn as events of a Poisson process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...datasets.clusters import Cluster
from .fleets import BY_CAUSE, PUBLISHED, Fleet, fleets, published_rate
from .request import JobFailures, JobRestart, SlowSpells

DAY_S = 86_400.0
# What people lose or hold up, in the mean of five published jobs, as ln(published / what machines explain): 0 (Llama 3
# 405B), 0.02 (Olmo Hybrid 7B), 0.08 (Olmo 3 7B), 0.11 (BLOOM), 0.33 (OPT-175B). tests/evidence/jobs.py, which leaves
# each one out
SETBACKS = 0.108
YEAR_S = 365.25 * DAY_S
OWN = {"per_gpu_year": "gpu", "per_node_year": "node", "per_link_year": "link", "per_job_year": "job"}


@dataclass(frozen=True)
class JobCause:
    """One cause of interruptions: how often in a second, whether its node is replaced, whether work is saved first.

    ``slow`` does not end the job: it holds it up.
    """

    name: str
    per_s: float
    replaced: bool = False
    planned: bool = False
    slow: bool = False


@dataclass(frozen=True)
class JobRates:
    """All causes on a cluster, how unsure their rate is, the share that people look into, and where it is all from."""

    causes: tuple[JobCause, ...]
    spread: float
    manual_share: float
    source: str

    @property
    def interruptions_per_s(self) -> float:
        """How often work is lost."""
        return sum(cause.per_s for cause in self.causes if not (cause.planned or cause.slow))

    @property
    def per_s(self) -> float:
        """How often anything happens."""
        return sum(cause.per_s for cause in self.causes)


def setback_factors(mean: float, lives: int, seed: int) -> np.ndarray:
    """How many times longer each life takes by what people do [lives]: exponentials of the logarithm, at least 1.

    Of a positive figure of which only the mean is known the exponential says least beside it.
    """
    return np.asarray(np.exp(mean * np.random.default_rng([seed, 10]).standard_exponential(lives)))


def mean_setbacks(setbacks: float | None, failures: JobFailures) -> float:
    """The mean logarithm that holds for a job; 0 for one that nothing is to interrupt."""
    if setbacks is not None:
        return setbacks
    return 0.0 if failures.fleet == "none" and not failures.measured else SETBACKS


def units_of(cluster: Cluster) -> dict[str, int]:
    """How many of each unit a cluster has."""
    links = cluster.nodes * cluster.nics_per_node
    return {"gpu": cluster.devices, "node": cluster.nodes, "link": links, "job": 1}


def rates_of(failures: JobFailures, restart: JobRestart, slow: SlowSpells, cluster: Cluster) -> JobRates:
    """The causes of a job on a cluster."""
    units = units_of(cluster)
    spread, manual, source = 0.0, 0.0, "none"
    causes: list[JobCause] = []
    if failures.measured:
        by_unit = {unit: getattr(failures, name) or 0.0 for name, unit in OWN.items()}
        causes = [
            JobCause(unit, rate * units[unit] / YEAR_S, replaced=unit in ("gpu", "node"))
            for unit, rate in by_unit.items()
            if rate
        ]
        source = "your own rates"
    elif failures.fleet != "none":
        causes, manual, source = _published(failures.fleet, units)
        spread = published_rate()[1]
    causes = [JobCause(c.name, c.per_s * failures.scale, c.replaced, c.planned) for c in causes if failures.scale]
    if slow.per_node_year and slow.slowdown > 1 and slow.hours:
        causes.append(JobCause("slow node", slow.per_node_year * cluster.nodes / YEAR_S, slow=True))
    return JobRates(
        tuple(causes),
        spread if failures.spread is None else failures.spread,
        manual if restart.manual_share is None else restart.manual_share,
        source,
    )


def _published(name: str, units: dict[str, int]) -> tuple[list[JobCause], float, str]:
    """Causes as in a fleet, or as in the mean of all, with the shares of the fleet that was published by cause."""
    detailed = fleets()[BY_CAUSE]
    if name == PUBLISHED:
        rate, _ = published_rate()
        factor = rate / detailed.per_gpu_day
        source = f"mean of {len(fleets())} published fleets ({', '.join(fleets())})"
        return _scaled(detailed, units, factor), detailed.manual_share, source
    fleet = fleets()[name]
    source = fleet.source.partition(":")[0]
    return _scaled(fleet, units, 1.0), fleet.manual_share, source


def _scaled(fleet: Fleet, units: dict[str, int], factor: float) -> list[JobCause]:
    """The causes of a fleet on other numbers of units."""
    nodes = fleet.devices / fleet.devices_per_node
    counted = {"gpu": fleet.devices, "node": nodes, "link": fleet.devices}  # one NIC a GPU
    return [
        JobCause(
            name,
            factor * cause.count / (counted[cause.of] * fleet.days * DAY_S) * units[cause.of],
            cause.replaced,
            cause.planned,
        )
        for name, cause in fleet.causes.items()
    ]


@dataclass(frozen=True)
class JobEvents:
    """The next event of each of some lives, arrays [n].

    ``gap_s`` since the event before it, ``down_s`` from an interruption until the job begins to load its checkpoint (0
    where none), ``held_s`` that the job stands still without losing work, ``replaced`` whether a node leaves,
    ``cause`` which of the causes it is.
    """

    gap_s: np.ndarray
    down_s: np.ndarray
    held_s: np.ndarray
    replaced: np.ndarray
    cause: np.ndarray


NextEvents = Callable[[np.ndarray], JobEvents]  # of lives by number


def drawn_events(
    rates: JobRates, restart: JobRestart, slow: SlowSpells, saved_s: float, loaded_s: float, lives: int, seed: int
) -> NextEvents:
    """Events of so many lives: each has its own rate, drawn once. A planned one saves for ``saved_s``; all load.

    Gaps are exponential. The same seed has the same events.
    """
    streams = [np.random.default_rng([seed, stream]) for stream in range(3)]
    factors = np.exp(rates.spread * streams[0].standard_normal(lives))
    total = rates.per_s
    shares = np.cumsum([cause.per_s for cause in rates.causes]) / total if total else np.zeros(0)
    planned = np.array([cause.planned for cause in rates.causes])
    is_slow = np.array([cause.slow for cause in rates.causes])
    replaced = np.array([cause.replaced for cause in rates.causes])

    def events(which: np.ndarray) -> JobEvents:
        if not total:
            none = np.zeros(len(which))
            return JobEvents(np.full(len(which), math.inf), none, none, none.astype(bool), none.astype(np.int64))
        # drawn for all lives, so that what one life meets does not hang on how long others take
        gap_s = streams[1].standard_exponential(lives)[which] / (total * factors[which])
        cause = np.minimum(np.searchsorted(shares, streams[1].random(lives)[which], side="right"), len(shares) - 1)
        usual_s = 60.0 * restart.minutes * np.exp(restart.spread * streams[2].standard_normal(lives)[which])
        people = streams[2].random(lives)[which] < rates.manual_share
        down_s = usual_s + loaded_s + 3600.0 * restart.manual_hours * people
        spell_s = 3600.0 * slow.hours * (1.0 - 1.0 / slow.slowdown)
        held_s = np.where(is_slow[cause], spell_s, np.where(planned[cause], usual_s + loaded_s + saved_s, 0.0))
        ends = ~(planned[cause] | is_slow[cause])
        return JobEvents(gap_s, np.where(ends, down_s, 0.0), held_s, replaced[cause] & ends, cause)

    return events
