"""How long collectives take in a world: hops, rates that short messages do not reach, rings and trees, the best."""

from __future__ import annotations

import math

from opcast.datasets.ops import KINDS, Op
from opcast.tests.worlds.chip import World

SHARES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
PROTOCOLS = ((0.45, 0.55), (0.92, 0.8), (1.0, 1.6))  # of the rate, and of a hop's time: for short to long messages
OWN_KERNELS = ("custom", "symm_mem")  # all-reduces of serving engines for small messages inside a node
VARIANTS = {"inplace": 0.97, "graph": 0.94, "registered": 0.93}  # of the time of NCCL issued call by call


def collective_us(world: World, op: Op, kernel: str) -> float:
    """Microseconds of one collective, exchange of experts or send by a kernel (``nccl``, ``deep_ep``, ``custom``)."""
    ranks = op.ranks
    if ranks < 2:
        return world.chip.kernel_us
    if KINDS[op.kind].family == "expert_parallel":
        return world.factor(0.05, kernel, op.kind) * _exchange_us(world, op, kernel)
    if op.size_bytes == 0:
        return world.links.base_us
    nodes = -(-ranks // max(op.ranks_per_node, 1))
    if op.kind == "all_reduce" and kernel.partition(":")[0] in OWN_KERNELS and nodes == 1:
        return _own_reduce_us(world, op)
    factor = world.factor(0.03, kernel.partition(":")[0], op.kind) * VARIANTS.get(kernel.partition(":")[2], 1.0)
    return factor * _nccl_us(world, op, nodes)


def _nccl_us(world: World, op: Op, nodes: int) -> float:
    if op.kind in SHARES:
        ways = [_ring_us(world, op, nodes, rate, hop) for rate, hop in PROTOCOLS]
        if op.kind == "all_reduce":
            ways += [_tree_us(world, op, nodes, rate, hop) for rate, hop in PROTOCOLS]
        return min(ways)
    links = world.links
    if op.kind == "all_to_all":
        inside = min(op.ranks_per_node, op.ranks) / op.ranks
        sent = op.size_bytes * (op.ranks - 1) / op.ranks
        near, far = (sent * inside, sent * (1.0 - inside)) if nodes > 1 else (sent, 0.0)
        hops = (
            links.base_us
            + 0.35 * links.near_us * op.ranks
            + (links.far_us * math.log2(nodes + 1) if nodes > 1 else 0.0)
        )
        each = op.size_bytes / op.ranks
        return hops + max(_move(world, near, each, False), _move(world, far, each, True, nodes)) / links.exchange
    hops = links.base_us + (links.far_us if nodes > 1 else links.near_us) * (
        1 if op.kind == "send_recv" else math.log2(op.ranks)
    )
    return hops + _move(world, float(op.size_bytes), float(op.size_bytes), nodes > 1, nodes)


def _move(world: World, size: float, message: float, far: bool, nodes: int = 1) -> float:
    """Time of bytes on a rank's link, in messages of a size."""
    links = world.links
    rate = (
        links.far_gbps * (1.0 - links.far_loss) ** max(math.log2(max(nodes, 1)) - 1.0, 0.0) if far else links.near_gbps
    )
    return size / (rate * 1e3 * message / (message + links.half_bytes)) if size > 0 else 0.0


def _ring_us(world: World, op: Op, nodes: int, rate: float, hop: float) -> float:
    """Every rank passes its share on, once round, for an all-reduce twice; rings share the NICs of a node."""
    links, rounds = world.links, SHARES[op.kind]
    steps = rounds * (op.ranks - 1)
    sent = rounds * op.size_bytes * (op.ranks - 1) / op.ranks
    hops = steps * links.near_us * hop
    message = op.size_bytes / op.ranks
    moving = _move(world, sent, message, False)
    if nodes > 1:
        hops += rounds * (nodes - 1) * (links.far_us * hop - links.near_us * hop)
        rails = min(op.ranks_per_node, op.ranks // nodes) or 1  # each node's traffic goes out by this many NICs
        moving = max(moving, _move(world, sent / rails, message, True, nodes))
    return links.base_us + hops + moving / rate


def _tree_us(world: World, op: Op, nodes: int, rate: float, hop: float) -> float:
    links = world.links
    inside = min(op.ranks, op.ranks_per_node)
    hops = (
        2.0
        * hop
        * (links.near_us * (inside - 1 if nodes > 1 else math.log2(inside) * 1.5) + links.far_us * math.log2(nodes))
    )
    sent = 2.0 * op.size_bytes * (op.ranks - 1) / op.ranks
    message = op.size_bytes / 8.0
    moving = _move(world, sent, message, False)
    if nodes > 1:
        rails = min(op.ranks_per_node, op.ranks // nodes) or 1
        moving = max(moving, _move(world, sent / rails, message, True, nodes))
    return links.base_us + hops + moving / (rate * links.tree_gain)


def _own_reduce_us(world: World, op: Op) -> float:
    """Peers read each other's memory: one barrier before, one after."""
    links = world.links
    once = links.near_us * 3.0 + world.chip.kernel_us + op.size_bytes * (op.ranks - 1) / (links.near_gbps * 1e3 * 0.7)
    twice = links.near_us * 5.0 + world.chip.kernel_us + 2.0 * op.size_bytes / (links.near_gbps * 1e3 * 0.7)
    return min(once, twice)


def _exchange_us(world: World, op: Op, kernel: str) -> float:
    """Tokens to the ranks of their experts: messages of a token each in low-latency mode, gathered ones otherwise."""
    links, cost = world.links, op.cost
    nodes = -(-op.ranks // max(op.ranks_per_node, 1))
    sent = float(cost.bytes) / 2.0
    inside = min(op.ranks_per_node, op.ranks) / op.ranks if nodes > 1 else 1.0
    fast = bool(op.mode)
    hops = (links.far_us if nodes > 1 else links.near_us) * (1.5 if fast else 4.0) + (
        0.4 if fast else 1.6
    ) * links.base_us
    message = float(op.hidden) * (8.0 if fast else 64.0)
    near = _move(world, sent * inside, message, False)
    far = _move(world, sent * (1.0 - inside), message, True, nodes)
    slow = 1.0 if kernel.startswith("deep_ep") else 1.5  # gathers, sorts and copies around an all-to-all
    return world.chip.kernel_us + slow * (hops + max(near, far) * (1.2 if fast else 1.0))
