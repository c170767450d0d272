"""Sums of a serving engine: by its own kernel where no table has it, by NCCL's where they are large, with the norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...datasets.devices import Device
from ...datasets.vocabulary import OpColumns
from ...models import analytical
from ...models.analytical.network import SUSTAINED_LINK
from ...models.choice import LAW, OWN_SUM
from .answers import Answers, Columns, Engine, in_turn

OWN_SUM_BYTES = 8 << 20
"""The largest sum of a kernel of an engine's own: CustomAllreduce's max_size of vLLM (0.33), of which SGLang's is."""

OWN_SUM_RANKS = (2, 4, 6, 8)  # _SUPPORTED_WORLD_SIZES of the same class, of vLLM and SGLang, on CUDA and ROCm
# KiB up to which each rank reads all that the others have, in one shot (csrc/custom_all_reduce.cuh)
ONE_SHOT_KIB = {2: np.inf, 4: 512, 6: 256, 8: 256}
# A barrier of all ranks, of which a shot has one at each end: on NVLink a one-shot sum of 8 KiB takes 2.4 to 3.1 us
# more than a launch (aiconfigurator's tables of H100); a link of Infinity Fabric taken to be a third slower
BARRIER_US = 2.0
OWN_SUM_SPREAD = 1.5  # of the interval each way: judged, no table has such a sum on a mesh, or of one rank with a norm


@dataclass(frozen=True)
class OwnSumsEngine:
    """Answers all-reduces of a serving engine inside a node of a mesh, by its own kernel; declines others.

    Each rank reads its peers over as many links at once: all that they have in one shot, else a part of it, and then
    the sums of the others' parts. ``links`` are those of a device, each to another peer.
    """

    device: Device
    links: int
    name: str = "network"

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        answers = Answers.declined(len(next(iter(columns.values()))))
        if kind != "all_reduce":
            return answers
        ranks, size = columns["ranks"], columns["size_bytes"]
        inside = np.isin(ranks, OWN_SUM_RANKS) & (ranks <= columns["ranks_per_node"]) & (ranks <= self.links + 1)
        at = np.flatnonzero(inside & (size <= OWN_SUM_BYTES))
        most = np.array([ONE_SHOT_KIB[int(count)] * 1024 for count in ranks[at]])
        one_shot = size[at] <= most
        read_bytes = np.where(one_shot, size[at], 2.0 * size[at] / ranks[at])
        rate = SUSTAINED_LINK * self.device.link_gbps / self.links * 1e3
        latency = self.device.launch_us + np.where(one_shot, 2, 3) * BARRIER_US + read_bytes / rate
        answers.latency_us[at] = latency
        answers.low_us[at], answers.high_us[at] = latency / OWN_SUM_SPREAD, latency * OWN_SUM_SPREAD
        answers.engine[at], answers.clause[at], answers.source[at] = self.name, OWN_SUM, OWN_SUM
        answers.in_envelope[at] = True
        return answers


@dataclass(frozen=True)
class LargeSumsEngine:
    """Answers all-reduces above :data:`OWN_SUM_BYTES`, or that leave a node, by rows of NCCL; declines others."""

    nccl: Engine

    @property
    def name(self) -> str:
        return self.nccl.name

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        answers = Answers.declined(len(next(iter(columns.values()))))
        if kind != "all_reduce":
            return answers
        large = (columns["size_bytes"] > OWN_SUM_BYTES) | (columns["ranks"] > columns["ranks_per_node"])
        positions = np.flatnonzero(large)
        if len(positions):
            large_columns = {name: values[positions] for name, values in columns.items()}
            answers.put(positions, self.nccl.answer(kind, large_columns, dtype, out_dtype, cache))
        return answers


@dataclass(frozen=True)
class NormSumsEngine:
    """Answers all-reduces with the norm in them; declines all else.

    ``own`` are rows and predictors of kernels that do both. What those do not reach takes as long as the sum alone by
    ``plain``, whom tables know, and what physics says that the norm adds to it: the residual's way through memory.
    """

    device: Device
    own: Sequence[Engine]
    plain: Sequence[Engine]
    name: str = "sums"

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        answers = Answers.declined(len(next(iter(columns.values()))))
        at = np.flatnonzero(columns["norm"]) if kind == "all_reduce" else ()
        if not len(at):
            return answers
        formats = dtype, out_dtype, cache
        rows = {name: values[at] for name, values in columns.items()}
        for engine in self.own:
            reply = engine.answer(kind, rows, *formats)
            reached = np.isfinite(reply.latency_us) & reply.in_envelope & np.isnan(answers.latency_us[at])
            answers.put(at[reached], reply.take(reached))
        unanswered = np.flatnonzero(np.isnan(answers.latency_us[at]))
        if len(unanswered):
            answers.put(
                at[unanswered], self._apart(kind, {name: values[unanswered] for name, values in rows.items()}, formats)
            )
        return answers

    def _apart(self, kind: str, columns: Columns, formats: tuple[str, str, str]) -> Answers:
        """The sum without the norm, and what the norm adds."""
        alone = {**columns, "norm": np.zeros_like(columns["norm"])}
        answers = in_turn(self.plain, kind, alone, *formats)
        dtype, out_dtype, cache = formats
        with_sum, less = (
            analytical.latency_us(OpColumns(kind, op_columns, dtype, out_dtype, cache), self.device)
            for op_columns in (columns, alone)
        )
        one = columns["ranks"] == 1  # nothing is launched for its sum
        added = with_sum - less + np.where(one, self.device.launch_us, 0.0)
        spreads = {"latency_us": 1.0, "low_us": 1.0 / OWN_SUM_SPREAD, "high_us": OWN_SUM_SPREAD}
        times = {
            name: (getattr(answers, name) + added) * np.where(one, spread, 1.0) for name, spread in spreads.items()
        }
        texts = {name: np.where(one, LAW, getattr(answers, name)) for name in ("clause", "source")}
        return replace(answers, **times, **texts)
