"""Served runs: the surrogate of a row's model and layout, its KV memory, and the closed form of its traffic.

Rows of one model, layout, engine and device share their tables. First tokens come later by a constant of the engine
(``conf/serving_engine``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...datasets.truth import ServingRow
from ..engines import Engine
from ..question.plan import Parallel, Plan
from ..question.work import Work
from ..serving.closed_form import ClosedLoop, closed_form
from ..serving.engines import load_serving_engine
from ..serving.host import host_time
from ..serving.iteration import IterationTables
from ..serving.kv import KvBudget
from ..serving.kv_memory import kv_budget
from ..serving.tabulate import Extent, tabulated
from ..step.build import engine_of
from ..step.state import State
from .cases import ValidationSettings, cluster_of, device_of, stack_of

EngineOf = Callable[[Any, Any], Engine]
TOKENS = {"vllm": 8192, "sglang": 16384, "trtllm": 16384}  # of an iteration, by InferenceX's recipes


@dataclass
class Replicas:
    """Tables and KV memory of every model, layout, engine and device asked about, each made once."""

    setting: ValidationSettings
    engine: EngineOf
    known: dict[str, tuple[IterationTables, KvBudget]] = field(default_factory=dict)

    def of(self, row: ServingRow) -> tuple[IterationTables, KvBudget]:
        """Those of a row. The errors of what it names and of simulating."""
        layout, tokens = row.layout, TOKENS[row.framework]
        longest = 2048 if row.input_len + row.output_len <= 2304 else 9472
        extent = Extent(sequences=512 if row.concurrency > 128 * layout.dp else 128, tokens=tokens, context=longest)
        key = repr((row.model, row.quantization, row.framework, row.hardware, layout, sorted(row.options), extent))
        if key not in self.known:
            self.known[key] = self._made(row, extent)
        return self.known[key]

    def _made(self, row: ServingRow, extent: Extent) -> tuple[IterationTables, KvBudget]:
        from ..simulate import simulated

        layout, setting = row.layout, self.setting
        plan = Plan(
            parallel=Parallel(tp=layout.tp, pp=layout.pp, dp=layout.dp, ep=layout.ep, etp=layout.etp),
            cluster=cluster_of(row.hardware, setting),
            stack=stack_of(row, setting),
            precision=row.precision,
            quantization=row.quantization,
            options=dict(row.options),
            calibration=setting.calibration,
        )
        device = device_of(row.hardware, setting)
        engine = self.engine(device, plan.cluster)
        cache: Path | None = setting.cache_dir

        def simulate(work: Work) -> State:
            return simulated(row.config, replace(work, cache="static"), plan, device, engine, cache)

        rule = load_serving_engine(row.framework).kv
        return tabulated(simulate, engine_of(plan.stack, engine), extent), kv_budget(
            simulate, device.memory_gib, rule, plan.parallel, extent.tokens
        )


def served(row: ServingRow, replicas: Replicas) -> dict[str, float]:
    """TTFT and TPOT in ms. The errors of simulating."""
    tables, kv = replicas.of(row)
    engine = load_serving_engine(row.framework)
    loop = ClosedLoop(
        concurrency=max(row.concurrency // row.layout.dp, 1),
        input_len=row.drawn * row.input_len,
        output_len=row.drawn * row.output_len,
        kv_tokens=kv.tokens,
        max_tokens=TOKENS[row.framework],
        mixed=row.framework != "sglang",
        reserves=row.framework == "trtllm",
        graphs=engine.graphs.sizes(row.layout.tp, row.concurrency),
    )
    ttft_us, tpot_us = closed_form(tables, loop)
    host = host_time(engine.host, row.version)
    return {"ttft": (ttft_us + host.ttft_us) * 1e-3, "tpot": host.iteration_us(tpot_us, loop.concurrency) * 1e-3}
