"""Sessions of agents: turns that follow each other, pauses of tools, a beginning that sessions share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.jobs.cli import main
from opcast.simulator.question.canonical import RequestError
from opcast.simulator.question.serving import IterationLaw, KvMemory, Scheduler, ServingRequest
from opcast.simulator.question.traffic import Lengths, RequestTraffic
from opcast.simulator.serving.requests import stream
from opcast.simulator.serving.sessions import KEY_TOKENS, turns_of_sessions

AGENT = RequestTraffic(
    rate=5.0,
    requests=200,
    turns=8,
    turns_least=2,
    think_s=2.0,
    think_cv=1.0,
    input=Lengths(mean=600),
    turn_input=Lengths("uniform", low=10, high=50),
    output=Lengths(mean=20),
    prefixes=2,
    prefix_tokens=512,
)


@given(requests=st.integers(1, 300), turns=st.integers(2, 9), least=st.integers(1, 9), seed=st.integers(0, 5))
def test_sessions_have_as_many_turns_as_asked_and_requests_come_out_even(
    requests: int, turns: int, least: int, seed: int
) -> None:
    least = min(least, turns)
    exists = turns_of_sessions(replace(AGENT, requests=requests, turns=turns, turns_least=least, seed=seed))
    counts = exists.sum(axis=0)
    assert exists.sum() == requests
    assert (np.diff(exists.astype(int), axis=0) <= 0).all()  # no turn without the one before it
    assert (counts[:-1] >= least).all()
    assert 1 <= counts[-1] <= turns


def test_each_prompt_begins_with_what_was_said_and_sessions_share_their_beginning() -> None:
    found = stream(AGENT)
    (rows,) = found.chunks
    follows = np.flatnonzero(rows.follower >= 0)
    grown = rows.input[rows.follower[follows]] - rows.input[follows] - rows.output[follows]
    assert ((grown >= 10) & (grown <= 50)).all()
    assert (rows.input[rows.comes_after == 0] == 600).all()
    contents = [
        tuple(found.keys[first : first + tokens // KEY_TOKENS])
        for first, tokens in zip(rows.keys, rows.shared, strict=True)
    ]
    for row in follows:
        assert contents[rows.follower[row]][: len(contents[row])] == contents[row]
    begun = {content[: 512 // KEY_TOKENS] for content in contents}
    assert len(begun) == 2
    firsts = [content for content, after in zip(contents, rows.comes_after, strict=True) if not after]
    assert len({content[512 // KEY_TOKENS] for content in firsts}) == len(firsts)
    waits = rows.think_us[rows.comes_after == 1] / 1e6
    assert waits.mean() == pytest.approx(2.0, rel=0.3)
    assert waits.std() == pytest.approx(2.0, rel=0.4)


def test_what_sessions_share_is_found_in_the_cache(played: Callable[..., Any]) -> None:
    """The beginning is found by all sessions but the first one, and no more than was said before is found, also where
    blocks are larger than contents and the shared beginning ends within one."""
    for block, shared in ((16, 512), (64, 500), (8, 500)):
        traffic = replace(AGENT, rate=0.5, requests=60, prefixes=1, prefix_tokens=shared)
        request = ServingRequest(
            law=IterationLaw(base_us=100.0),
            kv=KvMemory(1_000_000 // block, block, 1.0),
            traffic=traffic,
            scheduler=Scheduler(prefix_caching=True),
        )
        rows = np.sort(played(request).requests, order="request")
        first_turns = rows[rows["input_tokens"] == 600]
        common = shared // KEY_TOKENS * KEY_TOKENS // block * block
        assert first_turns["hit_tokens"][0] == 0
        assert (first_turns["hit_tokens"][1:] == common).all(), block
        later = rows[rows["input_tokens"] > 600]
        assert (later["hit_tokens"] > 600 - block).all()
        assert (later["hit_tokens"] < later["input_tokens"] - 9).all()


def test_settings_of_sessions_are_checked_and_taken_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    for values, said in (
        ({"turns_least": 2}, "traffic.turns_least is of sessions"),
        ({"turns": 3, "turns_least": 4}, "turns_least=4 is more than traffic.turns=3"),
        ({"turn_input": Lengths()}, "traffic.turn_input is of sessions"),
        ({"turns": 2, "turn_input": Lengths("uniform", low=9, high=3)}, "traffic.turn_input.low=9"),
        ({"turns": 2, "concurrency": 4}, "traffic.turns does not go with traffic.concurrency"),
    ):
        with pytest.raises(RequestError, match=said):
            RequestTraffic(**values)  # type: ignore[arg-type]
    sessions = ["traffic.turns=5", "traffic.turns_least=2", "traffic.turn_input.mean=30", "traffic.requests=30"]
    shared = ["traffic.prefixes=1", "traffic.prefix_tokens=512", "scheduler.prefix_caching=true", "traffic.think_cv=1"]
    law = ["law.base_us=100", "kv.blocks=9000", "traffic.think_s=1"]
    assert main(["serving", *sessions, *shared, *law]) == 0
    assert "prefix cache" in capsys.readouterr().out
