"""The order in which each pipeline stage runs its tasks, for every schedule, as arrays.

A schedule is one function here, registered by :func:`schedule`: from stages, micro-batches and virtual stages to
:class:`Orders`. Settings and messages know it from then on.

A *task* is a forward, a backward, or a half of a backward of one micro-batch through one chunk of layers. A stage holds
one chunk or several; which part of the model a chunk is, and the way that micro-batches take, is the *route*.

Every schedule but DualPipe is three interleaved sequences. On a stage that runs ``w`` forwards ahead, the k-th forward
comes just before the (k-w)-th backward, and the weight gradient of a backward follows that many backwards later, so
that ordering by those positions gives the whole schedule at once: GPipe runs all forwards ahead, 1F1B (PipeDream-Flush,
arXiv 2104.04473) as many as there are stages behind, interleaved (same paper) more by the chunks in between, ZB-H1
(arXiv 2401.10241) those of 1F1B with weight gradients put off by as many as there are stages before. DualPipe
(DeepSeek-V3, arXiv 2412.19437) feeds half of the micro-batches from either end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...datasets.near import meant
from .errors import PlanError

FORWARD, BACKWARD, INPUT, WEIGHT = range(4)
TASKS = ("forward", "backward", "input gradient", "weight gradient")


@dataclass(frozen=True)
class Orders:
    """Tasks of all stages, one stage after the other: those of stage s are ``offsets[s]:offsets[s + 1]``.

    ``kind`` (int8; index into ``TASKS``), ``chunk`` (int16) and ``micro_batch`` (int32) have one entry per task. A
    backward is either one ``BACKWARD`` or an ``INPUT`` and a ``WEIGHT`` gradient. ``paired`` marks a forward that runs
    at the same time as the backward after it. ``routes`` is [route, part, 2]: the (stage, chunk) that holds each part
    of the model on the way of the micro-batches whose number modulo the routes is that route's.
    """

    schedule: str
    stages: int
    chunks: int
    micro_batches: int
    offsets: np.ndarray
    kind: np.ndarray
    chunk: np.ndarray
    micro_batch: np.ndarray
    paired: np.ndarray
    routes: np.ndarray

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def stage(self) -> np.ndarray:
        """The stage of every task."""
        return np.repeat(np.arange(self.stages), np.diff(self.offsets))

    def rows(self) -> Iterator[slice]:
        """The tasks of each stage."""
        for first, after in zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True):
            yield slice(first, after)


Maker = Callable[[int, int, int], Orders]


class Schedule(NamedTuple):
    """How a schedule orders tasks, and whether its stages may hold several chunks (``parallel.vpp``)."""

    orders: Maker
    virtual: bool


SCHEDULES: dict[str, Schedule] = {}


def schedule(name: str, virtual: bool = False) -> Callable[[Maker], Maker]:
    """Register a function ``(stages, micro_batches, virtual) -> Orders`` as ``parallel.schedule=name``.

    It raises PlanError, with the nearest valid choice, for what it cannot run. ValueError when the name is taken.
    """

    def register(function: Maker) -> Maker:
        if name in SCHEDULES:
            raise ValueError(f"schedule {name!r} is defined twice")
        SCHEDULES[name] = Schedule(function, virtual)
        return function

    return register


def make_orders(schedule: str, stages: int, micro_batches: int, virtual: int = 1) -> Orders:
    """The orders of a schedule; PlanError when it cannot run with so many stages or micro-batches.

    ``virtual`` chunks per stage are those of ``interleaved``; DualPipe has two by itself (each rank holds the part of
    its mirror image, too), the others one.
    """
    if schedule not in SCHEDULES:
        raise PlanError(
            f"parallel.schedule={schedule!r} is not one of {', '.join(SCHEDULES)}{meant(schedule, SCHEDULES)}"
        )
    if virtual > 1 and not SCHEDULES[schedule].virtual:
        raise PlanError(f"parallel.schedule={schedule} has no virtual stages; take vpp=1 or interleaved")
    return SCHEDULES[schedule].orders(stages, micro_batches, virtual)


def forward_orders(stages: int, micro_batches: int) -> Orders:
    """The orders of a step without backward pass: each stage runs the micro-batches one after the other."""
    count = stages * micro_batches
    stage = np.arange(stages)
    return Orders(
        "forward",
        stages,
        1,
        micro_batches,
        np.arange(stages + 1) * micro_batches,
        np.full(count, FORWARD, dtype=np.int8),
        np.zeros(count, dtype=np.int16),
        np.tile(np.arange(micro_batches), stages).astype(np.int32),
        np.zeros(count, dtype=bool),
        np.stack([stage, np.zeros_like(stage)], axis=1)[None],
    )


def parts_of(orders: Orders, stage: int) -> list[int]:
    """The parts of the model that a stage holds, by the position of its chunks."""
    by_position = {
        int(position): part for route in orders.routes for part, (at, position) in enumerate(route) if at == stage
    }
    return [by_position[position] for position in sorted(by_position)]


@schedule("gpipe")
def gpipe(stages: int, micro_batches: int, virtual: int = 1) -> Orders:
    """All forwards, then all backwards."""
    return ahead("gpipe", stages, micro_batches, [micro_batches] * stages)


@schedule("1f1b")
def one_forward_one_backward(stages: int, micro_batches: int, virtual: int = 1) -> Orders:
    """PipeDream-Flush: as many forwards ahead as there are stages behind."""
    return ahead("1f1b", stages, micro_batches, list(range(stages - 1, -1, -1)))


@schedule("interleaved", virtual=True)
def interleaved(stages: int, micro_batches: int, virtual: int = 1) -> Orders:
    """1F1B over several chunks a stage; PlanError where micro-batches do not come in groups of all stages."""
    if micro_batches % stages:
        near = max(round(micro_batches / stages), 1) * stages
        raise PlanError(
            f"interleaved needs a number of micro-batches divisible by parallel.pp={stages}, not {micro_batches}; "
            f"take {near} micro-batches"
        )
    forwards = [(stages - stage - 1) * 2 + (virtual - 1) * stages for stage in range(stages)]
    return ahead("interleaved", stages, micro_batches, forwards, virtual)


@schedule("zb-h1")
def zero_bubble(stages: int, micro_batches: int, virtual: int = 1) -> Orders:
    """1F1B with weight gradients put off by as many backwards as there are stages before."""
    return ahead("zb-h1", stages, micro_batches, list(range(stages - 1, -1, -1)), split=True)


@schedule("dualpipe")
def dualpipe(stages: int, micro_batches: int, virtual: int = 1) -> Orders:
    """Half of the micro-batches from either end; PlanError for odd stages, or odd or too few micro-batches."""
    if stages % 2:
        raise PlanError(f"dualpipe needs an even number of stages, not parallel.pp={stages}; take pp={stages + 1}")
    if micro_batches % 2 or micro_batches < 2 * stages:
        near = max(2 * stages, micro_batches + micro_batches % 2)
        raise PlanError(
            f"dualpipe needs an even number of micro-batches, at least 2 x parallel.pp = {2 * stages}, "
            f"not {micro_batches}; take {near} micro-batches"
        )
    return _dualpipe(stages, micro_batches)


def ahead(
    name: str, stages: int, micro_batches: int, forwards: list[int], virtual: int = 1, split: bool = False
) -> Orders:
    """A schedule whose stages run some forwards ahead and then one forward, one backward in turns.

    ``forwards`` says how many, by stage; ``split`` runs weight gradients apart, put off by the number of the stage.
    """
    count = micro_batches * virtual
    step = np.arange(count)
    group, within = np.divmod(step, stages * virtual)
    chunk, micro_batch = (within // stages, group * stages + within % stages) if virtual > 1 else (step * 0, step)
    kind = np.repeat([FORWARD, INPUT, WEIGHT] if split else [FORWARD, BACKWARD], count)
    chunks = np.concatenate([chunk, virtual - 1 - chunk, chunk][: len(kind) // count])
    micro_batches_of = np.tile(micro_batch, len(kind) // count)
    rows = []
    for stage in range(stages):
        place = [3 * (step - min(forwards[stage], count)), 3 * step + 1, 3 * (step + stage) + 2]
        rows.append(np.argsort(np.concatenate(place[: len(kind) // count]), kind="stable"))
    order = np.concatenate(rows)
    part = np.arange(stages * virtual)
    return Orders(
        name,
        stages,
        virtual,
        micro_batches,
        np.arange(stages + 1) * len(kind),
        kind[order].astype(np.int8),
        chunks[order].astype(np.int16),
        micro_batches_of[order].astype(np.int32),
        np.zeros(len(order), dtype=bool),
        np.stack([part % stages, part // stages], axis=1)[None],
    )


def _dualpipe(stages: int, micro_batches: int) -> Orders:
    """DualPipe: chunk 0 serves the micro-batches that enter at the first stage, chunk 1 those from the last.

    Even micro-batches take the first route, odd ones the second.
    """
    rows = [_dualpipe_row(min(stage, stages - 1 - stage), stages, micro_batches) for stage in range(stages)]
    tasks = np.array([task for row in rows for task in row], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    stage_of = np.repeat(np.arange(stages), np.diff(offsets))
    chunk = tasks[:, 1] ^ (stage_of >= stages // 2)
    part = np.arange(stages)
    down, up = np.stack([part, part * 0], axis=1), np.stack([stages - 1 - part, part * 0 + 1], axis=1)
    return Orders(
        "dualpipe",
        stages,
        2,
        micro_batches,
        offsets,
        tasks[:, 0].astype(np.int8),
        chunk.astype(np.int16),
        (tasks[:, 2] * 2 + chunk).astype(np.int32),
        tasks[:, 3].astype(bool),
        np.stack([down, up]),
    )


def _dualpipe_row(depth: int, stages: int, micro_batches: int) -> list[tuple[int, int, int, int]]:
    """(kind, side, number within the side, paired) of a stage ``depth`` away from its end of the pipeline.

    Side 0 is what enters at the near end. Eight phases: forwards of the near side; of both in turns; backwards of the
    far side with their weight gradients and forwards; the steady state, a forward of one side with a backward of the
    other at the same time; and the same again backwards.
    """
    inner = stages // 2 - depth - 1
    row: list[tuple[int, int, int, int]] = []
    counts = {(kind, side): 0 for kind in range(4) for side in (0, 1)}
    put_off: list[tuple[int, int]] = []

    def run(kind: int, side: int, paired: int = 0) -> None:
        which = BACKWARD if kind == INPUT else kind  # both count as the backward of a micro-batch
        row.append((kind, side, counts[which, side], paired))
        if kind == INPUT:
            put_off.append((side, counts[which, side]))
        counts[which, side] += 1

    def weight() -> None:
        row.append((WEIGHT, *put_off.pop(0), 0))

    def both(side: int, paired: int = 1) -> None:
        run(FORWARD, side, paired)
        run(BACKWARD, 1 - side)

    for _ in range(2 * inner):
        run(FORWARD, 0)
    for _ in range(depth + 1):
        run(FORWARD, 0)
        run(FORWARD, 1)
    for _ in range(inner):
        run(INPUT, 1)
        weight()
        run(FORWARD, 1)
    for turn in range(micro_batches // 2 - stages + depth + 1):
        both(0, paired=0 if turn == 0 and not inner else 1)
        both(1)
    for _ in range(inner):
        run(BACKWARD, 1)
        both(1)
    for turn in range(2 * (depth + 1)):
        run(INPUT if turn > depth else BACKWARD, (turn + 1) % 2)
    for _ in range(inner):
        weight()
        run(INPUT, 0)
    while put_off:
        weight()
    return row
