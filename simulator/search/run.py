"""A search from its request to its answer: what fits together, what bounds leave out, what is simulated, what is best.

Points are simulated in waves, those with the lowest bound on the step's time first. After each wave points are left
out whose bound says that they are neither among the ``top`` nor on the front. Waves are as large whatever the number
of processes, so that the answer is the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..question.canonical import RequestError
from ..report.energy import least_w
from .bounds import Bounds, bound, standing
from .evaluate import OK, Evaluator, Row
from .explain import changes, reason, sensitivity, settling
from .expressions import ceilings
from .points import Folder, identity
from .rank import dominated, front, losses, meeting, ranked, tie
from .request import Asked, SearchRequest, asked
from .result import Left, SearchReport
from .space import AXES, MOST_POINTS, NAMES, Points, axes_sizes, derived, fit_together, fitting, neighbours, settings
from .workers import Workers

WAVE = 256  # points between two looks at what can still be best; those that are alike among them share work
CONSTRAINT = "constraint: "
FEW = 16  # points: no probes are worth their time for fewer
SETTLED = 4  # tied rows whose ops are compared
Progress = Callable[[int], AbstractContextManager[Callable[[int], None]]]


@dataclass
class Searched:
    """What was found so far: rows, and how many points were left out for which reason."""

    rows: list[Row] = field(default_factory=list)
    pruned: dict[str, Left] = field(default_factory=dict)
    left: list[Row] = field(default_factory=list)

    def leave(self, reason: str, points: Points, out: np.ndarray, why: Callable[[int], str]) -> None:
        """Note points [places] that are left out for a reason."""
        for at in out.tolist():
            self.left.append({**points.at(at), "status": reason, "why": why(at)})
        if len(out):
            known = self.pruned.get(reason)
            first = int(out[0])
            example = known or Left(0, points.at(first), why(first))
            self.pruned[reason] = Left(example.count + len(out), example.example, example.why)

    def found(self, rows: Sequence[Row]) -> None:
        """Note rows; those that were not timed are left out for their status."""
        self.rows += rows
        for row in rows:
            if row["status"] != OK:
                known = self.pruned.get(row["status"]) or Left(0, {name: row[name] for name in AXES}, row["why"])
                self.pruned[row["status"]] = Left(known.count + 1, known.example, known.why)

    @property
    def timed(self) -> list[Row]:
        """Rows that were simulated in full."""
        return [row for row in self.rows if row["status"] == OK]


def search(
    request: SearchRequest, workers: Callable[[Asked], Workers], folder: Folder, progress: Progress
) -> SearchReport:
    """The answer to a request. RequestError for an empty space and for rules that leave nothing of it.

    ``workers`` makes what simulates; ``folder`` keeps the points; ``progress`` opens a bar of so many points.
    """
    started = time.perf_counter()
    made = asked(request)
    crew = workers(made)
    found = Searched()
    sampler, combinations = request.sampler, math.prod(map(len, made.axes.values()))
    if sampler == "auto" and combinations > MOST_POINTS:
        sampler = "nsga2"
    count, left_out = combinations, dict[str, int]()
    if sampler in ("auto", "exhaustive"):
        points, _, left_out = space_of(made)
        count = len(points)
        points = after_rules(made, points, found)
        sampler = "exhaustive" if sampler == "exhaustive" or count <= request.exhaustive_up_to else "nsga2"
    if sampler == "exhaustive":
        exhaustive(made, points, crew, found, folder, progress)
    else:
        from .sampled import sample

        found = Searched()
        with progress(request.trials) as advance:
            found.found(sample(made, crew, folder, advance, sampler))
    folder.write(found.left, "left_out")
    return answer(made, crew, found, (combinations, count, left_out, sampler), started)


def space_of(made: Asked) -> tuple[Points, int, dict[str, int]]:
    """Points that fit together, combinations, and what left out how many (:func:`.space.fit_together`)."""
    return fit_together(made.axes, made.clusters, made.facts)


def after_rules(made: Asked, points: Points, found: Searched) -> Points:
    """The points that meet all rules, and constraints that read no more than rules. RequestError where none does."""
    rules, constraints = made.request.expressions()
    rules = [*rules, *(each for each in constraints if each.names <= set(NAMES))]
    kept = np.ones(len(points), dtype=bool)
    for rule in rules:
        holds = rule.holds(points.columns)
        if not holds.any():
            raise RequestError(f"the space is empty: none of {len(points):,} points meets the rule {rule.text!r}")
        found.leave(f"rule: {rule.text}", points, np.flatnonzero(kept & ~holds), lambda at: "it does not hold")
        kept &= holds
        if not kept.any():
            raise RequestError(f"the space is empty: no point meets {rule.text!r} and the rules before it")
    return points.only(kept)


def exhaustive(made: Asked, points: Points, crew: Workers, found: Searched, folder: Folder, progress: Progress) -> None:
    """Every point simulated, or left out because of a bound."""
    bounds = bounds_of(made, points, crew, progress)
    fits = may_fit(made, points, crew.evaluator, bounds)
    over = np.flatnonzero(~fits)
    found.leave("memory_bound", points, over, lambda at: f"needs at least {bounds.memory_gib[at]:.1f} GiB")
    fits &= may_meet(made, points, bounds, fits, found)
    lower = lower_losses(made, points, bounds, crew.evaluator)
    waiting = np.flatnonzero(fits)
    waiting = waiting[np.lexsort([waiting, bounds.time_s[waiting]])]
    with progress(len(waiting)) as advance:
        while len(waiting):
            wave, waiting = waiting[:WAVE], waiting[WAVE:]
            found.found(simulate(points, wave, crew, folder, advance))
            if "time" in made.request.prune and len(waiting):
                lost = beaten(made, lower[waiting], found.timed)
                out = waiting[lost]
                found.leave("time_bound", points, out, lambda at: f"takes at least {bounds.time_s[at]:.3f} s")
                waiting = waiting[~lost]
                advance(len(out))


def bounds_of(made: Asked, points: Points, crew: Workers, progress: Progress) -> Bounds:
    """The bounds of all points; nothing is known of few points, or where nothing is to be pruned."""
    if not made.request.prune or len(points) <= FEW:
        return Bounds(np.zeros(len(points)), np.zeros(len(points)), np.zeros(len(points)))
    families = standing(points)
    with progress(len(families)) as advance:
        return bound(points, crew.probes(families, advance), crew.evaluator)


def may_fit(made: Asked, points: Points, evaluator: Evaluator, bounds: Bounds) -> np.ndarray:
    """Whether a point's bound fits its device [points]."""
    if "memory" not in made.request.prune:
        return np.ones(len(points), dtype=bool)
    memory = per_cluster(points, lambda at: evaluator.place(points.at(at))[1].memory_gib)
    fits: np.ndarray = bounds.memory_gib <= memory
    return fits


def may_meet(made: Asked, points: Points, bounds: Bounds, kept: np.ndarray, found: Searched) -> np.ndarray:
    """Whether a point's bounds leave it a way to meet the constraints on its memory and its time [points]."""
    _, constraints = made.request.expressions()
    may = np.ones(len(points), dtype=bool)
    for prune, name, least, unit in (
        ("memory", "peak_gib", bounds.memory_gib, "GiB"),
        ("time", "step_time_s", bounds.time_s, "s"),
    ):
        for text, most in ceilings(constraints, name) if prune in made.request.prune else ():
            out = np.flatnonzero(kept & may & (least > most))
            found.leave(CONSTRAINT + text, points, out, partial(_takes, least, unit))
            may &= least <= most
    return may


def _takes(least: np.ndarray, unit: str, at: int) -> str:
    return f"takes at least {least[at]:.3g} {unit}"


def per_cluster(points: Points, figure: Callable[[int], float]) -> np.ndarray:
    """A figure of each point's cluster [points], asked once for each cluster."""
    names, first, which = np.unique(points.columns["cluster"].astype(str), return_index=True, return_inverse=True)
    return np.array([figure(int(at)) for at in first[: len(names)]])[which]


def simulate(
    points: Points, wave: np.ndarray, crew: Workers, folder: Folder, advance: Callable[[int], None]
) -> list[Row]:
    """The rows of some points [places], those of the folder as they are, the others simulated and kept there."""
    asked_for = [points.at(at) for at in wave.tolist()]
    rows: list[Row | None] = [folder.known.get(identity(point)) for point in asked_for]
    missing = [at for at, row in enumerate(rows) if row is None]
    advance(len(rows) - len(missing))
    made = crew.rows([asked_for[at] for at in missing], advance)
    folder.write(made)
    for at, row in zip(missing, made, strict=True):
        rows[at] = row
    return [row for row in rows if row is not None]


def lower_losses(made: Asked, points: Points, bounds: Bounds, evaluator: Evaluator) -> np.ndarray:
    """The least that each objective can come to [points, objectives], less being better."""
    c, work = points.columns, made.base.work
    seconds, devices = bounds.time_s, c["devices"]
    tokens = float(work.sequences * work.seq_len)
    place = {
        name: evaluator.place(points.at(int(np.flatnonzero(c["cluster"] == name)[0]))) for name in set(c["cluster"])
    }
    price = np.array([place[name][0].cluster.price_per_device_hour for name in c["cluster"]])
    watts = np.array([least_w(place[name][1]) for name in c["cluster"]])
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.where(seconds > 0, 1.0 / seconds, np.inf)
        peak = np.array(
            [
                place[name][1].tensor_rate(dtype) * 1e12
                for name, dtype in zip(c["cluster"], dtypes(made, points), strict=True)
            ]
        )
        use = bounds.model_flops * c["micro_batches"] * c["dp"] / devices / peak * rate
        known = {
            "step_time": seconds,
            "tokens_per_s": -tokens * rate,
            "tokens_per_s_per_gpu": -tokens * rate / devices,
            "mfu": np.where(seconds > 0, -use, -np.inf),
            "cost": price * devices * seconds / 3600.0,
            "energy": watts * devices * seconds,
            "memory": bounds.memory_gib,
            "gpus": devices.astype(float),
        }
    return np.stack([np.asarray(known[name], dtype=float) for name in made.request.objectives], axis=1)


def dtypes(made: Asked, points: Points) -> list[str]:
    """What each point's products compute in, as rates of devices know it."""
    from ...datasets.precisions import precision_of
    from ..question.requests import usual_precision

    found: dict[tuple[str, str], str] = {}
    for cluster, name in {*zip(points.columns["cluster"].tolist(), points.columns["precision"].tolist(), strict=True)}:
        if name == "auto":
            found[cluster, name] = usual_precision(_device(made, cluster))
        else:
            dtype, quantization = (
                (name, "") if name in (made.base.precision, made.base.quantization) else precision_of(name)
            )
            found[cluster, name] = quantization or dtype
    pairs = zip(points.columns["cluster"].tolist(), points.columns["precision"].tolist(), strict=True)
    return [found[pair] for pair in pairs]


def _device(made: Asked, cluster: str) -> Any:
    from ...datasets.devices import load_device

    own = made.base.cluster is not None and made.base.cluster.id == cluster
    return (
        made.base.device
        if own and not isinstance(made.base.device, str)
        else load_device(made.clusters[cluster].device)
    )


def beaten(made: Asked, lower: np.ndarray, rows: Sequence[Row]) -> np.ndarray:
    """Whether points can neither be among the best nor on the front, whatever they take [points]."""
    _, constraints = made.request.expressions()
    good = meeting(rows, constraints)
    if len(good) < made.request.top:
        return np.zeros(len(lower), dtype=bool)
    loss = losses(good, made.request.objectives)
    last = np.sort(loss[:, 0])[made.request.top - 1]
    best = losses(front(good, made.request.objectives), made.request.objectives)
    return (lower[:, 0] > last) & dominated(lower, best)


def answer(
    made: Asked,
    crew: Workers,
    found: Searched,
    counted: tuple[int, int, Mapping[str, int], str],
    started: float,
) -> SearchReport:
    """The report of what was found."""
    request = made.request
    _, constraints = request.expressions()
    timed = found.timed
    good = meeting(timed, constraints)
    order = ranked(good, request.objectives)
    best = explained(order[: request.top + 1], request)[: request.top]
    around = look_around(made, crew, found, best[0]) if best else []
    combinations, count, left_out, sampler = counted
    tied = [
        row
        for row in order
        if best and (row is order[0] or tie(order[0], row, request.objectives[0], request.noise_floor) == "noise")
    ]
    settle = (
        settling([crew.evaluator.report({n: row[n] for n in AXES}) for row in tied[:SETTLED]]) if len(tied) > 1 else []
    )
    return SearchReport(
        model=model_name(made),
        sampler=sampler,
        objectives=request.objectives,
        constraints=request.constraints,
        axes=axes_sizes(made.axes),
        combinations=combinations,
        points=count,
        left_out=dict(left_out),
        evaluated=len(timed),
        pruned=sum(each.count for each in found.pruned.values()),
        pruned_by=dict(found.pruned),
        best=tuple(best),
        pareto=tuple(front(good, request.objectives)),
        ties=max(len(tied) - 1, 0),
        sensitivity=tuple(sensitivity(best[0], around, request.objectives[0])) if best else (),
        measure_next=tuple(settle),
        notes=tuple(notes(found, good, timed, request)),
        wall_time_s=time.perf_counter() - started,
        rows=tuple(found.rows),
    )


def model_name(made: Asked) -> str:
    """What the model is called."""
    from ..trace.models import resolve

    return resolve(made.base.model).name


def explained(rows: Sequence[Mapping[str, Any]], request: SearchRequest) -> list[Row]:
    """Rows with rank, tie with the row before, what differs from the next one and why it is better than that."""
    first = request.objectives[0]
    best = []
    for at, row in enumerate(rows):
        after = rows[at + 1] if at + 1 < len(rows) else None
        said = "" if after is None else reason(row, after, first)
        differs = {} if after is None else {name: list(pair) for name, pair in changes(row, after).items()}
        before = tie(rows[at - 1], row, first, request.noise_floor) if at else ""
        best.append({"rank": at + 1, **row, "tie": before, "reason": said, "differs_from_next": differs})
    return best


def look_around(made: Asked, crew: Workers, found: Searched, best: Row) -> list[tuple[str, Row]]:
    """The rows of all points that differ from the best in one axis by one step, simulated where they were left out."""
    known = {identity(row): row for row in found.rows}
    near: list[tuple[str, Row]] = []
    for axis, point in neighbours(made.axes, best):
        point = {name: point[name] for name in AXES}
        column = {
            name: np.array([value], dtype=object if isinstance(value, str) else None) for name, value in point.items()
        }
        own = derived(column, made.clusters, made.facts)
        unmet = [what for what, holds in fitting(own, made.facts).items() if not holds.all()]
        if unmet:
            near.append((axis, {**point, "status": "does not fit together", "why": unmet[0]}))
        else:
            near.append((axis, known.get(identity(point)) or {**point, "status": "", "why": ""}))
    missing = [at for at, (_, row) in enumerate(near) if row["status"] == ""]
    rows = crew.rows([{name: near[at][1][name] for name in AXES} for at in missing], lambda done: None)
    for at, row in zip(missing, rows, strict=True):
        near[at] = near[at][0], row
    return near


def notes(
    found: Searched, good: Sequence[Mapping[str, Any]], timed: Sequence[Row], request: SearchRequest
) -> list[str]:
    """What a reader should know: why there is no answer, or how sure the first place is."""
    if good:
        return []
    unmet = [each for name, each in found.pruned.items() if name.startswith(CONSTRAINT)]
    if timed or unmet:
        nearest = f"; {settings(unmet[0].example)} {unmet[0].why}" if unmet else ""
        return [f"no point meets {' and '.join(request.constraints)}; {len(timed)} were simulated{nearest}"]
    needs = [row["peak_gib"] for row in found.rows if row.get("peak_gib")]
    least = f"; the smallest needs {min(needs):.1f} GiB" if needs else ""
    reasons = ", ".join(f"{each.count:,} {name}" for name, each in found.pruned.items())
    example = next((f" ({settings(each.example)}: {each.why})" for each in found.pruned.values()), "")
    return [f"no point of the space can run: {reasons}{least}{example}"]
