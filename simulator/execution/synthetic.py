"""Synthetic traces: a mix of ops and collectives drawn at random, the same on all ranks, for tests of networks.

Every rank computes and communicates in turns; a collective waits for the compute before it, and the compute after it
waits for the collective unless it is drawn to run beside it. Sizes are drawn log-uniformly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...datasets.loading import choice, load, whole
from ...datasets.ops import Op, OpError, make_op
from ...datasets.traces.builder import Attribute, TraceBuilder
from ...datasets.traces.classes import COLLECTIVES, OP
from ...datasets.traces.groups import GROUP_LABEL, GroupNumbers, RankedTraces
from ...datasets.traces.schema import CollectiveKind, NodeKind, TraceFileError

MESSAGE = "send_recv"
KINDS = (*COLLECTIVES, MESSAGE)
COMPUTE_STREAM, NETWORK_STREAM = 7, 20
MAX_NODES = 50_000_000


@dataclass(frozen=True)
class ComputeMix:
    """Compute that may be drawn: an op with its dims, or a time of its own. ``weight``: how often, beside the others.

    The time of an op is left to a simulator, or to a replay, unless ``duration_us`` gives it.
    """

    op: Mapping[str, Any] = field(default_factory=dict)
    duration_us: float = 0.0
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.op and not self.duration_us:
            raise TraceFileError("generate.compute: each entry needs op: {kind: gemm, m: …} or duration_us")
        if not 0 <= self.duration_us < 1e15 or not 0 < self.weight < float("inf"):
            raise TraceFileError(f"generate.compute: duration_us={self.duration_us} or weight={self.weight} is too low")

    @property
    def parsed_op(self) -> Op | None:
        """The op. TraceFileError for what is none."""
        fields = dict(self.op)
        try:
            return make_op(str(fields.pop("kind")), **fields) if fields else None
        except (OpError, TypeError, ValueError, KeyError) as error:
            raise TraceFileError(f"generate.compute: op={self.op}: {' '.join(str(error).split())}") from None


@dataclass(frozen=True)
class CommunicationMix:
    """Communication that may be drawn: ``kind`` (a collective, or ``send_recv``: to the next rank of the group), what a
    rank puts in, from ``low_bytes`` to ``high_bytes``, in groups of ``ranks`` (0: all) that are ``stride`` apart."""

    kind: str = "all_reduce"
    low_bytes: int = 1 << 20
    high_bytes: int = 0
    ranks: int = 0
    stride: int = 1
    weight: float = 1.0

    def __post_init__(self) -> None:
        choice(TraceFileError, "generate.communication kind", self.kind, KINDS)
        for name, value, minimum in (
            ("low_bytes", self.low_bytes, 1),
            ("ranks", self.ranks, 0),
            ("stride", self.stride, 1),
        ):
            whole(TraceFileError, f"generate.communication {name}", value, minimum)
        if not 0 < self.weight < float("inf") or (self.high_bytes and self.high_bytes < self.low_bytes):
            raise TraceFileError(
                f"generate.communication: weight={self.weight}, high_bytes={self.high_bytes} is too low"
            )


@dataclass(frozen=True)
class Synthetic:
    """What to generate: so many ``ranks``, each with so many ``nodes`` of which a ``share`` communicates.

    ``overlap`` is the share of communication that the next compute does not wait for, ``imbalance`` the standard
    deviation of ln of a rank's times of compute around the given ones.
    """

    ranks: int = 8
    nodes: int = 100
    share: float = 0.3
    overlap: float = 0.0
    imbalance: float = 0.0
    seed: int = 0
    compute: Sequence[ComputeMix] = (ComputeMix(duration_us=100.0),)
    communication: Sequence[CommunicationMix] = (CommunicationMix(),)

    def __post_init__(self) -> None:
        for name, value in (("ranks", self.ranks), ("nodes", self.nodes)):
            whole(TraceFileError, f"generate.{name}", value, 1)
        whole(TraceFileError, "generate.seed", self.seed, 0)
        if self.ranks * self.nodes > MAX_NODES:
            raise TraceFileError(f"generate: {self.ranks} x {self.nodes} nodes are more than {MAX_NODES:,}")
        for name, share in (("share", self.share), ("overlap", self.overlap)):
            if not 0 <= share <= 1:
                raise TraceFileError(f"generate.{name}={share} must be from 0 to 1")
        if not 0 <= self.imbalance <= 3:
            raise TraceFileError(f"generate.imbalance={self.imbalance} must be from 0 to 3")
        if (self.share < 1 and not self.compute) or (self.share > 0 and not self.communication):
            raise TraceFileError("generate: name what to draw from: compute=[…] and communication=[…]")
        for mix in self.communication:
            members = mix.ranks or self.ranks
            if self.ranks % (members * mix.stride) or members < 2:
                raise TraceFileError(f"generate.communication: groups of {members} ranks, {mix.stride} apart, do not "
                                     f"divide {self.ranks} ranks")  # fmt: skip


def load_synthetic(values: Mapping[str, Any]) -> Synthetic:
    """The settings of a configuration. TraceFileError names what is wrong."""
    settings = dict(values)
    for name, sort in (("compute", ComputeMix), ("communication", CommunicationMix)):
        if name in settings:
            if not isinstance(settings[name], Sequence) or not all(
                isinstance(entry, Mapping) for entry in settings[name]
            ):
                raise TraceFileError(f"generate.{name} must be a list of entries")
            settings[name] = tuple(
                load(sort, dict(entry), TraceFileError, f"generate.{name}") for entry in settings[name]
            )
    return load(Synthetic, settings, TraceFileError, "generate")


def generate(settings: Synthetic) -> RankedTraces:
    """The traces of all ranks, with their groups."""
    rng = np.random.default_rng(settings.seed)
    script = list(_draw_script(settings, rng))
    paces = np.exp(settings.imbalance * rng.standard_normal((settings.ranks, len(script))))
    groups = GroupNumbers()
    for name, ranks in _groups(settings):
        groups.number(name, ranks)
    traces = {}
    for rank in range(settings.ranks):
        builder = TraceBuilder([("schema", "string", "opcast synthetic"), ("rank", "int32", rank),
                                ("seed", "int64", settings.seed)])  # fmt: skip
        _add_rank_nodes(settings, rank, script, paces[rank], builder, groups)
        traces[rank] = builder.trace()
    return RankedTraces(traces, groups.members)


ScriptedStep = tuple[ComputeMix | CommunicationMix, int, bool]
"""What was drawn, its bytes, and whether the next compute goes on beside it."""


def _draw_script(settings: Synthetic, rng: np.random.Generator) -> Iterator[ScriptedStep]:
    for communicates in rng.random(settings.nodes) < settings.share:
        mix: Sequence[Any] = settings.communication if communicates else settings.compute
        weights = np.array([choice_mix.weight for choice_mix in mix])
        chosen = mix[int(rng.choice(len(mix), p=weights / weights.sum()))]
        if not communicates:
            yield chosen, 0, False
            continue
        low, high = chosen.low_bytes, max(chosen.high_bytes, chosen.low_bytes)
        size = low if high == low else round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))
        yield chosen, -(-size // 4) * 4, bool(rng.random() < settings.overlap)


def _group_of_rank(mix: CommunicationMix, ranks: int, rank: int) -> tuple[str, tuple[int, ...]]:
    """The group of a rank."""
    count = mix.ranks or ranks
    block, offset = rank // (count * mix.stride), rank % mix.stride
    first = block * count * mix.stride + offset
    return f"g{count}x{mix.stride}_{first}", tuple(range(first, first + count * mix.stride, mix.stride))


def _groups(settings: Synthetic) -> Iterator[tuple[str, tuple[int, ...]]]:
    for mix in settings.communication:
        for rank in range(settings.ranks):
            yield _group_of_rank(mix, settings.ranks, rank)


def _add_rank_nodes(
    settings: Synthetic,
    rank: int,
    script: Sequence[ScriptedStep],
    pace: np.ndarray,
    builder: TraceBuilder,
    groups: GroupNumbers,
) -> None:
    work, network, waits = 0, 0, 0  # the last of each, and the communication that compute waits for
    for index, (mix, size, beside) in enumerate(script):
        id = 2 * index + 1  # two ids each: a message is sent and received
        if isinstance(mix, ComputeMix):
            op = mix.parsed_op
            attributes: list[Attribute] = [("is_cpu_op", "bool", False), ("stream", "int64", COMPUTE_STREAM)]
            if op is not None:
                attributes += [("num_ops", "int64", int(op.cost.flops)), ("tensor_size", "uint64", int(op.cost.bytes)),
                         (OP, "string", json.dumps(op.to_dict()))]  # fmt: skip
            work = builder.add(id, op.kind if op else "compute", duration_us=mix.duration_us * float(pace[index]),
                               data=[parent for parent in (work, waits) if parent], attributes=attributes)  # fmt: skip
            waits = 0
            continue
        group, group_ranks = _group_of_rank(mix, settings.ranks, rank)
        parents = sorted({parent for parent in (work, network) if parent})
        if mix.kind == MESSAGE:
            ends = {NodeKind.COMM_SEND: (rank, group_ranks[(group_ranks.index(rank) + 1) % len(group_ranks)]),
                    NodeKind.COMM_RECV: (group_ranks[group_ranks.index(rank) - 1], rank)}  # fmt: skip
            for step, (kind, (source, target)) in enumerate(ends.items()):
                attributes = [("is_cpu_op", "bool", False), ("comm_size", "int64", size), ("comm_src", "int32", source),
                        ("comm_dst", "int32", target), ("comm_tag", "int32", index)]  # fmt: skip
                network = builder.add(id + step, kind.name.lower(), kind, data=parents, attributes=attributes)
        else:
            attributes = [("is_cpu_op", "bool", False), ("stream", "int64", NETWORK_STREAM),
                    ("comm_type", "int64", CollectiveKind[mix.kind.upper()]), ("comm_size", "int64", size),
                    ("pg_name", "string", groups.number(group, group_ranks)),
                    (GROUP_LABEL, "string", group)]  # fmt: skip
            network = builder.add(id, mix.kind, NodeKind.COMM_COLL, data=parents, attributes=attributes)
        waits = waits if beside else network
