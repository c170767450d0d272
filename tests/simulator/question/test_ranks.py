"""Ranks on devices: process groups by an order of dimensions and a placement, whatever they are."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.clusters import load_cluster
from opcast.jobs import cli
from opcast.simulator.network.mapping import process_groups
from opcast.simulator.passes.zero.families import halves
from opcast.simulator.question.plan import GROUPS, Parallel, Plan, check_plan
from opcast.simulator.question.ranks import LayoutError
from opcast.simulator.question.stragglers import stage_slowdowns

ORDERS = ["-".join(each) for each in permutations(("tp", "cp", "dp", "pp"))]
DEGREES = st.sampled_from([1, 2, 4])


def plan(nodes: int = 4, **parallel: object) -> Plan:
    return check_plan(Plan(Parallel(**parallel), replace(load_cluster("dgx_h100"), nodes=nodes)))  # type: ignore[arg-type]


def strides(made: Plan) -> dict[str, tuple[int, int]]:
    """Ranks and their distance in Megatron's usual order."""
    p, dp = made.parallel, made.dp
    stage = p.tp * p.cp * dp
    dense = {"tp": (p.tp, 1), "cp": (p.cp, p.tp), "dp": (dp, p.tp * p.cp), "dp_cp": (dp * p.cp, p.tp)}
    expert = {"etp": (p.etp, 1), "ep": (p.ep, p.etp), "edp": (stage // p.ep // p.etp, p.ep * p.etp)}
    return {**dense, "pp": (p.pp, stage), **expert}


@settings(deadline=None)
@given(st.sampled_from([1, 2, 4, 8, 32]), DEGREES, DEGREES, DEGREES, st.sampled_from([1, 2, 8]), DEGREES)
def test_the_usual_order_has_members_a_stride_apart(nodes: int, tp: int, cp: int, pp: int, ep: int, etp: int) -> None:
    if nodes * 8 % (tp * cp * pp) or nodes * 8 // pp % (ep * etp):
        return
    made = plan(nodes, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
    for name, (ranks, stride) in strides(made).items():
        near = max(1, min(ranks, 8 // stride))
        assert made.group(name)[1:4] == (ranks, near, "nvlink" if near == ranks else "ib")
        assert list(map(tuple, made.members(name).tolist())) == process_groups(nodes * 8, ranks, stride)


@settings(deadline=None)
@given(st.sampled_from(ORDERS), st.sampled_from(["linear", "round_robin", "list"]), DEGREES, DEGREES, DEGREES, DEGREES)
def test_every_device_is_in_one_group_of_a_dimension(
    order: str, placement: str, tp: int, cp: int, pp: int, ep: int
) -> None:
    listed = tuple(np.random.default_rng(7).permutation(64).tolist())
    made = plan(8, tp=tp, cp=cp, pp=pp, ep=ep, order=order, placement=listed if placement == "list" else placement)
    stages = [made.stage_devices(stage) for stage in range(pp)]
    home = {device: stage for stage, devices in enumerate(stages) for device in devices.tolist()}
    assert len(home) == 64
    for name in GROUPS:
        members = made.members(name)
        assert sorted(members.ravel().tolist()) == list(range(64))
        assert members.shape[1] == made.group(name).ranks
        across = {tuple(sorted({home[each] for each in group})) for group in members.tolist()}
        assert across == ({tuple(range(pp))} if name == "pp" else {(stage,) for stage in range(pp)})
    np.testing.assert_array_equal(made.members("pp"), np.stack(stages, axis=1))
    fewest = min(np.unique(group // 8, return_counts=True)[1].min() for group in made.members("dp"))
    assert made.group("dp").ranks_per_node == fewest


def test_an_order_says_who_is_a_neighbour() -> None:
    usual, piped, data = (plan(2, tp=2, pp=2, order=order) for order in ("tp-cp-dp-pp", "tp-cp-pp-dp", "dp-tp-cp-pp"))
    assert usual.members("pp")[0].tolist() == [0, 8]
    assert piped.members("pp")[0].tolist() == [0, 2]
    assert piped.members("dp")[0].tolist() == [0, 4, 8, 12]
    assert data.members("dp")[0].tolist() == [0, 1, 2, 3]
    assert data.members("tp")[0].tolist() == [0, 4]
    assert plan(2, tp=2, ep=4, order="dp-tp-cp-pp").members("ep")[0].tolist() == [0, 1, 2, 3]


def test_ranks_in_a_row_run_on_nodes_in_a_row() -> None:
    spread = plan(4, tp=4, placement="round_robin")
    assert spread.members("tp")[0].tolist() == [0, 8, 16, 24]
    assert spread.group("tp")[1:4] == (4, 1, "ib")
    assert spread.group("dp")[1:4] == (8, 8, "nvlink")


def test_the_node_with_the_fewest_members_counts() -> None:
    listed = [0, 1, 8, 2, *range(9, 16), *range(3, 8)]
    assert plan(2, tp=4, placement=listed).group("tp")[1:4] == (4, 1, "ib")
    assert plan(2, tp=2, placement=listed).group("tp")[1:4] == (2, 1, "ib")


def test_shards_and_replicas_divide_a_group() -> None:
    made = plan(4, tp=2, zero_stage=3, shard=4)
    shard, replicas = halves(made.group("dp_cp"), made)
    assert (shard.ranks, shard.ranks_per_node, shard.link) == (4, 4, "nvlink")
    assert (replicas.ranks, replicas.ranks_per_node, replicas.link) == (4, 1, "ib")
    assert made.members("dp_cp", 4)[0].tolist() == [0, 2, 4, 6]
    assert made.members("dp_cp", 4, 4)[0].tolist() == [0, 8, 16, 24]
    assert {(each.name, each.ranks, each.apart) for each in made.groups} >= {("dp_cp", 4, 1), ("dp_cp", 4, 4)}


def test_a_straggler_slows_the_stage_that_its_device_is_on() -> None:
    usual, spread = (
        replace(plan(2, pp=2, placement=placement), slow_devices={1: 1.5}) for placement in ("linear", "round_robin")
    )
    assert stage_slowdowns(usual).tolist() == [1.5, 1.0]
    assert stage_slowdowns(spread).tolist() == [1.5, 1.0]
    assert stage_slowdowns(replace(spread, slow_devices={4: 1.5, 12: 1.2})).tolist() == [1.0, 1.5]


def test_many_devices_are_quick() -> None:
    made = plan(2048, tp=8, pp=16, placement="round_robin")
    assert made.members("dp").shape == (128, 128)
    assert made.members("dp") is made.members("dp")
    with pytest.raises(ValueError, match="read-only"):
        made.members("dp")[0, 0] = 1


def test_a_list_of_devices_names_each_once() -> None:
    with pytest.raises(LayoutError, match=r"lists 3 devices, dgx_h100 has 32; list each device from 0 to 31 once"):
        plan(placement=[0, 1, 2])


CALL = "simulate workload=train model=tiny_llama_100m cluster=dgx_h100 parallel.tp=8 format=json".split()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("parallel.order=tp-dp-pp", "parallel.order='tp-dp-pp' must name tp, cp, dp and pp once each"),
        ("parallel.order=3", "parallel.order=3 must name"),
        ("parallel.placement=random", "parallel.placement='random' is not one of linear, round_robin; or list"),
        ("parallel.placement=[0,1,2,3,4,5,6,6]", "parallel.placement lists device 6 twice"),
        ("parallel.placement=[0,1,2,3,4,5,6,8]", "parallel.placement lists device 8, dgx_h100 has none of that"),
        ("parallel.placement=[0,a]", "parallel.placement=[0, 'a'] is not one of"),
    ],
)
def test_bad_input_is_one_line(setting: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*CALL, *setting.split()]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert json.loads(captured.out) == {"error": captured.err.removeprefix("opcast: ").rstrip()}
    assert captured.err.count("\n") == 1
