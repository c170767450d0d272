"""What a recorded operator call is made of. No torch in here, so that mapping can be tested on plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..graph import NO_CALLS, HostCalls


class View(NamedTuple):
    """A tensor as an operator was given it: which storage, and how it lies in it (strides in elements)."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


@dataclass(slots=True)
class Call:
    """One operator call that does work.

    ``arguments`` are by the operator's own names, tensors as views. ``inside`` is the class of the
    module that runs, in backward the autograd node, "" where the engine itself adds up gradients; ``of_view``
    tells whether the first tensor is a view that keeps its base alive. ``written`` lists the storages updated in
    place, ``groups`` the rows of each group of a grouped product, ``attended`` (causal, window) of an attention
    whose mask says so, ``freed`` the storages let go of before the next call.
    """

    name: str
    arguments: dict[str, Any]
    inputs: tuple[View, ...]
    outputs: tuple[View, ...]
    written: tuple[int, ...] = ()
    path: str = ""
    phase: str = "forward"
    inside: str = ""
    of_view: bool = False
    groups: tuple[int, ...] = ()
    attended: tuple[int, int] | None = None
    host: HostCalls = NO_CALLS
    freed: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Storage:
    """Memory behind one or more tensors."""

    size_bytes: int
    dtype: str
