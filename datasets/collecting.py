"""How often Python looks for garbage in a process of our own.

Graphs, configurations and imported modules are hundreds of thousands of objects that stay. With Python's own thresholds
they are looked through again and again: 9 % of the processor time of a first answer for a new model. Looking through
them once more as the process ends is another 8 %.
"""

from __future__ import annotations

import atexit
import gc

THRESHOLDS = 200_000, 20, 100


def collect_seldom() -> None:
    """Let Python look for garbage more seldom, in this process, and no more when it ends."""
    gc.set_threshold(*THRESHOLDS)
    atexit.register(gc.freeze)
