"""The kinds of searches as data: what answers a search, compares two of its points and starts one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .question import SearchQuestion
from .request import SearchRequest

if TYPE_CHECKING:
    from ..engines.bench import Bench
    from .compare import ComparedPoints
    from .result import SearchReport
    from .spread import Crew, Progress
    from .view import RowsView


@dataclass(frozen=True)
class SearchKind:
    """What one kind of search is done with.

    ``search`` takes who simulates, where points are kept (None: nowhere) and what opens a bar; ``compare`` the names of
    two points and where they are kept. ``launch`` says how a point is started under a framework (None: the usual one),
    and what to say of it. ``view`` is how its rows are shown.
    """

    search: Callable[[Any, Bench, Crew, Path | None, Progress], SearchReport]
    compare: Callable[[Any, Bench, Sequence[str], Path | None], ComparedPoints]
    launch: Callable[[Any, Mapping[str, Any], str | None], tuple[str, str]]
    view: RowsView


def kind_of(request: SearchQuestion) -> SearchKind:
    """The kind of a search."""
    if isinstance(request, SearchRequest):
        from .compare import compare
        from .launch import launch_point
        from .run import search
        from .shown import LAYOUTS

        return SearchKind(search, compare, launch_point, LAYOUTS)
    from .served.compare import compare_ways
    from .served.launch import launch_way
    from .served.run import search_serving
    from .served.shown import WAYS

    return SearchKind(search_serving, compare_ways, launch_way, WAYS)
