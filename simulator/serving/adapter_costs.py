"""What an adapter takes on a replica: memory beside keys and values, time of its kernels, time to load it.

vLLM 0.33.0 takes memory for ``max_loras`` adapters of the largest rank at its start: beside each product of a layer
that has n slices (query, key and value: 3; gate and up: 2), n matrices A of rank x inputs and as many B of
outputs x rank (``create_lora_weights`` of ``lora/layers/base_linear.py``, split as the product is). In an iteration
with an adapter each such product has three kernels more: a buffer set to zero, one that shrinks all tokens by the
matrices A of their adapters, and one that expands them by the matrices B (``lora/ops/triton_ops``). Their time here is
that of batched products of as many matrices, as the engines answer it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from ...datasets.ops import Op
from ..engines import ask
from ..memory.breakdown import GIB
from ..passes.mixed import ABSORBED
from ..question.adapters import ServedAdapters
from ..question.work import Work
from .between import executed_nodes
from .kv import KvBudget, KvError
from .tabulate import make_monotone, points_up_to

if TYPE_CHECKING:
    from .steps import ReplicaSteps

DTYPE, BITS = "bf16", 16  # of adapters, which no engine quantises
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
COPIES = 4  # host calls for a slice: its A and B are set to zero and copied (``set_lora``)
OF_ENGINE = {"sglang": 8}  # max_loras that nobody set: SGLang's max_loras_per_batch; vLLM's is 1


@dataclass(frozen=True)
class AdapterCosts:
    """Bytes of an adapter on one GPU (``gpu_bytes``) and in its file; microseconds of the host to put it on a GPU;
    microseconds ``extra_us`` [adapters of a batch, their tokens] of an iteration."""

    gpu_bytes: float
    file_bytes: float
    host_us: float
    counts: np.ndarray
    tokens: np.ndarray
    extra_us: np.ndarray


@dataclass(frozen=True)
class AdaptedProduct:
    """A product with adapters on one GPU: its operation, how often it runs, and of how many slices it is."""

    op: Op
    times: float
    slices: int


def most_loras(lora: ServedAdapters, policy: str) -> int:
    """Adapters on a GPU, as the engine of a policy has it where nobody says."""
    return min(lora.max_loras or OF_ENGINE.get(policy, 1), lora.adapters)


def most_in_host(lora: ServedAdapters, policy: str) -> int:
    """Adapters in host memory: as many as on a GPU, or all of them for an engine that has no limit."""
    usual = lora.adapters if policy in OF_ENGINE else most_loras(lora, policy)
    return max(min(lora.max_cpu_loras or usual, lora.adapters), most_loras(lora, policy))


def by_hand(lora: ServedAdapters) -> AdapterCosts:
    """The costs of adapters where there is no model: those given, else none."""
    adapter_us, token_us = lora.adapter_us or 0.0, lora.token_us or 0.0
    size = (lora.gib or 0.0) * GIB
    unit = np.array([0.0, 1.0])
    return AdapterCosts(size, size, 0.0, unit, unit, np.add.outer(unit * adapter_us, unit * token_us))


def costs_of(lora: ServedAdapters, steps: ReplicaSteps, most: int, most_tokens: int) -> AdapterCosts:
    """The costs of adapters beside the products of a model's step. KvError where it has no product for them."""
    products = adapted(steps, lora.modules)
    if not products:
        raise KvError(f"lora.modules={lora.modules} names no product of this model: take another, or lora.adapters=0")
    parallel = steps.plan.parallel
    elements = sum(product.times * (product.slices * product.op.k + product.op.n) for product in products)
    gpu_bytes = elements * lora.rank * BITS / 8 / parallel.pp
    slices = sum(product.times * product.slices for product in products) / parallel.pp
    size = lora.gib * GIB if lora.gib is not None else gpu_bytes * parallel.pp * parallel.tp
    costs = by_hand(replace(lora, gib=size / GIB))
    costs = replace(
        costs,
        gpu_bytes=gpu_bytes if lora.gib is None else size / (parallel.tp * parallel.pp),
        host_us=slices * COPIES * steps.device.dispatch_us,
    )
    if lora.adapter_us is not None:
        return costs
    counts, tokens = points_up_to(COUNTS, max(most, 2)), points_up_to(TOKENS, most_tokens)
    extra_us = np.array(
        [[kernels_us(products, steps, lora.rank, count, number) for number in tokens] for count in counts]
    )
    return replace(
        costs, counts=np.array(counts, float), tokens=np.array(tokens, float), extra_us=make_monotone(extra_us)
    )


def adapted(steps: ReplicaSteps, modules: str) -> list[AdaptedProduct]:
    """The products of a decode step that have adapters: those of its layers, but for experts, routers and the last."""
    products: dict[tuple[Op, int], float] = {}
    for node, times, _ in executed_nodes(steps.simulate(Work("batch", decodes=((1, 1),)))):
        op, *_, name = node.op, *node.path.split(".")
        if op is None or op.kind != "gemm" or node.source in ABSORBED or ".layers." not in f".{node.path}.":
            continue
        attention = "attn" in node.path or "attention" in node.path
        if name in ("gate", "router") or modules not in ("all", "attention" if attention else "mlp"):
            continue
        slices = (3 if attention else 2) if name.endswith(("attn", "attention", "mlp")) else 1
        products[op, slices] = products.get((op, slices), 0.0) + times
    return [AdaptedProduct(op, times, slices) for (op, slices), times in products.items()]


def kernels_us(products: Sequence[AdaptedProduct], steps: ReplicaSteps, rank: int, count: int, tokens: int) -> float:
    """Microseconds that so many adapters of so many tokens together add to an iteration."""
    rows = -(-tokens // count)
    ops = []
    for product in products:
        like = product.op.replace(batch=count, m=rows, dtype=DTYPE)
        ops += [like.replace(n=product.slices * rank), like.replace(k=rank)]
    answers = ask(steps.kernels, ops, "cold").latency_us
    each_us = answers[0::2] + answers[1::2] + steps.device.launch_us
    return float(sum(product.times * us for product, us in zip(products, each_us.tolist(), strict=True)))


def less_memory(kv: KvBudget, size_bytes: float, what: str, setting: str) -> KvBudget:
    """The KV memory of a rank that so many bytes leave. KvError, with what takes them and its setting, for none."""
    block_bytes = kv.bytes_per_token * kv.block_tokens
    fewer = ceil(size_bytes / block_bytes) if size_bytes and block_bytes else 0
    if fewer >= kv.blocks:
        raise KvError(f"{what} of {size_bytes / GIB:.1f} GiB leave no KV memory: take fewer ({setting})")
    return replace(kv, blocks=kv.blocks - fewer)
