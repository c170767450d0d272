"""Kernels of one kind on one device are learned together: what they share, what tells them apart, and how sure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from opcast.datasets.vocabulary import OpColumns
from opcast.models import analytical
from opcast.models.candidates import Options
from opcast.models.learning import Learned, learn
from opcast.models.table import MeasurementTable
from opcast.models.together import MOST_ROWS, _some, learn_together, of_own_rows
from opcast.models.transfer import ALONE, TOGETHER, adapted, learned_ways

from .conftest import FAST, GPU

Law = Callable[[dict[str, np.ndarray]], np.ndarray]
OPTIONS = FAST.for_kind("gemm")


def shared(columns: dict[str, np.ndarray]) -> np.ndarray:
    """What a chip makes of a shape: ln of a factor that no analytical law knows."""
    return 0.5 * np.sin(1.3 * np.log2(columns["m"])) + 0.4 * np.cos(0.9 * np.log2(columns["n"] / columns["k"]))


def peculiar(columns: dict[str, np.ndarray]) -> np.ndarray:
    """The same of a kernel that has nothing in common with others."""
    return -shared(columns)


def of_shape(columns: dict[str, np.ndarray]) -> np.ndarray:
    """A factor of every shape that no other shape tells, the same for all kernels."""
    seeds = [columns[name].tolist() for name in ("m", "n", "k")]
    return 0.15 * np.array([np.random.default_rng(seed).standard_normal() for seed in zip(*seeds, strict=True)])


def rows(kernel: str, count: int, seed: int, level: float = 0.0, law: Law = shared) -> MeasurementTable:
    rng = np.random.default_rng(seed)
    columns = {
        "batch": np.ones(count, dtype=np.int64),
        "m": rng.choice(2 ** np.arange(3, 14), count),
        "n": rng.choice(np.arange(512, 8193, 512), count),
        "k": rng.choice(np.arange(512, 8193, 512), count),
        "layout": np.ones(count, dtype=np.int64),
    }
    latency = analytical.latency_us(OpColumns("gemm", columns, "bf16", None), GPU) * np.exp(level + law(columns))
    names = [np.full(count, name) for name in ("bf16", "bf16", "cold")]
    return MeasurementTable("gemm", GPU, kernel, columns, *names, latency, sources={"source": ["harness"]})


def taught(table: MeasurementTable, others: list[MeasurementTable]) -> tuple[Learned, Learned]:
    """What rows teach alone, and together with others."""
    ops = table.frame()
    alone = learn(table, ops, OPTIONS)
    return alone, learn_together(table, ops, others, OPTIONS, alone)


def missed(learned: Learned, table: MeasurementTable) -> np.ndarray:
    ops = table.frame()
    return np.log(table.latency_us / ops.analytical_us) - learned.correction.predict(ops.matrix)


def test_few_rows_of_each_kernel_are_many_of_all() -> None:
    table, asked = rows("a", 10, 1, 0.3), rows("a", 150, 50, 0.3)
    others = [rows(name, 30, seed, level) for name, seed, level in (("b", 2, -0.4), ("c", 3, 0.0), ("d", 4, 0.8))]
    alone, together = taught(table, others)
    assert np.abs(missed(together, asked)).mean() < 0.4 * np.abs(missed(alone, asked)).mean()
    assert abs(np.median(missed(together, asked))) < 0.1  # the level is its own


def test_an_op_is_left_out_of_all_kernels_at_once() -> None:
    """What was timed by all kernels alike says nothing of how well an op is answered that none of them was timed on."""

    def both(columns: dict[str, np.ndarray]) -> np.ndarray:
        return shared(columns) + of_shape(columns)

    table, asked = rows("a", 40, 1, law=both), rows("a", 300, 50, law=both)
    others = [rows("b", 40, 1, 0.5, both), rows("c", 40, 1, -0.5, both)]
    _, together = taught(table, others)
    held_out, fresh = np.abs(together.residuals[together.chosen]), np.abs(missed(together, asked))
    assert held_out.mean() == pytest.approx(fresh.mean(), rel=0.5)
    assert held_out.mean() > 0.08


def test_a_kernel_that_is_like_no_other_is_learned_alone() -> None:
    table, others = rows("a", 60, 1, law=peculiar), [rows("b", 60, 2)]
    assert learned_ways([], table, OPTIONS, others=others).chosen == ALONE
    assert learned_ways([], rows("a", 12, 1), OPTIONS, others=others).chosen == TOGETHER


def test_the_order_of_kernels_does_not_matter() -> None:
    table, asked = rows("a", 12, 1), rows("a", 40, 50).frame()
    others = [rows("b", 20, 2, 0.5), rows("c", 30, 3, -0.5)]
    first, second = (taught(table, each)[1].correction.predict(asked.matrix) for each in (others, others[::-1]))
    np.testing.assert_allclose(first, second, atol=1e-5)


def test_a_level_is_that_of_others_where_no_row_of_its_own_is_left() -> None:
    """Rows of one group are left out whole: then nothing is known of their kernel but that it is one."""
    table = rows("a", 12, 1, 0.3)
    table = dataclasses.replace(table, columns={**table.columns, "n": np.full(12, 4096), "k": np.full(12, 4096)})
    _, together = taught(table, [rows("b", 40, 2, 0.5), rows("c", 40, 3, 0.1)])
    assert np.isfinite(together.residuals[together.chosen]).all()


def test_rows_of_others_are_a_share_of_each() -> None:
    tables = [rows("b", 1000, 2), rows("c", 50, 3), rows("d", 900, 4)]
    kept = {each.backend: len(each) for each in _some(tables, MOST_ROWS, 0)}
    assert kept == {"c": 50, "b": 275, "d": 275}


def test_only_own_rows_of_the_same_device_and_another_kernel_count() -> None:
    table, other = rows("a", 12, 1), rows("b", 12, 2)
    foreign = dataclasses.replace(other, backend="c", sources={"source": ["vidur"]})
    elsewhere = dataclasses.replace(other, device=dataclasses.replace(GPU, id="another"))
    others = [table, other, foreign, elsewhere]
    assert of_own_rows(table, others, OPTIONS) == [other]
    assert not of_own_rows(dataclasses.replace(table, sources={"source": ["vidur"]}), others, OPTIONS)
    assert not of_own_rows(table, others, dataclasses.replace(OPTIONS, candidates=("lightgbm",)))
    assert not of_own_rows(table, others, Options().for_kind("all_reduce"))
    eager, compiled = (dataclasses.replace(table, kind="rope", backend=name) for name in ("torch", "inductor"))
    assert not of_own_rows(eager, [compiled], OPTIONS)
    assert not of_own_rows(compiled, [eager], OPTIONS)


def test_few_rows_are_as_sure_as_those_of_all_kernels_were_right() -> None:
    inside = []
    for seed in range(4):
        table = rows("a", 10, 10 + seed, 0.3)
        others = [rows(name, 20, 20 * number + seed, 0.2 * number) for number, name in enumerate("bcd", 2)]
        ways = learned_ways([], table, OPTIONS, others=others)
        answered = adapted(dataclasses.replace(ways, chosen=TOGETHER)).predict_frame(rows("a", 100, 900 + seed).frame())
        asked_us = rows("a", 100, 900 + seed, 0.3).latency_us
        inside.append((answered.low_us <= asked_us) & (asked_us <= answered.high_us))
    assert 0.8 < np.mean(inside) < 0.99


def test_a_kernel_timed_cold_is_warm_as_far_as_others_are() -> None:
    """Of three kernels the one that is unlike the others was timed warm, and is twice as fast where its inputs lie in
    the cache."""

    def saved(columns: dict[str, np.ndarray]) -> np.ndarray:
        size = OpColumns("gemm", columns, "bf16", None).cost.bytes
        return np.asarray(-0.7 * np.minimum(GPU.l2_mib * 2**20 / size, 1.0))

    def ratio(learned: Learned, table: MeasurementTable, cache: str) -> np.ndarray:
        own = dataclasses.replace(table, cache=np.full(len(table), cache))
        return learned.correction.predict(own.frame().matrix)

    table, alike, asked = rows("a", 40, 1, 0.3), rows("c", 60, 3), rows("a", 200, 50, 0.3)
    other = rows("b", 160, 2, -0.5, peculiar)
    warm = np.arange(len(other)) % 2 == 0
    factor = np.where(warm, np.exp(saved(other.columns)), 1.0)
    other = dataclasses.replace(other, cache=np.where(warm, "warm", "cold"), latency_us=other.latency_us * factor)
    _, together = taught(table, [other, alike])
    missed_by = ratio(together, asked, "warm") - ratio(together, asked, "cold") - saved(asked.columns)
    assert np.abs(missed_by[saved(asked.columns) > -0.35]).mean() < 0.2, "of ops twice as large as the cache"
