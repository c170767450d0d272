"""The engine that answers for groups across nodes, and who answers when there are several."""

from __future__ import annotations

import dataclasses
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.clusters import ClusterError, load_cluster
from opcast.datasets.devices import load_device
from opcast.datasets.ops import make_op
from opcast.datasets.schema import Measurement
from opcast.datasets.store import Store
from opcast.simulator.engines import ask, build_engine
from opcast.simulator.engines.network import NetworkEngine
from opcast.simulator.network.nccl_times import Tuning, collective_us

H100 = load_device("h100_sxm")
CLUSTER = dataclasses.replace(load_cluster("dgx_h100"), nodes=64)
ENGINE = NetworkEngine(H100, CLUSTER)
MIB = 2**20


def op(kind: str = "all_reduce", size: int = 256 * MIB, ranks: int = 16, per_node: int = 8):
    return make_op(
        kind, size_bytes=size, ranks=ranks, ranks_per_node=per_node, link="ib" if ranks > per_node else "nvlink"
    )


def us(*ops, engine=ENGINE) -> list[float]:
    return ask(engine, list(ops)).latency_us.tolist()


def test_a_rank_alone_in_its_node_has_one_nic_and_eight_have_eight() -> None:
    one, eight = us(op(ranks=64, per_node=1, size=1024 * MIB), op(ranks=64, per_node=8, size=1024 * MIB))
    assert one / eight == pytest.approx(8.0, rel=0.15)


def test_nics_are_shared_out_among_all_devices_of_a_node() -> None:
    shared = dataclasses.replace(CLUSTER, nics_per_node=4)
    for per_node in (1, 4, 8):
        full, half = (
            us(op(size=4096 * MIB, ranks=16 * per_node, per_node=per_node), engine=NetworkEngine(H100, c))[0]
            for c in (CLUSTER, shared)
        )
        assert half / full == pytest.approx(2.0, rel=0.1)


def test_large_all_reduces_across_nodes_come_near_published_bandwidth() -> None:
    # nccl-tests, H100 and MI355X nodes with eight 400 Gb/s NICs: 365 to 468 GB/s of bus bandwidth
    for ranks, low, high in ((16, 340, 490), (32, 340, 400), (96, 340, 400)):
        bus = 8192 * MIB * 2 * (ranks - 1) / ranks / us(op(size=8192 * MIB, ranks=ranks))[0] / 1e3
        assert low < bus < high


def test_expert_exchange_across_nodes_sends_a_token_once_a_node() -> None:
    dims = {"tokens": 4096, "hidden": 7168, "topk": 8, "experts": 256, "link": "ib", "dtype": "fp8"}
    across = us(make_op("ep_dispatch", ranks=64, ranks_per_node=8, **dims))[0]
    nodes = 7 * (1 - (7 / 8) ** 8)
    assert across == pytest.approx(4096 * 7168 * nodes / (50 * 0.92) / 1e3, rel=0.2)
    direct = us(make_op("ep_dispatch", ranks=64, ranks_per_node=8, mode="low_latency", **dims))[0]
    assert direct > across


def test_what_is_no_communication_is_declined() -> None:
    assert np.isnan(ask(ENGINE, [make_op("gemm", m=8, n=8, k=8)]).latency_us[0])


def test_a_group_larger_than_the_cluster_is_refused() -> None:
    with pytest.raises(ClusterError, match="1024 ranks is larger than dgx_h100 with 64 nodes, which has 512"):
        us(op(ranks=1024))


def test_predictors_answer_inside_a_node_and_the_network_across(root: Path) -> None:
    fused = build_engine(H100, [], [root / "models" / "shipped"], cluster=CLUSTER)
    ops = [op(ranks=8), op(ranks=16), make_op("gemm", m=64, n=4096, k=4096)]
    assert ask(fused, ops).engine.tolist() == ["learned", "network", "learned"]
    alone = build_engine(H100, [], [root / "models" / "shipped"])
    assert ask(alone, ops).engine.tolist() == ["learned"] * 3


def test_a_group_of_few_ranks_or_another_format_inside_a_node_is_still_learned(root: Path) -> None:
    fused = build_engine(H100, [], [root / "models" / "shipped"], cluster=CLUSTER)
    usual, few, single = (
        make_op("all_reduce", size_bytes=64 * MIB, ranks=4, ranks_per_node=per_node, link="nvlink", dtype=dtype)
        for per_node, dtype in ((8, "bf16"), (4, "bf16"), (4, "fp32"))
    )
    found = ask(fused, [usual, few, single])
    assert found.engine.tolist() == ["learned"] * 3
    assert found.latency_us == pytest.approx(found.latency_us[0])


def test_the_network_and_the_predictors_agree_inside_a_node(root: Path) -> None:
    learned = build_engine(H100, [], [root / "models" / "shipped"], ("learned",))
    ops = [
        op(kind, size, ranks)
        for kind in ("all_reduce", "all_gather")
        for size in (64 * MIB, 512 * MIB)
        for ranks in (4, 8)
    ]
    assert us(*ops) == pytest.approx(us(*ops, engine=learned), rel=0.25)


def test_what_nccl_is_told_to_take_counts_before_what_was_measured(root: Path) -> None:
    told = dataclasses.replace(CLUSTER, nccl={"algorithm": "ring", "protocol": "Simple", "channels": 8})
    ops = [op(ranks=8), op(ranks=16), op("all_to_all", ranks=16), make_op("gemm", m=64, n=4096, k=4096)]
    free, forced = (build_engine(H100, [], [root / "models" / "shipped"], cluster=each) for each in (CLUSTER, told))
    assert ask(forced, ops).engine.tolist() == ["network", "network", "network", "learned"]
    assert ask(forced, ops).latency_us[0] > 2 * ask(free, ops).latency_us[0]  # a third of the channels
    few = op(size=8 * 2**10, ranks=8)
    assert us(few, engine=NetworkEngine(H100, told))[0] > 2 * us(few)[0]  # Simple, where LL would serve


def test_without_nvls_large_sums_of_a_node_go_round_rings() -> None:
    b200, size = load_device("b200_sxm"), 8 * 2**30
    node = load_cluster("dgx_b200")
    plain, off, ring = (
        us(op(size=size, ranks=8), engine=NetworkEngine(b200, dataclasses.replace(node, nccl=nccl)))[0]
        for nccl in ({}, {"nvls": False}, {"algorithm": "ring"})
    )
    assert off == ring
    # nccl-tests on 8 B200, 8 GiB (ml-engineering, network/README): 838 GB/s of bus bandwidth with NVLS, 682 without
    assert off / plain == pytest.approx(838.0 / 682.2, rel=0.05)


def test_two_of_eight_joined_without_a_switch_have_one_link() -> None:
    node = load_cluster("mi300x_8")
    mesh = NetworkEngine(load_device("mi300x"), node)
    switch = NetworkEngine(load_device("mi300x"), dataclasses.replace(node, mesh_links=0))
    for kind in ("all_reduce", "all_to_all"):
        for ranks, links in ((2, 1), (4, 3), (8, 7)):
            one, other = (us(op(kind, size=1024 * MIB, ranks=ranks), engine=each)[0] for each in (mesh, switch))
            assert 0.65 * 7 / links < one / other <= 7 / links * 1.001  # a rank's copy of its own part uses no link
    assert us(op(size=1024 * MIB, ranks=2), engine=mesh)[0] > 1024 * MIB / 64e3  # 64 GB/s one way
    pair = op("send_recv", size=1024 * MIB, ranks=2)
    assert us(pair, engine=mesh)[0] / us(pair, engine=switch)[0] == pytest.approx(7.0, rel=0.05)


def test_a_low_latency_exchange_grows_with_the_share_of_tokens_that_leave_not_with_peers() -> None:
    # DeepEP's README, low-latency kernels on H800: us by ranks, dispatch in FP8 and combine in 16 bits
    published = {16: (118, 195), 64: (173, 314), 128: (192, 369), 256: (194, 360)}
    h800 = NetworkEngine(load_device("h800_sxm"), dataclasses.replace(load_cluster("hgx_h800"), nodes=32))
    for ranks, times in published.items():
        dims = {"tokens": 128, "hidden": 7168, "topk": 8, "experts": 256, "ranks": ranks, "ranks_per_node": 8}
        ops = [
            make_op("ep_dispatch", mode="low_latency", dtype="fp8", out_dtype="fp8", **dims),
            make_op("ep_combine", mode="low_latency", dtype="bf16", **dims),
        ]
        assert us(*ops, engine=h800) == pytest.approx(times, rel=0.1)


@pytest.mark.parametrize(
    ("nccl", "message"),
    [
        ({"algorithm": "rings"}, "cluster.nccl.algorithm='rings' is not one of ring, tree, nvls, collnet"),
        ({"protocol": "simple"}, "cluster.nccl.protocol='simple' is not one of LL, LL128, Simple"),
        ({"nvls": "off"}, "cluster.nccl.nvls='off' is not one of True, False"),
        ({"channels": 0}, "cluster.nccl.channels=0 must be a whole number of at least 1"),
        ({"proto": "LL"}, "cluster.nccl has no setting 'proto'; it has algorithm, protocol, nvls, channels"),
        ("ring", "cluster.nccl='ring' must be a mapping"),
    ],
)
def test_what_nccl_cannot_be_told_is_refused(nccl: object, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        NetworkEngine(H100, dataclasses.replace(CLUSTER, nccl=nccl))


def test_measurements_of_a_store_set_the_constants(tmp_path: Path) -> None:
    truth = Tuning(base=2.0, hop=2.0, ring=0.6, network=0.3, far_hop=3.0)
    store, rows = Store(tmp_path / "store"), []
    for ranks in (2, 4, 8, 16, 32):
        sizes = 2 ** np.arange(10, 31, 2)
        dims = {"ranks": np.full(len(sizes), ranks), "ranks_per_node": np.full(len(sizes), 8)}
        times = collective_us("all_reduce", sizes.astype(float), ENGINE.groups(dims), truth)
        for size, latency in zip(sizes.tolist(), times.tolist(), strict=True):
            common = {"device_id": "h100_sxm", "run_id": "test", "measured_at": datetime(2026, 1, 1, tzinfo=UTC)}
            rows.append(Measurement(op=op("all_reduce", size, ranks), latency_us=latency, backend="nccl", **common))
    store.write(rows, "test")
    learnt = NetworkEngine(H100, CLUSTER, [store])
    assert (learnt.tuning.base, learnt.tuning.ring) == pytest.approx((2.0, 0.6), rel=0.1)
    assert learnt.tuning.network == pytest.approx(0.3, rel=0.1)
    unseen = op("all_reduce", 3 * 10**7, 64)
    expected = collective_us(
        "all_reduce", np.array([3e7]), ENGINE.groups({"ranks": np.array([64]), "ranks_per_node": np.array([8])}), truth
    )
    assert us(unseen, engine=learnt) == pytest.approx(expected.tolist(), rel=0.1)
    assert us(unseen, engine=ENGINE) != pytest.approx(expected.tolist(), rel=0.3)


def test_ten_thousand_ops_take_milliseconds() -> None:
    rng = np.random.default_rng(0)
    ops = [op(size=int(size)) for size in rng.integers(1, 2**30, 10_000)]
    from opcast.datasets.ops import iterate_groups

    ((kind, dtype, out, _, columns),) = iterate_groups(ops)
    start = time.process_time()
    ENGINE.answer(kind, columns, dtype, out, "warm")
    assert time.process_time() - start < 0.1
