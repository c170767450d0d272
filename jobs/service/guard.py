"""The door of the service: token, host, size, number and time of requests, before any of them is read.

A plain ASGI middleware. Beyond a limit a request is refused at once (401, 403, 408, 413, 415, 429), never queued. What
nobody foresaw ends here too: 500 for the caller, one line for the operator.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from ..cli import unforeseen
from .refusals import Refusals
from .settings import ServiceSettings, is_loopback

Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Refusal = tuple[int, str, str]

HELD = 4  # bodies of the largest size that may be in memory at a time, in whatever number of calls
OPEN = ("/", "/docs", "/health", "/static/")  # without a token: the page's own files, and whether the service lives
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"SAMEORIGIN"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)


class Guard:
    """Lets a request through to ``app``, or answers it with why not."""

    def __init__(self, app: App, settings: ServiceSettings, refusals: Refusals) -> None:
        self.app, self.settings, self.refusals = app, settings, refusals
        self.under_way = 0
        self.held = 0  # bytes of bodies in memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._refusal(scope, headers) or self._busy()
        if refusal is not None:
            return await self._refuse(send, *refusal)
        body = bytearray()
        try:
            refusal = await self._read(receive, body) or self._busy()
            if refusal is not None:
                return await self._refuse(send, *refusal)
            self.under_way += 1  # only now: a body that comes slowly keeps nobody out
            try:
                await self._answer(scope, bytes(body), receive, send)
            finally:
                self.under_way -= 1
        except LeftError:
            return
        finally:
            self.held -= len(body)

    def _refusal(self, scope: Scope, headers: Mapping[str, str]) -> Refusal | None:
        """The status, code and message of a request that is not let in."""
        settings = self.settings
        if settings.token is None and not is_loopback(_host(headers)):  # another site's name that leads here
            return 403, "host", "without a token only this machine's own names are answered: http://127.0.0.1"
        if settings.token is not None and not _open(scope["path"]):
            token = headers.get("authorization", "").removeprefix("Bearer ").strip()
            if not hmac.compare_digest(token.encode(), settings.token.encode()):
                return 401, "token", "send the service's token as the header Authorization: Bearer TOKEN"
        if scope["method"] in ("POST", "PUT", "PATCH"):
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind not in ("application/json", ARROW):  # what another site's form cannot send
                return 415, "content_type", f"send application/json or {ARROW}, not {kind or 'nothing'}"
            packed = headers.get("content-encoding", "identity").strip().lower()
            if packed != "identity":
                return 415, "content_encoding", f"send the body as it is, not as {packed}"
            length = headers.get("content-length", "0")
            if not length.isdecimal() or int(length) > self._most:
                return self._too_large
        return None

    def _busy(self) -> Refusal | None:
        if self.under_way >= self.settings.connections:
            return 429, "busy", f"{self.under_way} requests are under way: ask again in a moment"
        return None

    @property
    def _most(self) -> int:
        return self.settings.body_mib * 2**20

    @property
    def _too_large(self) -> Refusal:
        return 413, "too_large", f"a body may have {self.settings.body_mib} MiB"

    async def _read(self, receive: Receive, body: bytearray) -> Refusal | None:
        """Fill ``body``, bounded in size and time; why not, where it cannot be."""
        more = True
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise LeftError
                    chunk = message.get("body", b"")
                    body += chunk
                    self.held += len(chunk)
                    more = message.get("more_body", False)
                    if len(body) > self._most:
                        return self._too_large
                    if self.held > HELD * self._most:
                        return 429, "busy", "other large bodies are under way: ask again in a moment"
        except TimeoutError:
            return 408, "slow", f"the body did not come within {self.settings.timeout_s} s"
        return None

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Pass the request on with its body; what nobody foresaw becomes 500, where nothing was sent yet."""
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        started = False

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, replay, _with_headers(sending))
        except Exception as error:
            self.refusals.log(f"{scope['method']} {scope['path']}: {unforeseen(error)}")
            if not started:
                await self._refuse(send, 500, "unexpected", f"unexpected {type(error).__name__}, please report")

    async def _refuse(self, send: Send, status: int, code: str, message: str) -> None:
        body = self.refusals.body(status, code, message)
        usual = ((b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()))
        also = {401: ((b"www-authenticate", b"Bearer"),), 429: ((b"retry-after", b"1"),)}.get(status, ())
        start = {"type": "http.response.start", "status": status, "headers": [*usual, *also, *HEADERS]}
        await send(start)
        await send({"type": "http.response.body", "body": body})


class LeftError(Exception):
    """The caller left before its body was whole."""


def _host(headers: Mapping[str, str]) -> str:
    """The name by which the service was called; empty where it is none."""
    try:
        return urlsplit(f"//{headers.get('host', '')}").hostname or ""
    except ValueError:
        return ""


ARROW = "application/vnd.apache.arrow.stream"


def _open(path: str) -> bool:
    return any(
        path == prefix or (prefix != "/" and prefix.endswith("/") and path.startswith(prefix)) for prefix in OPEN
    )


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *HEADERS]}
        await send(message)

    return sending
