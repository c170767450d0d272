"""Process groups of traces that others wrote get numbers for names: ASTRA-sim reads no others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .gathering import with_attribute
from .groups import GROUP_LABEL, RankedTraces, is_number
from .table import ExecutionTrace


def with_numbered_groups(run: RankedTraces) -> RankedTraces:
    """The run with a number for each group that has another name, which goes to the attribute ``group_name``.

    Names that are numbers stay as they are; the new ones follow the largest of them. The same name has the same number
    on all ranks.
    """
    used = [_group_words(trace) for trace in run.traces.values()]
    names = list(dict.fromkeys([*run.members, *(name for words in used for name in words.values())]))
    highest = max((int(name) for name in names if is_number(name)), default=0)
    others = [name for name in names if name and not is_number(name)]
    numbers = {name: str(highest + 1 + index) for index, name in enumerate(others)}
    if not numbers:
        return run
    traces = {rank: _renamed(trace, numbers) for rank, trace in run.traces.items()}
    return replace(run, traces=traces, members={numbers.get(name, name): ranks for name, ranks in run.members.items()})


def _group_words(trace: ExecutionTrace) -> dict[int, str]:
    """The groups of a trace, by the number of their word."""
    words = trace.text("pg_name")
    return {number: trace.words[number] for number in np.unique(words[words >= 0]).tolist()}


def _renamed(trace: ExecutionTrace, numbers: dict[str, str]) -> ExecutionTrace:
    words, new = trace.words, dict[int, int]()
    for word, name in _group_words(trace).items():
        if name in numbers:
            words, new[word] = words.with_text(numbers[name])
    if not new:
        return trace
    words, label = words.with_text(GROUP_LABEL)
    groups = trace.text("pg_name")
    rows = np.flatnonzero(np.isin(groups, list(new)))
    attributes = trace.attributes
    is_group = (attributes.name == trace.names["pg_name"]) & np.isin(attributes.value, list(new))
    value = attributes.value.copy()
    value[is_group] = [new[word] for word in value[is_group].tolist()]
    attributes = with_attribute(replace(attributes, value=value), rows, label, "string", groups[rows])
    return replace(trace, words=words, attributes=attributes)
