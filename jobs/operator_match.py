"""A simulated step beside a real one: which operator call each node stands for, and their times for a person."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from ..simulator.report.answer import InferenceReport, StepReport
from ..simulator.report.comparison import OpComparison, StepComparison
from ..simulator.report.timeline import program_order
from ..simulator.report.view import time_text
from .show import say

# Attention has as many operators as kernels: flash, efficient, cudnn, fused for overrideable devices, one for CPUs; and
# the one that opcast traces for accelerators. The step has one of them wherever the graph has one.
ATTENTION = re.compile(
    r"scaled_dot_product_.*?attention(_for_cpu|_math|_overrideable)?(?P<backward>_backward)?"
    r"|(flash|efficient|cudnn)_attention_(forward|(?P<behind>backward))"
    r"|opcast\.attention(?P<back>_backward)?"
)


def plain_name(source: str) -> str:
    """An operator's name without namespace, overload and in-place form's underscores; attention by one name."""
    name = source.removeprefix("aten.").replace("opcast::", "opcast.").strip("_")
    if match := ATTENTION.match(name):
        return "attention_backward" if any(match.group("backward", "behind", "back")) else "attention"
    return name.partition(".")[0].strip("_").removesuffix("_impl")


def match_operators(nodes: Sequence[str], calls: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Pairs of places where both have the same operator, in the order of both, as many as line up.

    What only one of the two has is passed over: views of the real step, an operator that a kernel replaces.
    """
    ours, theirs = [[plain_name(name) for name in names] for names in (nodes, calls)]
    own_names = set(ours)
    places = [index for index, name in enumerate(theirs) if name in own_names]
    matcher = SequenceMatcher(None, ours, [theirs[index] for index in places], autojunk=False)
    for start, other, length in matcher.get_matching_blocks():
        yield from ((start + i, places[other + i]) for i in range(length))


def compare_operators(
    name: str, report: StepReport | InferenceReport, recorded: tuple[list[str], list[float]]
) -> list[OpComparison]:
    """Each node beside the operator call of the real step that it stands for; says how many have none."""
    executed = list(program_order(report.state)) if report.state else []
    names, measured_us = recorded
    pairs = list(match_operators([node.source for node, _, _ in executed], names))
    comparisons = []
    for position, call in pairs:
        node, costs, index = executed[position]
        if node.op is None:
            continue
        predicted = float(costs.kernel_us[index])
        comparisons.append(
            OpComparison(
                workload=name,
                kind=node.op.kind,
                source=node.source,
                path=node.path,
                phase=node.phase,
                detail=str(node.op),
                predicted_us=predicted,
                low_us=predicted * float(costs.low[index]),
                high_us=predicted * float(costs.high[index]),
                measured_us=measured_us[call],
            )
        )
    if missing := len(executed) - len(pairs):
        say(f"{name}: {missing} of {len(executed)} operators of the simulated step are not in the real one")
    return comparisons


def step_times(step: StepComparison, spread: str = "") -> tuple[str, str, str]:
    """A step's time as predicted, its interval, and as measured, for a person."""
    predicted, low, high, measured = (time_text(1e3 * time_ms) for time_ms in step.times_ms().values())
    return predicted, f"{low} to {high}", f"{measured}{spread}"
