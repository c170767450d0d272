"""A search from its request to its answer: what fits together, what bounds leave out, what is simulated, what is best.

Points are simulated in waves, those with the lowest bound on the step's time first. After each wave points are left
out whose bound says that they are neither among the ``top`` nor on the front. Waves are as large whatever the number
of processes, so that the answer is the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets.devices import Device
from ..question.plan import Plan
from ..report.energy import least_w
from .answer import Counted, Search, answer
from .bounds import Bounds, bound, standing
from .evaluate import Evaluator
from .explain import change, changes, reason
from .expressions import ceilings
from .outcome import Row, SearchOutcome, after_rules, fitting_together
from .points import Folder, identity
from .rank import dominated, front, losses
from .request import SearchRequest, SearchSetup
from .result import SearchReport
from .space import AXES, MOST_POINTS, Points, combinations, derived, fitting, neighbours, settings
from .spread import Crew, Progress
from .workers import Workers

if TYPE_CHECKING:
    from ..engines.bench import Bench

WAVE = 256  # points between two looks at what can still be best; those that are alike among them share work
CONSTRAINT = "constraint: "
FEW = 16  # points: no probes are worth their time for fewer


def search(
    request: SearchRequest, bench: Bench, crew: Crew, points_path: Path | None, progress: Progress
) -> SearchReport:
    """The answer to a request. RequestError for an empty space and for rules that leave nothing of it.

    The folder ``points_path`` keeps the points; ``progress`` opens a bar of so many points.
    """
    started, folder = time.perf_counter(), Folder(points_path, request)
    workers, outcome = Workers(Evaluator.of(request, bench), crew), SearchOutcome()
    setup = workers.setup
    sampler, count = request.sampler, math.prod(map(len, setup.axes.values()))
    if sampler == "auto" and count > MOST_POINTS:
        sampler = "nsga2"
    counted = Counted(count, count, {}, sampler)
    if sampler in ("auto", "exhaustive"):
        points, left_out = space_of(setup)
        inside = points.only(after_rules(request.before(), points.columns, points.at, outcome))
        few = sampler == "exhaustive" or len(inside) <= request.exhaustive_up_to
        counted = Counted(count, len(points), left_out, "exhaustive" if few else "nsga2")
    if counted.sampler == "exhaustive":
        exhaustive(inside, workers, outcome, folder, progress)
    else:
        from .sampled import sample

        outcome = SearchOutcome()
        with progress(request.trials) as advance:
            outcome.add(sample(workers, folder, advance, counted.sampler), AXES)
    folder.write(outcome.left() if folder.path else (), "left_out")
    return answer(layouts(workers), outcome, counted, started)


def layouts(crew: Workers) -> Search:
    """What a search over layouts says of itself."""
    return Search(
        crew.setup.request,
        crew.setup.axes,
        changes,
        reason,
        AXES,
        report=lambda row: crew.evaluator.report({name: row[name] for name in AXES}),
        around=partial(look_around, crew),
        notes=partial(notes, crew.setup.request),
    )


def space_of(setup: SearchSetup) -> tuple[Points, dict[str, int]]:
    """Points that fit together, and what left out how many combinations (:func:`.outcome.fitting_together`)."""
    points = derived(combinations(setup.axes), setup.clusters, setup.facts)
    inside, left_out = fitting_together(fitting(points, setup.facts), len(points), "combinations")
    return points.only(inside), left_out


def exhaustive(points: Points, crew: Workers, outcome: SearchOutcome, folder: Folder, progress: Progress) -> None:
    """Every point simulated, or left out because of a bound."""
    setup, bounds = crew.setup, bounds_of(points, crew, progress)
    fits = may_fit(points, crew.evaluator, bounds)
    over = np.flatnonzero(~fits)
    outcome.leave_all("memory_bound", over, points.at, lambda at: f"needs at least {bounds.memory_gib[at]:.1f} GiB")
    fits &= may_meet(setup, points, bounds, fits, outcome)
    lower = lower_losses(points, bounds, crew.evaluator)
    waiting = np.flatnonzero(fits)
    waiting = waiting[np.lexsort([waiting, bounds.time_s[waiting]])]
    with progress(len(waiting)) as advance:
        while len(waiting):
            wave, waiting = waiting[:WAVE], waiting[WAVE:]
            outcome.add(simulate(points, wave, crew, folder, advance), AXES)
            if "time" in setup.request.prune and len(waiting):
                lost = beaten(setup, lower[waiting], outcome.timed)
                out = waiting[lost]
                outcome.leave_all("time_bound", out, points.at, lambda at: f"takes at least {bounds.time_s[at]:.3f} s")
                waiting = waiting[~lost]
                advance(len(out))


def bounds_of(points: Points, crew: Workers, progress: Progress) -> Bounds:
    """The bounds of all points; nothing is known of few points, or where nothing is to be pruned."""
    if not crew.setup.request.prune or len(points) <= FEW:
        return Bounds(*np.zeros((3, len(points))))
    families = standing(points)
    with progress(len(families)) as advance:
        return bound(points, crew.probes(families, advance), crew.evaluator)


def may_fit(points: Points, evaluator: Evaluator, bounds: Bounds) -> np.ndarray:
    """Whether a point's bound fits its device [points]."""
    if "memory" not in evaluator.setup.request.prune:
        return np.ones(len(points), dtype=bool)
    _, first, which = np.unique(points.columns["cluster"].astype(str), return_index=True, return_inverse=True)
    memory = np.array([evaluator.place(points.at(int(at)))[1].memory_gib for at in first])
    return bounds.memory_gib <= memory[which]


def may_meet(
    setup: SearchSetup, points: Points, bounds: Bounds, fits: np.ndarray, outcome: SearchOutcome
) -> np.ndarray:
    """Whether a point's bounds leave it a way to meet the constraints on its memory and its time [points]."""
    _, constraints = setup.request.expressions()
    may = np.ones(len(points), dtype=bool)
    for prune, name, least, unit in (
        ("memory", "peak_gib", bounds.memory_gib, "GiB"),
        ("time", "step_time_s", bounds.time_s, "s"),
    ):
        for text, most in ceilings(constraints, name) if prune in setup.request.prune else ():
            out = np.flatnonzero(fits & may & (least > most))
            outcome.leave_all(CONSTRAINT + text, out, points.at, partial(_takes, least, unit))
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
    new_rows = crew.rows([asked_for[at] for at in missing], advance, folder.write)
    for at, row in zip(missing, new_rows, strict=True):
        rows[at] = row
    return [row for row in rows if row is not None]


def lower_losses(points: Points, bounds: Bounds, evaluator: Evaluator) -> np.ndarray:
    """The least that each objective can come to [points, objectives], less being better."""
    c, setup = points.columns, evaluator.setup
    seconds, devices = bounds.time_s, c["devices"]
    tokens = float(setup.base.work.sequences * setup.base.work.seq_len)
    kinds = list(zip(c["cluster"].tolist(), c["precision"].tolist(), strict=True))
    known_at = {kind: evaluator.place(points.at(kinds.index(kind))) for kind in dict.fromkeys(kinds)}
    price, watts, peak = np.array([least_of(*known_at[kind][:2]) for kind in kinds]).reshape(-1, 3).T
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.where(seconds > 0, 1.0 / seconds, np.inf)
        use = bounds.model_flops * c["micro_batches"] * c["dp"] / devices / peak * rate
        lower = {
            "step_time": seconds,
            "tokens_per_s": -tokens * rate,
            "tokens_per_s_per_gpu": -tokens * rate / devices,
            "mfu": np.where(seconds > 0, -use, -np.inf),
            "cost": price * devices * seconds / 3600.0,
            "energy": watts * devices * seconds,
            "memory": bounds.memory_gib,
            "gpus": devices.astype(float),
        }
    return np.stack([np.asarray(lower[name], dtype=float) for name in setup.request.objectives], axis=1)


def least_of(plan: Plan, device: Device) -> tuple[float, float, float]:
    """Of a device of a plan: its price an hour, the watts it takes at least, its FLOP/s in the plan's format."""
    peak = device.tensor_rate(plan.quantization or plan.precision) * 1e12
    return plan.cluster.price_per_device_hour, least_w(device), peak


def beaten(setup: SearchSetup, lower: np.ndarray, rows: Sequence[Row]) -> np.ndarray:
    """Whether points can neither be among the best nor on the front, whatever they take [points]."""
    good = setup.request.good(rows)
    if len(good) < setup.request.top:
        return np.zeros(len(lower), dtype=bool)
    loss = losses(good, setup.request.objectives)
    last = np.sort(loss[:, 0])[setup.request.top - 1]
    best = losses(front(good, setup.request.objectives), setup.request.objectives)
    return (lower[:, 0] > last) & dominated(lower, best)


def look_around(crew: Workers, best: Row, outcome: SearchOutcome, good: Sequence[Row]) -> list[dict[str, Any]]:
    """What each change of one axis of the best by one step costs, simulated where it was left out; or why it cannot
    be."""
    setup, by_identity = crew.setup, {identity(row): row for row in outcome.rows}
    near: list[tuple[str, Row]] = []
    for axis, point in neighbours(setup.axes, best):
        point = {name: point[name] for name in AXES}
        point_columns = derived(
            combinations({name: [value] for name, value in point.items()}), setup.clusters, setup.facts
        )
        unmet = [what for what, holds in fitting(point_columns, setup.facts).items() if not holds.all()]
        if unmet:
            near.append((axis, {**point, "status": "does not fit together", "why": unmet[0]}))
        else:
            near.append((axis, by_identity.get(identity(point), {**point, "status": "", "why": ""})))
    missing = [at for at, (_, row) in enumerate(near) if row["status"] == ""]
    rows = crew.rows([{name: near[at][1][name] for name in AXES} for at in missing], lambda done: None)
    for at, row in zip(missing, rows, strict=True):
        near[at] = near[at][0], row
    return [change(best, axis, row, setup.request.objectives[0]) for axis, row in near]


def notes(request: SearchRequest, outcome: SearchOutcome) -> list[str]:
    """Why there is no answer."""
    unmet = [entry for name, entry in outcome.pruned.items() if name.startswith(CONSTRAINT)]
    if outcome.timed or unmet:
        nearest = f"; {settings(unmet[0].example)} {unmet[0].why}" if unmet else ""
        return [f"no point meets {' and '.join(request.constraints)}; {len(outcome.timed)} were simulated{nearest}"]
    needs = [row["peak_gib"] for row in outcome.rows if row.get("peak_gib")]
    least = f"; the smallest needs {min(needs):.1f} GiB" if needs else ""
    reasons = ", ".join(f"{entry.count:,} {name}" for name, entry in outcome.pruned.items())
    example = next((f" ({settings(entry.example)}: {entry.why})" for entry in outcome.pruned.values()), "")
    return [f"no point of the space can run: {reasons}{least}{example}"]
