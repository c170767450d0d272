"""Answers that are sent part by part, the first of which is there before anything is sent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from concurrent.futures import Executor
from contextlib import aclosing, closing

from starlette.responses import StreamingResponse

from .answering import contained


async def begun(parts: AsyncGenerator[bytes, None], media_type: str) -> StreamingResponse:
    """The response of some parts. What goes wrong before the first of them is raised here, and has a status."""
    first = await anext(parts)

    async def whole() -> AsyncIterator[bytes]:
        async with aclosing(parts):
            yield first
            async for part in parts:
                yield part

    return StreamingResponse(whole(), media_type=media_type)


async def taken(parts: Generator[bytes, None, None], executor: Executor) -> AsyncGenerator[bytes, None]:
    """What an iterator gives, run in ``executor`` as fast as it goes; it ends with who reads it.

    A slow reader holds nobody up: what waits for it is at most the whole answer.
    """
    loop, queue, client_left = asyncio.get_running_loop(), asyncio.Queue[bytes | None](), threading.Event()

    def run() -> None:
        with closing(parts):
            for part in parts:
                if client_left.is_set():
                    return
                loop.call_soon_threadsafe(queue.put_nowait, part)

    running = loop.run_in_executor(executor, contained, run)
    running.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (piece := await queue.get()) is not None:
            yield piece
        await running
    finally:
        client_left.set()
