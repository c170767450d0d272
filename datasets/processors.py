"""How many processors this process may use."""

from __future__ import annotations

import os

MOST = "LOKY_MAX_CPU_COUNT"  # joblib's own bound, which its processes heed, too


def usable_processors() -> int:
    """Processors that this process may use: those it is bound to, and no more than $LOKY_MAX_CPU_COUNT."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = os.environ.get(MOST, "")
    return min(count, int(most)) if most.isdecimal() and int(most) else count
