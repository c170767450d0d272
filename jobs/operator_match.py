"""Which operator call of a real step each node of the simulated one stands for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from ..simulator.report.answer import InferenceReport, StepReport
from ..simulator.report.comparison import OpComparison
from ..simulator.report.timeline import in_order
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
    if found := ATTENTION.match(name):
        return "attention_backward" if any(found.group("backward", "behind", "back")) else "attention"
    return name.partition(".")[0].strip("_").removesuffix("_impl")


def matched(nodes: Sequence[str], calls: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Pairs of places where both have the same operator, in the order of both, as many as line up.

    What only one of the two has is passed over: views of the real step, an operator that a kernel replaces.
    """
    ours, theirs = [[plain_name(each) for each in names] for names in (nodes, calls)]
    wanted = set(ours)
    places = [place for place, name in enumerate(theirs) if name in wanted]
    matcher = SequenceMatcher(None, ours, [theirs[place] for place in places], autojunk=False)
    for start, other, length in matcher.get_matching_blocks():
        yield from ((start + i, places[other + i]) for i in range(length))


def compare_operators(
    name: str, report: StepReport | InferenceReport, recorded: tuple[list[str], list[float]]
) -> list[OpComparison]:
    """Each node beside the operator call of the real step that it stands for; says how many have none."""
    executed = list(in_order(report.state)) if report.state else []
    names, measured_us = recorded
    pairs = list(matched([node.source for node, _, _ in executed], names))
    made = []
    for place, call in pairs:
        node, costs, index = executed[place]
        if node.op is None:
            continue
        predicted = float(costs.kernel_us[index])
        made.append(
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
    return made
