"""Which ranks run a collective and what link they cross: nodes, bridges, NVLink domains of many machines."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opcast.datasets.ops import LINKS, make_op
from opcast.harness import environment, placement, topology
from opcast.harness.ledger import CampaignError
from opcast.harness.placement import rank_map
from opcast.harness.plan import CampaignPlan, Case, Settings, build_plan
from opcast.harness.rank_map import RankMap, islands, localize, localize_plan
from opcast.harness.topology import Nic

EIGHT = (0,) * 8
TWO_NODES = RankMap(EIGHT + (1,) * 8, EIGHT + (1,) * 8, between="ib")
CUDA = Settings(device="cuda")


def ways(ranks: int, where: RankMap, backend: str = "nccl") -> list[tuple[str, int]]:
    """Link and ranks per node of each way in which an all_reduce of so many ranks is measured."""
    dims = {"tokens": 8, "hidden": 64, "topk": 2, "experts": 64} if backend == "deep_ep" else {"size_bytes": 1024}
    op = make_op("ep_dispatch" if backend == "deep_ep" else "all_reduce", ranks=ranks, **dims)
    cases = localize(Case(op, backend), where)
    return [(LINKS[case.op.link], case.op.ranks_per_node) for case in cases]


def test_ranks_of_one_node_cross_its_link_and_those_of_several_the_network() -> None:
    assert ways(2, TWO_NODES) == [("nvlink", 2), ("ib", 1)]
    assert ways(8, TWO_NODES) == [("nvlink", 8), ("ib", 4)]
    assert ways(3, TWO_NODES) == [("nvlink", 3)]
    assert ways(16, TWO_NODES) == [("ib", 8)]
    assert ways(32, TWO_NODES) == []
    assert TWO_NODES.members(4, 2) == (0, 1, 8, 9)
    assert TWO_NODES.members(8, 8) == tuple(range(8))
    eight_nodes = RankMap(*(tuple(i // 8 for i in range(64)),) * 2, between="ib")
    assert ways(8, eight_nodes) == [("nvlink", 8), ("ib", 4), ("ib", 1)]
    assert eight_nodes.members(8, 1) == tuple(range(0, 64, 8))
    cyclic = RankMap((0, 1, 0, 1), (0, 1, 0, 1), between="ib")  # as srun may deal ranks out
    assert (cyclic.members(2, 2), cyclic.members(2, 1)) == ((0, 2), (0, 1))


def test_gpus_that_bridges_join_in_pairs_are_not_all_on_nvlink() -> None:
    pairs = RankMap(EIGHT, islands(8, [(0, 1), (2, 3), (4, 5), (6, 7)]))
    assert [ways(ranks, pairs)[0][0] for ranks in (2, 4, 8)] == ["nvlink", "pcie", "pcie"]
    mesh = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3), (0, 4), (1, 5), (2, 6), (3, 7), (4, 5), (5, 6), (6, 7)]
    assert ways(8, RankMap(EIGHT, islands(8, mesh))) == [("nvlink", 8)]  # DGX-1: by way of a neighbour


def test_deep_ep_runs_where_its_nodes_are_whole() -> None:
    """Its kernels take eight ranks for one node."""
    assert ways(8, TWO_NODES, "deep_ep") == [("nvlink", 8)]
    assert ways(16, TWO_NODES, "deep_ep") == [("ib", 8)]


def test_the_campaign_of_two_nodes_has_cases_inside_and_between_them() -> None:
    from opcast.jobs.composing import compose

    spec = compose("profile", ["campaign=collectives", "+settings.device=cuda"])
    plan = build_plan({**spec["campaign"], "settings": {**spec["campaign"]["settings"], "device": "cuda"}})
    found = localize_plan(plan, {"rank_map": TWO_NODES.to_dict()})
    crossing = [case for case in found.cases if case.op.ranks > case.op.ranks_per_node]
    assert {case.op.ranks for case in crossing} == {2, 4, 6, 8, 16}
    assert {LINKS[case.op.link] for case in crossing} == {"ib"}
    inside = [case for case in found.cases if case.op.ranks <= case.op.ranks_per_node]
    assert {LINKS[case.op.link] for case in inside} == {"nvlink"}
    deep = [(c.op.ranks, c.op.mode, c.op.hidden) for c in found.cases if c.backend == "deep_ep"]
    changes = sum(before != after for before, after in itertools.pairwise(deep))
    assert changes == len(set(deep)) - 1  # each group's memory is made once


def test_more_ranks_than_there_are_are_left_out_unless_nothing_else_is_asked() -> None:
    ops = [make_op("all_reduce", size_bytes=1024, ranks=ranks) for ranks in (8, 64)]
    plan = CampaignPlan("some", tuple(Case(op, "nccl") for op in ops), (), CUDA)
    told = {"rank_map": RankMap(EIGHT, EIGHT).to_dict()}
    assert [case.op.ranks for case in localize_plan(plan, told).cases] == [8]
    lost = replace(plan, cases=plan.cases[1:])
    assert localize_plan(lost, told).cases == lost.cases


# --- what the machines tell ----------------------------------------------------------------------------


def told_of(gpus: int, link: Any, domain: str = "") -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What the ranks of one node tell: their place, and the first one what joins the GPUs."""
    names = [f"GPU{i}" for i in range(gpus)]
    links = {a: {b: "X" if a == b else link(int(a[3:]), int(b[3:])) for b in names} for a in names}
    facts = {"links": links, "gpus": {name: f"gpu-{name}" for name in names}}
    places = [{"gpu": f"gpu-{name}", **({"domain": domain} if domain else {})} for name in names]
    return [(place, {} if number else facts) for number, place in enumerate(places)]


def test_the_links_of_each_two_gpus_are_those_of_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "nics", lambda: [Nic("mlx5_0", 50.0, "ib")])
    switched = told_of(4, lambda a, b: "NV18")
    both = rank_map(["a"] * 4 + ["b"] * 4, [*switched, *switched], CUDA)
    assert (both.nodes, both.islands, both.between) == ((0,) * 4 + (1,) * 4, (0,) * 4 + (4,) * 4, "ib")
    bridged = rank_map(["a"] * 4, told_of(4, lambda a, b: "NV4" if a // 2 == b // 2 else "SYS"), CUDA)
    assert [bridged.link(range(ranks)) for ranks in (2, 4)] == ["nvlink", "pcie"]


def test_machines_of_one_nvlink_domain_are_one_node() -> None:
    tray = told_of(4, lambda a, b: "NV18", domain="clique")
    found = rank_map(["a"] * 4 + ["b"] * 4, [*tray, *tray], CUDA)
    assert ways(8, found) == [("nvlink", 8)]


@pytest.mark.parametrize(("state", "uuid", "known"), [(3, 7, True), (3, 0, False), (2, 7, False)])
def test_an_nvlink_domain_has_an_id(monkeypatch: pytest.MonkeyPatch, state: int, uuid: int, known: bool) -> None:
    pynvml = pytest.importorskip("pynvml")

    def answer(handle: object, info: Any) -> None:
        info._obj.state = state
        ctypes.memset(ctypes.byref(info._obj), uuid, 16)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetGpuFabricInfo", answer)
    monkeypatch.setattr(environment, "_nvml", lambda: pynvml)
    monkeypatch.setattr(environment, "_nvml_handle", lambda index: "handle")
    assert bool(environment.nvlink_domain()) is known


def test_a_link_that_nobody_tells_is_given_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "nics", list)
    silent: list[tuple[dict[str, Any], dict[str, Any]]] = [({"gpu": "gpu-1"}, {}), ({"gpu": "gpu-2"}, {})]
    with pytest.raises(CampaignError, match=r"settings\.link=nvlink \(xGMI too\)"):
        rank_map(["a", "a"], silent, CUDA)
    assert ways(2, rank_map(["a", "a"], silent, replace(CUDA, link="nvlink"))) == [("nvlink", 2)]
    amd = [({"gpu": None}, {"xgmi": True}), ({"gpu": None}, {})]
    assert ways(2, rank_map(["a", "a"], amd, CUDA)) == [("nvlink", 2)]
    apart = rank_map(["a", "b"], silent, replace(CUDA, link="ib"))
    assert ways(2, apart) == [("ib", 1)]
    assert placement.fabric() == "roce"


def test_the_uuids_of_nvidia_smi_name_the_gpus_of_the_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, GPU-aaaa-1'\necho '1, GPU-bbbb-2'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert topology.uuids() == {"GPU0": "aaaa-1", "GPU1": "bbbb-2"}
