"""What a replica of a layout is: how long its iterations take at the places that a search looks at, and its KV memory.

The tables are those of :mod:`...serving.tabulate`, made from a dozen steps at the search's own batches and chunks;
``opcast serving`` takes several dozen to know all batches between. They are kept on disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ....datasets.clusters import Cluster
from ...question.plan import load_stack
from ...question.requests import SimulateRequest, plan_of
from ...question.serving import IterationLaw, Scheduler
from ...serving.bench import ServingBench
from ...serving.connect import ENGINES
from ...serving.context import long_context
from ...serving.engines import ServingEngine, load_serving_engine
from ...serving.host import HostTime, fitted_hosts, host_name, layers_and_experts
from ...serving.iteration import IterationTables
from ...serving.kv import KvBudget
from ...serving.kv_memory import kv_budget
from ...serving.setup import HostShare, ServedReplica, by_hand, rules
from ...serving.surrogate import HeldOut, Surrogate, key_of, read, stepper, write
from ...serving.tabulate import Extent, TablePoints, tabulated
from ...trace.models import resolve
from .request import ReplicaLayout, ServedSearchRequest, step_of

FEW_ROWS = 16  # sequences: weights are read for as many, so that one and all between take as long as they
SAMPLES = (1, 1 << 20)  # what a step at a batch says goes before; between the ends the last layer is all but linear
CONTEXTS = (1, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
FEWEST_TOKENS = 64


@dataclass(frozen=True)
class LayoutReplica:
    """A replica of a layout under an engine."""

    layout: ReplicaLayout
    engine: ServingEngine
    step: SimulateRequest
    tables: IterationTables
    kv: KvBudget
    host: HostTime

    def served(self) -> ServedReplica:
        """The same as the event loop takes it."""
        host = HostShare(self.host.step_us, self.host.seq_us, overlapped=False, ttft_us=self.host.ttft_us)
        return ServedReplica(self.tables, self.kv, host, stages=self.layout.pp, devices=self.layout.devices)


def host_of(engine: ServingEngine, step: SimulateRequest) -> HostTime:
    """The fitted host of an engine, with what the layers of a step's model add to a first token in its constant."""
    host = fitted_hosts().of(host_name(engine.id, engine.host))
    return replace(host, ttft_us=host.first_token_us(0, 0.0, *layers_and_experts(resolve(step.model).language)))


def engine_name(policy: str) -> str:
    """The engine of a policy."""
    return ENGINES.get(policy, "vllm")


def usual_max_tokens(policy: str) -> int:
    """The tokens of an iteration that a policy's engine has by itself."""
    law = by_hand(IterationLaw(base_us=1.0), 1, 16, 0.0)
    return rules(Scheduler(policy=policy), law).max_tokens


def replica_of(
    request: ServedSearchRequest,
    layout: ReplicaLayout,
    engine: str,
    clusters: Mapping[str, Cluster],
    batches: Sequence[int],
    chunks: Sequence[int],
    bench: ServingBench,
) -> LayoutReplica:
    """The replica of a layout. KvError where the model leaves no KV memory, the errors of simulating a step."""
    own = load_serving_engine(engine)
    step = step_of(request, layout, clusters)
    step = step if step.stack is not None else replace(step, stack=load_stack(own.stack))
    simulate, usual = stepper(step, bench)
    device = bench.device(step.device, step.cluster)
    long, parallel = long_context(resolve(step.model).config or {}), plan_of(step, device).parallel
    kv = kv_budget(simulate, device.memory_gib, own.kv, parallel, max(chunks), sequences=max(batches), long=long)
    held = request.input_len + request.output_len / 2
    batches = [batch for batch in batches if batch * held <= kv.tokens] or [min(batches)]
    sequences = max(max(batches), max((own.graphs.sizes(layout.tp, max(batches))), default=1), 2)
    most = max(max(chunks) - sequences, 1)  # tables of prompts reach as far as sequences more
    extent = Extent(sequences, most, max(request.input_len + request.output_len, 1024))
    points = table_points(request, batches, chunks)
    tables = kept(step, bench, extent, points, lambda: tabulated(simulate, usual, extent, points))
    return LayoutReplica(layout, own, step, tables, kv, host_of(own, step))


def table_points(request: ServedSearchRequest, batches: Sequence[int], chunks: Sequence[int]) -> TablePoints:
    """Points at the batches and chunks of the search, and where prompts of its length end."""
    tokens = tuple(sorted({FEWEST_TOKENS, 512, *chunks, min(request.input_len, max(chunks))}))
    rows = tuple(sorted({1, *(batch for batch in batches if batch >= FEW_ROWS)}))
    return TablePoints(rows, tokens, SAMPLES, tuple(sorted({1, *batches})), CONTEXTS, (16, 128, *tokens))


def kept(
    step: SimulateRequest,
    bench: ServingBench,
    extent: Extent,
    points: TablePoints,
    made: Callable[[], IterationTables],
) -> IterationTables:
    """The tables of a step from disk, or made now and kept there; those of a function are not kept."""
    if callable(step.model):
        return made()
    name = hashlib.sha256(f"{key_of(step, bench, extent)} {points}".encode()).hexdigest()[:32]
    path: Path = bench.graphs.parent / "surrogates" / f"{name}.npz"
    found = read(path)
    if found is None:
        found = Surrogate(made(), HeldOut(0, 0.0, 0.0, 0.0, 0.0))
        write(path, found)
    return found.tables
