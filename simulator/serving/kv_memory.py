"""How many KV blocks an engine has: its own formula, on weights, activations and caches as they are simulated.

- vLLM (``of_total``): utilisation times the whole memory, less weights, the peak of a dummy pass of
  ``max_num_batched_tokens`` and what is no tensor; CUDA graphs are not deducted.
- SGLang (``static``): what is free after the weights, less total x (1 - mem_fraction_static).
- TensorRT-LLM (``of_free``): a fraction of what weights and the profiled peak leave free.

An engine's start-up log says how large these really were (:func:`overheads_of`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import floor

from ..graph import Graph
from ..memory.breakdown import GIB
from ..passes.kept import kept_bytes
from ..question.plan import Parallel
from ..question.work import Work
from ..step.build import LaidOut
from ..trace.context import LONG
from .engines import KvRule
from .kv import KvBudget, KvError

MIB = 1 / 1024
MOST_STATES = 0.9 / 1.9  # SGLang's mamba_full_memory_ratio, states over keys and values (``server_args.py``)


@dataclass(frozen=True)
class EngineMemory:
    """What one GPU's memory goes to beside keys and values, in GiB. ``other`` is context, NCCL and workspaces."""

    total_gib: float
    weights_gib: float
    activations_gib: float
    other_gib: float


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of keys and values on one GPU: ``whole`` of each token, on average over a sequence; of them ``windowed`` in
    layers of which a longer sequence takes no more; and ``state`` of a sequence's linear attention and short
    convolutions beside keys and values."""

    whole: float
    windowed: float = 0.0
    state: float = 0.0


@dataclass(frozen=True)
class Overheads:
    """What an engine's start-up log said, in GiB; None where it did not. ``kv_tokens`` fit in its KV memory."""

    weights_gib: float | None = None
    activations_gib: float | None = None
    other_gib: float | None = None
    kv_gib: float | None = None
    kv_tokens: int | None = None

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of a token, where the log gives both."""
        return self.kv_gib * GIB / self.kv_tokens if self.kv_gib and self.kv_tokens else None


def available_gib(
    rule: KvRule, memory: EngineMemory, max_tokens: int = 8192, graphs: int = 512, ranks: int = 1
) -> float:
    """GiB of KV memory on one GPU. ``ranks`` are tp x pp, ``graphs`` the largest CUDA graph (both SGLang's affair).

    KvError where nothing is left.
    """
    used = memory.weights_gib + memory.activations_gib + memory.other_gib + rule.spare_gib
    if rule.rule == "of_total":
        kv_gib = rule.fraction * memory.total_gib - used
    elif rule.rule == "of_free":
        kv_gib = rule.fraction * (memory.total_gib - used)
    else:
        fraction = rule.fraction or usual_fraction(memory.total_gib, max_tokens, graphs, ranks)
        free = memory.total_gib - memory.weights_gib - memory.other_gib - rule.spare_gib
        kv_gib = free - memory.total_gib * (1 - fraction)
    if kv_gib <= 0:
        raise KvError(
            f"weights of {memory.weights_gib:.1f} GiB and {used - memory.weights_gib:.1f} GiB beside them leave no KV "
            f"memory of {memory.total_gib:.1f} GiB: take more GPUs, fewer bits or a larger fraction"
        )
    return kv_gib


def usual_fraction(total_gib: float, chunk: int, graphs: int, ranks: int) -> float:
    """SGLang's own mem_fraction_static: 1 - reserved / total (``server_args.py``)."""
    least = 10240 if total_gib > 60 else 0
    return 1 - max(least, 512 + 1.5 * max(chunk, 2048) + 2 * graphs + 128 * ranks) * MIB / total_gib


def blocks_of(
    rule: KvRule, available: float, tokens: TokenBytes, copies: int = 1, longest: TokenBytes | None = None
) -> KvBudget:
    """The budget of so many GiB on each GPU; a replica holds ``copies`` times a GPU's bytes of each token. ``longest``
    are those of a long sequence."""
    blocks = floor(available * GIB / (tokens.whole * rule.block_tokens))
    stretch = 1.0 if longest is None else tokens.whole / longest.whole
    return KvBudget(max(blocks, 1), rule.block_tokens, tokens.whole * copies, stretch)


def token_bytes(step: LaidOut, cached: int = LONG, share: float = 1.0) -> TokenBytes:
    """Of a decode step of one sequence with ``cached`` tokens before it, on a GPU of the fullest stage. Of what layers
    with a window keep a ``share`` counts."""
    stages: dict[int, list[Graph]] = {}
    for chunk in step.pipelines[0]:
        stages.setdefault(chunk.stage, []).append(chunk.graph)
    fullest = max((kept_bytes(graphs, cached) for graphs in stages.values()), key=lambda cache: cache.all)
    windowed = share * fullest.windowed / (cached + 1)
    whole = fullest.whole / (cached + 1) + windowed
    if not whole:  # of a model of states alone each token has its part of them
        return TokenBytes(fullest.state / (cached + 1), fullest.state / (cached + 1))
    return TokenBytes(whole, windowed, fullest.state)


def kv_budget(
    lay_out: Callable[[Work], LaidOut],
    total_gib: float,
    rule: KvRule,
    parallel: Parallel,
    max_tokens: int = 8192,
    learned: Overheads | None = None,
    sequences: int = 256,
    long: int = LONG,
    cached: int = LONG,
    share: float = 1.0,
) -> KvBudget:
    """The KV memory of a replica (of one attention-DP rank) under an engine's rule, on devices of ``total_gib``.

    States of linear attention are kept apart for ``sequences`` of them. ``long`` is how many tokens of one sequence the
    model can have cached, ``cached`` how many a usual one has: of what is shorter than a window its layers keep all, so
    that a token takes more there. ``share`` is one of :class:`.engines.KvRule`'s ``window_share``.

    ``lay_out`` cuts its steps for its devices. ``learned`` takes the place of what is simulated, figure by figure.
    KvError where nothing is left.
    """
    memory = lay_out(Work("batch", prompts=((max_tokens, 1),))).memory
    by_class = memory.by_class
    engine_memory = EngineMemory(
        total_gib,
        by_class["weights"],
        by_class["activations of the moment"] + by_class["gathered weights and buffers"],
        by_class["context and communicators"],
    )
    overheads = learned or Overheads()
    overrides = {
        name: value
        for name in ("weights_gib", "activations_gib", "other_gib")
        if (value := getattr(overheads, name)) is not None
    }
    rule = replace(rule, spare_gib=0.0) if overheads.other_gib is not None else rule
    p = parallel
    available = overheads.kv_gib
    if available is None:
        available = available_gib(rule, replace(engine_memory, **overrides), max_tokens, ranks=p.tp * p.pp)
    longest = per_token = token_bytes(lay_out(Work("decode", batch=1, input_len=long, cache="static")), long, share)
    if longest.windowed and cached < long:
        per_token = token_bytes(lay_out(Work("decode", batch=1, input_len=cached, cache="static")), cached, share)
    if overheads.kv_gib is None and per_token.state:
        available = beside_states(available, per_token, sequences)
    if overheads.bytes_per_token is not None:
        longest = per_token = TokenBytes(overheads.bytes_per_token)
    elif overheads.kv_tokens is not None:
        available = overheads.kv_tokens * longest.whole / GIB  # engines count tokens of a long sequence
    return blocks_of(rule, available, per_token, p.tp * p.pp, longest)


def beside_states(available: float, per_token: TokenBytes, sequences: int) -> float:
    """GiB that the states of so many sequences leave, which take at most :data:`MOST_STATES` of what there is."""
    return available - min(sequences * per_token.state / GIB, MOST_STATES * available)


# --- start-up logs -----------------------------------------------------------------------------------------

GIB_FIGURE = r"\s*([\d.]+)\s*Gi?B"
PROFILED = rf"in memory usage profiling:{GIB_FIGURE}"
SIZED = rf"#tokens:.*?\bK size:{GIB_FIGURE}, V size:{GIB_FIGURE}"
LINES = {  # what stands in several groups adds up
    "weights_gib": (
        rf"model weights take{GIB_FIGURE}",
        rf"weights memory:{GIB_FIGURE}",
        rf"[Mm]odel loading took{GIB_FIGURE}",
        rf"Load weight end\..*?mem usage={GIB_FIGURE}",
        rf"Memory used after loading model weights \(inside torch\) {PROFILED}",
    ),
    "activations_gib": (
        rf"PyTorch activation peak memory takes{GIB_FIGURE}",
        rf"torch peak memory increase:{GIB_FIGURE}",
        rf"Memory dynamically allocated during inference \(inside torch\) {PROFILED}",
    ),
    "other_gib": (
        rf"non_torch_memory takes{GIB_FIGURE}",
        rf"non-torch forward increase memory:{GIB_FIGURE}",
        rf"Memory used outside torch .*?{PROFILED}",
    ),
    "kv_gib": (
        rf"[Aa]vailable KV cache memory:{GIB_FIGURE}",
        rf"reserved for KV Cache is{GIB_FIGURE}",
        SIZED,
        rf"#tokens:.*?\bKV size:{GIB_FIGURE}",
        rf"Allocated{GIB_FIGURE} for max tokens in paged KV cache",
    ),
    "kv_tokens": (
        r"GPU KV cache size:\s*([\d,]+) tokens",
        r"KV [Cc]ache (?:is )?allocated\..*?#tokens:\s*([\d,]+)",
        r"max_total_num_tokens=(\d+)",
        r"for max tokens in paged KV cache \(([\d,]+)\)",
    ),
}
CONCURRENCY = r"Maximum concurrency for ([\d,]+) tokens per request:\s*([\d.]+)x"
APART = 0.05  # of two figures for the same, from which on they disagree
BLOCKS = r"# GPU blocks: (\d+)", 16  # how vLLM before 0.8 said it, and tokens of its blocks


def overheads_of(
    lines: Iterable[str], name: str = "the log", tell: Callable[[str], None] = lambda _: None
) -> Overheads:
    """What a start-up log of vLLM, SGLang or TensorRT-LLM says of memory, the last word of each figure.

    vLLM's line of the KV cache's size says a part of what fits for a model with several kinds of cache; that of the
    largest concurrency goes before it, and ``tell`` is told where they disagree. KvError for a log that says nothing of
    memory.
    """
    figures: dict[str, float | int] = {}
    at_once = 0
    for line in lines:
        if match := re.search(CONCURRENCY, line):
            at_once = round(int(match[1].replace(",", "")) * float(match[2]))
        for figure, patterns in LINES.items():
            for pattern in patterns:
                if match := re.search(pattern, line):
                    texts = [text.replace(",", "").rstrip(".") for text in match.groups()]
                    figures[figure] = int(texts[0]) if figure == "kv_tokens" else sum(map(float, texts))
        if match := re.search(BLOCKS[0], line):
            figures["kv_tokens"] = int(match.group(1)) * BLOCKS[1]
    sized = figures.get("kv_tokens", at_once)
    if at_once and abs(sized / at_once - 1) > APART:
        tell(
            f"{name}: its line of the KV cache's size says {sized:,} tokens, that of the largest concurrency "
            f"{at_once:,}, which are taken: the first counts blocks of several kinds of cache as one"
        )
        figures["kv_tokens"] = at_once
    if not figures:
        raise KvError(f"{name} has no line of an engine's memory, such as 'Available KV cache memory: 5.65 GiB'")
    return Overheads(**figures)  # type: ignore[arg-type]
