"""Other tools on the same rows: adapters by name, each imported only when it is asked for.

``table`` is what a table itself carries of another tool's predictions; ``aiconfigurator`` is NVIDIA's, from PyPI.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence

from ...datasets.loading import nearest
from ...datasets.truth import Row, UnsupportedRow

Answer = tuple[Mapping[str, Mapping[str, float]], tuple[UnsupportedRow, ...]]
Rival = Callable[[Sequence[Row]], Answer]
RIVALS = {"table": "rivals", "aiconfigurator": "rival_aiconfigurator"}


class RivalError(ValueError):
    """A rival that does not exist, or is not installed. The message says what to do."""


def ask_rival(name: str) -> Rival:
    """The function that answers rows; RivalError for a name that has none or a tool that is not installed."""
    if name not in RIVALS:
        raise RivalError(f"rival={name!r} has no adapter; {nearest(name, RIVALS, 'choose from')}")
    module = importlib.import_module(f".{RIVALS[name]}", __package__)
    ready: Callable[[], Rival] = module.rival
    return ready()


def rival() -> Rival:
    """The predictions that a table carries beside its measurements (its ``peer_*`` columns)."""

    def answer(rows: Sequence[Row]) -> Answer:
        known = {row.id: row.peer for row in rows if row.peer}
        missing = tuple(UnsupportedRow(row.id, "the table has no prediction of it") for row in rows if not row.peer)
        return known, missing

    return answer
