"""What a person asks of a network: sizes, groups, transfers, and what is said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.ops import bus_factor
from opcast.simulator.network.fabric import Fabric, Transfer
from opcast.simulator.network.fidelity import load_over_time, simulate
from opcast.simulator.network.query import (
    TransferError,
    bandwidths,
    parallel_groups,
    parse_group,
    parse_size,
    parse_transfers,
    read_transfers,
    summarize_transfers,
)
from opcast.simulator.network.shapes import Port, Servers, fat_tree


@pytest.mark.parametrize(
    ("text", "size"),
    [("1GiB", 2**30), ("64 MiB", 2**26), ("1.5GB", 1_500_000_000), ("1kb", 1000), ("17", 17), ("2e6B", 2_000_000)],
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("value", ["1XB", "GiB", "-1", -1, 1.5, "0.3B", True, None, float("nan"), "9EiB"])
def test_what_is_no_size_is_refused(value: Any) -> None:
    with pytest.raises(TransferError, match="must be a whole number of bytes"):
        parse_size(value)


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 64))
def test_groups_beside_each_other_share_no_device(ranks: int, stride: int, devices: int) -> None:
    if (ranks - 1) * stride >= devices:
        with pytest.raises(TransferError, match="larger than"):
            parse_group(None, ranks, stride, devices)
        return
    group = parse_group(None, ranks, stride, devices)
    every = parallel_groups(group, devices)
    named = [device for each in every for device in each]
    assert group in every
    assert len(set(named)) == len(named)
    assert set(named) <= set(range(devices))


def test_a_file_lists_transfers(tmp_path: Path) -> None:
    path = tmp_path / "jobs.yaml"
    path.write_text(
        "transfers:\n"
        "- {collective: all_reduce, group: {ranks: 4, stride: 2}, size_bytes: 1MiB, algorithm: ring, name: a}\n"
        "- {collective: send, group: [0, 5], size_bytes: 10, after: a, release_us: 3}\n"
    )
    made, names = read_transfers(path, 8)
    assert names == ["a", "transfer 1"]
    assert made == [
        Transfer("all_reduce", (0, 2, 4, 6), 2.0**20, "ring"),
        Transfer("send", (0, 5), 10.0, None, 3.0, (0,)),
    ]
    assert parse_transfers(made, 8)[0] == made


GOOD = {"collective": "all_reduce", "group": [0, 1], "size_bytes": 1}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (3, "it has no setting '3'"),
        ({**GOOD, "speed": 1}, "no setting 'speed'"),
        ({"collective": "all_reduce", "group": [0, 1]}, "lacks 'size_bytes'"),
        ({**GOOD, "size_bytes": "many"}, "size_bytes='many' must be"),
        ({**GOOD, "after": 0}, "after=0 is no earlier transfer"),
        ({**GOOD, "after": "b"}, "after='b' is no earlier transfer"),
        ({**GOOD, "release_us": -1}, "release_us=-1 must be"),
        ({**GOOD, "algorithm": "magic"}, "algorithm='magic' is not one of"),
        ({**GOOD, "collective": "gossip"}, "collective='gossip' is not one of all_reduce"),
        ({**GOOD, "collective": "send", "group": [0, 1, 2]}, "a send has two devices"),
        ({**GOOD, "group": {"first": 6, "ranks": 4}}, "device 8"),
        ({**GOOD, "group": {"ranks": 0}}, "ranks=0 must be"),
        ({**GOOD, "group": {"rank": 2}}, "no setting 'rank'"),
        ({**GOOD, "group": []}, "must be a list of devices"),
        ({**GOOD, "group": [0, 1.5]}, "device 1.5"),
    ],
)
def test_bad_transfers_are_one_line(value: Any, says: str) -> None:
    with pytest.raises(TransferError, match=says) as caught:
        parse_transfers([value], 8)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("transfer 0: ")


def test_names_are_taken_once() -> None:
    with pytest.raises(TransferError, match="'a' is taken"):
        parse_transfers([{**GOOD, "name": "a"}, {**GOOD, "name": "a"}], 8)


def test_what_is_said_adds_up() -> None:
    fabric = Fabric(fat_tree(Servers(4, 4, Port(400.0, 0.5, "nvlink"), Port(50.0, 1.0)), 8), server=4)
    asked = [Transfer("all_reduce", tuple(range(16)), 2**26, "ring"), Transfer("send", (0, 9), 2**24, after=(0,))]
    outcome = simulate(fabric, asked, "flow")
    found = summarize_transfers(fabric, asked, ["a", "b"], outcome)
    first, second = found["transfers"]
    assert first["algbw_gbps"] == pytest.approx(2**26 / (first["end_us"] - first["start_us"]) / 1e3)
    assert second["end_us"] == found["total_us"]
    top = found["hot_links"][0]
    load = outcome.utilisation(fabric.topology.bandwidth_gbps)
    assert top["busy"] == load.max()
    shares = found["over_time"]["links"][top["link"]]
    assert np.mean(shares) == pytest.approx(top["busy"], rel=1e-6)
    (link,) = fabric.topology.find(top["link"])
    assert load_over_time(fabric, asked, outcome, len(shares))[:, link] == pytest.approx(np.array(shares), abs=1e-6)


def test_links_over_time_carry_what_they_carry_and_no_more_than_they_can() -> None:
    fabric = Fabric(fat_tree(Servers(4, 4, Port(400.0, 0.5, "nvlink"), Port(50.0, 1.0)), 8, 4.0), server=4)
    asked = [
        Transfer("all_reduce", tuple(range(0, 16, 2)), 2**28, "ring"),
        Transfer("all_to_all", tuple(range(4, 12)), 2**26),
        Transfer("send", (3, 12), 2**24, None, 200.0),
        Transfer("send", (0, 15), 2**24, after=(1,)),
    ]
    outcome = simulate(fabric, asked, "flow")
    capacity = fabric.topology.bandwidth_gbps * 1e3
    shares = load_over_time(fabric, asked, outcome, 40)
    assert shares.max() <= 1.0 + 1e-6
    carried = shares.sum(axis=0) * capacity * outcome.total_us / 40
    assert carried == pytest.approx(outcome.carried_bytes, rel=5e-3, abs=1.0)
    evenly = load_over_time(fabric, asked, outcome._replace(run=None), 40)
    assert evenly.sum(axis=0) == pytest.approx(shares.sum(axis=0), rel=5e-3, abs=1e-6)


def test_bandwidths_follow_nccl_tests() -> None:
    found = bandwidths("all_reduce", 8, 1e9, 1e4)
    assert found["algbw_gbps"] == pytest.approx(100.0)
    assert found["busbw_gbps"] == pytest.approx(100.0 * float(bus_factor("all_reduce", 8)))
    assert bandwidths("send", 2, 1e9, 0.0)["algbw_gbps"] == 0.0
