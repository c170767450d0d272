"""What every search is asked, whatever it is over: axes with their values, rules and constraints, and what is best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from ...datasets.clusters import Cluster, load_cluster
from ...datasets.loading import choice, number, whole
from ...datasets.precisions import precision_of
from ..question.canonical import RequestError
from ..question.declaration import setting
from ..question.place import THIS_MACHINE
from ..question.plan import Parallel
from ..question.requests import SimulateRequest, StepQuestion
from .expressions import Expression, contradiction, parse
from .objectives import Objective
from .rank import Row, meeting

NO_CLUSTER = "a search needs a cluster: cluster=dgx_h100 cluster.nodes=8 (`opcast list clusters`)"
Checks = Mapping[str, Callable[[str, Any], object]]  # axis -> what raises for a value that it cannot have
BY_FORMULA = "a search times collectives by formula on healthy devices: leave network, faults and stragglers out"


@dataclass(frozen=True)
class SearchAxes:
    """The axes that all searches have, each a list of values. ``WHOLE`` are those of whole numbers, ``CHECKS`` say what
    is wrong with a value of another; what stands in neither is any word."""

    WHOLE: ClassVar[Sequence[str]] = ("nodes",)
    CHECKS: ClassVar[Checks] = {}

    cluster: tuple[str, ...] = setting(
        (), "names in conf/cluster, each of its own kind of GPU; [] = the one of cluster=…"
    )
    nodes: tuple[int, ...] = setting((), "how many nodes of it; [] = cluster.nodes")
    precision: tuple[str, ...] = setting((), "names in conf/precision; [] = the one of precision=…")

    def __post_init__(self) -> None:
        for axis in fields(self):
            values = getattr(self, axis.name)
            values = (values,) if isinstance(values, (str, int)) else tuple(values or ())
            object.__setattr__(self, axis.name, tuple(dict.fromkeys(values)))
            for value in values:
                self._check(axis.name, value)

    def _check(self, axis: str, value: Any) -> None:
        """RequestError for a value that an axis cannot have."""
        name = f"space.{axis}"
        if axis in self.WHOLE:
            whole(RequestError, name, value, 1)
        elif axis in self.CHECKS:
            self.CHECKS[axis](name, value)
        else:
            word(name, value)
        if axis in ("cluster", "precision"):
            (load_cluster if axis == "cluster" else precision_of)(value)


def word(name: str, value: Any) -> str:
    """The value itself; RequestError where it is no word."""
    if not isinstance(value, str):
        raise RequestError(f"{name}={value!r} must be a word")
    return value


class SearchQuestion(StepQuestion):
    """A search: a space of axes, and a step with all that is not searched, in the field that ``STEP`` names.

    ``RULED`` are the names that rules read, ``READ`` those that constraints read, ``POINT`` those that a point of it is
    named by; ``NOUNS`` are what one of these is called, and many, and where rows of it are kept.
    """

    OBJECTIVES: ClassVar[Mapping[str, Objective]]
    LISTS: ClassVar[Sequence[str]] = ("objectives", "constraints")
    COUNTS: ClassVar[Sequence[str]] = ("top",)
    RULED: ClassVar[Sequence[str]]
    READ: ClassVar[Sequence[str]]
    POINT: ClassVar[Sequence[str]]
    NOUNS: ClassVar[tuple[str, str, str]]
    space: Any
    objectives: tuple[str, ...]
    constraints: tuple[str, ...]
    top: int
    noise_floor: float

    def __post_init__(self) -> None:
        for name in self.LISTS:
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        for name in self.objectives:
            choice(RequestError, "objectives", name, tuple(self.OBJECTIVES))
        if not self.objectives:
            raise RequestError(f"objectives=[] says nothing of what is best; take [{next(iter(self.OBJECTIVES))}]")
        for name in self.COUNTS:
            whole(RequestError, name, getattr(self, name), 1)
        number(RequestError, "noise_floor", self.noise_floor)
        self.check()
        self.expressions()

    def check(self) -> None:
        """RequestError for what this kind of search cannot be asked."""

    @property
    def fixed(self) -> SimulateRequest:
        """The step with all that is not searched."""
        return getattr(self, self.STEP)

    def check_place(self) -> None:
        """RequestError for a step on no cluster, or whose collectives a formula does not time."""
        step = self.fixed
        if step.network.fidelity not in ("auto", "analytical") or step.network.named or step.stragglers:
            raise RequestError(BY_FORMULA)
        if step.cluster is None and not self.space.cluster:
            raise RequestError(NO_CLUSTER)

    def check_degrees(self, *names: str) -> None:
        """RequestError for a degree of the step that is the search's to choose."""
        for name in names:
            if (value := getattr(self.fixed.parallel, name)) != getattr(Parallel(), name):
                way = f"take space.{name}=[…]" if hasattr(self.space, name) else "leave it out"
                raise RequestError(f"parallel.{name}={value} is an axis of the search: {way}")

    def expressions(self) -> tuple[list[Expression], list[Expression]]:
        """Rules and constraints, parsed. RequestError for what is none, and for two that no point can meet."""
        rules = [parse(text, self.RULED, "space.rules") for text in self.space.rules]
        met = [parse(text, tuple(dict.fromkeys(self.READ)), "constraints") for text in self.constraints]
        both = contradiction([*rules, *met])
        if both is not None:
            raise RequestError(
                f"no point can meet both {both[0]!r} and {both[1]!r}: leave one out, or change its number"
            )
        return rules, met

    def good(self, rows: Sequence[Row]) -> list[Row]:
        """The rows that are ranked: those that meet all constraints."""
        return meeting(rows, self.expressions()[1])

    def limits(self) -> tuple[str, ...]:
        """What :meth:`good` rows meet, as text."""
        return self.constraints

    def clusters(self, also: Sequence[str] = ()) -> dict[str, Cluster]:
        """The clusters that are asked about, and others, by name: the step's own with its figures, others with as many
        nodes."""
        base = self.fixed.cluster
        names: Sequence[str] = self.space.cluster or (() if base is None else (base.id,))
        nodes = 1 if base is None else base.nodes
        return {
            name: base if base is not None and name == base.id else replace(load_cluster(name), nodes=nodes)
            for name in (*names, *also)
        }

    def placed(self, cluster: Cluster, precision: str, **changes: Any) -> SimulateRequest:
        """The step on a cluster, in a format of conf/precision, with changes. The errors of its parts."""
        step = self.fixed
        dtype, quantization = step.precision, step.quantization
        if precision != (quantization or dtype):
            dtype, quantization = precision_of(precision)
        is_base = step.cluster is not None and cluster.id == step.cluster.id
        device = step.device if is_base else THIS_MACHINE
        return replace(step, cluster=cluster, device=device, precision=dtype, quantization=quantization, **changes)
