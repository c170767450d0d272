"""The door of the service: token, host, size, number and time of requests, before any of them is read.

A plain ASGI middleware. Beyond a limit a request is refused at once (401, 403, 408, 413, 429), never queued.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from .settings import ServiceSettings, is_loopback

Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = ("/", "/health", "/static/")  # without a token: the page's own files, and whether the service lives
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"SAMEORIGIN"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)


def error_body(code: str, message: str) -> bytes:
    """How every refusal and failure looks: ``{"error": {"code": …, "message": …}}``."""
    return msgspec.json.encode({"error": {"code": code, "message": message}})


def encoded(value: Any) -> bytes:
    """A value as JSON; numpy's numbers are numbers, NaN and infinities null."""
    return msgspec.json.encode(value, enc_hook=lambda each: each.item())


class Guard:
    """Lets a request through to ``app``, or answers it with why not."""

    def __init__(self, app: App, settings: ServiceSettings) -> None:
        self.app, self.settings = app, settings
        self.under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            return await _refuse(send, *refusal)
        if self.under_way >= self.settings.connections:
            said = f"{self.under_way} requests are under way: ask again in a moment"
            return await _refuse(send, 429, "busy", said, ((b"retry-after", b"1"),))
        self.under_way += 1
        try:
            await self._within(scope, receive, send)
        finally:
            self.under_way -= 1

    def _refusal(self, scope: Scope, headers: Mapping[str, str]) -> tuple[int, str, str] | None:
        """The status, code and message of a request that is not let in."""
        settings = self.settings
        host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        if settings.token is None and not is_loopback(host):  # another site's name that leads here
            return 403, "host", "without a token only this machine's own names are answered: http://127.0.0.1"
        if settings.token is not None and not _open(scope["path"]):
            given = headers.get("authorization", "").removeprefix("Bearer ").strip()
            if not hmac.compare_digest(given.encode(), settings.token.encode()):
                return 401, "token", "send the service's token as the header Authorization: Bearer TOKEN"
        if scope["method"] in ("POST", "PUT", "PATCH"):
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind not in ("application/json", ARROW):  # what another site's form cannot send
                return 415, "content_type", f"send application/json or {ARROW}, not {kind or 'nothing'}"
            length = headers.get("content-length", "0")
            if not length.isdigit() or int(length) > self._most:
                return 413, "too_large", f"a body may have {settings.body_mib} MiB"
        return None

    @property
    def _most(self) -> int:
        return self.settings.body_mib * 2**20

    async def _within(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its body read: bounded in size and time."""
        body = bytearray()
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > self._most:
                        return await _refuse(send, 413, "too_large", f"a body may have {self.settings.body_mib} MiB")
        except TimeoutError:
            return await _refuse(send, 408, "slow", f"the body did not come within {self.settings.timeout_s} s")
        held: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return held.pop() if held else await receive()

        await self.app(scope, replay, _with_headers(send))


ARROW = "application/vnd.apache.arrow.stream"


def _open(path: str) -> bool:
    return any(path == each or (each != "/" and each.endswith("/") and path.startswith(each)) for each in OPEN)


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *HEADERS]}
        await send(message)

    return sending


async def _refuse(
    send: Send, status: int, code: str, message: str, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    body = error_body(code, message)
    usual = ((b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()))
    also = ((b"www-authenticate", b"Bearer"),) if status == 401 else ()
    start = {"type": "http.response.start", "status": status, "headers": [*usual, *also, *headers, *HEADERS]}
    await send(start)
    await send({"type": "http.response.body", "body": body})
