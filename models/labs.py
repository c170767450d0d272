"""How far labs are apart that time the same op: what an answer learned from one lab's table misses of another's.

A table says how its own timings scatter, not how machines, versions, kernels, data and timers differ. The widths by
family and length of ops come from tables that no predictor has learned: ``tests/benchmarks/labs.py`` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

WIDTHS = Path(__file__).parent / "shipped" / "labs.json"
HARNESS = "harness"  # the source of rows that were timed on the machine itself
OWN_SOURCES = (HARNESS, "mine")  # beside them a table of one's own, whose mapping says so
EDGES_US = (30.0, 300.0)  # between short, usual and long ops: start-up, clocks and caches count less and less


@lru_cache
def widths(path: Path = WIDTHS) -> Mapping[str, np.ndarray]:
    """By family, of short, usual and long ops [3]: what 90 % of another lab's timings are within, in ln units.

    That is beside the noise of the predictor's own table.
    """
    families = json.loads(path.read_text("utf-8"))["families"]
    return {family: np.array(entry["half_width"]) for family, entry in families.items()}


def apart(family: str, card: Mapping[str, Any], latency_us: np.ndarray) -> np.ndarray:
    """How far labs are apart on ops of a family that take so long [n], in ln units.

    0 for a predictor of rows that were timed on the machine itself, and for families that other labs' tables do not
    widen.
    """
    sources = card.get("sources", {}).get("source") or OWN_SOURCES
    if set(OWN_SOURCES).intersection(sources) or family not in widths():
        return np.zeros(len(latency_us))
    return widths()[family][band(latency_us)]


def kernels_apart(family: str, latency_us: np.ndarray) -> np.ndarray:
    """How far another kernel for the same op may be from the one that was timed [n], in ln units.

    As far as labs are apart, whose tables are of different kernels. 0 for families of which that is not known.
    """
    return widths()[family][band(latency_us)] if family in widths() else np.zeros(len(latency_us))


def band(latency_us: np.ndarray) -> np.ndarray:
    """Which ops are short (0), usual (1) and long (2) [n]; ops without an answer count as long."""
    return np.searchsorted(EDGES_US, latency_us, side="right")
