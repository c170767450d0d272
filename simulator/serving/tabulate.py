"""The tables of an iteration's law, from a few dozen simulated steps and attention asked at all sizes at once.

A pass is the sum of what its parts depend on (:class:`.iteration.IterationTables`). Token-wise kernels come from
steps simulated at some numbers of tokens, less their attention and their last layer; the last layer from steps that
differ in samples alone. Between two simulated steps the kernels of one are asked of the engines at the sizes between,
and are off by as much as at both ends (:mod:`.between`). Attention comes from the kernels of one such step, asked of
the engines with other sizes. What a step says of a kernel beyond the engines' answer (warm caches, clocks,
calibration) is taken along as a factor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ...datasets.ops import Op
from ..engines import Engine, ask
from ..graph import Node
from ..passes.mixed import ABSORBED, DECODE, PROMPT, SCAN
from ..question.work import Work
from ..step.state import State
from .between import FEW, Executed, Simulate, Simulated, between, executed_nodes, last_layer
from .iteration import IterationTables, at_point

# Points of the axes. Where a product's tiles are full its time jumps: there stand two points, side by side.
ROWS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 72, 96, 128, 136, 160, 192, 256, 264, 320, 384, 512)
TOKENS = (1, 8, 16, 32, 48, 64, 65, 96, 128, 129, 192, 256, 257, 384, 512, 513, 768, 1024, 1025, 1536, 2048, 2049)
MANY_TOKENS = (3072, 4096, 4097, 6144, 8192, 12288, 16384)
ATTENDING = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 512)
FEW_KEYS = (1, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072)
CONTEXTS = (*FEW_KEYS, 4096, 5120, 6144, 8192, 10240, 12288, 16384, 20480, 24576, 32768)
PROMPTS = (1, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 32768)
SAMPLES = (1, 8, 32, 64, 128, 256, 512, 1024)
EXPERTS = ("fused_moe", "grouped_gemm")
MIXING = (*PROMPT, SCAN)  # what runs over prompts alone, whoever decodes beside them
SHORTEST = 64  # tokens of a prompt: batches of many shorter ones are beyond what engines know, and hardly attend


@dataclass(frozen=True)
class Extent:
    """How far the tables reach: sequences that decode, tokens of an iteration, tokens of a sequence."""

    sequences: int = 256
    tokens: int = 8192
    context: int = 32768


@dataclass(frozen=True)
class TablePoints:
    """The points of the axes up to where tables reach: sequences that decode, tokens of an iteration, samples; and of
    attention, which is asked at all of them at once. Who asks at known places alone needs no others."""

    rows: tuple[int, ...] = ROWS
    tokens: tuple[int, ...] = (*TOKENS, *MANY_TOKENS)
    samples: tuple[int, ...] = SAMPLES
    attending: tuple[int, ...] = ATTENDING
    contexts: tuple[int, ...] = CONTEXTS
    prompts: tuple[int, ...] = PROMPTS

    @property
    def usual(self) -> bool:
        """Whether nobody chose the points: then not all of them are simulated."""
        return self == TablePoints()


@dataclass(frozen=True)
class Kernel:
    """An attention kernel of a step: ``times`` executions, each ``factor`` times what the engines answer."""

    op: Op
    source: str
    times: float
    factor: float


def tabulate(simulate: Simulate, engine: Engine, extent: Extent, points: TablePoints | None = None) -> IterationTables:
    """The tables of whatever ``simulate`` simulates; its errors."""
    points = points or TablePoints()
    rows, tokens = (
        points_up_to(points.rows, extent.sequences),
        points_up_to(points.tokens, extent.tokens + extent.sequences),
    )
    contexts, lengths = points_up_to(points.contexts, extent.context), points_up_to(points.prompts, extent.tokens)
    usual = points.usual
    samples = points_up_to(points.samples, max(extent.sequences, 2))
    sample_axis, sample_us = _axis(last_layer(_with_samples(simulate, samples[-1]), samples, engine))
    head_us = {row: at_point(sample_axis, sample_us, row) for row in (1, *rows)}
    # a sequence that is longer than any window, so that what a window cuts shows
    decoding = Simulated(simulate, lambda row: Work("batch", decodes=((row, extent.context - 1),)))
    prompts = Simulated(simulate, lambda count: Work("batch", prompts=((count, 1),), samples=0))
    decode = between(decoding, rows, FEW if usual else (), engine, partial(_token_wise, DECODE, head_us, 0.0))
    mixed = between(prompts, tokens, FEW if usual else (), engine, partial(_token_wise, MIXING, {}, head_us[1]))
    (longest,) = prompts.at(tokens[-1])
    attending = points_up_to(points.attending, extent.sequences)
    attend = _attend(decoding, engine, attending, contexts, extent.context)
    chunks = _kernels(longest, MIXING, engine)
    prompt = _prompt(chunks, engine, lengths, contexts)
    cached = _projected(chunks, engine, (0, *contexts)) if any(k.op.kind == "gemm" for k in chunks) else None
    cached_axis = np.array([0.0, *map(float, contexts)])
    return IterationTables(
        *_axis(decode),
        *_axis(mixed),
        sample_axis,
        sample_us,
        cached_axis,
        np.zeros(len(cached_axis)) if cached is None else make_monotone(cached - cached[0]),
        _floats(attending),
        _floats(contexts),
        make_monotone(attend),
        _floats(lengths),
        _floats(contexts),
        make_monotone(prompt),
        *_axis(between(prompts, tokens, FEW if usual else (), engine, _of_experts)),
        *_kernel_counts(prompts),
    )


def points_up_to(usual: Sequence[int], last: int) -> tuple[int, ...]:
    """The points of an axis up to ``last``, itself included; beyond the usual ones they double. At least two."""
    points = [point for point in usual if point < last]
    while points and points[-1] * 2 < last and last > usual[-1]:
        points.append(points[-1] * 2)
    return (*points, last) if points else (last, last + 1)


def make_monotone(values: np.ndarray) -> np.ndarray:
    """The values made monotone along every axis: none is less than one before it."""
    monotone = np.maximum(np.asarray(values, dtype=np.float64), 0.0)
    for axis in range(monotone.ndim):
        monotone = np.maximum.accumulate(monotone, axis=axis)
    return monotone


def _floats(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def _axis(points: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
    return _floats(list(points)), make_monotone(np.array(list(points.values())))


# --- what a step says --------------------------------------------------------------------------------------


def _token_wise(
    kinds: Sequence[str], head_us: dict[int, float], other_us: float, size: int, state: State
) -> tuple[float, list[Executed]]:
    """Microseconds of a step of that size but for attention and last layer, and the kernels that they are of."""
    attention = _of_attention(state, kinds)
    took_us = state.total_us - sum(times * each_us for _, times, each_us in attention)
    left_out = {id(node) for node, _, _ in attention}
    others = [kernel for kernel in executed_nodes(state) if id(kernel[0]) not in left_out]
    return took_us - head_us.get(size, other_us), others


def _kernel_counts(prompts: Simulated) -> tuple[np.ndarray, np.ndarray]:
    """Kernels of passes over prompts of the sizes that were simulated, and these [sizes]."""
    sizes = sorted(prompts.known)
    counts = [sum(times for _, times, _ in executed_nodes(state)) for state in prompts.at(*sizes)]
    return _floats(sizes), np.array(counts, dtype=np.float64)


def _of_experts(size: int, state: State) -> tuple[float, list[Executed]]:
    """Microseconds of a step's experts that ranks of attention data parallelism share, and their kernels."""
    parallel = state.plan.parallel
    shared = parallel.dp > 1 and parallel.ep * parallel.etp > parallel.tp
    experts = [kernel for kernel in executed_nodes(state) if shared and kernel[0].op and kernel[0].op.kind in EXPERTS]
    return sum(times * each_us for _, times, each_us in experts), experts


def _of_attention(state: State, kinds: Sequence[str]) -> list[tuple[Node, float, float]]:
    """Attention kernels of these kinds, absorbed products and projections of a latent cache for a prompt."""
    nodes = executed_nodes(state)
    ranks = {node.path: node.work.kv_lora_rank for node, _, _ in nodes if node.kind == "mla_prefill"}
    sparse = any(node.kind.startswith("sparse") for node, _, _ in nodes)  # absorbed in prompts, too

    def belongs(node: Node) -> bool:
        if node.op is None:
            return False
        if kinds == DECODE:
            return node.op.kind in DECODE or (node.source in ABSORBED and not sparse)
        above = node.path.rpartition(".")[0]
        projects = node.op.kind == "gemm" and node.op.batch == 1 and node.op.k == ranks.get(above)
        return node.op.kind in MIXING or projects

    return [node for node in nodes if belongs(node[0])]


def _kernels(state: State, kinds: Sequence[str], engine: Engine) -> list[Kernel]:
    """The distinct attention kernels of a step."""
    sums_by_kernel: dict[tuple[Op, str], list[float]] = {}
    for node, times, each_us in _of_attention(state, kinds):
        assert node.op is not None
        sums = sums_by_kernel.setdefault((node.op, node.source), [0.0, 0.0])
        sums[0] += times
        sums[1] += times * each_us
    answers = ask(engine, [op for op, _ in sums_by_kernel], "cold").latency_us
    return [
        Kernel(op, source, times, total / times / answer)
        for ((op, source), (times, total)), answer in zip(sums_by_kernel.items(), answers.tolist(), strict=True)
    ]


def _with_samples(simulate: Simulate, count: int) -> Simulated:
    """Steps of so many tokens of as many sequences that differ in their samples alone."""
    return Simulated(simulate, lambda row: Work("batch", prompts=((1, 1),) * count, samples=row))


# --- attention at all sizes --------------------------------------------------------------------------------


def _asked(kernels: Sequence[Kernel], engine: Engine, sized: Callable[[Kernel, int], Op], count: int) -> np.ndarray:
    """Microseconds of all kernels at each of ``count`` sizes."""
    total = np.zeros(count)
    for kernel in kernels:
        ops = [sized(kernel, index) for index in range(count)]
        total += kernel.times * kernel.factor * ask(engine, ops, "cold").latency_us
    return total


def _attend(steps: Simulated, engine: Engine, rows: Sequence[int], contexts: Sequence[int], reach: int) -> np.ndarray:
    """Decode attention [rows, contexts]: kernels whose keys are fewer than the context see no further back.

    Windows of few sequences stay in the cache from step to step: how much faster a kernel is for it goes from that of
    one simulated step to that of the next.
    """
    grid = [(row, context) for row in rows for context in contexts]
    kernels_by_size = {size: _kernels(steps.known[size], DECODE, engine) for size in sorted(steps.known)}
    kernels = kernels_by_size[max(kernels_by_size)]
    alike = {size: same_kernels for size, same_kernels in kernels_by_size.items() if len(same_kernels) == len(kernels)}

    def sized(kernel: Kernel, index: int) -> Op:
        row, context = grid[index]
        if kernel.op.kind == "gemm":
            return kernel.op.replace(m=row)
        if kernel.op.kind == "linear_attention_decode":
            return kernel.op.replace(batch=row)
        keys = min(context + 1, kernel.op.seq_kv) if kernel.op.seq_kv < reach else context + 1
        return kernel.op.replace(batch=row, seq_kv=keys)

    total_us = np.zeros((len(rows), len(contexts)))
    for index, kernel in enumerate(kernels):
        factors = np.interp(
            rows, list(alike), [row_kernels[index].factor / kernel.factor for row_kernels in alike.values()]
        )
        total_us += factors[:, None] * _asked([kernel], engine, sized, len(grid)).reshape(total_us.shape)
    return total_us


def _prompt(kernels: Sequence[Kernel], engine: Engine, lengths: Sequence[int], contexts: Sequence[int]) -> np.ndarray:
    """Attention of prompts [new tokens, mean keys of a query], and projections of a latent cache for them.

    Few keys are those of several prompts with nothing cached; more than a prompt of all tokens has are cached.
    """
    grid = [(tokens, keys) for tokens in lengths for keys in contexts]
    shapes = [_shape(tokens, keys) for tokens, keys in grid]
    total = np.zeros(len(grid))
    for kernel in kernels:
        if kernel.op.kind == "gemm":
            ops, parts = [kernel.op.replace(m=tokens) for tokens, _ in grid], np.ones(len(grid))
        else:
            scan = kernel.op.kind == SCAN
            sizes = [{"seq": new} if scan else {"seq_q": new, "seq_kv": keys} for _, new, keys, _ in shapes]
            ops = [kernel.op.replace(batch=shape[0], **size) for shape, size in zip(shapes, sizes, strict=True)]
            parts = np.array([share for *_, share in shapes])
        total += kernel.times * kernel.factor * ask(engine, ops, "cold").latency_us * parts
    return total.reshape(len(lengths), len(contexts))


def _shape(tokens: int, keys: int) -> tuple[int, int, int, float]:
    """(batch, seq_q, seq_kv) of prompts of so many tokens whose queries see ``keys`` on average; the part of its time
    where they are less than one whole prompt or no whole number of them."""
    length = max(2 * keys - 1, SHORTEST)
    if length >= tokens:
        return 1, tokens, max(round(keys + (tokens - 1) / 2), tokens), 1.0
    number = tokens / length
    return max(round(number), 1), length, length, number / max(round(number), 1)


def _projected(kernels: Sequence[Kernel], engine: Engine, contexts: Sequence[int]) -> np.ndarray:
    """What projecting cached tokens of a latent cache takes: the same products of as many rows."""
    products = [kernel for kernel in kernels if kernel.op.kind == "gemm"]
    return _asked(products, engine, lambda kernel, index: kernel.op.replace(m=max(contexts[index], 1)), len(contexts))
