"""What comes in later, as a heap by time: caches that move, and the next turns of sessions."""

from __future__ import annotations

from .state import LoopState


def push_due(state: LoopState, time_us: float, code: int) -> None:
    """``code`` comes in at a time; of equal times the lower code first."""
    heap, index = state.due, state.totals[0].due
    state.totals[0].due = index + 1
    while index > 0:
        above = (index - 1) // 2
        if not sooner(time_us, code, heap[above].time_us, heap[above].code):
            break
        heap[index].time_us, heap[index].code = heap[above].time_us, heap[above].code
        index = above
    heap[index].time_us, heap[index].code = time_us, code


def pop_due(state: LoopState) -> int:
    """Take out what comes in first."""
    heap = state.due
    code = heap[0].code
    state.totals[0].due -= 1
    size = state.totals[0].due
    time_us, last = heap[size].time_us, heap[size].code
    index = 0
    while 2 * index + 1 < size:
        below = 2 * index + 1
        right = below + 1
        if right < size and sooner(heap[right].time_us, heap[right].code, heap[below].time_us, heap[below].code):
            below = right
        if not sooner(heap[below].time_us, heap[below].code, time_us, last):
            break
        heap[index].time_us, heap[index].code = heap[below].time_us, heap[below].code
        index = below
    heap[index].time_us, heap[index].code = time_us, last
    return code


def sooner(time_us: float, code: int, other_us: float, other: int) -> bool:
    """Whether the one comes in before the other."""
    return time_us < other_us or (time_us == other_us and code < other)
