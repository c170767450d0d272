"""A search or a sweep over HTTP: a stream of server-sent events with its progress, and at the end its answer.

It runs in a process of its own and counts in a file of two numbers that the stream looks at. It ends with the
stream: a caller that leaves stops it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ...simulator.search.question import SearchQuestion
from ...simulator.search.spread import Crew
from ..cli import unforeseen
from ..show import one_line
from ..sweeping import QuestionSweep
from .answering import DiedError, Processes, SlowError
from .encoding import encoded
from .refusals import Refusals
from .work import bench_of

LOOK_S = 0.5  # between two looks at the progress
Question = SearchQuestion | QuestionSweep


async def events(request: Question, processes: Processes, refusals: Refusals) -> AsyncGenerator[bytes, None]:
    """``progress`` events (``done`` and ``total`` points), then one ``answer``, or one ``error`` as of other calls.

    BusyError in place of the first event where too much is under way.
    """
    with TemporaryDirectory(prefix="opcast-search-") as folder:
        meter = Path(folder) / "meter"
        counts = np.memmap(meter, np.int64, "w+", shape=2)
        running = asyncio.create_task(processes.run(searched, (request, meter), limit="search_s"))
        await asyncio.sleep(0)  # it begins, or is refused
        if running.done():
            running.result()
        try:
            counts_sent: tuple[int, int] | None = None
            while not running.done():
                if (now := (int(counts[0]), int(counts[1]))) != counts_sent:
                    yield event("progress", {"done": now[0], "total": now[1]})
                    counts_sent = now
                await asyncio.wait({running}, timeout=LOOK_S)
            yield event("answer", running.result())
        except Exception as error:
            yield event("error", failure(error, refusals))
        finally:
            running.cancel()
            del counts


def failure(error: Exception, refusals: Refusals) -> dict[str, str]:
    """Why a search has no answer, in the words of other calls."""
    if isinstance(error, (SlowError, DiedError)):
        return {"code": "slow" if isinstance(error, SlowError) else "died", "message": str(error)}
    if isinstance(error, ValueError) and type(error).__module__.startswith("opcast"):
        return {"code": "bad_input", "message": refusals.outside(one_line(error))}
    refusals.log(f"a search: {unforeseen(error)}")
    return {"code": "unexpected", "message": f"unexpected {type(error).__name__}, please report"}


def event(kind: str, value: Any) -> bytes:
    """One server-sent event."""
    return b"event: " + kind.encode() + b"\ndata: " + encoded(value) + b"\n\n"


def searched(request: Question, meter: Path) -> dict[str, Any]:
    """The answer to a search or a sweep, its progress counted in ``meter``. Runs in a process of its own."""
    counts = np.memmap(meter, np.int64, "r+", shape=2)

    @contextmanager
    def bar(total: int) -> Iterator[Callable[[int], None]]:
        counts[:] = 0, total

        def advance(done: int) -> None:
            counts[0] += done

        yield advance

    if isinstance(request, QuestionSweep):
        return request.answered(Crew(), bar).to_dict()
    return bench_of(request).search(request, progress=bar).to_dict()
