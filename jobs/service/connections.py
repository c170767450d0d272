"""Connections that do not get on are let go: heads that come slowly, answers that nobody takes, more than can be open.

A head of a request must be whole :data:`HEAD_S` seconds after the connection began, or after the rest of the request
before it; a caller must take something of its answer every :data:`TAKE_S` seconds. Where too many connections are open,
those that have not asked anything yet are let go first, the oldest before others.
"""

from __future__ import annotations

import asyncio
from typing import Any

HEAD_S = 10.0
TAKE_S = 30.0
MOST = 4096
SPARE_FILES = 256  # that the process needs besides connections


def most_connections() -> int:
    """Connections that may be open: as many as the system lets this process have files, less what it needs itself."""
    try:
        import resource
    except ImportError:  # Windows
        return MOST
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST if files < 0 else max(min(MOST, files - SPARE_FILES), 64)


def timed(head_s: float = HEAD_S, take_s: float = TAKE_S, most: float | None = None) -> type[asyncio.Protocol]:
    """uvicorn's protocol for HTTP, with these limits."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    limit, usual = most or most_connections(), AutoHTTPProtocol
    idle: dict[Any, None] = {}  # connections that have asked nothing yet, the oldest first

    class TimedProtocol(usual):  # type: ignore[valid-type,misc]
        """A connection that is let go when it does not get on."""

        head: asyncio.TimerHandle | None = None
        stalled: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._await_head()
            if len(self.connections) > limit:
                next(iter(idle)).transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_came()
            self.resume_writing()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._head_came()
            elif self.head is None and not self.transport.is_closing():
                self._await_head()

        def pause_writing(self) -> None:
            super().pause_writing()
            self.stalled = self.stalled or self.loop.call_later(take_s, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self.stalled is not None:
                self.stalled.cancel()
                self.stalled = None

        def _await_head(self) -> None:
            self.head = self.loop.call_later(head_s, self.transport.abort)
            idle[self] = None

        def _head_came(self) -> None:
            idle.pop(self, None)
            if self.head is not None:
                self.head.cancel()
                self.head = None

    return TimedProtocol
