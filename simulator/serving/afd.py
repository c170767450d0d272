"""Attention and feed-forward layers on GPUs of their own (AFD): tables of iterations that only decode.

The batch of an iteration is cut into micro-batches. While one is with attention another is with the feed-forward layers
or experts, and a third is on its way (MegaScale-Infer, arXiv 2504.02263, section 4.1; Step-3, arXiv 2507.19427, has the
same pipeline). With Ta, Te and Tc of one micro-batch and layer on attention, on experts and on the way between them,
the round of a micro-batch is Ta + Te + 2 Tc, and the slower stage takes Tf = max(Ta, Te). L layers of m micro-batches
take

    round + (L - 1) max(m Tf, round) + (m - 1) Tf

which is the paper's (Ta + Te + 2 Tc) + Tf (m L - 1) where transfers are hidden, m Tf >= round.

Ranks of attention are taken to have batches alike, and to send at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from ...datasets.dtypes import BITS
from ...datasets.ops import Op
from ..engines import ask
from ..question.ffn_apart import FfnApart
from ..question.work import Work
from .between import executed_nodes
from .iteration import IterationTables, at_point, at_points
from .tabulate import ATTENDING, CONTEXTS, make_monotone, points_up_to

if TYPE_CHECKING:
    from .steps import ReplicaSteps


@dataclass(frozen=True)
class FfnCosts:
    """What feed-forward layers take: microseconds ``here_us`` of so many tokens beside attention, which is then saved,
    and ``there_us`` on their own GPUs; bytes of a token's row, rows of a token, layers, bytes of weights on a GPU."""

    here_us: Callable[[float], float]
    there_us: Callable[[float], float]
    token_bytes: float
    copies: int
    layers: int
    weight_bytes: float = 0.0


def by_hand(apart: FfnApart) -> FfnCosts:
    """The costs where there is no model: a law is then that of attention alone."""
    fixed_us, token_us = apart.ffn_us or 0.0, (apart.ffn_token_us or 0.0) / max(apart.ffn_gpus, 1)
    return FfnCosts(
        lambda tokens: 0.0,
        lambda tokens: fixed_us + token_us * tokens,
        apart.token_bytes or 0.0,
        apart.copies or 1,
        apart.layers or 1,
    )


def costs_of(apart: FfnApart, steps: ReplicaSteps) -> FfnCosts:
    """The costs of a model's feed-forward layers, as the engines answer their kernels with other sizes."""
    nodes = executed_nodes(steps.simulate(Work("batch", decodes=((1, 1),))))
    products = [
        (node.op, times, node.path.rpartition(".")[2])
        for node, times, _ in nodes
        if node.op
        and node.op.kind in ("gemm", "fused_moe")
        and ".layers." in f".{node.path}."
        and "attn" not in node.path
    ]
    there = [(on_gpus(op, name, apart.ffn_gpus), times) for op, times, name in products]
    topk = [op.topk for op, _, _ in products if op.kind == "fused_moe"]
    hidden = int(steps.config.get("hidden_size", 0))
    hand = by_hand(apart)

    def took_us(ops: Sequence[tuple[Op, float]], tokens: float) -> float:
        answers = ask(steps.kernels, [sized(op, tokens) for op, _ in ops], "cold").latency_us
        return float(answers @ np.array([times for _, times in ops])) if ops else 0.0

    return FfnCosts(
        lambda tokens: took_us([(op, times) for op, times, _ in products], tokens),
        hand.there_us if apart.ffn_us is not None else lambda tokens: took_us(there, tokens),
        2.0 * hidden if apart.token_bytes is None else apart.token_bytes,
        apart.copies or max(topk, default=1),
        apart.layers or int(steps.config.get("num_hidden_layers", 1)),
        sum(times * weight_bytes(op) for op, times, _ in products) / steps.plan.parallel.pp,
    )


def sized(op: Op, tokens: float) -> Op:
    """The same of so many tokens."""
    count = max(ceil(tokens), 1)
    return op.replace(m=count) if op.kind == "gemm" else op.replace(tokens=count)


def on_gpus(op: Op, name: str, gpus: int) -> Op:
    """The part of a product that one of so many GPUs has: experts are shared out, others are cut."""
    if op.kind == "fused_moe":
        return op.replace(ep=min(gpus, op.experts), tp=1)
    if name in ("gate", "router"):
        return op
    return op.replace(k=ceil(op.k / gpus)) if name == "down_proj" else op.replace(n=ceil(op.n / gpus))


def weight_bytes(op: Op) -> float:
    """Bytes of the weights of a product on a GPU."""
    if op.kind == "gemm":
        return op.n * op.k * BITS[op.dtype] / 8
    return (2 + op.gated) * op.hidden * op.inter / op.tp * op.experts / op.ep * BITS[op.dtype] / 8


def ping_pong_us(attention_us: float, ffn_us: float, transfer_us: float, layers: int, batches: int) -> float:
    """Microseconds of an iteration of so many micro-batches, each of which takes so long in all layers."""
    slower_us = max(attention_us, ffn_us) / layers
    round_us = (attention_us + ffn_us + 2 * transfer_us) / layers
    return round_us + (layers - 1) * max(batches * slower_us, round_us) + (batches - 1) * slower_us


def transfer_us(apart: FfnApart, costs: FfnCosts, tokens: float, ranks: int) -> float:
    """Microseconds of one way of a micro-batch of so many tokens of each rank, all layers: the more loaded end sends or
    takes in its rows one after the other."""
    sent = tokens * costs.copies
    taken_in = ranks * tokens * max(costs.copies / apart.ffn_gpus, 1.0 if costs.copies == 1 else 0.0)
    return costs.layers * (apart.us + max(sent, taken_in) * costs.token_bytes / (apart.gbps * 1e3))


def iteration_us(
    tables: IterationTables, apart: FfnApart, costs: FfnCosts, ranks: int, decodes: float, context: float
) -> float:
    """Microseconds of an iteration in which each of so many ranks decodes so many sequences, without the last layer."""
    batches = min(apart.micro_batches, ceil(decodes))
    tokens = decodes / batches
    beside_us = at_point(tables.decode_axis, tables.decode_us, tokens) - costs.here_us(tokens)
    attend_us = at_points(tables.attend_rows, tables.attend_context, tables.attend_us, tokens, context)
    way_us = transfer_us(apart, costs, tokens, ranks)
    ffn_us = costs.there_us(ranks * tokens)
    return ping_pong_us(max(beside_us, 0.0) + attend_us, ffn_us, way_us, costs.layers, batches)


def apart_tables(
    tables: IterationTables, apart: FfnApart, costs: FfnCosts, ranks: int, sequences: int, longest: int
) -> IterationTables:
    """Tables of a rank whose feed-forward layers are elsewhere: attention's table has all but the last layer."""
    rows, contexts = points_up_to(ATTENDING, max(sequences, 2)), points_up_to(CONTEXTS, max(longest, 2))
    us = [[iteration_us(tables, apart, costs, ranks, row, context) for context in contexts] for row in rows]
    return tables._replace(
        decode_axis=np.array([0.0, 1.0]),
        decode_us=np.zeros(2),
        attend_rows=np.array(rows, float),
        attend_context=np.array(contexts, float),
        attend_us=make_monotone(np.array(us)),
        expert_us=0.0 * tables.expert_us,
    )
