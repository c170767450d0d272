"""From a plan to the state of a workload: chunks and memory (:func:`lay_out`), then their times (:func:`build`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...datasets.devices import Device
from ...datasets.ops import Op
from ..engines import Engine, FusedEngine
from ..engines.flow import FlowEngine
from ..engines.learned import LearnedEngine
from ..graph import Graph
from ..memory.breakdown import GIB, Memory
from ..memory.lifetimes import ChunkWalk
from ..memory.stage import stage_memory
from ..passes import remembered
from ..passes.caches import size_caches
from ..passes.mixed import mix
from ..passes.model_flops import count_model_flops
from ..passes.order import INFERENCE, TRAINING, apply_passes
from ..passes.pipeline import Chunk, split_pipeline
from ..passes.quantize import PREPARED
from ..question.orders import Orders, forward_orders, make_orders, parts_of
from ..question.plan import Plan, Stack
from ..question.stragglers import stage_slowdowns
from ..question.work import Work
from ..timing.placement import place_tasks, send_times, time_chunks
from ..timing.schedule.pipeline import in_flight
from ..trace import Model, Workload, trace
from ..trace.redimension import batch_graph, step_graph
from ..trace.workload import TOGETHER, traced_load
from .state import State, Step

MANY = 1e6  # steps in a row: more than a power limit takes to act


@dataclass(frozen=True)
class Part:
    """A kind of step that a workload runs ``times`` times, with so many tokens a sequence."""

    kind: str
    seq_len: int
    times: float = 1.0

    @property
    def context(self) -> int:
        """Tokens of a sequence that are cached after the step."""
        return self.seq_len + (self.kind == "decode")


def parts(work: Work) -> Iterator[Part]:
    """The kinds of step that stand for a workload.

    A generation is one prefill and ``output_len - 1`` decode steps whose context grows by one each: their mean is taken
    by Simpson's rule over first, middle and last context.
    """
    if work.kind == "train":
        yield Part("train", work.seq_len)
        return
    if work.kind == "batch":
        yield Part("batch", work.iteration.tokens)
        return
    yield Part("decode" if work.kind == "decode" else "prefill", work.input_len)
    steps = work.output_len - 1 if work.kind == "generate" else 0
    if steps > 0:
        first, last = work.input_len, work.input_len + steps - 1
        weights = {first: 1 / 6, (first + last) // 2: 4 / 6, last: 1 / 6}
        if steps <= 2:  # no context lies between them
            weights = dict.fromkeys((first, last), 1 / steps)
        for context, weight in weights.items():
            yield Part("decode", context, steps * weight)


def in_a_row(phases: Sequence[Part]) -> list[float]:
    """How many steps of each kind follow each other without a pause: a prompt stands alone, with what it generates.

    A training step, a decode step and a served iteration that are asked for by themselves are one of many.
    """
    repeated = {phase.kind for phase in phases} in ({"train"}, {"decode"}, {"batch"})
    return [MANY if repeated else phase.times for phase in phases]


@dataclass(frozen=True)
class LaidOut:
    """A workload cut into the chunks of its plan, and what each stage needs of its device's memory; without times.

    ``graphs`` and ``pipelines`` are by kind of step, before any pass and after all; ``saved_gib`` is by kind and chunk.
    """

    work: Work
    plan: Plan
    device: Device
    parts: tuple[Part, ...]
    orders: Orders
    graphs: tuple[Graph, ...]
    pipelines: tuple[tuple[Chunk, ...], ...]
    saved_gib: tuple[tuple[float, ...], ...]
    memories: tuple[Memory, ...]

    @property
    def ops(self) -> list[Op]:
        """The ops of all chunks."""
        graphs = (chunk.graph for chunks in self.pipelines for chunk in chunks)
        return [node.op for graph in graphs for node, _ in graph.weighted() if node.op is not None]

    @property
    def memory(self) -> Memory:
        """Peak memory of the stage that needs most."""
        return max(self.memories, key=lambda memory: memory.peak_gib)

    @property
    def peak_gib(self) -> float:
        """What the fullest stage needs of its device."""
        return self.memory.peak_gib


def lay_out(model: Model, work: Work, plan: Plan, device: Device, cache_dir: Path | None) -> LaidOut:
    """A workload under a prepared plan (:mod:`.checks`), before anything of it is timed.

    Raises PlanError for degrees that do not go together, and the errors of :func:`..trace.trace`.
    """
    phases = tuple(parts(work))
    orders = orders_of(work, plan)
    graphs = tuple(traced(model, work, plan, phase, device, cache_dir) for phase in phases)
    passes = TRAINING
    if work.kind != "train":
        graphs = tuple(remembered.run(count_model_flops, graph, plan) for graph in graphs)
        passes = INFERENCE
    rewritten = [
        apply_passes(graph, replace(plan, context=phase.context), passes)
        for graph, phase in zip(graphs, phases, strict=True)
    ]
    if work.kind == "batch":
        rewritten = [served(rewritten[0], model, work, plan, device, cache_dir)]
        graphs = (replace(graphs[0], model_flops=rewritten[0].model_flops),)
    pipelines = tuple(split_pipeline(graph, plan) for graph in rewritten)
    walks: dict[int, ChunkWalk] = {}
    memories = [stage_memories(orders, chunks, plan, device, work, walks) for chunks in pipelines]
    saved = tuple(tuple(walks[id(chunk.graph)].saved / GIB for chunk in chunks) for chunks in pipelines)
    fullest = tuple(max(stage, key=lambda memory: memory.peak_gib) for stage in zip(*memories, strict=True))
    return LaidOut(work, plan, device, phases, orders, graphs, pipelines, saved, fullest)


def build(laid: LaidOut, engine: Engine) -> State:
    """The state of a workload: its chunks timed and placed, each communication as long as its engine says."""
    work, plan, device, orders = laid.work, laid.plan, laid.device, laid.orders
    engine = engine_of(plan.stack, engine)
    slow = stage_slowdowns(plan)[orders.routes[:, :, 0]].max(axis=0).tolist()
    kinds = [phase.kind for phase in laid.parts]
    prompts = [kind == "prefill" or (kind == "batch" and bool(work.prompts)) for kind in kinds]
    runs, slowdowns = in_a_row(laid.parts), [slow] * len(kinds)
    times = time_chunks(laid.pipelines, kinds, prompts, runs, slowdowns, plan, device, engine)
    overhead_us = plan.stack.step_overhead_us + work.data_loading_ms * 1e3
    steps = []
    for phase, graph, chunks, saved, phase_plan in zip(
        laid.parts, laid.graphs, laid.pipelines, laid.saved_gib, times, strict=True
    ):
        sends = send_times(orders, chunks, plan, engine)
        pipeline = place_tasks(orders, phase_plan, plan, sends)
        steps.append(
            Step(
                phase.kind,
                phase.times,
                graph,
                plan,
                device,
                chunks,
                phase_plan,
                saved,
                orders,
                sends,
                pipeline,
                overhead_us,
            )
        )
    return State(work, plan, device, tuple(steps), laid.memories, *_find_learned(engine))


def _find_learned(engine: Engine) -> tuple[tuple[Path, ...], str | None]:
    """The folders of predictors that an engine asks, and for which backend."""
    engines = engine.engines if isinstance(engine, FusedEngine) else [engine]
    learned = [each for each in engines if isinstance(each, LearnedEngine)]
    usual = learned[-1] if learned else None  # before it come those of a stack, for its own kinds
    return (tuple(each.root for each in usual.registries), usual.backend) if usual else ((), None)


def orders_of(work: Work, plan: Plan) -> Orders:
    """The order of tasks on every stage."""
    p = plan.parallel
    if work.kind == "train":
        return make_orders(p.schedule, p.pp, plan.micro_batches, p.vpp)
    return forward_orders(p.pp, plan.micro_batches)


def traced(model: Model, work: Work, plan: Plan, phase: Part, device: Device, cache_dir: Path | None) -> Graph:
    """The graph of one step of one micro-batch on one device, before any pass.

    Engines keep a preallocated cache; plain PyTorch keeps the cache that the workload names. Where the host computes,
    attention is what torch runs there.
    """
    attention = "sdpa" if device.synchronous else "fused"
    if phase.kind == "train":
        usual = Workload(
            "train",
            work.micro_batch,
            phase.seq_len,
            attention=attention,
            expert_load=traced_load(work.routing),
            frozen=work.frozen,
            lora_rank=work.lora_rank,
            lora_modules=work.lora_modules,
            lora_dropout=work.lora_dropout,
            lora_groups=tuple(name for name in TOGETHER if name in plan.stack.fusion) if work.lora_rank else (),
            mtp_layers=work.mtp_layers,
            kbit=plan.quantization in PREPARED,
            images=work.images,
            image_px=work.image_px,
        )
        return trace(model, usual, plan.precision, cache_dir)
    engine = "paged_attention" in plan.stack.fusion
    workload = Workload(
        kind="prefill" if phase.kind == "batch" else phase.kind,
        batch=work.batch // plan.micro_batches,
        seq_len=phase.seq_len,
        cache="static" if engine else work.cache,
        optimizer="none",
        attention=attention,
        expert_load=traced_load(work.routing),
        logits="all" if plan.stack.all_logits else "last",
        images=work.images if phase.kind == "prefill" else 0,
        image_px=work.image_px,
    )
    if phase.kind == "batch":
        batch = work.iteration
        return batch_graph(model, workload, batch.sampled, batch.kept, plan.precision, cache_dir)
    windows = engine and phase.kind == "decode"
    return step_graph(model, workload, plan.precision, cache_dir, windows)


def served(prompts: Graph, model: Model, work: Work, plan: Plan, device: Device, cache_dir: Path | None) -> Graph:
    """A pass over all tokens of a batch, after all passes, with the attention of its chunks and decoding sequences."""
    batch, decodes, decode_plan = work.iteration, None, plan
    if batch.decoding:
        context = max(round(batch.decode_context / batch.decoding), 1)
        alone = replace(work, kind="decode", batch=batch.decoding, input_len=context)
        graph = traced(model, alone, plan, Part("decode", context), device, cache_dir)
        decode_plan = replace(plan, context=context + 1)
        decodes = apply_passes(graph, decode_plan, INFERENCE)
    return size_caches(mix(prompts, decodes, batch), decode_plan)


def stage_memories(
    orders: Orders, chunks: Sequence[Chunk], plan: Plan, device: Device, work: Work, walks: dict[int, ChunkWalk]
) -> list[Memory]:
    """Peak memory of every stage; stages with the same chunks and as many micro-batches in flight are one.

    ``walks`` is filled with what was found about each distinct chunk graph.
    """
    flying = in_flight(orders) if work.kind == "train" else np.ones((orders.stages, orders.chunks), dtype=np.int64)
    memory_of: dict[tuple[object, ...], Memory] = {}
    memories = []
    for stage, counts in enumerate(flying.tolist()):
        graphs = [chunks[chunk].graph for chunk in parts_of(orders, stage)]
        key = tuple(map(id, graphs)), tuple(counts)
        if key not in memory_of:
            memory_of[key] = stage_memory(graphs, counts, plan, device, walks)
        memories.append(memory_of[key])
    return memories


def engine_of(stack: Stack, engine: Engine) -> Engine:
    """The engine as a stack asks it: what that one launches goes first (:mod:`..engines.chain`)."""
    if not isinstance(engine, FusedEngine):
        return engine
    own_kernels = stack.kernels, stack.mat_vecs, stack.unpackings
    key = repr((stack.id, stack.backend, stack.collectives, stack.attention, stack.fusion, own_kernels))
    if key not in engine.derived:
        engines = [
            replace(member, beneath=engine_of(stack, member.beneath)) if isinstance(member, FlowEngine) else member
            for member in engine.engines
        ]
        engine.derived[key] = FusedEngine(engines, stack=stack)
    return engine.derived[key]
