"""What a fusion rule is: patterns of nodes, and the one kernel that takes their place.

A :class:`Rule` has one :class:`Pattern` per form (forward, backward). A pattern says which nodes may belong
(``members``), which must be there (``needs``), in which modules (``path``), and what the kernel is (``kernel``: from a
:class:`Match` to an op). Nodes are named by their source without namespace (``mul``, ``rsqrt``); a matrix product by
its layout (``gemm.nt`` a Linear, ``gemm.nn`` the gradient of its input, ``gemm.tn`` of its weight).

Members belong together when one writes what another reads, or, in a pattern with ``siblings``, when both read the
same tensor; with ``module`` only within one module. All that hangs together is one match, or, in a pattern with
``grow``, as much of it as one kernel can do at one place in the order.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ....datasets.ops import LAYOUT, Op
from ...graph import Node
from ..rewriting.draft import Draft, Section


@dataclass(frozen=True)
class Match:
    """Nodes that a pattern found in one section; tensors are those of its first repetition.

    ``inputs`` are read and made elsewhere, ``outputs`` are made here and used elsewhere, in order of appearance.
    ``results`` are those outputs that are not only there for the backward pass.
    """

    draft: Draft
    section: Section
    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    results: tuple[int, ...]

    def elements(self, tensor: int) -> int:
        """Number of elements of a tensor."""
        return self.draft.numel(tensor)

    def find(self, name: str) -> Node | None:
        """The first member of this name (see :func:`name_of`) or op kind."""
        matches = (n for n in self.nodes if name_of(n) == name or n.kind == name)
        return next(matches, None)

    def largest(self, tensors: tuple[int, ...]) -> int:
        """The tensor of most elements, the first of equals; IndexError when there is none."""
        return sorted(tensors, key=self.elements, reverse=True)[0]

    def formats(self) -> tuple[str, str]:
        """Dtype of the largest input and of the largest result."""
        return self.draft.dtype(self.largest(self.inputs)), self.draft.dtype(self.largest(self.results))


@dataclass(frozen=True)
class Pattern:
    """One form of a rule. ``kernel`` may decline a match with None.

    ``in_place``: the kernel's result overwrites its largest input where size and dtype agree. ``reads`` is a pattern
    that the module which made one of the inputs must match (``rotary``). ``updates``: members may update in place what
    others made (a residual stream). ``within`` is a second pattern for the path (of a
    compiler that sees the layers alone). ``first`` says what a match that grows may begin with:
    nodes that are made of others are not in it.
    """

    members: tuple[str, ...]
    kernel: Callable[[Match], Op | None]
    needs: tuple[str, ...] = ()
    path: str = ""
    phase: str = "forward"
    siblings: bool = False
    module: bool = False
    grow: bool = False
    updates: bool = False
    in_place: bool = False
    reads: str = ""
    within: str = ""
    first: Callable[[Draft, Node], bool] | None = None


@dataclass(frozen=True)
class Rule:
    """A fusion: what a framework runs as one kernel.

    ``remakes``: the backward kernel computes the forward kernel's intermediates again from its inputs, so that these
    are kept instead of them. ``lets_go``: the largest input of the forward kernel is nobody's after its last use,
    even where the traced step held on to it (logits that a model returns). ``rewrite`` is for what is no kernel: it
    changes the draft itself, and the flags by tensor of what the step lets go of, and says whether it did.
    """

    name: str
    patterns: tuple[Pattern, ...] = ()
    remakes: bool = True
    lets_go: bool = False
    rewrite: Callable[[Draft, np.ndarray], bool] | None = None


def name_of(node: Node) -> str:
    """The name that patterns know a node by."""
    if node.kind == "gemm":
        return f"gemm.{LAYOUT.choices[node.work.layout]}"
    return node.source.partition(".")[2] or node.source


def matches_path(pattern: str, path: str) -> bool:
    """Whether a regular expression is found in a module's path; the empty one always is."""
    return not pattern or re.search(pattern, path) is not None
