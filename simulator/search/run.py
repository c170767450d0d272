"""A search from its request to its answer: what fits together, what bounds leave out, what is simulated, what is best.

Points are simulated in waves, those with the lowest bound on the step's time first. After each wave points are left
out whose bound says that they are neither among the ``top`` nor on the front. Waves are as large whatever the number
of processes, so that the answer is the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from ...datasets.devices import Device
from ..question.plan import Plan
from ..report.energy import least_w
from .answer import Counted, Search, answer
from .bounds import Bounds, bound, standing
from .evaluate import Evaluator
from .explain import change, changes, reason
from .expressions import ceilings
from .found import Found, Row, after_rules, fitting_together
from .points import Folder, identity
from .rank import dominated, front, losses
from .request import Asked, SearchRequest, asked
from .result import SearchReport
from .space import AXES, MOST_POINTS, Points, combinations, derived, fitting, neighbours, settings
from .workers import Workers

WAVE = 256  # points between two looks at what can still be best; those that are alike among them share work
CONSTRAINT = "constraint: "
FEW = 16  # points: no probes are worth their time for fewer
Progress = Callable[[int], AbstractContextManager[Callable[[int], None]]]


def search(
    request: SearchRequest, workers: Callable[[Asked], Workers], folder: Folder, progress: Progress
) -> SearchReport:
    """The answer to a request. RequestError for an empty space and for rules that leave nothing of it.

    ``workers`` makes what simulates; ``folder`` keeps the points; ``progress`` opens a bar of so many points.
    """
    started = time.perf_counter()
    made = asked(request)
    crew, found = workers(made), Found()
    sampler, count = request.sampler, math.prod(map(len, made.axes.values()))
    if sampler == "auto" and count > MOST_POINTS:
        sampler = "nsga2"
    counted = Counted(count, count, {}, sampler)
    if sampler in ("auto", "exhaustive"):
        points, left_out = space_of(made)
        kept = points.only(after_rules(request.before(), points.columns, points.at, found))
        few = sampler == "exhaustive" or len(kept) <= request.exhaustive_up_to
        counted = Counted(count, len(points), left_out, "exhaustive" if few else "nsga2")
    if counted.sampler == "exhaustive":
        exhaustive(made, kept, crew, found, folder, progress)
    else:
        from .sampled import sample

        found = Found()
        with progress(request.trials) as advance:
            found.add(sample(made, crew, folder, advance, counted.sampler), AXES)
    folder.write(found.left() if folder.path else (), "left_out")
    return answer(layouts(made, crew), found, counted, started)


def layouts(made: Asked, crew: Workers) -> Search:
    """What a search over layouts says of itself."""
    return Search(
        made.request,
        made.axes,
        changes,
        reason,
        AXES,
        report=lambda row: crew.evaluator.report({name: row[name] for name in AXES}),
        around=partial(look_around, made, crew),
        notes=partial(notes, made.request),
    )


def space_of(made: Asked) -> tuple[Points, dict[str, int]]:
    """Points that fit together, and what left out how many combinations (:func:`.found.fitting_together`)."""
    points = derived(combinations(made.axes), made.clusters, made.facts)
    kept, left_out = fitting_together(fitting(points, made.facts), len(points), "combinations")
    return points.only(kept), left_out


def exhaustive(made: Asked, points: Points, crew: Workers, found: Found, folder: Folder, progress: Progress) -> None:
    """Every point simulated, or left out because of a bound."""
    bounds = bounds_of(made, points, crew, progress)
    fits = may_fit(made, points, crew.evaluator, bounds)
    over = np.flatnonzero(~fits)
    found.leave_all("memory_bound", over, points.at, lambda at: f"needs at least {bounds.memory_gib[at]:.1f} GiB")
    fits &= may_meet(made, points, bounds, fits, found)
    lower = lower_losses(made, points, bounds, crew.evaluator)
    waiting = np.flatnonzero(fits)
    waiting = waiting[np.lexsort([waiting, bounds.time_s[waiting]])]
    with progress(len(waiting)) as advance:
        while len(waiting):
            wave, waiting = waiting[:WAVE], waiting[WAVE:]
            found.add(simulate(points, wave, crew, folder, advance), AXES)
            if "time" in made.request.prune and len(waiting):
                lost = beaten(made, lower[waiting], found.timed)
                out = waiting[lost]
                found.leave_all("time_bound", out, points.at, lambda at: f"takes at least {bounds.time_s[at]:.3f} s")
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
    _, first, which = np.unique(points.columns["cluster"].astype(str), return_index=True, return_inverse=True)
    memory = np.array([evaluator.place(points.at(int(at)))[1].memory_gib for at in first])
    fits: np.ndarray = bounds.memory_gib <= memory[which]
    return fits


def may_meet(made: Asked, points: Points, bounds: Bounds, kept: np.ndarray, found: Found) -> np.ndarray:
    """Whether a point's bounds leave it a way to meet the constraints on its memory and its time [points]."""
    _, constraints = made.request.expressions()
    may = np.ones(len(points), dtype=bool)
    for prune, name, least, unit in (
        ("memory", "peak_gib", bounds.memory_gib, "GiB"),
        ("time", "step_time_s", bounds.time_s, "s"),
    ):
        for text, most in ceilings(constraints, name) if prune in made.request.prune else ():
            out = np.flatnonzero(kept & may & (least > most))
            found.leave_all(CONSTRAINT + text, out, points.at, partial(_takes, least, unit))
            may &= least <= most
    return may


def _takes(least: np.ndarray, unit: str, at: int) -> str:
    return f"takes at least {least[at]:.3g} {unit}"


def simulate(
    points: Points, wave: np.ndarray, crew: Workers, folder: Folder, advance: Callable[[int], None]
) -> list[Row]:
    """The rows of some points [places], those of the folder as they are, the others simulated and kept there."""
    asked_for = [points.at(at) for at in wave.tolist()]
    rows: list[Row | None] = [folder.known.get(identity(point)) for point in asked_for]
    missing = [at for at, row in enumerate(rows) if row is None]
    advance(len(rows) - len(missing))
    made = crew.rows([asked_for[at] for at in missing], advance, folder.write)
    for at, row in zip(missing, made, strict=True):
        rows[at] = row
    return [row for row in rows if row is not None]


def lower_losses(made: Asked, points: Points, bounds: Bounds, evaluator: Evaluator) -> np.ndarray:
    """The least that each objective can come to [points, objectives], less being better."""
    c, work = points.columns, made.base.work
    seconds, devices = bounds.time_s, c["devices"]
    tokens = float(work.sequences * work.seq_len)
    kinds = list(zip(c["cluster"].tolist(), c["precision"].tolist(), strict=True))
    known_at = {kind: evaluator.place(points.at(kinds.index(kind))) for kind in dict.fromkeys(kinds)}
    price, watts, peak = np.array([least_of(*known_at[kind][:2]) for kind in kinds]).reshape(-1, 3).T
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.where(seconds > 0, 1.0 / seconds, np.inf)
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


def least_of(plan: Plan, device: Device) -> tuple[float, float, float]:
    """Of a device of a plan: its price an hour, the watts it takes at least, its FLOP/s in the plan's format."""
    peak = device.tensor_rate(plan.quantization or plan.precision) * 1e12
    return plan.cluster.price_per_device_hour, least_w(device), peak


def beaten(made: Asked, lower: np.ndarray, rows: Sequence[Row]) -> np.ndarray:
    """Whether points can neither be among the best nor on the front, whatever they take [points]."""
    good = made.request.good(rows)
    if len(good) < made.request.top:
        return np.zeros(len(lower), dtype=bool)
    loss = losses(good, made.request.objectives)
    last = np.sort(loss[:, 0])[made.request.top - 1]
    best = losses(front(good, made.request.objectives), made.request.objectives)
    return (lower[:, 0] > last) & dominated(lower, best)


def look_around(made: Asked, crew: Workers, best: Row, found: Found, good: Sequence[Row]) -> list[dict[str, Any]]:
    """What each change of one axis of the best by one step costs, simulated where it was left out; or why it cannot
    be."""
    known = {identity(row): row for row in found.rows}
    near: list[tuple[str, Row]] = []
    for axis, point in neighbours(made.axes, best):
        point = {name: point[name] for name in AXES}
        own = derived(combinations({name: [value] for name, value in point.items()}), made.clusters, made.facts)
        unmet = [what for what, holds in fitting(own, made.facts).items() if not holds.all()]
        if unmet:
            near.append((axis, {**point, "status": "does not fit together", "why": unmet[0]}))
        else:
            near.append((axis, known.get(identity(point), {**point, "status": "", "why": ""})))
    missing = [at for at, (_, row) in enumerate(near) if row["status"] == ""]
    rows = crew.rows([{name: near[at][1][name] for name in AXES} for at in missing], lambda done: None)
    for at, row in zip(missing, rows, strict=True):
        near[at] = near[at][0], row
    return [change(best, axis, row, made.request.objectives[0]) for axis, row in near]


def notes(request: SearchRequest, found: Found) -> list[str]:
    """Why there is no answer."""
    unmet = [each for name, each in found.pruned.items() if name.startswith(CONSTRAINT)]
    if found.timed or unmet:
        nearest = f"; {settings(unmet[0].example)} {unmet[0].why}" if unmet else ""
        return [f"no point meets {' and '.join(request.constraints)}; {len(found.timed)} were simulated{nearest}"]
    needs = [row["peak_gib"] for row in found.rows if row.get("peak_gib")]
    least = f"; the smallest needs {min(needs):.1f} GiB" if needs else ""
    reasons = ", ".join(f"{each.count:,} {name}" for name, each in found.pruned.items())
    example = next((f" ({settings(each.example)}: {each.why})" for each in found.pruned.values()), "")
    return [f"no point of the space can run: {reasons}{least}{example}"]
