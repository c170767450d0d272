"""The op kinds of communication: collectives by nccl-tests' conventions, and the exchange between experts.

They are registered with all others; import them from :mod:`.ops`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .vocabulary import Cost, Dim, define


def bus_factor(collective: str, ranks: Any) -> Any:
    """busbw / algbw of a collective as in nccl-tests' PERFORMANCE.md; zero for a single rank."""
    ranks = np.asarray(ranks, dtype=np.float64)
    share = (ranks - 1) / np.maximum(ranks, 1)
    if collective == "all_reduce":
        return 2 * share
    if collective in ("all_gather", "reduce_scatter", "all_to_all"):
        return share
    return np.where(ranks > 1, 1.0, 0.0)


LINKS = ("nvlink", "pcie", "ib", "roce", "loopback")
COLLECTIVE = (
    Dim("size_bytes", low=0, help="buffer size as nccl-tests reports it for this collective"),
    Dim("ranks"),
    Dim("ranks_per_node", default=8),
    Dim("link", low=0, default=0, choices=LINKS, help="slowest link that the group crosses"),
)
NORM = Dim(
    *("norm", 0, 0, ("no", "yes")), help="the residual's add and the norm in the same kernel", along=(), of_backend=True
)


def _collective(name: str, d: Any, reduces: bool) -> Cost:
    sent = d.size_bytes * bus_factor(name, d.ranks)
    share = np.where(np.asarray(d.ranks) > 1, (d.ranks - 1) / np.maximum(d.ranks, 1), 0.0)
    adds = share * d.size_bytes / d.itemsize
    return Cost(adds if reduces else 0.0 * adds, sent, sent, "network")


@define(*COLLECTIVE, NORM, family="collective")
def all_reduce(d: Any) -> Cost:
    """Sum over ranks, result everywhere. ``size_bytes`` = the buffer of each rank; sends 2(n-1)/n of it.

    With ``norm`` each rank adds the residual to the sum and normalises it: what inference engines run between layers.
    """
    return _collective("all_reduce", d, True)


@define(*COLLECTIVE, family="collective")
def all_gather(d: Any) -> Cost:
    """Concatenation of every rank's shard. ``size_bytes`` = the gathered buffer; sends (n-1)/n of it."""
    return _collective("all_gather", d, False)


@define(*COLLECTIVE, family="collective")
def reduce_scatter(d: Any) -> Cost:
    """Sum over ranks, one shard each. ``size_bytes`` = the input buffer of each rank; sends (n-1)/n of it."""
    return _collective("reduce_scatter", d, True)


@define(*COLLECTIVE, family="collective")
def all_to_all(d: Any) -> Cost:
    """Every rank sends 1/n of its buffer to each. ``size_bytes`` = that buffer; sends (n-1)/n of it."""
    return _collective("all_to_all", d, False)


@define(*COLLECTIVE, family="collective")
def broadcast(d: Any) -> Cost:
    """One rank's buffer of ``size_bytes`` to all."""
    return _collective("broadcast", d, False)


@define(*COLLECTIVE, family="collective")
def send_recv(d: Any) -> Cost:
    """Each rank sends ``size_bytes`` to its neighbour and receives as much (nccl-tests' sendrecv)."""
    return _collective("send_recv", d, False)


EXPERT_PARALLEL = (
    Dim("tokens", help="tokens of one rank"),
    "hidden",
    "topk",
    Dim("experts", along=()),
    "ranks",
    Dim("ranks_per_node", default=8),
    Dim("link", low=0, default=0, choices=LINKS, help="slowest link that the group crosses"),
    Dim("mode", low=0, default=0, choices=("normal", "low_latency"), help="kernels for throughput, or for few tokens"),
    Dim("sms", low=0, default=0, help="compute units given to it, 0 = its own choice"),
)


def _expert_exchange(d: Any, itemsize: Any) -> Cost:
    """Each token goes once to every other rank that holds one of its topk experts (DeepEP's normal mode)."""
    reached = d.ranks * (1.0 - (1.0 - 1.0 / d.ranks) ** (1.0 * d.topk))
    rows = d.tokens * np.where(np.asarray(d.mode) > 0, 1.0 * d.topk, reached)
    sent = rows * d.hidden * itemsize * (d.ranks - 1) / d.ranks
    return Cost(0.0 * sent, sent, sent, "network")


@define(*EXPERT_PARALLEL, family="expert_parallel", law="expert_exchange")
def ep_dispatch(d: Any) -> Cost:
    """All-to-all of routed tokens to the ranks that hold their experts, in dtype (DeepSeek-V3, arXiv 2412.19437)."""
    return _expert_exchange(d, d.itemsize)


@define(*EXPERT_PARALLEL, family="expert_parallel", law="expert_exchange")
def ep_combine(d: Any) -> Cost:
    """The way back of :func:`ep_dispatch`: experts' outputs to the tokens' ranks, in out_dtype, and their sum."""
    return _expert_exchange(d, d.out_itemsize)
