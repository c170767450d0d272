"""Constants fitted on half of NCCL's measured groups hold on the other half."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from opcast.datasets.devices import load_device
from opcast.simulator.network.calibrate import fit
from opcast.simulator.network.law import LL_GBPS, Groups, Tuning, collective_us
from opcast.simulator.network.tunings import tuning

MIB = 2**20
TABLES = {"h100_sxm": "2.29.2", "b200_sxm": "2.29.2", "a100_sxm": "2.27.3"}
START = Tuning(base=1.2, hop=1.5, bulk_us=8.0, ring=0.78, copy=2.0, nvls=0.6, exchange=0.65, peer_us=0.2)


def table(folder: Path, system: str):
    """Rows by (kind, ranks): sizes in bytes and measured us, in half precision."""
    import pandas as pd

    file = folder / "data" / "aiconfigurator" / system / f"{system}__nccl__nccl__{TABLES[system]}.parquet"
    rows = pd.read_parquet(file).query("nccl_dtype == 'half'")
    rows = rows.assign(kind=rows.op_name.replace({"alltoall": "all_to_all"}), ranks=rows.num_gpus.astype(int))
    found = rows.groupby(["kind", "ranks", "message_size"]).latency.median().reset_index()
    return {
        key: (each.message_size.to_numpy() * 2.0, each.latency.to_numpy() * 1e3)
        for key, each in found.groupby(["kind", "ranks"])
    }


def groups(system: str, ranks: np.ndarray) -> Groups:
    device = load_device("a100_sxm_80gb" if system == "a100_sxm" else system)
    most = LL_GBPS.get(device.architecture, LL_GBPS["hopper"])
    return Groups(ranks, ranks, device.link_gbps, 1.0, low_latency_gbps=most)


def packed(system: str, part):
    out = {}
    for kind in sorted({kind for kind, _ in part}):
        each = [(size, np.full(len(size), float(n)), us) for (k, n), (size, us) in part.items() if k == kind]
        size, ranks, us = (np.concatenate(columns) for columns in zip(*each, strict=True))
        out[kind] = (size, groups(system, ranks), us)
    return out


@pytest.mark.reference
@pytest.mark.parametrize("system", TABLES)
def test_half_of_the_groups_predicts_the_other_half(system: str, reference_data: Path) -> None:
    found = table(reference_data, system)
    fitted, unseen = ({key: found[key] for key in list(found)[first::2]} for first in (1, 0))
    start = START if system != "a100_sxm" else Tuning(**{**START.__dict__, "nvls": 0.0})
    constants, _ = fit(packed(system, fitted), start)
    shipped = tuning(load_device("a100_sxm_80gb" if system == "a100_sxm" else system), "nvlink")
    for chosen in (constants, shipped):
        large, small = [], []
        for kind, (size, g, us) in packed(system, unseen).items():
            error = np.abs(collective_us(kind, size, g, chosen) / us - 1.0)
            large.append(error[size >= MIB])
            small.append(error[size < MIB])
        assert np.median(np.concatenate(large)) < 0.08
        assert np.median(np.concatenate(small)) < 0.10


def test_known_constants_are_found_again() -> None:
    truth = Tuning(base=1.5, hop=2.0, ring=0.7, exchange=0.6, copy=1.5, bulk_us=5.0, peer_us=0.5)
    size = np.tile(2.0 ** np.arange(8, 30), 3)
    g = Groups(np.repeat([2.0, 4.0, 8.0], 22), np.repeat([2.0, 4.0, 8.0], 22), 450.0, 50.0)
    rows = {kind: (size, g, collective_us(kind, size, g, truth)) for kind in ("all_reduce", "all_gather", "all_to_all")}
    found, error = fit(rows, Tuning())
    assert error < 0.02
    assert (found.base, found.ring) == pytest.approx((truth.base, truth.ring), rel=0.05)
