"""Which warnings reach a user: those of opcast, and none of the packages that it calls.

What a package warns its callers of (a renamed argument, a missing header) is for who works on opcast. Who starts Python
with ``-W`` or ``PYTHONWARNINGS`` sees what these say.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

_LOCK = Lock()
_INSIDE = [0]


class OpcastWarning(UserWarning):
    """What opcast itself warns of."""


_FILTERS: list[Any] = [("default", None, OpcastWarning, None, 0), ("ignore", None, Warning, None, 0)]


@contextmanager
def own_warnings() -> Iterator[None]:
    """While anybody is inside, in whichever thread, warnings of other packages are not shown.

    ``warnings.catch_warnings`` would, where calls of several threads overlap, leave its filters behind for good.
    """
    _step(1)
    try:
        yield
    finally:
        _step(-1)


def _step(by: int) -> None:
    """One more or one less is inside: the first brings the filters, the last takes them away."""
    with _LOCK:
        _INSIDE[0] += by
        filters: list[Any] = warnings.filters  # type: ignore[assignment]
        if by > 0 and _INSIDE[0] == 1 and not sys.warnoptions:
            filters[:0] = _FILTERS
        if _INSIDE[0] == 0:
            filters[:] = [entry for entry in filters if not any(entry is ours for ours in _FILTERS)]
