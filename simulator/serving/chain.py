"""One function out of a table of them, as machine code can call it: by a number, without a list of functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Link = Callable[[int, Any, Any], Any]


def chain(link: Link, functions: Sequence[Any], usual: Any = None) -> list[Any]:
    """Functions of which the last calls the one of ``functions`` whose place is asked for, each before it one fewer.

    ``link(place, own, others)`` makes one that calls ``own`` at its place, else ``others``. The ``usual`` function (the
    last, unless given) is called at all other places.
    """
    usual = usual or functions[-1]
    links = [usual]
    for index in reversed(range(len(functions))):
        if functions[index] is not usual:
            links.append(link(index, functions[index], links[-1]))
    return links
