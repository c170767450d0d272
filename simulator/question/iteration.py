"""The batch of one iteration of an inference engine: prompt chunks beside sequences that decode one token.

All of it goes through the model in one pass. What is added up over sequences decides how long that takes: layers see
tokens, the last layer sees samples, attention sees pairs of a query and a key. So for chunks of any lengths stand as
many equal ones as have the same new tokens, cached tokens and pairs (:attr:`Iteration.chunks`), and for decoding
sequences as many with the mean context: the work done is the sum over sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

from ...datasets.loading import whole


class Chunks(NamedTuple):
    """``number`` prompt chunks alike, each of ``new`` tokens after ``cached`` ones."""

    number: float
    new: float
    cached: float


@dataclass(frozen=True)
class Iteration:
    """``prompts`` are (new tokens, cached tokens) of each chunk, ``decodes`` (sequences, cached tokens of each).

    ``samples`` sequences yield a token: all of them, where it is None. The model's layers run on ``padded`` tokens,
    those of a CUDA graph: as many as there are, where it is None.
    """

    prompts: tuple[tuple[int, int], ...] = ()
    decodes: tuple[tuple[int, int], ...] = ()
    samples: int | None = None
    padded: int | None = None

    @property
    def decoding(self) -> int:
        """Sequences that decode a token."""
        return sum(count for count, _ in self.decodes)

    @property
    def decode_context(self) -> int:
        """Cached tokens of decoding sequences."""
        return sum(count * context for count, context in self.decodes)

    @property
    def prefill_tokens(self) -> int:
        """New tokens of all chunks."""
        return sum(new for new, _ in self.prompts)

    @property
    def prefill_pairs(self) -> float:
        """Pairs of a query and a key that it sees, over all chunks."""
        return sum(new * (cached + (new + 1) / 2) for new, cached in self.prompts)

    @property
    def prefill_context(self) -> int:
        """Tokens cached before the chunks."""
        return sum(cached for _, cached in self.prompts)

    @property
    def tokens(self) -> int:
        """Tokens that the model's layers run on, padding included."""
        return max(self.decoding + self.prefill_tokens, self.padded or 0)

    @property
    def sampled(self) -> int:
        """Rows of the last layer, which runs for one even where no sequence ends its prompt."""
        sequences = self.decoding + len(self.prompts)
        return max(sequences if self.samples is None else self.samples, 1)

    @property
    def kept(self) -> int:
        """Tokens in the caches after the iteration."""
        return self.decode_context + self.decoding + self.prefill_tokens + self.prefill_context

    @property
    def chunks(self) -> Chunks:
        """The equal chunks with the same new tokens, cached tokens and pairs; of equal chunks, these themselves."""
        return equal_chunks(self.prefill_tokens, self.prefill_pairs, self.prefill_context)


def equal_chunks(tokens: float, pairs: float, context: float) -> Chunks:
    """The equal chunks that have so many new tokens, pairs and cached tokens in all.

    Of n chunks of q new tokens after c cached ones, n·q = tokens, n·c = context and n·q·(c + (q + 1) / 2) = pairs, so
    that n = tokens · (context + tokens / 2) / (pairs - tokens / 2). That is at least 1 for any chunks.
    """
    count = max(tokens * (context + tokens / 2) / max(pairs - tokens / 2, tokens / 2), 1.0)
    return Chunks(count, tokens / count, context / count)


def attended(chunks: Chunks) -> tuple[int, int, int]:
    """(batch, seq_q, seq_kv) of the attention of equal chunks, in whole numbers."""
    number = max(round(chunks.number), 1)
    new = ceil(round(chunks.new * chunks.number, 6) / number)
    return number, new, new + round(chunks.cached * chunks.number / number)


def pairs_of(error: type[ValueError], name: str, values: Any, least: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Pairs of whole numbers, each of at least so much. ``error`` for anything else, with the bad value."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise error(f"{name}={values!r} must be a list of pairs, such as [[512,0]]")
    pairs = []
    for pair in values:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise error(f"{name} has {pair!r}, which is no pair of whole numbers, such as [512,0]")
        for value, fewest in zip(pair, least, strict=True):
            whole(error, name, value, fewest)
        pairs.append((int(pair[0]), int(pair[1])))
    return tuple(pairs)
