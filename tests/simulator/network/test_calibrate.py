"""Constants fitted on half of NCCL's measured groups hold on the other half."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.devices import Device, load_device
from opcast.simulator.network.calibrate import fit
from opcast.simulator.network.nccl import GroupShapes
from opcast.simulator.network.nccl_times import Tuning, collective_us
from opcast.simulator.network.tunings import tuning

MIB = 2**20
TABLES = {
    "h100_sxm": ("h100_sxm", "2.29.2"),
    "b200_sxm": ("b200_sxm", "2.29.2"),
    "a100_sxm_80gb": ("a100_sxm", "2.27.3"),
    "gb200": ("gb200", "2.29.2"),
    "rtx_pro_6000_server": ("rtx_pro_6000_server", "2.29.2"),
}
UNSEEN = {"b300_sxm": ("b300_sxm", "2.29.2"), "gb300": ("gb300", "2.29.2")}


def table(folder: Path, device: str):
    """Rows by (kind, ranks): sizes in bytes and measured us, in half precision."""
    import pandas as pd

    system, version = (TABLES | UNSEEN)[device]
    file = folder / "data" / "aiconfigurator" / system / f"{system}__nccl__nccl__{version}.parquet"
    rows = pd.read_parquet(file).query("nccl_dtype == 'half'")
    rows = rows.assign(kind=rows.op_name.replace({"alltoall": "all_to_all"}), ranks=rows.num_gpus.astype(int))
    found = rows.groupby(["kind", "ranks", "message_size"]).latency.median().reset_index()
    return {
        key: (each.message_size.to_numpy() * 2.0, each.latency.to_numpy() * 1e3)
        for key, each in found.groupby(["kind", "ranks"])
    }


def halves(found):
    """Groups as a chess board has squares: of every collective and every number of ranks, some in each half."""
    kinds, ranks = (sorted({key[place] for key in found}) for place in (0, 1))
    colour = {key: (kinds.index(key[0]) + ranks.index(key[1])) % 2 for key in found}
    return [{key: each for key, each in found.items() if colour[key] == half} for half in (1, 0)]


def packed(device: Device, part):
    out = {}
    for kind in sorted({kind for kind, _ in part}):
        each = [(size, np.full(len(size), float(n)), us) for (k, n), (size, us) in part.items() if k == kind]
        size, ranks, us = (np.concatenate(columns) for columns in zip(*each, strict=True))
        out[kind] = (size, groups(device, ranks), us)
    return out


def groups(device: Device, ranks: np.ndarray) -> GroupShapes:
    inside = "nvlink" if device.link_gbps else "pcie"
    return GroupShapes(ranks, ranks, device.link_gbps or device.pcie_gbps, 1.0, inside, generation=device.architecture)


def errors(device: Device, part, constants: Tuning) -> tuple[np.ndarray, np.ndarray]:
    """Absolute error of each row, and its size in bytes."""
    found = [
        (np.abs(collective_us(kind, size, g, constants) / us - 1.0), size)
        for kind, (size, g, us) in packed(device, part).items()
    ]
    return tuple(np.concatenate(each) for each in zip(*found, strict=True))


@pytest.mark.reference
@pytest.mark.parametrize("name", TABLES)
def test_half_of_the_groups_predicts_the_other_half(name: str, reference_data: Path) -> None:
    device = load_device(name)
    fitted, unseen = halves(table(reference_data, name))
    start = Tuning(nvls=0.0 if name == "a100_sxm_80gb" else 0.5)
    link = "nvlink" if device.link_gbps else "pcie"
    constants, _ = fit(packed(device, fitted), start if link == "nvlink" else Tuning(beyond=0.5, crowd=0.5))
    for chosen in (constants, tuning(device, link)):
        error, size = errors(device, unseen, chosen)
        assert np.median(error[size < MIB]) < 0.08
        assert np.median(error[(size >= MIB) & (size < 16 * MIB)]) < 0.08
        assert np.median(error[size >= 16 * MIB]) < 0.06


@pytest.mark.reference
@pytest.mark.parametrize("name", UNSEEN)
def test_constants_of_one_gpu_hold_on_the_next_of_its_generation(name: str, reference_data: Path) -> None:
    device = load_device(name)
    error, size = errors(device, table(reference_data, name), tuning(device, "nvlink"))
    assert np.median(error[size < MIB]) < 0.06
    assert np.median(error[size >= MIB]) < 0.05


@pytest.mark.reference
@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 8])
def test_another_machine_and_odd_numbers_of_ranks_are_predicted_too(ranks: int, reference_data: Path) -> None:
    device = load_device("a100_sxm_80gb")
    file = reference_data / "data" / "vtrain" / f"all_reduce_a100_{ranks}gpus.csv"
    rows = np.genfromtxt(file, delimiter=",", skip_header=1, usecols=(0, 3))
    size, us = rows[:, 0], rows[:, 1] / 1e3
    g = groups(device, np.full(len(size), float(ranks)))
    error = np.abs(collective_us("all_reduce", size, g, tuning(device, "nvlink")) / us - 1.0)
    assert np.median(error) < 0.05


def test_known_constants_are_found_again() -> None:
    truth = Tuning(base=1.5, hop=2.0, ring=0.7, exchange=0.6, copy=1.5, bulk_us=15.0, peer_us=0.5, overlap=1.5)
    size = np.tile(2.0 ** np.arange(8, 30), 3)
    g = GroupShapes(np.repeat([2.0, 4.0, 8.0], 22), np.repeat([2.0, 4.0, 8.0], 22), 450.0, 50.0)
    rows = {kind: (size, g, collective_us(kind, size, g, truth)) for kind in ("all_reduce", "all_gather", "all_to_all")}
    found, error = fit(rows, Tuning())
    assert error < 0.02
    assert (found.base, found.ring) == pytest.approx((truth.base, truth.ring), rel=0.05)
