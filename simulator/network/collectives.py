"""What each collective moves over which links: algorithms as NCCL runs them, as activities of the fluid model.

An algorithm turns a group of ranks (in the order of the communicator) into *phases*; each phase is a list of
:class:`Move`: pairs of ranks that exchange at one common rate, the bytes of one pair, and how many hops of latency
pass until the last byte is there. Pipelining inside a phase is perfect, as it is in NCCL for large messages: a ring
that turns 2(n - 1) times is one move of n pairs. Formulas: Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH", 2005; Sanders, Speck and Traeff, "Two-tree algorithms", 2009; NCCL 2.27's tuning.

Sizes follow nccl-tests: see the collective kinds in ``datasets/ops.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .topology import TopologyError


@dataclass(frozen=True, eq=False)
class Move:
    """``source[i]`` sends ``size_bytes`` to ``target[i]``, all pairs at one rate.

    Beside the bytes it takes ``steps`` latencies: of the longest pair, or on average of all when it goes ``round``.
    """

    source: np.ndarray
    target: np.ndarray
    size_bytes: float
    steps: float = 1.0
    round: bool = False


Phase = list[Move]  # moves at the same time, independent of each other
Plan = list[Phase]  # phases one after the other
Algorithm = Callable[[np.ndarray, float], Plan]


def plan(collective: str, algorithm: str, group: Sequence[int], size_bytes: float, per_node: int = 0) -> Plan:
    """Phases of a collective over the ranks of ``group``; nothing to do for a single rank.

    ``per_node`` ranks in a row share a server; NCCL then runs a ring or tree a NIC, each with its share of the bytes,
    in at its own GPU of every server. TopologyError for an unknown combination.
    """
    if algorithm not in algorithms(collective):
        raise TopologyError(f"{collective} has no algorithm {algorithm!r}; it has {', '.join(algorithms(collective))}")
    variants = ALGORITHMS[collective]
    ranks = np.asarray(group, dtype=np.int64)
    if len(np.unique(ranks)) != len(ranks):
        raise TopologyError(f"a group names rank {_duplicate_rank(ranks)} twice")
    if len(ranks) < 2:
        return []
    if algorithm == "hierarchical":
        return _hierarchical(collective, ranks, float(size_bytes), per_node)
    whole_servers = 1 < per_node < len(ranks) and len(ranks) % per_node == 0
    if algorithm in CHANNEL_ALGORITHMS and whole_servers:
        return _channels(algorithm, collective, ranks.reshape(-1, per_node), float(size_bytes))
    return variants[algorithm](ranks, float(size_bytes))


def algorithms(collective: str) -> tuple[str, ...]:
    """Algorithms of a collective; TopologyError for an unknown one."""
    if collective not in ALGORITHMS:
        raise TopologyError(f"unknown collective {collective!r}; known: {', '.join(ALGORITHMS)}")
    return tuple(ALGORITHMS[collective])


def _channels(algorithm: str, collective: str, servers: np.ndarray, size: float) -> Plan:
    """One ring or tree a GPU of a server, which enters the server at that GPU: ranks [servers, gpus], a share each.

    A ring leaves a server by the GPU before the one it came in by and enters the next on the same rail, so that every
    other server is walked backwards; a chain is that ring from the root on. A tree joins equal GPUs, and a chain each
    of them to the rest of its server.
    """
    count, root = servers.shape[1], servers[0, 0]
    plans = []
    for channel in range(count):
        rotated = np.roll(servers, -channel, axis=1)
        if algorithm == "tree":
            plans.append(_tree_of_chains(rotated, size / count))
            continue
        rotated[1::2] = rotated[1::2, ::-1]
        ring = rotated.ravel()
        ring = np.roll(ring, -int(np.flatnonzero(ring == root)[0])) if collective in ROOTED_COLLECTIVES else ring
        plans.append(ALGORITHMS[collective][algorithm](ring, size / count))
    return [[move for channel_plan in plans for move in channel_plan[phase]] for phase in range(len(plans[0]))]


def _tree_of_chains(servers: np.ndarray, size: float) -> Plan:
    """Up and down a chain inside each server and two trees over their first GPUs; latencies of both add up."""
    first, second = servers[:, :-1].ravel(), servers[:, 1:].ravel()
    ends = np.concatenate([first, second]), np.concatenate([second, first])
    hops = Move(*ends, 0.0, 2.0 * (servers.shape[1] - 1))
    return [[hops], [*_double_tree(servers[:, 0], size)[0], Move(*ends, size, 0.0)]]


def _duplicate_rank(ranks: np.ndarray) -> int:
    values, counts = np.unique(ranks, return_counts=True)
    return int(values[counts > 1][0])


def _ring_phase(ranks: np.ndarray, size: float, steps: float) -> Plan:
    return [[Move(ranks, np.roll(ranks, -1), size, steps, round=True)]]


def _ring_all_reduce(ranks: np.ndarray, size: float) -> Plan:
    """Reduce-scatter, then all-gather, round the same ring: 2(n-1)/n of the buffer over every edge."""
    n = len(ranks)
    return _ring_phase(ranks, 2.0 * (n - 1) / n * size, 2.0 * (n - 1))


def _ring_shards(ranks: np.ndarray, size: float) -> Plan:
    n = len(ranks)
    return _ring_phase(ranks, (n - 1) / n * size, n - 1.0)


def _chain(ranks: np.ndarray, size: float) -> Plan:
    """From the first rank to the last, piece by piece."""
    return [[Move(ranks[:-1], ranks[1:], size, len(ranks) - 1.0, round=True)]]


def _reverse_chain(ranks: np.ndarray, size: float) -> Plan:
    return _chain(ranks[::-1], size)


def _scatter(ranks: np.ndarray, size: float) -> Plan:
    """The first rank sends each other one its share."""
    return [[Move(np.repeat(ranks[:1], len(ranks) - 1), ranks[1:], size / len(ranks))]]


def _gather(ranks: np.ndarray, size: float) -> Plan:
    return [[Move(ranks[1:], np.repeat(ranks[:1], len(ranks) - 1), size / len(ranks))]]


def _double_tree(ranks: np.ndarray, size: float) -> Plan:
    """Two binary trees, each with half the buffer, up and down; an inner node of one is a leaf of the other."""
    depth = float(np.ceil(np.log2(len(ranks))))
    moves: Phase = []
    for order in (ranks, np.roll(ranks, 1)):
        child, parent = _tree_edges(order)
        moves.append(Move(np.concatenate([child, parent]), np.concatenate([parent, child]), size / 2.0, 2.0 * depth))
    return [moves]


def _tree_edges(ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Child and parent of each edge of NCCL's balanced binary tree: odd positions are leaves (trees.cc)."""
    n = len(ranks)
    position = np.arange(1, n)
    low = position & -position
    parent = (position ^ low) | (low << 1)
    parent = np.where(parent >= n, position ^ low, parent)
    return ranks[position], ranks[parent]


def _halving_doubling(ranks: np.ndarray, size: float) -> Plan:
    """Recursive halving, then doubling: partners at distances 1, 2, 4, ... with half, a quarter, ... of the buffer.

    Of n ranks beyond the last power of two each first adds its buffer to a neighbour's, and is sent the sum at the end.
    """
    beyond = len(ranks) - 2 ** int(np.log2(len(ranks)))
    idle, busy = ranks[: 2 * beyond : 2], ranks[1 : 2 * beyond : 2]
    shards = _exchanges(np.concatenate([busy, ranks[2 * beyond :]]), size)
    before, after = ([[Move(idle, busy, size)]], [[Move(busy, idle, size)]]) if beyond else ([], [])
    return before + shards + shards[::-1] + after


def _doubling(ranks: np.ndarray, size: float) -> Plan:
    return _exchanges(ranks, size)[::-1]


def _exchanges(ranks: np.ndarray, size: float) -> Plan:
    n = len(ranks)
    if n & (n - 1):
        raise TopologyError(f"recursive halving needs a power of two of ranks, not {n}; use ring")
    position = np.arange(n)
    return [[Move(ranks, ranks[position ^ (1 << bit)], size / 2.0 ** (bit + 1))] for bit in range(int(np.log2(n)))]


def _pairs(ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    n = len(ranks)
    shift = np.arange(1, n)
    position = np.arange(n)
    return np.repeat(ranks, n - 1), ranks[(position[:, None] + shift).ravel() % n]


def _direct_shards(ranks: np.ndarray, size: float) -> Plan:
    """Every rank to every other at once, one shard each."""
    return [[Move(*_pairs(ranks), size / len(ranks))]]


def _direct_all_reduce(ranks: np.ndarray, size: float) -> Plan:
    return _direct_shards(ranks, size) + _direct_shards(ranks, size)


def _pairwise_all_to_all(ranks: np.ndarray, size: float) -> Plan:
    """n - 1 rounds; in round i every rank sends to the one i further on. NCCL groups them, so rounds overlap."""
    n = len(ranks)
    return [[Move(ranks, np.roll(ranks, -shift), size / n) for shift in range(1, n)]]


def _neighbours(ranks: np.ndarray, size: float) -> Plan:
    return [[Move(ranks, np.roll(ranks, -1), size)]]


def _hierarchical(collective: str, ranks: np.ndarray, size: float, per_node: int) -> Plan:
    """Two levels: inside each server, then between equal places of all servers, then inside again."""
    n = len(ranks)
    if per_node < 1 or n % per_node:
        raise TopologyError(f"hierarchical needs groups of whole servers: {n} ranks, {per_node} of them a server")
    grid = ranks.reshape(-1, per_node)
    servers = [grid[i] for i in range(len(grid))] if per_node > 1 else []
    rails = [grid[:, i] for i in range(per_node)] if len(grid) > 1 else []

    def run_at_once(groups: list[np.ndarray], phase: Callable[[np.ndarray, float], Plan], size_bytes: float) -> Plan:
        return [[move for group in groups for move in phase(group, size_bytes)[0]]] if groups else []

    if collective == "all_reduce":
        inner = run_at_once(servers, _ring_shards, size)
        return inner + run_at_once(rails, _ring_all_reduce, size / per_node) + inner
    if collective == "all_gather":
        return run_at_once(rails, _ring_shards, size / per_node) + run_at_once(servers, _ring_shards, size)
    if collective == "reduce_scatter":
        return run_at_once(servers, _ring_shards, size) + run_at_once(rails, _ring_shards, size / per_node)
    if collective == "all_to_all":
        return run_at_once(servers, _direct_shards, size) + run_at_once(rails, _direct_shards, size)
    chain = _chain if collective == "broadcast" else _reverse_chain
    across = run_at_once([grid[:, 0]] if len(grid) > 1 else [], chain, size)
    inside = run_at_once(servers, chain, size)
    return across + inside if collective == "broadcast" else inside + across


ROOTED_COLLECTIVES = ("broadcast", "reduce")  # from or to the first rank of the group
CHANNEL_ALGORITHMS = ("ring", "tree")
SERVER_ORDERED_ALGORITHMS = (
    *CHANNEL_ALGORITHMS,
    "hierarchical",
)  # what NCCL walks server by server, whatever the order of ranks
ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": {
        "ring": _ring_all_reduce,
        "tree": _double_tree,
        "halving_doubling": _halving_doubling,
        "direct": _direct_all_reduce,
    },
    "all_gather": {"ring": _ring_shards, "halving_doubling": _doubling, "direct": _direct_shards},
    "reduce_scatter": {"ring": _ring_shards, "halving_doubling": _exchanges, "direct": _direct_shards},
    "all_to_all": {"direct": _direct_shards, "pairwise": _pairwise_all_to_all},
    "broadcast": {"ring": _chain},
    "reduce": {"ring": _reverse_chain},
    "gather": {"direct": _gather},
    "scatter": {"direct": _scatter},
    "send_recv": {"ring": _neighbours},
}
for _name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", *ROOTED_COLLECTIVES):
    ALGORITHMS[_name]["hierarchical"] = _ring_all_reduce  # its phases need the server size: see plan
