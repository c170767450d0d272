"""Whether measurements of the same ops have moved: a fresh campaign against a store, or two releases of an engine.

For each kind, device and backend the ops that both have are paired. Their ln(fresh / known) are tested against a move
of ``margin`` either way (Wilcoxon's signed-rank test: no normal noise is assumed), so that what is too small to matter
is no drift however many rows say it. Holm's procedure over all tests keeps the chance of any false alarm below
``alpha`` (Holm, "A simple sequentially rejective multiple test procedure", 1979).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .columns import values
from .ops import KINDS, Op
from .repeatability import latencies
from .store import Store

MARGIN = 0.01  # moves of one percent are within what a machine does from day to day
ALPHA = 0.01
FEWEST = 8  # pairs below which nothing can be said at such a level
INTERVAL = 0.95
VERSIONS = ("driver", "firmware", "cuda", "torch", "nccl", "cudnn", "cublas", "triton", "opcast_version")


@dataclass(frozen=True)
class Shift:
    """How far the rows of one kind on a device and backend have moved. ``low`` to ``high`` holds the median move
    (95 %); all in percent. ``p`` is that of the test, before the correction; ``verdict`` drifted, steady or unknown."""

    kind: str
    device: str
    backend: str
    rows: int
    percent: float
    low: float
    high: float
    p: float
    verdict: str
    against: str = ""


def drift(reference: Store, fresh: Store, margin: float = MARGIN, alpha: float = ALPHA) -> list[Shift]:
    """Every kind, device and backend that both stores have good rows of; the fresh one against what was known."""
    pairs = {}
    for kind_name in sorted(set(reference.kinds()) & set(fresh.kinds()) & set(KINDS)):
        for device_id in sorted(set(reference.devices(kind_name)) & set(fresh.devices(kind_name))):
            one, other = (latencies(store, kind_name, device_id) for store in (reference, fresh))
            for backend in sorted({str(key[-2]) for key in one} & {str(key[-2]) for key in other}):
                keys = [key for key in one if key[-2] == backend and key in other]
                pairs[kind_name, device_id, backend, ""] = _moves(
                    [one[key] for key in keys], [other[key] for key in keys]
                )
    return judged(pairs, margin, alpha)


def releases(store: Store, old: str, new: str, margin: float = MARGIN, alpha: float = ALPHA) -> list[Shift]:
    """Every kind and device of two releases of an engine (``vllm-0.14.0``, ``vllm-0.24.0``), kernel by kernel."""
    pairs = {}
    for kind_name in sorted(set(store.kinds()) & set(KINDS)):
        for device_id in store.devices(kind_name):
            by_key = latencies(store, kind_name, device_id)
            kernels = {str(key[-2]).partition(":")[2] for key in by_key if _release(key) in (old, new)}
            for kernel in sorted(kernels):
                one, other = (_of(by_key, f"{release}:{kernel}") for release in (old, new))
                keys = [key for key in one if key in other]
                if keys:
                    moved = _moves([one[key] for key in keys], [other[key] for key in keys])
                    pairs[kind_name, device_id, f"{new}:{kernel}", f"{old}:{kernel}"] = moved
    return judged(pairs, margin, alpha)


def judged(
    pairs: Mapping[tuple[str, str, str, str], np.ndarray], margin: float = MARGIN, alpha: float = ALPHA
) -> list[Shift]:
    """The verdict on every (kind, device, backend, against) from its moves ln(fresh / known) [n], all together."""
    labels = list(pairs)
    p = np.array([moved_p(pairs[label], margin) for label in labels])
    drifted = holm(p, alpha)
    shifts = []
    for label, moves, p_value, moved in zip(labels, pairs.values(), p.tolist(), drifted.tolist(), strict=True):
        kind_name, device_id, backend, against = label
        verdict = "drifted" if moved else "steady" if len(moves) >= FEWEST else "unknown"
        middle, low, high = (100 * np.expm1(value) for value in median_interval(moves))
        figures = len(moves), float(middle), float(low), float(high), p_value, verdict
        shifts.append(Shift(kind_name, device_id, backend, *figures, against))
    return shifts


@dataclass(frozen=True)
class StepMove:
    """How much longer a step takes on a device, in percent, if its host and waiting move as its kernels do.

    ``own`` is the share of its kernels' time whose ops both stores have, ``by_kind`` the share of those that moved with
    their kind; the others are taken not to have moved. ``low`` to ``high`` are the ends of the kinds' intervals, and
    the margin either way for ops that were measured.
    """

    device: str
    percent: float
    low: float
    high: float
    own: float
    by_kind: float


def step_moves(
    reference: Store, fresh: Store, shifts: Sequence[Shift], shares: Mapping[Op, float], margin: float = MARGIN
) -> list[StepMove]:
    """What a step becomes whose ops have such ``shares`` of its time, on each device of ``shifts``."""
    moves_of_steps = []
    for device_id in sorted({shift.device for shift in shifts}):
        moved = {shift.kind: shift for shift in shifts if shift.device == device_id and shift.verdict == "drifted"}
        paired = {kind: _by_op(reference, fresh, kind, device_id) for kind in {s.kind for s in shifts}}
        total, own, by_kind = np.zeros(3), 0.0, 0.0
        for op, share in shares.items():
            factors = np.ones(3)
            if moves := paired.get(op.kind, {}).get((*op.dims, op.dtype, op.out_dtype)):
                own += share
                factors = float(np.exp(np.mean(moves))) * np.array([1.0, 1.0 / (1.0 + margin), 1.0 + margin])
            elif op.kind in moved:
                by_kind += share
                shift = moved[op.kind]
                factors = 1.0 + np.array([shift.percent, shift.low, shift.high]) / 100.0
            total += share * factors
        percent, low, high = (100.0 * (float(value) / (sum(shares.values()) or 1.0) - 1.0) for value in total)
        moves_of_steps.append(StepMove(device_id, percent, low, high, own, by_kind))
    return moves_of_steps


def _by_op(reference: Store, fresh: Store, kind: str, device_id: str) -> dict[tuple[object, ...], list[float]]:
    """Moves ln(fresh / known) of ops that both stores have, over backends and states of the cache."""
    if not all(kind in store.kinds() and device_id in store.devices(kind) for store in (reference, fresh)):
        return {}
    one, other = (latencies(store, kind, device_id) for store in (reference, fresh))
    moves: dict[tuple[object, ...], list[float]] = {}
    for key in one.keys() & other.keys():
        moves.setdefault(key[:-2], []).append(float(np.log(other[key] / one[key])))
    return moves


def moved_p(moves: np.ndarray, margin: float) -> float:
    """How likely moves so far beyond ``margin`` are where the true one is inside; 1 for too few rows."""
    from scipy.stats import wilcoxon

    if len(moves) < FEWEST:
        return 1.0
    edge = float(np.log1p(margin))
    slower = wilcoxon(moves - edge, alternative="greater", zero_method="zsplit").pvalue
    faster = wilcoxon(moves + edge, alternative="less", zero_method="zsplit").pvalue
    return float(min(1.0, 2.0 * min(slower, faster)))


def holm(p: np.ndarray, alpha: float) -> np.ndarray:
    """Which of several hypotheses are rejected, the chance of any wrong one at most ``alpha`` (bool [n])."""
    order = np.argsort(p, kind="stable")
    allowed = p[order] <= alpha / np.arange(len(p), 0, -1)
    rejected = np.zeros(len(p), dtype=bool)
    rejected[order[: len(p) if allowed.all() else int(np.argmin(allowed))]] = True
    return rejected


def median_interval(moves: np.ndarray) -> tuple[float, float, float]:
    """The median and order statistics that hold it in 95 % of samples; the extremes where there are too few."""
    from scipy.stats import binom

    ordered = np.sort(moves)
    rank = max(int(binom.ppf((1 - INTERVAL) / 2, len(moves), 0.5)) - 1, 0)
    return float(np.median(ordered)), float(ordered[rank]), float(ordered[len(ordered) - 1 - rank])


def versions(store: Store, kind_names: Iterable[str], device_id: str) -> dict[str, list[str]]:
    """Distinct versions of driver and libraries among a device's rows of some kinds."""
    by_library: dict[str, set[str]] = {}
    for kind_name in kind_names:
        rows = store.read(kind_name, device_id, columns=VERSIONS)
        for name in VERSIONS:
            by_library.setdefault(name, set()).update(
                str(version) for version in values(rows[name]) if version is not None
            )
    return {name: sorted(version) for name, version in by_library.items() if version}


def _release(key: Sequence[object]) -> str:
    return str(key[-2]).partition(":")[0]


def _of(by_key: Mapping[tuple[object, ...], float], backend: str) -> dict[tuple[object, ...], float]:
    """Rows of a backend by op and cache."""
    return {(*key[:-2], key[-1]): latency for key, latency in by_key.items() if key[-2] == backend}


def _moves(reference: Sequence[float], fresh: Sequence[float]) -> np.ndarray:
    return np.log(np.array(fresh, dtype=float)) - np.log(np.array(reference, dtype=float))
