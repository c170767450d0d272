"""The kinds of step that stand for a workload, and how much each weighs."""

from __future__ import annotations

import pytest

from opcast.simulator.question.work import Work
from opcast.simulator.step.build import MANY, Part, in_a_row, parts


def mean_of(work: Work, power: int) -> float:
    """The mean over decode steps of context ^ power, as the parts weigh contexts."""
    decodes = [part for part in parts(work) if part.kind == "decode"]
    return sum(part.times * part.seq_len**power for part in decodes) / (work.output_len - 1)


@pytest.mark.parametrize("output_len", [2, 3, 4, 10, 257, 1000])
def test_decode_steps_are_counted_once_each(output_len: int) -> None:
    first, *decodes = parts(Work("generate", input_len=100, output_len=output_len))
    assert first == Part("prefill", 100)
    assert sum(part.times for part in decodes) == pytest.approx(output_len - 1)
    contexts = [part.seq_len for part in decodes]
    assert (contexts[0], contexts[-1]) == (100, 100 + output_len - 2)


@pytest.mark.parametrize("power", [1, 2, 3])
def test_simpsons_rule_is_exact_up_to_cubes(power: int) -> None:
    """Of a time that grows with the context ^ power: its mean over the contexts from first to last."""
    first, last = 100, 1100
    work = Work("generate", input_len=first, output_len=last - first + 2)
    exact = (last ** (power + 1) - first ** (power + 1)) / (power + 1) / (last - first)
    assert mean_of(work, power) == pytest.approx(exact)


def test_two_steps_weigh_alike() -> None:
    """No context lies between the first and the last: each is one step."""
    assert list(parts(Work("generate", input_len=7, output_len=3)))[1:] == [Part("decode", 7), Part("decode", 8)]


def test_one_token_is_a_prompt_and_one_more_a_single_step() -> None:
    assert list(parts(Work("generate", input_len=7, output_len=1))) == [Part("prefill", 7)]
    assert list(parts(Work("generate", input_len=7, output_len=2)))[1:] == [Part("decode", 7, 1.0)]
    assert [part.context for part in parts(Work("decode", input_len=7))] == [8]


def test_steps_asked_for_by_themselves_are_many_in_a_row() -> None:
    assert in_a_row([*parts(Work("train", seq_len=8))]) == [MANY]
    prompt, *decodes = generated = [*parts(Work("generate", input_len=8, output_len=61))]
    assert in_a_row(generated) == [prompt.times, *(part.times for part in decodes)]
