"""Which measurements teach most: rounds of a campaign that looks for what makes predicted steps wrong.

What is not known of an op is the variance of a Gaussian process over log features (:mod:`.kriging`), in units of
ln(measured / analytical). What it costs is its share of the time of the steps that somebody plans. A measurement is
worth what it takes from the sum of variance times share over all ops of these steps, for each second that it takes
(the integrated criterion of Cohn, "Active Learning with Statistical Models", 1996; a greedy choice is within 1 - 1/e of
the best for it, Krause and Guestrin 2005). Variances do not depend on the values to come, so a whole round is chosen
before it is measured; then scales and amplitude are learned anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .kriging import Scales, covariance, default_scales, fit, search

UNKNOWN = 0.4  # standard deviation of ln(measured / analytical) where nothing was measured yet
FEWEST = 8  # rows from which scales are learned
SEARCHED = 200  # rows that they are learned on


@dataclass(frozen=True, eq=False)
class Subject:
    """One kind of op on one backend: what can be measured and what is asked of it.

    ``candidates`` [n, f] and ``asked`` [m, f] are features, ``share`` [m] of the steps' time, ``cost_s`` [n] the time
    of a measurement; ``measured`` [k, f] what is known, with ``target`` [k], ln(measured / analytical).
    """

    names: Sequence[str]
    candidates: np.ndarray
    cost_s: np.ndarray
    asked: np.ndarray
    share: np.ndarray
    measured: np.ndarray
    target: np.ndarray
    seed: int = 0


@dataclass(eq=False)
class Belief:
    """What is known of a subject while a round is chosen: its process, conditioned on what is measured and chosen."""

    subject: Subject
    scales: Scales
    amplitude: float  # variance of the process
    points: np.ndarray = field(init=False)  # [n + m, c]: candidates, then what is asked
    variance: np.ndarray = field(init=False)  # [n + m], in units of the amplitude
    cross: np.ndarray = field(init=False)  # [n, m]: covariance of candidates with what is asked
    factors: list[np.ndarray] = field(default_factory=list, init=False)  # rows of the Cholesky factor, [n + m] each
    taken: np.ndarray = field(init=False)  # bool [n]

    def __post_init__(self) -> None:
        subject = self.subject
        self.points = self.scales.scaled(np.concatenate([subject.candidates, subject.asked]))
        self.variance = np.ones(len(self.points))
        n = len(subject.candidates)
        self.taken = np.zeros(n, dtype=bool)
        self.cross = covariance(self.points[:n], self.points[n:])
        scaled = self.scales.scaled(subject.measured)
        if len(scaled):
            self._condition(scaled)

    def _condition(self, scaled: np.ndarray) -> None:
        """Take what is measured into account, all at once."""
        kernel = covariance(scaled, scaled) + self.scales.noise * np.eye(len(scaled))
        solved = np.linalg.solve(np.linalg.cholesky(kernel), covariance(scaled, self.points))
        self.factors = list(solved)
        self.variance -= (solved**2).sum(axis=0)
        n = len(self.subject.candidates)
        self.cross -= solved[:, :n].T @ solved[:, n:]

    def gains(self) -> np.ndarray:
        """What each candidate takes from :meth:`doubt`, a second of measuring [n]; -1 for what was chosen already."""
        n = len(self.taken)
        worth = (self.cross**2 @ self.subject.share) / (np.maximum(self.variance[:n], 0.0) + self.scales.noise)
        return np.where(self.taken, -1.0, self.amplitude * worth / self.subject.cost_s)

    def choose(self, position: int) -> None:
        """Count a candidate as measured."""
        n = len(self.taken)
        column = covariance(self.points[position : position + 1], self.points)[0]
        for row in self.factors:
            column -= row[position] * row
        gain = column / np.sqrt(max(self.variance[position], 0.0) + self.scales.noise)
        self.factors.append(gain)
        self.variance -= gain**2
        self.cross -= np.outer(gain[:n], gain[n:])
        self.taken[position] = True

    def doubt(self) -> float:
        """Sum over what is asked of variance times share."""
        n = len(self.taken)
        return float(self.amplitude * (np.maximum(self.variance[n:], 0.0) @ self.subject.share))


def believe(subject: Subject) -> Belief:
    """The process of a subject: with scales and amplitude learned where enough was measured, else as usual."""
    if len(subject.target) < FEWEST:
        every = np.concatenate([subject.candidates, subject.asked])
        return Belief(subject, default_scales(every, subject.names), UNKNOWN**2)
    centred = subject.target - np.median(subject.target)
    scales = search(subject.measured, subject.names, centred, SEARCHED, subject.seed)
    if not len(scales.columns):
        scales = default_scales(np.concatenate([subject.candidates, subject.asked]), subject.names)
    spread = 1.4826 * float(np.median(np.abs(centred)))
    return Belief(subject, scales, max(spread, float(np.std(centred)) / 2, 0.01) ** 2)


@dataclass(frozen=True)
class Round:
    """What to measure next: positions of candidates by subject, and the doubt before and after, as relative errors."""

    picks: Mapping[str, Sequence[int]]
    before: float
    after: float
    cost_s: float

    @property
    def gain(self) -> float:
        """The share of the expected error that the round is to remove."""
        return 1.0 - self.after / self.before if self.before else 0.0


def plan_round(subjects: Mapping[str, Subject], points: int, seconds: float = float("inf")) -> Round:
    """The most valuable measurements over all subjects, at most so many and so long. Shares are over all of them.

    A subject that cannot be learned yet (fewer than :data:`FEWEST` measurements) goes before the others.
    """
    beliefs = {name: believe(subject) for name, subject in subjects.items()}
    before = expected_error(beliefs)
    gains = {name: subject.gains() for name, subject in beliefs.items() if len(subject.taken)}
    picks: dict[str, list[int]] = {}
    spent = 0.0
    for _ in range(points):
        few = {name for name in gains if len(subjects[name].target) + len(picks.get(name, ())) < FEWEST}
        few = {name for name in few if gains[name].max() > 0.0}
        best = max(few or gains, key=lambda name: float(gains[name].max()), default=None)
        if best is None or gains[best].max() <= 0.0:
            break
        position = int(np.argmax(gains[best]))
        cost = float(subjects[best].cost_s[position])
        if spent + cost > seconds:
            break
        spent += cost
        picks.setdefault(best, []).append(position)
        beliefs[best].choose(position)
        gains[best] = beliefs[best].gains()
    return Round(picks, before, expected_error(beliefs), spent)


def expected_error(beliefs: Mapping[str, Belief]) -> float:
    """The error of an op that a step spends its time in, as expected: the root of variance times share."""
    return float(np.sqrt(sum(belief.doubt() for belief in beliefs.values())))


def forecast(subject: Subject, positions: np.ndarray) -> np.ndarray:
    """What would be said of some candidates from what was measured: ln(measured / analytical) [p]; 0 from nothing."""
    if len(subject.target) < FEWEST:
        centre = float(np.median(subject.target)) if len(subject.target) else 0.0
        return np.full(len(positions), centre)
    belief = believe(subject)
    centre = float(np.median(subject.target))
    weights = np.ones(len(subject.target))
    return centre + fit(subject.measured, subject.target - centre, weights, belief.scales).predict(
        subject.candidates[positions]
    )
