"""Files of SimAI and ASTRA-sim: read, written again, and refused in one line when they are not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opcast.simulator.network.fabric import Fabric
from opcast.simulator.network.formats import (
    COLLECTIVES,
    FormatError,
    Layer,
    Work,
    Workload,
    members,
    read_astra_network,
    read_astra_system,
    read_busbw,
    read_workload,
    serial_us,
    write_astra_network,
    write_busbw,
    write_workload,
)
from opcast.simulator.network.shapes import Dimension, Port, product, single_switch

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
    assert found.layers[0].forward == Work(5000, "all_gather", 50331648)
    assert found.layers[1].weight_gradient == Work(1, "reduce_scatter", 4096, "DP_EP")
    assert read_workload(write_workload(found)) == found


busy = st.tuples(
    st.integers(0, 10**9),
    st.sampled_from(sorted(COLLECTIVES.values())),
    st.integers(1, 2**40),
    st.sampled_from(["", "EP"]),
)
works = st.one_of(busy.map(lambda each: Work(*each)), st.integers(0, 10**9).map(Work))
layers = st.tuples(st.sampled_from(["mlp", "x"]), works, works, works, st.integers(0, 1000)).map(
    lambda each: Layer(*each)
)


@settings(deadline=None)
@given(
    st.lists(layers, max_size=6),
    st.fixed_dictionaries({n: st.integers(1, 64) for n in ("tp", "ep", "pp", "vpp", "ga", "gpus")}),
)
def test_what_is_written_is_read_again(rows: list[Layer], degrees: dict[str, int]) -> None:
    workload = Workload(degrees, rows, 7)
    assert read_workload(write_workload(workload)) == workload


def test_groups_follow_the_rank_order() -> None:
    found = read_workload(TEXT)
    assert members(found, "forward", found.layers[0].forward) == range(4)
    assert members(found, "forward", found.layers[1].forward) == range(0, 8, 4)
    assert members(found, "weight_gradient", found.layers[1].weight_gradient) == range(0, 16, 8)
    assert members(found, "weight_gradient", Work(1, "all_reduce", 1)) == range(0, 16, 4)


def test_a_workload_takes_its_compute_and_its_collectives() -> None:
    fabric = Fabric(single_switch(16, Port(50.0, 0.5)))
    found = read_workload(TEXT)
    moved = [
        ("all_gather", range(4), 50331648),
        ("reduce_scatter", range(4), 50331648),
        ("all_to_all", (0, 4), 1048576),
        ("reduce_scatter", (0, 8), 4096),
    ]
    assert serial_us(found, fabric) == pytest.approx(
        12.005 - 0.001 + sum(fabric.latency_us(*each) for each in moved), rel=1e-3
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "starts with HYBRID_TRANSFORMER"),
        (TEXT.replace("\n2\n", "\n3\n"), "promises 3 layers, 2 follow"),
        (TEXT.replace("ALLGATHER", "GOSSIP"), "line 3: 'GOSSIP' is no number or collective"),
        (TEXT.replace("\t5000", "\tmany"), "line 3: .*many"),
        (TEXT.replace("\t100\n", "\n"), "line 3 has 11 fields, not 12"),
        (TEXT.replace("all_gpus: 16", "all_gpus: x"), "line 1 must be names and whole numbers"),
    ],
)
def test_bad_workloads_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        read_workload(text)
    assert "\n" not in str(caught.value)


def test_bus_bandwidths_go_both_ways() -> None:
    text = "test\nTP:\n  allreduce,: 300\n  allgather,: 280\n  alltoall,: 230,\n"
    text += "DP:\n  allreduce,: null\nPP:\n  busbw: 47.5\n"
    found = read_busbw(text)
    assert found == {
        "TP": {"all_reduce": 300.0, "all_gather": 280.0, "all_to_all": 230.0},
        "DP": {},
        "PP": {"busbw": 47.5},
    }
    assert read_busbw(write_busbw(found)) == found
    with pytest.raises(FormatError, match="line 3 of the bus bandwidths"):
        read_busbw("test\nTP:\n  allreduce,: fast\n")


def test_an_astra_network_goes_both_ways() -> None:
    dimensions = [Dimension("ring", 4, 300.0, 0.5), Dimension("switch", 8, 50.0, 1.0)]
    made, again = product(dimensions), read_astra_network(write_astra_network(dimensions))
    assert again.nodes == made.nodes
    assert again.bandwidth_gbps == pytest.approx(made.bandwidth_gbps)
    assert again.latency_us == pytest.approx(made.latency_us)
    with pytest.raises(FormatError, match="has no torus"):
        write_astra_network([Dimension("torus", 4, 1.0)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("topology: [ Ring ]", "lists topology, npus_count"),
        ("topology: [ Ring ]\nnpus_count: [ 4, 4 ]\nbandwidth: [ 50 ]\nlatency: [ 500 ]", "of one length"),
        ("topology: [ Star ]\nnpus_count: [ 4 ]\nbandwidth: [ 50 ]\nlatency: [ 500 ]", "'Star' is not one of Ring"),
        ("topology: [ Ring ]\nnpus_count: [ 4 ]\nbandwidth: [ -5 ]\nlatency: [ 500 ]", "bandwidth_gbps=-5"),
        ("topology: [", "is no YAML: line 1"),
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
        read_astra_network(text)
    assert "\n" not in str(caught.value)


def test_an_astra_system_is_mapped() -> None:
    found = read_astra_system(
        '{"all-reduce-implementation": ["ring", "halvingDoubling"], "preferred-dataset-splits": 4,'
        ' "endpoint-delay": 10, "local-mem-bw": 1600}'
    )
    assert found["algorithms"] == {"all_reduce": ["ring", "halving_doubling"]}
    assert (found["chunks"], found["endpoint_delay_us"]) == (4, 0.01)
    with pytest.raises(FormatError, match="system JSON: 'magic'"):
        read_astra_system('{"all-reduce-implementation": ["magic"]}')
