"""Requests to a live OpenAI-compatible server, and when each of their tokens came.

They go to the address that is given and nowhere else: no redirect is followed, no proxy of the environment is asked. A
run has a most number of requests and seconds; whatever has ended by then is kept.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import httpx

ENDPOINT = "/v1/completions"
LONGEST_LINE = 1 << 20  # bytes of an event of a stream; one of a token has some hundred
LONGEST_ANSWER = 1 << 28  # bytes of an answer
CONNECT_S = 10.0
SAID = 160  # characters of what a server says of an error


class ServerAddressError(ValueError):
    """An address that nothing is sent to."""


@dataclass(frozen=True)
class SentRequest:
    """A request to send: when (seconds from the start), its prompt (token ids, or a text), how many tokens it asks."""

    arrival_s: float
    prompt: Sequence[int] | str
    input_tokens: int
    output_tokens: int


@dataclass
class ObservedRequest:
    """What was seen of a request. Times in seconds; ``token_s`` are those since it was sent at which tokens came.

    ``input_tokens`` and ``output_tokens`` are the server's own counts where it says them, else those asked for and the
    events that came. ``error`` is empty where it was answered.
    """

    request: int
    arrival_s: float
    sent_s: float
    input_tokens: int
    asked_tokens: int
    output_tokens: int = 0
    token_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class SendingPlan:
    """How requests are sent: ``concurrency`` at a time at most (0: as they come), for ``seconds`` at most."""

    url: str
    model: str
    seconds: float
    concurrency: int = 0
    key: str = ""
    extra: tuple[tuple[str, Any], ...] = (("ignore_eos", True),)


def endpoint_of(url: str) -> str:
    """The address of completions of a server. ServerAddressError for what is no plain http address."""
    parts = urlsplit(url)
    try:
        port_is_good = parts.port is None or parts.port > 0
    except ValueError:
        port_is_good = False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_good:
        raise ServerAddressError(f"url={url} is no address of a server: write it as http://HOST:PORT")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ServerAddressError(f"url={parts.hostname} has a name, a key or a query in it: give scheme, host and port")
    path = parts.path.rstrip("/")
    path = path if path.endswith("/completions") else f"{path.removesuffix('/v1')}{ENDPOINT}"
    return f"{parts.scheme}://{parts.netloc}{path}"


def observe(
    requests: Sequence[SentRequest], plan: SendingPlan, progress: Callable[[int], None] = lambda count: None
) -> Iterator[ObservedRequest]:
    """Send all requests and wait for them; those that have no answer when the time is over say so.

    ServerAddressError where nothing may be sent. A run that is interrupted gives what has ended before it raises.
    """
    address = endpoint_of(plan.url)
    rows: list[ObservedRequest] = []
    interrupted = False
    try:
        asyncio.run(_send_all(requests, plan, address, rows, progress))
    except KeyboardInterrupt:
        interrupted = True
    yield from sorted(rows, key=lambda row: row.request)
    if interrupted:
        raise KeyboardInterrupt


async def _send_all(
    requests: Sequence[SentRequest],
    plan: SendingPlan,
    address: str,
    rows: list[ObservedRequest],
    progress: Callable[[int], None],
) -> None:
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    timeout = httpx.Timeout(plan.seconds, connect=min(CONNECT_S, plan.seconds))
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {plan.key}"} if plan.key else {})
    places = asyncio.Semaphore(plan.concurrency or len(requests))
    began = time.perf_counter()
    async with httpx.AsyncClient(
        trust_env=False, follow_redirects=False, limits=limits, timeout=timeout, headers=headers
    ) as client:

        async def one(number: int, request: SentRequest) -> None:
            await asyncio.sleep(max(request.arrival_s - (time.perf_counter() - began), 0.0))
            async with places:
                sent_s = time.perf_counter() - began
                row = ObservedRequest(number, request.arrival_s, sent_s, request.input_tokens, request.output_tokens)
                try:
                    await _send(client, address, plan, request, row)
                except asyncio.CancelledError:
                    row.error = f"no whole answer within the {plan.seconds:g} s of the run"
                    raise
                except (httpx.HTTPError, ValueError) as error:
                    row.error = f"{type(error).__name__}: {str(error)[:SAID]}".rstrip(": ")
                finally:
                    row.end_s = time.perf_counter() - began - sent_s
                    rows.append(row)
                    progress(1)

        tasks = [asyncio.create_task(one(number, request)) for number, request in enumerate(requests)]
        _, late = await asyncio.wait(tasks, timeout=plan.seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _send(
    client: httpx.AsyncClient, address: str, plan: SendingPlan, request: SentRequest, row: ObservedRequest
) -> None:
    """Send one request and note when its tokens come. ValueError for an answer that is none, HTTPError of httpx."""
    body = {
        "model": plan.model,
        "prompt": request.prompt if isinstance(request.prompt, str) else list(request.prompt),
        "max_tokens": request.output_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **dict(plan.extra),
    }
    began = time.perf_counter()
    async with client.stream("POST", address, json=body) as answer:
        if answer.status_code != 200:
            reason = ""
            async for piece in answer.aiter_bytes():
                reason = piece[:SAID].decode("utf-8", "replace")
                break
            moved = " (redirects are not followed)" if answer.is_redirect else ""
            raise ValueError(f"HTTP {answer.status_code}{moved} {' '.join(reason.split())}".rstrip())
        waiting, total, ended = b"", 0, False
        async for piece in answer.aiter_bytes():
            now_s, total = time.perf_counter() - began, total + len(piece)
            *lines, waiting = (waiting + piece).split(b"\n")
            if len(waiting) > LONGEST_LINE or total > LONGEST_ANSWER:
                raise ValueError("the answer is no stream of tokens: it is too long")
            for line in lines:
                ended |= _take(line.strip(), now_s, row)
    if not ended and not _is_done(waiting.strip()):
        raise ValueError("the stream ended early")
    if not row.token_s:
        raise ValueError("the answer has no token")
    row.output_tokens = row.output_tokens or len(row.token_s)


def _is_done(line: bytes) -> bool:
    """Whether a line is the last of a stream that is whole."""
    return line.startswith(b"data:") and line[5:].strip() == b"[DONE]"


def _take(line: bytes, now_s: float, row: ObservedRequest) -> bool:
    """Note an event of a stream: a token, or the counts at its end. ValueError for what is neither.

    Returns whether it ends the stream: ``[DONE]``, counts alone, or a reason why the answer is finished.
    """
    if not line.startswith(b"data:") or _is_done(line):
        return _is_done(line)
    try:
        event = json.loads(line[5:])
    except (ValueError, RecursionError):
        raise ValueError(f"the server sent no JSON: {line[:SAID].decode('utf-8', 'replace')}") from None
    if not isinstance(event, dict) or "error" in event:
        raise ValueError(f"the server says {str(event)[:SAID]}")
    choices, usage = event.get("choices"), event.get("usage")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    if choice.get("text"):
        row.token_s.append(now_s)
    if isinstance(usage, dict):
        counts = usage.get("prompt_tokens"), usage.get("completion_tokens")
        row.input_tokens, row.output_tokens = (
            count if isinstance(count, int) and count > 0 else known
            for count, known in zip(counts, (row.input_tokens, row.output_tokens), strict=True)
        )
    return bool(choice.get("finish_reason")) or (isinstance(usage, dict) and not choices)
