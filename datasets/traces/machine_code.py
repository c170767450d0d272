"""Loops over arrays as machine code where numba is installed, and as plain Python without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def compile_loop(loop: Callable[..., Any], callees: tuple[Callable[..., Any], ...] = ()) -> Callable[..., Any]:
    """A loop as machine code, kept on disk after the first time; the loop itself without numba.

    ``callees`` are the functions that it calls, each after those that it calls itself.
    """
    try:
        import numba
        import numba.extending
    except ImportError:
        return loop
    for callee in callees:
        numba.extending.register_jitable(callee)
    return numba.njit(cache=True)(loop)
