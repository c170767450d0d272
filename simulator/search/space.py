"""A space of training layouts as data, and the points of it that fit together.

An axis is the values of one setting. Where none are given they are natural ones: divisors of what is to be divided.
Points are columns: one numpy array for each axis, with what follows from it beside (``dp``, ``devices``, ...).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ...datasets.clusters import Cluster
from ...datasets.loading import choice, flag, whole
from ..question.canonical import RequestError
from ..question.declaration import setting
from ..question.orders import SCHEDULES
from ..question.stack import OVERLAPS, Stack
from ..trace import Model
from ..trace.models import resolve
from .question import Checks, SearchAxes, word

MOST_POINTS = 2_000_000  # of the product of all axes
MOST_TP = 16  # of natural values; context and data ranks are cheaper beyond
TOKENS_A_RANK = 4096  # context parallelism is worth its exchanges from so many tokens on
MICRO_BATCHES = (1, 2, 4, 8)
MOST_CHUNKS = 12  # virtual stages of natural values
UNEVEN = 1.25  # natural pipelines: how many times the mean the fullest stage may hold
DERIVED = ("dp", "devices", "devices_per_node", "micro_batches", "model_ranks")


@dataclass(frozen=True)
class Space(SearchAxes):
    """Axes of a search over layouts, each a list of values; without any, what is natural for the model, cluster and
    framework.

    ``rules`` must hold for a point to be asked about: they read axes and ``dp``, ``devices``, ``devices_per_node``,
    ``micro_batches`` and ``model_ranks`` (tp x cp x pp).
    """

    WHOLE = ("nodes", "tp", "pp", "vpp", "cp", "ep", "etp", "micro_batch")
    CHECKS: ClassVar[Checks] = {
        "zero_stage": lambda name, value: choice(RequestError, name, whole(RequestError, name, value), (0, 1, 2, 3)),
        "sequence_parallel": partial(flag, RequestError),
        "schedule": lambda name, value: choice(RequestError, name, word(name, value), tuple(SCHEDULES)),
        "overlap": lambda name, value: overlaps(name, word(name, value)),
    }

    tp: tuple[int, ...] = setting(
        (), "tensor parallel; [] = powers of two that divide the attention heads, within a node"
    )
    pp: tuple[int, ...] = setting((), "pipeline stages; [] = divisors of the devices that spread the layers well")
    vpp: tuple[int, ...] = setting((), "virtual stages; [] = those that divide the layers of a stage")
    cp: tuple[int, ...] = setting((), "context parallel; [] = while a rank has at least 4,096 tokens of a sequence")
    ep: tuple[int, ...] = setting((), "expert parallel; [] = powers of two that divide the experts")
    etp: tuple[int, ...] = setting((), "tensor parallel inside an expert; [] = 1")
    zero_stage: tuple[int, ...] = setting((), "0 | 1 | 2 | 3; [] = what the framework is used with")
    sequence_parallel: tuple[bool, ...] = setting((), "[] = true where tp is above 1")
    schedule: tuple[str, ...] = setting(
        (), "gpipe | 1f1b | interleaved | zb-h1 | dualpipe; [] = 1f1b, interleaved with virtual stages"
    )
    overlap: tuple[str, ...] = setting(
        (), "what runs beside compute, such as dp+tp, or none; [] = what the framework overlaps"
    )
    micro_batch: tuple[int, ...] = setting((), "[] = 1, 2, 4 and 8")
    recompute: tuple[str, ...] = setting((), "[] = none, selective and full")
    rules: tuple[str, ...] = setting(
        (), 'what must hold of a point, such as ["tp * pp <= 32", "cp == 1 or recompute != \'full\'"]'
    )


AXES = tuple(each.name for each in fields(Space) if each.name != "rules")
NAMES = (*AXES, *DERIVED)


def overlap_of(text: str) -> tuple[str, ...]:
    """The groups whose communication runs beside compute, of ``dp+tp`` or ``none``."""
    return () if text == "none" else tuple(text.split("+"))


def overlaps(name: str, text: str) -> None:
    """RequestError for a group whose communication nothing can run beside."""
    for group in overlap_of(text):
        choice(RequestError, name, group, OVERLAPS)


@dataclass(frozen=True)
class Facts:
    """What natural values divide: of a model its layers, heads and experts (0: unknown or none), of a step the rest."""

    layers: int = 0
    heads: int = 0
    experts: int = 0
    seq_len: int = 2048
    global_batch: int = 1


def facts_of(model: Model, seq_len: int, global_batch: int) -> Facts:
    """The facts of a model from its configuration; a function has none. TraceError for a model that is not there."""
    config = dict(resolve(model).language)
    config |= {k: v for k, v in dict(config.get("text_config") or {}).items() if k not in config}

    def figure(*names: str) -> int:
        return next((int(config[name]) for name in names if isinstance(config.get(name), int)), 0)

    return Facts(
        layers=figure("num_hidden_layers", "n_layer", "num_layers"),
        heads=figure("num_attention_heads", "n_head", "n_heads", "num_heads"),
        experts=figure("n_routed_experts", "num_local_experts", "num_experts"),
        seq_len=seq_len,
        global_batch=global_batch,
    )


def natural(
    space: Space, facts: Facts, clusters: Sequence[Cluster], stack: Stack, precision: str
) -> dict[str, tuple[Any, ...]]:
    """The values of every axis: those given, and natural ones of the others. ``clusters`` are all that are asked about.

    A framework that shards weights by itself (torchtitan) starts from ZeRO-2, Megatron ends with ZeRO-1.
    """
    devices, layers = max(cluster.devices for cluster in clusters), facts.layers
    inside = max(cluster.devices_per_node for cluster in clusters)
    powers = [2**power for power in range(21)]
    widths = [n for n in powers if n <= min(inside, MOST_TP) and (not facts.heads or facts.heads % n == 0)]
    stages = [
        n for n in range(1, min(layers, devices) + 1) if devices % n == 0 and -(-layers // n) * n <= UNEVEN * layers
    ]
    contexts = [n for n in powers if n * TOKENS_A_RANK <= facts.seq_len or n == 1]
    experts = [n for n in powers if facts.experts and facts.experts % n == 0 and n <= devices]
    even = [n for n in range(1, MOST_CHUNKS + 1) if any(layers % (n * p) == 0 for p in stages if p > 1)]
    values: dict[str, Sequence[Any]] = {
        "cluster": [clusters[0].id],
        "nodes": [clusters[0].nodes],
        "precision": [precision],
        "tp": widths,
        "pp": stages or [1],
        "vpp": even or [1],
        "cp": contexts,
        "ep": experts or [1],
        "etp": [1],
        "zero_stage": zero_stages(stack),
        "sequence_parallel": [True],
        "schedule": ["1f1b"],
        "overlap": ["+".join(stack.overlap) or "none"],
        "micro_batch": [n for n in MICRO_BATCHES if facts.global_batch % n == 0],
        "recompute": ["none", "selective", "full"],
    }
    return {name: getattr(space, name) or tuple(values[name]) for name in AXES}


def zero_stages(stack: Stack) -> tuple[int, ...]:
    """The stages of ZeRO that a framework is used with."""
    if stack.id.startswith(("torchtitan", "llama3", "llm_foundry", "torch")):
        return (2, 3)
    return (0, 1) if stack.id.startswith(("megatron", "nemo", "nanotron")) else (0, 1, 2, 3)


@dataclass(frozen=True)
class Points:
    """Points by column: ``columns[name]`` is one array for each axis and for what follows from them [points]."""

    columns: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def at(self, index: int) -> dict[str, Any]:
        """One point as plain values, axes only."""
        return plainest_point({name: _plain(self.columns[name][index]) for name in AXES})

    def only(self, where: np.ndarray) -> Points:
        """The points where ``where`` is true, or at those places."""
        return Points({name: column[where] for name, column in self.columns.items()})


def plainest_point(point: Mapping[str, Any]) -> dict[str, Any]:
    """The point without sequence parallelism where it has no tensor parallelism: what an axis says of all points."""
    return {**point, "sequence_parallel": point["sequence_parallel"] and point["tp"] > 1}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def combinations(axes: Mapping[str, Sequence[Any]]) -> dict[str, np.ndarray]:
    """Every combination of the axes' values by column, the last axis fastest. RequestError for more than can be
    listed."""
    count = math.prod(map(len, axes.values()))
    if count > MOST_POINTS:
        raise RequestError(
            f"the space has {count:,} combinations, more than the {MOST_POINTS:,} that are listed: give fewer values "
            "of its axes, or search by sampler=nsga2"
        )
    grid = np.indices([len(values) for values in axes.values()], dtype=np.int32).reshape(len(axes), -1)
    return {name: _column(values)[grid[at]] for at, (name, values) in enumerate(axes.items())}


def _column(values: Sequence[Any]) -> np.ndarray:
    kind = object if isinstance(values[0], str) else bool if isinstance(values[0], bool) else np.int64
    return np.array(list(values), dtype=kind)


def derived(columns: dict[str, np.ndarray], clusters: Mapping[str, Cluster], facts: Facts) -> Points:
    """The points of some columns, with what follows from their axes."""
    per_node = np.array([clusters[name].devices_per_node for name in columns["cluster"]], dtype=np.int64)
    devices = per_node * columns["nodes"]
    ranks = columns["tp"] * columns["cp"] * columns["pp"]
    dp = np.maximum(devices // ranks, 1)
    micro_batches = np.maximum(facts.global_batch // (columns["micro_batch"] * dp), 1)
    columns |= {"dp": dp, "devices": devices, "devices_per_node": per_node, "model_ranks": ranks}
    return Points(columns | {"micro_batches": micro_batches})


def fitting(points: Points, facts: Facts) -> dict[str, np.ndarray]:
    """Where points fit together, by what they must meet [points]; a point that says the same as another does not."""
    c = points.columns
    tp, pp, vpp, cp, ep, etp, dp = (c[name] for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp"))
    sequence = c["sequence_parallel"]  # where no point leaves it out, it says nothing of those that cannot use it
    chunks, most = pp * vpp, facts.layers or 10**9
    virtual = np.array([SCHEDULES[name].virtual or name == "1f1b" for name in c["schedule"]], dtype=bool)
    interleaved = c["schedule"] == "interleaved"
    return {
        "tp x cp x pp divides the devices": c["devices"] % c["model_ranks"] == 0,
        "tp divides the attention heads": (facts.heads % tp == 0) if facts.heads else tp > 0,
        "pp x vpp is at most the number of layers": chunks <= most,
        "virtual stages need a pipeline and a schedule that has them": (vpp == 1) | ((pp > 1) & virtual),
        "virtual stages are even": (vpp == 1) | (most % chunks == 0) | (facts.layers == 0),
        "interleaving needs vpp above 1 and micro-batches that are a multiple of pp": np.where(
            (vpp > 1) | interleaved, c["micro_batches"] % pp == 0, True
        )
        & ~(interleaved & (vpp == 1)),
        "a schedule needs a pipeline": (pp > 1) | (c["schedule"] == "1f1b"),
        "micro_batch x dp divides the global batch": facts.global_batch % (c["micro_batch"] * dp) == 0,
        "cp divides the sequence in two parts a rank": (cp == 1) | (facts.seq_len % (2 * cp) == 0),
        "ep divides the experts": (ep == 1) if not facts.experts else facts.experts % ep == 0,
        "ep x etp divides the ranks of a stage": (c["devices"] // pp) % (ep * etp) == 0,
        "etp is at most tp": etp <= tp,
        "sequence parallelism needs tensor parallelism": (tp > 1) | ~sequence | sequence.all(),
        "ZeRO needs data ranks": (dp * cp > 1) | (c["zero_stage"] == c["zero_stage"].min(initial=3)),
    }


def settings(point: Mapping[str, Any]) -> str:
    """A point in short, as a person reads it: what is not usual of it."""
    defaults = {"vpp": 1, "cp": 1, "ep": 1, "etp": 1, "zero_stage": 0, "schedule": "1f1b", "recompute": "none"}
    words = [
        f"{name}={point[name]}" for name in ("tp", "pp", "vpp", "cp", "ep", "etp") if point[name] != defaults.get(name)
    ]
    other_axes = ("zero_stage", "schedule", "micro_batch", "recompute")
    words += [f"{name}={point[name]}" for name in other_axes if point[name] != defaults.get(name)]
    return " ".join(words)


def neighbours(axes: Mapping[str, Sequence[Any]], point: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The points that differ from one in a single axis by one step down or up, each with the axis."""
    near_points = []
    choices = axes["sequence_parallel"]
    point = {
        **point,
        "sequence_parallel": point["sequence_parallel"] if point["sequence_parallel"] in choices else choices[0],
    }
    for name in AXES:
        values = sorted(axes[name]) if not isinstance(axes[name][0], str) else list(axes[name])
        at = values.index(point[name])
        near = values if isinstance(values[0], str) else values[max(at - 1, 0) : at + 2]
        near_points += [(name, plainest_point({**point, name: value})) for value in near if value != point[name]]
    return near_points
