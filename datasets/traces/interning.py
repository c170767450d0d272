"""Texts that get a number when they are first seen, in arrays that the loops over bytes fill and that grow between."""

from __future__ import annotations

import numpy as np

from .machine_code import compile_loop
from .scanning import COMPILE_FROM_BYTES, FNV_BASIS, rehash
from .table import Words

INITIAL_WORDS = 1 << 10


class Interner:
    """Open-addressed words. ``room`` makes space before a loop runs, so that the loop itself never grows anything."""

    def __init__(self) -> None:
        self.used = np.array([1], np.int64)
        self.hashes = np.full(INITIAL_WORDS, FNV_BASIS, np.int64)
        self.offsets = np.zeros(INITIAL_WORDS + 1, np.int64)
        self.blob = np.zeros(INITIAL_WORDS, np.uint8)
        self.table = np.full(2 * INITIAL_WORDS, -1, np.int32)
        rehash(self.hashes, 1, self.table)

    def room(self, words: int, size_bytes: int) -> None:
        """See that so many more words, of so many bytes together, fit."""
        count = int(self.used[0])
        self.hashes = _grow(self.hashes, count + words)
        self.offsets = _grow(self.offsets, count + words + 1)
        self.blob = _grow(self.blob, int(self.offsets[count]) + size_bytes)
        if 2 * (count + words) > len(self.table):
            self.table = np.full(1 << (2 * (count + words) - 1).bit_length(), -1, np.int32)
            (compile_loop(rehash) if count > COMPILE_FROM_BYTES else rehash)(self.hashes, count, self.table)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """What the loops take: table, hashes, offsets, texts, how many."""
        return self.table, self.hashes, self.offsets, self.blob, self.used

    def words(self) -> Words:
        """What was seen so far, by number."""
        offsets = self.offsets[: int(self.used[0]) + 1].copy()
        return Words(self.blob[: offsets[-1]].copy(), offsets)


class WordList:
    """Texts that get numbers one at a time, from Python."""

    def __init__(self) -> None:
        self.numbers: dict[bytes, int] = {b"": 0}

    def add(self, text: str | bytes) -> int:
        """The number of a text."""
        raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        return self.numbers.setdefault(raw, len(self.numbers))

    def words(self) -> Words:
        """All texts by number."""
        offsets = np.zeros(len(self.numbers) + 1, np.int64)
        np.cumsum([len(text) for text in self.numbers], out=offsets[1:])
        return Words(np.frombuffer(b"".join(self.numbers), np.uint8), offsets)


def _grow(array: np.ndarray, length: int) -> np.ndarray:
    if len(array) >= length:
        return array
    longer = np.empty(max(length, len(array) * 3 // 2), array.dtype)
    longer[: len(array)] = array
    return longer
