"""Where ranks run decides what their collectives cost: orders and placements with links that are simulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opcast.datasets.clusters import Cluster, load_cluster
from opcast.datasets.devices import load_device
from opcast.datasets.ops import make_op
from opcast.simulator.engines import FusedEngine, ask, build_engine
from opcast.simulator.engines.flow import FlowEngine
from opcast.simulator.engines.network import NetworkEngine
from opcast.simulator.network.build import build_fabric
from opcast.simulator.network.fabric import Transfer
from opcast.simulator.question.plan import Parallel, Plan, load_stack
from opcast.simulator.question.work import Work
from opcast.simulator.simulate import simulate

H100 = load_device("h100_sxm")
TINY = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 2,
    "vocab_size": 8192,
}


def cluster(nodes: int = 8, **topology: Any) -> Cluster:
    return replace(load_cluster("dgx_h100"), nodes=nodes, topology={"shape": "fat_tree", "radix": 16, **topology})


def flows(joined: Cluster, **parallel: Any) -> FlowEngine:
    formula = NetworkEngine(H100, joined)
    return FlowEngine(formula, formula, Plan(Parallel(**parallel), joined))


def group_us(engine: FlowEngine, name: str, kind: str = "all_reduce", size: int = 2**28) -> float:
    """How long a collective in the groups of a dimension takes, all at once."""
    assert engine.plan is not None
    group = engine.plan.group(name)
    op = make_op(kind, size_bytes=size, ranks=group.ranks, ranks_per_node=group.ranks_per_node, link=group.link)
    return float(ask(engine, [op]).latency_us[0])


@pytest.mark.parametrize("mapped", [{"order": "dp-tp-cp-pp"}, {"placement": "round_robin"}])
def test_tensor_ranks_across_nodes_wait_for_nics(mapped: dict[str, str]) -> None:
    usual, spread = (group_us(flows(cluster(), tp=8, **each), "tp") for each in ({}, mapped))
    assert spread > 5 * usual
    usual, spread = (group_us(flows(cluster(), tp=8, **each), "dp") for each in ({}, mapped))
    assert spread < usual / 5  # data ranks are neighbours now


def test_an_order_moves_a_step(tmp_path: Path) -> None:
    joined, found = cluster(), []
    for order in ("tp-cp-dp-pp", "dp-tp-cp-pp"):
        plan = Plan(Parallel(tp=8, zero_stage=1, order=order), joined, load_stack("megatron"))
        engine = build_engine(H100, [], [], cluster=joined)
        engine = FusedEngine([FlowEngine(NetworkEngine(H100, joined), engine, plan), *engine.engines])
        work = Work(seq_len=2048, micro_batch=1, global_batch=64)
        found.append(simulate(TINY, work, plan, H100, engine, tmp_path).step_time_s)
    assert found[1] > 1.5 * found[0]


def test_neighbours_on_one_rail_stay_under_their_leaf() -> None:
    turned = [8 * node + (rank + node) % 8 for node in range(8) for rank in range(8)]  # each node one GPU further on

    def carried(shape: str, placement: Any) -> dict[str, float]:
        """Bytes over NVLink and over links of spines, of the rings of all data-parallel groups."""
        joined = cluster(8, shape=shape)
        made, plan = build_fabric(joined, H100).with_group_size(1), Plan(Parallel(tp=8, placement=placement), joined)
        rings = [Transfer("all_reduce", tuple(group), 1e6, "ring") for group in plan.members("dp").tolist()]
        bytes_of, topology = made.flow(rings)[2].carried_bytes, made.topology
        spine = topology.links_of_node("spine0") if "spine0" in topology.index else np.zeros(0, dtype=np.int64)
        return {"nvlink": bytes_of[np.array(topology.kind) == "nvlink"].sum(), "spine": bytes_of[spine].sum()}

    assert carried("rails", "linear") == {"nvlink": 0.0, "spine": 0.0}
    assert carried("rails", turned)["nvlink"] > 0  # on to the GPU of the next one's rail, and out by its NIC
    assert carried("fat_tree", "linear")["spine"] > 0


def test_nodes_may_hold_different_numbers_of_a_group() -> None:
    listed = [*range(6), *range(8, 14), *range(6, 8), *range(14, 64)]  # the first groups lie in nodes as 6 + 2, 4 + 4
    engine = flows(cluster(), tp=8, placement=listed)
    assert engine.plan is not None
    assert engine.plan.group("tp")[1:4] == (8, 2, "ib")
    assert group_us(engine, "tp") > 2 * group_us(flows(cluster(), tp=8), "tp")
    for kind in ("all_gather", "all_to_all", "send_recv"):
        assert np.isfinite(group_us(engine, "tp", kind))
