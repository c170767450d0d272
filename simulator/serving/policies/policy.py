"""What a policy of a scheduler is: how it forms batches, and what its engine has where nobody says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..queues import nobody_new

Form = Callable[[Any, Any, int, int, float], None]
Again = Callable[[Any, Any, int], bool]


@dataclass(frozen=True)
class Policy:
    """How a scheduler forms batches, and what its engine has by itself.

    ``form(state, rules, rank, batch, now_us)`` puts what runs and what waits on a rank into a batch (:mod:`..queues`).
    Where all that run decode, ``again(state, rules, rank)`` says whether it would form the same batch anew, and counts
    the iteration. ``engine`` is the one whose memory, graphs and limits are its (``conf/serving_engine``; empty: none
    of today), which calls it as ``said`` in its arguments.
    """

    name: str
    form: Form
    again: Again = nobody_new
    engine: str = ""
    said: tuple[str, ...] = ()
    max_seqs: int = 256
    max_tokens: int = 8192
    chunk: int = 8192
    watermark: float = 0.0  # share of blocks that admission leaves free
    spare: int = 0  # blocks that must stay free beside decodes
    chunked: bool = True  # prompts may be cut
    padded: bool = False  # prompts of a batch count as long as its longest
    lag: bool = False  # the next iteration is scheduled while one runs
    mixed: bool = True  # prompts run beside decodes
    reserves: bool = False  # blocks for prompt and answer are taken at the start
    refuses: str = ""  # prompts longer than an iteration: "long" all of them, "uncut" where they are not cut
    holds_back: bool = False  # prompts may wait for each other
    counts_ends: bool = False  # it counts on where answers end, unless prefixes are cached
    loads: str = "layers"  # how it loads caches from tiers below the GPU
    repeats: bool = True  # a batch that only decodes may be counted again without a look at its requests

    def __call__(self, state: Any, rules: Any, rank: int, batch: int, now_us: float) -> None:
        """Form a batch."""
        self.form(state, rules, rank, batch, now_us)

    @property
    def framework(self) -> str:
        """The engine in whose framework it runs."""
        return self.engine or "vllm"
