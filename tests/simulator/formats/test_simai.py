"""Files of SimAI and ASTRA-sim: read, written again, and refused in one line when they are not."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.simulator.formats.simai import (
    COLLECTIVES,
    FormatError,
    LayerPhase,
    SimaiWorkload,
    WorkloadLayer,
    group_ranks,
    read_busbw,
    read_workload,
    write_workload,
)
from opcast.simulator.network.astra import astra_network

HEAD = "HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 4 ep: 2 pp: 1 vpp: 1 ga: 1 all_gpus: 16 "
TEXT = (
    HEAD
    + """checkpoints: 0 checkpoint_initiates: 0 pp_comm 1024
2
attention\t-1\t5000\tALLGATHER\t50331648\t7000\tREDUCESCATTER\t50331648\t1\tNONE\t0\t100
experts\t-1\t1\tALLTOALL_EP\t1048576\t1\tNONE\t0\t1\tREDUCESCATTER_DP_EP\t4096\t100
"""
)


def test_a_simai_workload_is_read() -> None:
    found = read_workload(TEXT)
    assert dict(found.degrees) == {"tp": 4, "ep": 2, "pp": 1, "vpp": 1, "ga": 1, "gpus": 16}
    assert found.pp_bytes == 1024
    assert found.layers[0].forward == LayerPhase(5000, "all_gather", 50331648)
    assert found.layers[1].weight_gradient == LayerPhase(1, "reduce_scatter", 4096, "DP_EP")
    assert read_workload(write_workload(found)) == found


busy = st.tuples(
    st.integers(0, 10**9),
    st.sampled_from(sorted(COLLECTIVES.values())),
    st.integers(1, 2**40),
    st.sampled_from(["", "EP"]),
)
works = st.one_of(busy.map(lambda each: LayerPhase(*each)), st.integers(0, 10**9).map(LayerPhase))
layers = st.tuples(st.sampled_from(["mlp", "x"]), works, works, works, st.integers(0, 1000)).map(
    lambda each: WorkloadLayer(*each)
)


@settings(deadline=None)
@given(
    st.lists(layers, max_size=6),
    st.fixed_dictionaries({n: st.integers(1, 64) for n in ("tp", "ep", "pp", "vpp", "ga", "gpus")}),
)
def test_what_is_written_is_read_again(rows: list[WorkloadLayer], degrees: dict[str, int]) -> None:
    workload = SimaiWorkload(degrees, rows, 7)
    assert read_workload(write_workload(workload)) == workload


@pytest.mark.parametrize(
    ("head", "degrees", "more"),
    [
        ("pp: 1 ga: 1 all_gpus: 8 checkpoints: 0 checkpoint_initiates: 0", {"vpp": 1, "gpus": 8}, ((), ())),
        ("pp: 2 vpp: 1 ga: 8 all_gpus: 32 pp_comm: 8388608.0", {"ga": 8, "gpus": 32}, ((), ())),
        ("pp: 1 all_gpus: 8 checkpoints: 2 1 5 checkpoint_initiates: 1 4", {"gpus": 8}, ((1, 5), (4,))),
    ],
)
def test_first_lines_of_several_versions_are_read(head: str, degrees: dict, more: tuple) -> None:
    layer = "embedding_layer     -1 556000  ALLREDUCE   536870912      1       NONE 0        1      NONE   0      1 "
    found = read_workload(f"HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 4 ep: 1 {head}\n1\n{layer}")
    assert found.degrees["tp"] == 4
    assert {name: found.degrees[name] for name in degrees} == degrees
    assert (found.lists["checkpoints"], found.lists["checkpoint_initiates"]) == more
    assert found.layers[0].forward == LayerPhase(556000, "all_reduce", 536870912)
    assert read_workload(write_workload(found)) == found


def test_groups_follow_the_rank_order() -> None:
    found = read_workload(TEXT)
    assert group_ranks(found, "forward", found.layers[0].forward) == range(4)
    assert group_ranks(found, "forward", found.layers[1].forward) == range(0, 8, 4)
    assert group_ranks(found, "weight_gradient", found.layers[1].weight_gradient) == range(0, 16, 8)
    assert group_ranks(found, "weight_gradient", LayerPhase(1, "all_reduce", 1)) == range(0, 16, 4)
    with pytest.raises(FormatError, match="all_gpus: 16 do not divide into pp: 3 stages"):
        group_ranks(read_workload(TEXT.replace("pp: 1", "pp: 3")), "forward", LayerPhase(1))
    with pytest.raises(FormatError, match="16 GPUs of a stage do not divide into ep: 3"):
        group_ranks(read_workload(TEXT.replace("ep: 2", "ep: 3")), "forward", LayerPhase(1, scope="EP"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "starts with HYBRID_TRANSFORMER"),
        (TEXT.replace("\n2\n", "\n3\n"), "promises 3 layers, 2 follow"),
        (TEXT.replace("ALLGATHER", "GOSSIP"), "line 3: 'GOSSIP' is not one of ALLREDUCE, ALLGATHER"),
        (TEXT.replace("\t5000", "\tmany"), "line 3: .*many"),
        (TEXT.replace("\t100\n", "\n"), "line 3 has 11 fields, not 12"),
        (TEXT.replace("all_gpus: 16", ""), "line 1 lacks all_gpus, .* add all_gpus: N, a multiple of 4"),
        (TEXT.replace("all_gpus: 16", "all_gpus: x"), "line 1: all_gpus is 'x', which is no whole number"),
        (TEXT.replace("all_gpus: 16", "all_gpus: 0"), "line 1: all_gpus: 0 must be at least 1"),
        (TEXT.replace("pp_comm 1024", "pp_comm"), "line 1: pp_comm is 'nothing'"),
        (TEXT.replace("ALLTOALL_EP", "ALLTOALL_MARS"), "line 4: 'ALLTOALL_MARS' is not one of"),
        (TEXT.replace("50331648", "-1"), "line 3: bytes is '-1', which is no whole number"),
        (TEXT.replace("5000", "inf"), "line 3: compute is 'inf', which is no whole number"),
        (TEXT.replace("5000", "12.5"), "line 3: compute is '12.5'"),
        (TEXT.replace("\n2\n", "\ntwo\n"), "line 2: the number of layers is 'two'"),
        (TEXT.replace("\n2\n", "\n2\n\n\n").replace("\t4096", "\tx"), "line 6: bytes is 'x'"),
    ],
)
def test_bad_workloads_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        read_workload(text)
    assert "\n" not in str(caught.value)


def test_bus_bandwidths_are_read() -> None:
    text = "test\nTP:\n  allreduce,: 300\n  allgather,: 280\n  alltoall,: 230,\n"
    text += "DP:\n  allreduce,: null\nPP:\n  busbw: 47.5\n"
    found = read_busbw(text)
    assert found == {
        "TP": {"all_reduce": 300.0, "all_gather": 280.0, "all_to_all": 230.0},
        "DP": {},
        "PP": {"busbw": 47.5},
    }
    assert read_busbw("PP:\nbusbw: 47.5") == {"PP": {"busbw": 47.5}}  # a title is not always there


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("test\nTP:\n  allreduce,: fast\n", "line 3: 'fast' is no rate in GB/s"),
        ("test\nTP:\n  allreduce,: -5\n", "line 3: '-5' is no rate"),
        ("test\nTP:\n  allreduce,: nan\n", "line 3: 'nan' is no rate"),
        ("test\nTP:\n  gossip,: 5\n", "line 3: 'gossip' is not one of allreduce, allgather"),
        ("test\nXP:\n", "line 2: 'XP' is not one of TP, DP, EP, PP"),
        ("test\nallreduce,: 5\n", "line 2: 'allreduce' is not one of .* under TP, DP"),
        ("", "have lines TP:, DP:, EP:, PP:"),
    ],
)
def test_bad_bus_bandwidths_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        read_busbw(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("topology: [ Ring ]", "lists topology, npus_count"),
        ("topology: [ Ring ]\nnpus_count: [ 4, 4 ]\nbandwidth: [ 50 ]\nlatency: [ 500 ]", "of one length"),
        ("topology: [ Star ]\nnpus_count: [ 4 ]\nbandwidth: [ 50 ]\nlatency: [ 500 ]", "'Star' is not one of Ring"),
        ("topology: [ Ring ]\nnpus_count: [ 4 ]\nbandwidth: [ -5 ]\nlatency: [ 500 ]", "bandwidth_gbps=-5"),
        (
            "topology: [ Ring ]\nnpus_count: [ many ]\nbandwidth: [ 5 ]\nlatency: [ 500 ]",
            "npus_count='many' is no number",
        ),
        (
            "topology: [ Ring ]\nnpus_count: [ 4 ]\nbandwidth: [ fast ]\nlatency: [ 500 ]",
            "bandwidth='fast' is no number",
        ),
        ("7", "of one length"),
    ],
)
def test_bad_astra_networks_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        astra_network(yaml.safe_load(text))
    assert "\n" not in str(caught.value)
