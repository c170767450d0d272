"""Sessions: requests that follow each other, as those of a chat or of an agent that calls tools.

Each prompt begins with all that was said before in its session, and adds new tokens: what a user writes, or what a tool
returns. The next turn comes a pause after the answer: a user's thought, or the time of a tool. Sessions may begin
with one of a few contents that they share, such as instructions and descriptions of tools.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..question.traffic import RequestTraffic
from .arrivals import ArrivalClock, generators, lengths
from .loop import RequestChunk
from .state import NONE
from .streams import SECOND_US, chunk

KEY_TOKENS = 16  # tokens of one content among the keys of sessions, as many as a block of vLLM's has


def with_turns(traffic: RequestTraffic) -> tuple[RequestChunk, np.ndarray]:
    """Sessions whose turns follow each other, and contents of their tokens where they share a beginning (int64, empty
    where they do not).

    Rows are ordered turn by turn, so that those of first turns are in order of arrival. Rates and numbers are those of
    requests: sessions begin so much more seldom, and the last of them are a turn shorter where requests do not come out
    even.
    """
    arrivals, inputs, outputs, contents = generators(traffic.seed)
    exists = turns_of_sessions(traffic)
    turns, sessions = len(exists), int(exists.shape[1])
    begun = replace(
        traffic,
        turns=1,
        turns_least=None,
        think_s=0.0,
        think_cv=0.0,
        turn_input=None,
        prefixes=0,
        prefix_tokens=0,
        requests=sessions,
        warmup=None,
        rate=traffic.rate / traffic.mean_turns,
    )
    if traffic.arrival == "ramp":
        begun = replace(begun, rate_end=traffic.rate_end / traffic.mean_turns)
    new_tokens = lengths(traffic.input, inputs, sessions * turns).reshape(turns, sessions)
    if traffic.turn_input is not None:
        new_tokens[1:] = lengths(traffic.turn_input, inputs, sessions * (turns - 1)).reshape(turns - 1, sessions)
    output = lengths(traffic.output, outputs, sessions * turns).reshape(turns, sessions)
    prompt = np.cumsum(new_tokens, axis=0) + np.cumsum(output, axis=0) - output
    rows = np.flatnonzero(exists)
    count = len(rows)
    times = np.zeros(count)
    times[:sessions] = ArrivalClock(begun, arrivals).take(sessions)
    row_of = np.full((turns + 1) * sessions, NONE)
    row_of[rows] = np.arange(count)
    session, length = rows % sessions, (prompt + output).ravel()[rows]
    keys, more = np.zeros(0, np.int64), {}
    if traffic.prefixes:
        chosen = (contents.random(sessions) * traffic.prefixes).astype(np.int64)
        longest = np.zeros(sessions, np.int64)
        np.maximum.at(longest, session, length)
        keys, first = session_keys(longest, chosen, traffic.prefix_tokens)
        more["keys"] = first[session]
    requests = chunk(
        times,
        prompt.ravel()[rows],
        output.ravel()[rows],
        session,
        length,
        comes_after=(rows >= sessions).astype(np.int8),
        follower=row_of[rows + sessions],
        think_us=pauses(traffic, count) * SECOND_US,
        **more,
    )
    return requests, keys


def turns_of_sessions(traffic: RequestTraffic) -> np.ndarray:
    """Whether a session has a turn: bool [turns, sessions], as many as there are requests."""
    turns, least = traffic.turns, traffic.turns_least
    if least is None:
        sessions = -(-traffic.requests // turns)
        return (np.arange(turns * sessions) < traffic.requests).reshape(turns, sessions)
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(traffic.seed).spawn(6)[4]))
    counts = random.integers(least, turns + 1, -(-traffic.requests // least))
    sums = np.cumsum(counts)
    counts = counts[: int(np.searchsorted(sums, traffic.requests)) + 1]
    counts[-1] -= int(counts.sum()) - traffic.requests
    return np.arange(turns)[:, None] < counts[None, :]


def pauses(traffic: RequestTraffic, count: int) -> np.ndarray:
    """Seconds between an answer and the next turn: gamma of mean ``think_s`` and ``think_cv``; float64 [count]."""
    if not traffic.think_cv or not traffic.think_s:
        return np.full(count, traffic.think_s)
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(traffic.seed).spawn(6)[5]))
    shape = traffic.think_cv**-2.0
    return random.gamma(shape, traffic.think_s / shape, count)


def session_keys(longest: np.ndarray, content: np.ndarray, shared_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Contents of the tokens of sessions, :data:`KEY_TOKENS` each, int64 [contents]; and where those of each begin
    [sessions]. Equal ones at equal places of two sessions are the same.

    The first ``shared_tokens`` of a session are those of its ``content``; what follows is no other session's.
    """
    blocks = -(-longest // KEY_TOKENS)
    first = np.cumsum(blocks) - blocks
    session = np.repeat(np.arange(len(blocks), dtype=np.int64), blocks)
    shared = np.arange(len(session)) - first[session] < shared_tokens // KEY_TOKENS
    return np.where(shared, -1 - content[session], session), first
