"""Interpolation along one size: exact at points, physics beyond them, plain arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.datasets.devices import Device, load_device
from opcast.datasets.vocabulary import OpColumns
from opcast.models import interpolant
from opcast.models.features import feature_names, frame

SIZES = 2 ** np.arange(10, 31)


@pytest.fixture(scope="module")
def device() -> Device:
    return load_device("h100_sxm")


def features(device: Device, sizes: np.ndarray, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Features of all-reduces [n, f] and their analytical time [n]."""
    columns = {"size_bytes": sizes, **{k: np.full(len(sizes), v) for k, v in constant(ranks).items()}}
    made = frame(OpColumns("all_reduce", columns, "bf16", None), device)
    return made.matrix, made.analytical_us


def constant(ranks: int) -> dict[str, int]:
    return {"ranks": ranks, "ranks_per_node": 8, "link": 0, "norm": 0}


def times(sizes: np.ndarray, ranks: int) -> np.ndarray:
    """Latency of a machine with an alpha and a beta of its own."""
    return 9.0 + 2.0 * ranks + sizes * 2.0 * (ranks - 1) / ranks / 250e3


def fitted(device: Device, sizes: np.ndarray, all_ranks: tuple[int, ...]) -> interpolant.Interpolant:
    parts = [(*features(device, sizes, ranks), times(sizes, ranks)) for ranks in all_ranks]
    matrix = np.concatenate([part[0] for part in parts])
    target = np.concatenate([np.log(part[2] / part[1]) for part in parts])
    return interpolant.fit(matrix, feature_names("all_reduce"), target, np.ones(len(target)))


def answer(model: interpolant.Interpolant, device: Device, sizes: np.ndarray, ranks: int) -> np.ndarray:
    matrix, analytical = features(device, sizes, ranks)
    return analytical * np.exp(model.predict(matrix))


def test_measured_sizes_are_answered_as_measured(device: Device) -> None:
    made = fitted(device, SIZES, (2, 8))
    for ranks in (2, 8):
        assert answer(made, device, SIZES, ranks) == pytest.approx(times(SIZES, ranks), rel=1e-4)


def test_sizes_between_and_beyond_follow_alpha_and_beta(device: Device) -> None:
    made = fitted(device, SIZES[SIZES <= 2**26], (2, 8))
    between = 3 * SIZES[:15]
    assert answer(made, device, between, 8) == pytest.approx(times(between, 8), rel=0.1)
    beyond = SIZES[SIZES > 2**26]
    assert answer(made, device, beyond, 8) == pytest.approx(times(beyond, 8), rel=0.06)


def test_a_series_goes_on_beyond_its_ends_as_its_neighbours_do(device: Device) -> None:
    """A campaign that ended early has small messages of one rank count, and all of its neighbours: of fast links."""

    def fast(sizes: np.ndarray, ranks: int) -> np.ndarray:
        return 9.0 + 2.0 * ranks + sizes * 2.0 * (ranks - 1) / ranks / 1500e3

    few = (SIZES >= 2**13) & (SIZES <= 2**16)
    parts = [(SIZES, 2), (SIZES[few], 4), (SIZES, 8)]
    seen = [features(device, *part) for part in parts]
    target = np.concatenate([np.log(fast(*part) / law_us) for part, (_, law_us) in zip(parts, seen, strict=True)])
    matrix = np.concatenate([each for each, _ in seen])
    made = interpolant.fit(matrix, feature_names("all_reduce"), target, np.ones(len(target)))
    assert answer(made, device, SIZES[~few], 4) == pytest.approx(fast(SIZES[~few], 4), rel=0.25)


def test_one_small_size_of_a_series_goes_on_as_neighbours_that_begin_at_larger_ones(device: Device) -> None:
    """A campaign that ended early has one size of a number of ranks, smaller than all of its neighbours'."""
    parts = [(SIZES[4:], 4), (SIZES[:1], 8)]
    seen = [features(device, *part) for part in parts]
    target = np.concatenate([np.log(times(*part) / law_us) for part, (_, law_us) in zip(parts, seen, strict=True)])
    matrix = np.concatenate([each for each, _ in seen])
    made = interpolant.fit(matrix, feature_names("all_reduce"), target, np.ones(len(target)))
    assert answer(made, device, SIZES[-6:], 8) == pytest.approx(times(SIZES[-6:], 8), rel=0.2)


def test_what_is_faster_than_the_law_stays_so_beyond_its_end(device: Device) -> None:
    """A law that knows one NIC a node says nothing of eight: nothing returns to it where nobody measured."""
    near = SIZES[SIZES <= 2**24]
    matrix, _ = features(device, near, 8)
    made = interpolant.fit(matrix, feature_names("all_reduce"), np.full(len(near), np.log(0.15)), np.ones(len(near)))
    assert np.exp(made.predict(features(device, SIZES, 8)[0])) == pytest.approx(0.15, rel=0.06)


def test_an_unseen_rank_count_lies_between_its_neighbours(device: Device) -> None:
    made = fitted(device, SIZES, (2, 8))
    matrix, _ = features(device, SIZES, 4)
    both = [made.predict(features(device, SIZES, ranks)[0]) for ranks in (2, 8)]
    ratio = made.predict(matrix)
    assert (ratio >= np.minimum(*both) - 0.2).all()
    assert (ratio <= np.maximum(*both) + 0.2).all()


@given(st.lists(st.floats(-1.0, 1.0), min_size=2, max_size=12), st.integers(0, 4))
def test_beyond_the_last_size_time_never_falls(ratios: list[float], repeats: int) -> None:
    sizes = 2.0 ** np.arange(10, 10 + len(ratios))
    device = load_device("h100_sxm")
    matrix, _ = features(device, sizes, 4)
    rows = [*range(len(ratios)), *([0] * repeats)]
    made = interpolant.fit(matrix[rows], feature_names("all_reduce"), np.array(ratios)[rows], np.ones(len(rows)))
    far = sizes[-1] * 2.0 ** np.arange(0, 12, 0.5)
    assert (np.diff(answer(made, device, far, 4)) >= -1e-3).all()


def test_one_spike_moves_nothing(device: Device) -> None:
    matrix, analytical = features(device, SIZES, 4)
    target = np.log(times(SIZES, 4) / analytical)
    target[5] += 2.0
    made = interpolant.fit(matrix, feature_names("all_reduce"), target, np.ones(len(target)))
    assert answer(made, device, SIZES[4:7], 4) == pytest.approx(times(SIZES[4:7], 4), rel=0.05)


def test_arrays_bring_it_back_bit_by_bit(device: Device) -> None:
    made = fitted(device, SIZES, (2, 4, 8))
    back = interpolant.Interpolant.from_arrays(made.arrays())
    matrix, _ = features(device, 3 * SIZES, 6)
    assert np.array_equal(back.predict(matrix), made.predict(matrix))
    assert all(array.dtype != object for array in made.arrays().values())


def test_company_and_order_of_rows_change_nothing(device: Device) -> None:
    made = fitted(device, SIZES, (2, 8))
    matrix, _ = features(device, 3 * SIZES, 4)
    order = np.random.default_rng(0).permutation(len(matrix))
    assert np.array_equal(made.predict(matrix)[order], made.predict(matrix[order]))
    assert made.predict(matrix[3:4])[0] == made.predict(matrix)[3]


def test_features_without_a_size_are_refused() -> None:
    with pytest.raises(ValueError, match="no size to interpolate over"):
        interpolant.fit(np.zeros((2, 1), np.float32), ["analytical"], np.zeros(2), np.ones(2))
