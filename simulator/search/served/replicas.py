"""What a replica of a layout is: how long its iterations take at the places that a search looks at, and its KV memory.

The tables are those of :mod:`...serving.tabulate`, made from a dozen steps at the search's own batches and chunks;
``opcast serving`` takes several dozen to know all batches between. They are kept on disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ....datasets.clusters import Cluster
from ...question.plan import load_stack
from ...question.requests import SimulateRequest
from ...question.serving import IterationLaw, Scheduler
from ...serving.engines import ServingEngine, load_serving_engine
from ...serving.host import host_name, host_time
from ...serving.learned import with_known_steps
from ...serving.replica import ServedReplica, by_hand, replica
from ...serving.rules import SchedulerRules
from ...serving.setup import rules
from ...serving.steps import steps_of
from ...serving.surrogate import Surrogate, key_of, load_or_make
from ...serving.tabulate import Extent, TablePoints, tabulate
from .request import ReplicaLayout, ServedSearchRequest, step_of

if TYPE_CHECKING:
    from ...engines.bench import Bench

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
    served: ServedReplica


Replicas = dict[tuple[ReplicaLayout, str], LayoutReplica]  # by layout and engine


@cache
def usual_rules(policy: str) -> SchedulerRules:
    """The rules that a policy's engine has by itself."""
    return rules(Scheduler(policy=policy), by_hand(IterationLaw(base_us=1.0), 1, 16, 0.0))


def replica_of(
    request: ServedSearchRequest,
    layout: ReplicaLayout,
    engine: str,
    clusters: Mapping[str, Cluster],
    batches: Sequence[int],
    chunks: Sequence[int],
    bench: Bench,
) -> LayoutReplica:
    """The replica of a layout. KvError where the model leaves no KV memory, the errors of simulating a step."""
    server = load_serving_engine(engine)
    step = step_of(request, layout, clusters)
    step = step if step.stack is not None else replace(step, stack=load_stack(server.stack))
    steps = steps_of(step, bench)
    tokens = request.input_len + request.output_len / 2
    kv = steps.kv_budget(server.kv, max(chunks), sequences=max(batches), cached=tokens)
    batches = [batch for batch in batches if batch * tokens <= kv.tokens] or [min(batches)]
    sequences = max(max(batches), max((server.graphs.sizes(layout.tp, max(batches))), default=1), 2)
    most = max(max(chunks) - sequences, 1)  # tables of prompts reach as far as sequences more
    extent = Extent(sequences, most, max(request.input_len + request.output_len, 1024))
    points = table_points(request, batches, chunks)
    path = None if callable(step.model) else path_of(step, bench, extent, points)
    surrogate = load_or_make(path, lambda: Surrogate(tabulate(steps.simulate_all, steps.kernels, extent, points)))
    host = host_time(host_name(server.id, server.host), server.host)
    served = with_known_steps(replica(steps, server, host, surrogate, kv, layout.dp), step, steps.device.id, server.id)
    return LayoutReplica(layout, server, step, served)


def table_points(request: ServedSearchRequest, batches: Sequence[int], chunks: Sequence[int]) -> TablePoints:
    """Points at the batches and chunks of the search, and where prompts of its length end."""
    tokens = tuple(sorted({FEWEST_TOKENS, 512, *chunks, min(request.input_len, max(chunks))}))
    rows = tuple(sorted({1, *(batch for batch in batches if batch >= FEW_ROWS)}))
    return TablePoints(rows, tokens, SAMPLES, tuple(sorted({1, *batches})), CONTEXTS, (16, 128, *tokens))


def path_of(step: SimulateRequest, bench: Bench, extent: Extent, points: TablePoints) -> Path:
    """Where the tables of a step at these points are kept."""
    name = hashlib.sha256(f"{key_of(step, bench, extent)} {points}".encode()).hexdigest()[:32]
    return bench.graphs.parent / "surrogates" / f"{name}.npz"
