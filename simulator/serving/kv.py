"""The memory that an engine has for keys and values, as blocks of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from ...datasets.loading import number, whole


class KvError(ValueError):
    """A KV memory that cannot be. The message names the figure and the way out."""


@dataclass(frozen=True)
class KvBudget:
    """KV memory of one replica (of one attention-DP rank where it has several).

    ``blocks`` of ``block_tokens`` tokens each; ``bytes_per_token`` are those of the whole replica, as a transfer of a
    cache to another replica moves them. All are of sequences of usual length; a long one alone may have ``stretch``
    times as many tokens, as layers with a window keep no more of it.
    """

    blocks: int
    block_tokens: int = 16
    bytes_per_token: float = 0.0
    stretch: float = 1.0

    def __post_init__(self) -> None:
        whole(KvError, "kv.blocks", self.blocks, 1)
        whole(KvError, "kv.block_tokens", self.block_tokens, 1)
        number(KvError, "kv.bytes_per_token", self.bytes_per_token)

    @property
    def tokens(self) -> int:
        """Tokens that fit."""
        return self.blocks * self.block_tokens

    @property
    def longest(self) -> int:
        """Tokens of one sequence alone that fit."""
        return int(self.tokens * self.stretch)
