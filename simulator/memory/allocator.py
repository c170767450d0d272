"""What torch's caching allocator takes from the device for a step: its segments, replayed block by block.

``torch.cuda.max_memory_reserved`` counts segments, not tensors. A request is rounded to 512 bytes and served from the
smallest free block of its stream and pool that holds it, which is split; a freed block joins its free neighbours. Up
to 1 MiB come from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, more from segments of their own, rounded to
2 MiB. Expandable segments grow at their end instead (one for each stream and pool). When the device is full, segments
without a block in use are given back first. See ``c10/cuda/CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

MIB = 2**20
BLOCK, SMALL, SMALL_SEGMENT, LARGE, LARGE_SEGMENT, GRAIN = 512, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 2 * MIB
EXPANDABLE_STRIDE = 2**48  # addresses apart that expandable segments begin
Pool = tuple[str, bool]  # stream, small


class OutOfMemoryError(MemoryError):
    """The device has no room for a request, unused segments given back."""


@dataclass(slots=True)
class SegmentPart:
    """A part of a segment, in use or free; neighbours are those of the same segment."""

    address: int
    size: int
    pool: Pool
    free: bool = True
    before: SegmentPart | None = None
    after: SegmentPart | None = None


@dataclass
class Allocator:
    """The state of a device's memory. ``capacity`` is in bytes (0: without end); sums and their peaks are in bytes."""

    capacity: int = 0
    expandable: bool = False
    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    _free: dict[Pool, list[tuple[int, int]]] = field(default_factory=dict)  # (size, address), sorted
    _spans: dict[int, SegmentPart] = field(default_factory=dict)  # free ones by address
    _tails: dict[Pool, SegmentPart] = field(default_factory=dict)  # last span of each expandable segment
    _next: int = 0

    def allocate(self, size: int, stream: str = "") -> SegmentPart:
        """The block that serves a request of ``size`` bytes; OutOfMemoryError where none can."""
        rounded = max(-(-size // BLOCK), 1) * BLOCK
        pool = stream, rounded <= SMALL
        block = self._best_fit(pool, rounded)
        if block is None:
            block = self._grow(pool, rounded) if self.expandable else self._new_segment(pool, rounded)
        rest = block.size - rounded
        if rest >= BLOCK if pool[1] or self.expandable else rest > SMALL:
            self._split(block, rounded)
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def release(self, span: SegmentPart) -> None:
        """Gives a block back; it joins its free neighbours."""
        self.allocated -= span.size
        span.free = True
        after, before = span.after, span.before
        if after is not None and after.free:
            self._remove_free(after)
            self._join(span, after)
        if before is not None and before.free:
            self._remove_free(before)
            self._join(before, span)
            span = before
        self._add_free(span)

    def empty(self) -> None:
        """Gives segments (in expandable ones, whole grains at the end) without a block in use back to the device."""
        for span in list(self._spans.values()):
            if span.before is None and span.after is None:
                self._remove_free(span)
                self.reserved -= span.size
                if self._tails.get(span.pool) is span:
                    del self._tails[span.pool]
            elif self.expandable and span.after is None:
                spare = span.size // GRAIN * GRAIN
                self._remove_free(span)
                span.size -= spare
                self.reserved -= spare
                if span.size:
                    self._add_free(span)
                elif span.before is not None:
                    span.before.after = None
                    self._tails[span.pool] = span.before

    def _best_fit(self, pool: Pool, size: int) -> SegmentPart | None:
        """The smallest free span that holds a size, the lowest of equals, out of the pool."""
        free = self._free.setdefault(pool, [])
        position = bisect_left(free, (size, 0))
        if position == len(free):
            return None
        _, address = free.pop(position)
        return self._spans.pop(address)

    def _new_segment(self, pool: Pool, size: int) -> SegmentPart:
        segment_bytes = SMALL_SEGMENT if pool[1] else LARGE_SEGMENT if size < LARGE else -(-size // GRAIN) * GRAIN
        self._map(segment_bytes)
        span = SegmentPart(self._next, segment_bytes, pool)
        self._next += segment_bytes
        return span

    def _grow(self, pool: Pool, size: int) -> SegmentPart:
        """The free end of a pool's expandable segment, made at least as long as a request."""
        grain = SMALL_SEGMENT if pool[1] else LARGE_SEGMENT
        if self.capacity and self.reserved + self._missing_bytes(pool, size, grain) > self.capacity:
            self.empty()
        grown_bytes = self._missing_bytes(pool, size, grain)
        self._map(grown_bytes)
        tail = self._tails.get(pool)
        if tail is not None and tail.free:
            self._remove_free(tail)
            tail.size += grown_bytes
            return tail
        start = self._next if tail is None else tail.address + tail.size
        self._next += EXPANDABLE_STRIDE if tail is None else 0
        span = SegmentPart(start, grown_bytes, pool, before=tail)
        if tail is not None:
            tail.after = span
        self._tails[pool] = span
        return span

    def _missing_bytes(self, pool: Pool, size: int, grain: int) -> int:
        tail = self._tails.get(pool)
        return -(-(size - (tail.size if tail is not None and tail.free else 0)) // grain) * grain

    def _map(self, size: int) -> None:
        if self.capacity and self.reserved + size > self.capacity:
            self.empty()
            if self.reserved + size > self.capacity:
                raise OutOfMemoryError(f"{self.reserved + size} bytes needed of {self.capacity}")
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _split(self, span: SegmentPart, size: int) -> None:
        rest = SegmentPart(span.address + size, span.size - size, span.pool, before=span, after=span.after)
        if span.after is not None:
            span.after.before = rest
        elif self._tails.get(span.pool) is span:
            self._tails[span.pool] = rest
        span.size, span.after = size, rest
        self._add_free(rest)

    def _join(self, first: SegmentPart, second: SegmentPart) -> None:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        elif self._tails.get(first.pool) is second:
            self._tails[first.pool] = first

    def _add_free(self, span: SegmentPart) -> None:
        insort(self._free.setdefault(span.pool, []), (span.size, span.address))
        self._spans[span.address] = span

    def _remove_free(self, span: SegmentPart) -> None:
        free = self._free[span.pool]
        del free[bisect_left(free, (span.size, span.address))]
        del self._spans[span.address]
