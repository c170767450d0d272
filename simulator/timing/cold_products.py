"""Cold products that nobody timed: a row that was timed warm says more of them than physics makes of it.

A correction learned on warm rows counts for cold ones as a factor, as far as physics is right about the cache. A row
may have been timed on several copies of its weights in turn (aiconfigurator's collectors take up to six, so that no
cache holds them), or be slow for another reason than memory: then the factor is as many times too large as the cache
is faster than memory. Weights that lie in memory take as long as their share of a product with so many that no cache
holds them, which a warm row tells as well; a kernel loads them while it waits for what else made the warm row slow.

Kin carry the same over to devices whose caches are faster than their memory by another factor. There the sum of a
narrow product and of the share of a wide one bounds what a product with few rows takes: both could run in turn. The
wide one is one that the caches of kin do not hold either: they were timed with those.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

import numpy as np

from ...datasets.devices import Device, DeviceError, load_device
from ...datasets.dtypes import weight_itemsize
from ...datasets.ops import KINDS, LAYOUT, Op
from ...datasets.vocabulary import OpColumns
from ..engines import Answers, Engine, ask

TIMES_CACHE = 4.0  # weights of so many last-level caches: no part of them stays from call to call. Judged
SLOWER = 1.02  # a cold answer that is worth another question. Judged
FEW_ROWS = 16  # products that wait for their weights
MOST_ROWS = (
    512  # with more, products compute for longer than memory takes, and weights are not most of what they read. Judged
)
NARROW = 128  # columns of the product that takes the shortest time for its depth. Judged
WEIGHT_GRADIENT = LAYOUT.choices.index("tn")  # a product of activations: no weights are read
TRANSFER = "transfer"  # the engine that asks kin


def weight_bytes(op: Op) -> float:
    """Bytes of the second operand of a product; 0 of another op."""
    return float(op.batch * op.n * op.k * weight_itemsize(op.dtype)) if op.kind == "gemm" else 0.0


def bound_cold_products(
    engine: Engine, ops: Sequence[Op], warm: Answers, cold: Answers, device: Device
) -> tuple[Answers, Answers]:
    """``warm`` and ``cold`` [n]: products that nobody timed cold take at most as long as warm, or as from memory.

    On a GPU, of weights and at most :data:`MOST_ROWS` rows. From memory they take their share of the time that
    ``engine`` gives a product with :data:`TIMES_CACHE` times the cache of weights, and a kernel's shortest time. Those
    with few rows that kin answer take at most that share and the time of a narrow product as deep.
    """
    if device.synchronous or not ops:
        return warm, cold
    rows = np.array([op.m if op.kind == "gemm" and op.layout != WEIGHT_GRADIENT else np.inf for op in ops])
    by_kin = (rows <= FEW_ROWS) & (warm.engine == TRANSFER)
    doubtful = (rows <= MOST_ROWS) & ~cold.in_envelope & (cold.latency_us > SLOWER * warm.latency_us)
    at = np.flatnonzero(by_kin | doubtful)
    if not len(at):
        return warm, cold
    products = [ops[index] for index in at.tolist()]
    caches_mib = [max(device.l2_mib, largest_cache_mib(str(warm.predictor[index]))) for index in at.tolist()]
    times = np.array(
        [np.ceil(TIMES_CACHE * mib * 2**20 / weight_bytes(op)) for op, mib in zip(products, caches_mib, strict=True)]
    )
    wide = [op.replace(n=int(op.n * count)) for op, count in zip(products, times, strict=True)]
    share = ask(engine, wide).latency_us / times
    narrow = np.full(len(ops), np.inf)
    if by_kin.any():
        kin_ops = [op.replace(n=min(op.n, NARROW)) for op in (ops[index] for index in np.flatnonzero(by_kin).tolist())]
        narrow[by_kin] = ask(engine, kin_ops).latency_us
    warm = at_most(warm, at, narrow[at] + share)
    unmeasured = ~cold.in_envelope[at]
    most_us = np.where(unmeasured, np.maximum(warm.latency_us[at], device.launch_us + share), np.inf)
    return warm, at_most(cold, at, most_us)


@lru_cache(maxsize=1024)
def largest_cache_mib(predictors: str) -> float:
    """The largest last-level cache of the devices that predictors, by their names, learned from; 0 of none."""
    caches_mib = [0.0]
    for name in predictors.split(" + "):
        with suppress(DeviceError):  # measured by the user, or learned from several
            caches_mib.append(load_device(name.rpartition("/")[2].partition("@")[0]).l2_mib)
    return max(caches_mib)


def bound_asked_products(engine: Engine, query: OpColumns, cold: Answers, device: Device) -> Answers:
    """The ``cold`` answers for ops of one kind, products bound as those of a step are."""
    if query.kind != "gemm":
        return cold
    at = np.flatnonzero((query.columns["m"] <= MOST_ROWS) & ~cold.in_envelope)
    if len(at):
        dims = zip(*(query.columns[name][at].tolist() for name in KINDS[query.kind].names), strict=True)
        ops = [Op(query.kind, values, query.dtype, query.out_dtype or query.dtype) for values in dims]
        cold.put(at, bound_cold_products(engine, ops, ask(engine, ops), cold.take(at), device)[1])
    return cold


def at_most(answers: Answers, at: np.ndarray, most_us: np.ndarray) -> Answers:
    """The answers, those ``at`` some places no longer than ``most_us``, with their bounds."""
    shorter = np.ones(len(answers.latency_us))
    shorter[at] = np.minimum(most_us / answers.latency_us[at], 1.0)
    return replace(answers, **{name: getattr(answers, name) * shorter for name in ("latency_us", "low_us", "high_us")})
