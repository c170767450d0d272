"""What each ZeRO stage changes, as a table: each cell follows from the properties that passes ask of a plan.

ZeRO: Rajbhandari et al. 2020, arXiv 1910.02054. Bytes are those of sec. 7: with weights and gradients of Ψ bytes each,
on n ranks. The conditions themselves are properties of :class:`...question.plan.Parallel` and ``Plan``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...question.plan import Parallel

STAGES = (0, 1, 2, 3)
WHOLE, PART, NEVER = "whole", "1/n", "never"
AFTER_UPDATE, BY_LAYER = "once a step, after the update", "before each layer, forward and backward"
LAST, EACH = "with the last micro-batch", "with each micro-batch"


@dataclass(frozen=True)
class StageRow:
    """One thing that a stage may change: what it is under a layout, and the options or settings that change it."""

    what: str
    cell: Callable[[Parallel], str]
    unless: str = ""


def _part(shared: bool) -> str:
    return PART if shared else WHOLE


ROWS = (
    StageRow("optimizer's states, fp32 masters", lambda p: _part(p.shards_optimizer)),
    StageRow("gradients kept", lambda p: _part(p.shards_gradients), "whole while micro-batches are summed before"),
    StageRow("weights between layers", lambda p: _part(p.shards_weights), "`options.reshard_after_forward=false`"),
    StageRow("frozen weights", lambda p: _part(p.shards_weights)),
    StageRow("gradients are summed by", lambda p: "reduce_scatter" if p.shards_optimizer else "all_reduce"),
    StageRow(
        "gradients are summed",
        lambda p: EACH if p.shards_gradients else LAST,
        "`options.reduce_every_micro_batch`; with pipeline stages only with the last",
    ),
    StageRow(
        "weights are gathered",
        lambda p: BY_LAYER if p.shards_weights else AFTER_UPDATE if p.gathers_updated_weights else NEVER,
        "`stack.overlap` `dp_gather`: beside the next forward pass; pipeline stages keep them for backward",
    ),
    StageRow(
        "bytes sent by a rank", lambda p: f"{3 if p.shards_weights else 2}Ψ(n-1)/n", "once a step, of one micro-batch"
    ),
)


def cells(row: StageRow) -> tuple[str, ...]:
    """What a row says of each stage."""
    return tuple(row.cell(Parallel(zero_stage=stage)) for stage in STAGES)


def table() -> str:
    """The table of docs/passes.md."""
    heads = "".join(f" {stage} |" for stage in STAGES)
    lines = [f"| `parallel.zero_stage` |{heads} unless |", "| --- " * (len(STAGES) + 2) + "|"]
    return "\n".join([*lines, *(f"| {row.what} | {' | '.join(cells(row))} | {row.unless} |" for row in ROWS)])
