"""What moves over a fabric: one transfer."""

from __future__ import annotations

from typing import NamedTuple


class Transfer(NamedTuple):
    """A collective over ranks, or a message (``send``) from the first rank of ``group`` to the second.

    ``size_bytes`` as nccl-tests has it; ``after`` are positions of transfers that must have ended; ``algorithm`` None
    means the fastest alone.
    """

    collective: str
    group: tuple[int, ...]
    size_bytes: float
    algorithm: str | None = None
    release_us: float = 0.0
    after: tuple[int, ...] = ()
