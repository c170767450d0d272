"""Predictors of the service follow the aliases of an MLflow registry."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from ...models.following import AliasFollower
from ...models.registry import Registry
from ...models.tracking import TrackingError
from ..show import say
from .settings import ServiceSettings


@asynccontextmanager
async def followed(settings: ServiceSettings) -> AsyncIterator[None]:
    """Look at the aliases now and then, for as long as the block runs; nothing where none are followed.

    Engines are made anew when a predictor of the registry becomes current (:class:`....simulator.workbench.Workbench`).
    """
    if settings.follow is None:
        yield
        return
    follower = AliasFollower(settings.follow, Registry(Path(settings.sources.predictors).expanduser()))
    task = asyncio.create_task(_look(follower, settings.follow_s))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _look(follower: AliasFollower, every_s: int) -> None:
    last_text = ""
    while True:
        try:
            for name in await asyncio.to_thread(follower.look):
                say(f"{name} answers now: its alias moved")
            last_text = ""
        except TrackingError as error:  # what is loaded stays; said once until it is another
            if str(error) != last_text:
                say(f"opcast: {error}")
            last_text = str(error)
        await asyncio.sleep(every_s)
