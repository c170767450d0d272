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
            async for each in parts:
                yield each

    return StreamingResponse(whole(), media_type=media_type)


async def taken(parts: Generator[bytes, None, None], executor: Executor) -> AsyncGenerator[bytes, None]:
    """What an iterator gives, run in ``executor`` as fast as it goes; it ends with who reads it.

    A slow reader holds nobody up: what waits for it is at most the whole answer.
    """
    loop, held, left = asyncio.get_running_loop(), asyncio.Queue[bytes | None](), threading.Event()

    def run() -> None:
        with closing(parts):
            for each in parts:
                if left.is_set():
                    return
                loop.call_soon_threadsafe(held.put_nowait, each)

    running = loop.run_in_executor(executor, contained, run)
    running.add_done_callback(lambda _: held.put_nowait(None))
    try:
        while (each := await held.get()) is not None:
            yield each
        await running
    finally:
        left.set()
