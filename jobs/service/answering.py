"""Who answers: ops in one thread of this process, many callers' at once; steps in processes that can be stopped.

An op takes less than a millisecond and a hundred take little more, so ops that came while others were answered are
answered together. A step can take minutes and cannot be stopped inside Python, so that it runs in a process of a pool,
which is ended when its time is over or nobody waits for it any more. So does code of one's own that the service was
started with (``allow``): it may end its process, which is replaced, and never this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Generic, TypeVar

from pebble import ProcessExpired, ProcessPool

from ...simulator.question.predictions import PredictRequest
from ...simulator.report.answer import OpPrediction
from ...simulator.trace.models import HUB_ID
from .settings import ServiceSettings
from .work import bench_of

A = TypeVar("A")
B = TypeVar("B")
LOOK_S = 0.25  # how often a caller is asked whether it is still there


class BusyError(Exception):
    """More questions wait than may."""


class SlowError(Exception):
    """A question took longer than it may."""


class GoneError(Exception):
    """Nobody waits for the answer any more."""


class DiedError(Exception):
    """The process that answered ended by itself, or the system ended it."""


class EndedError(ValueError):
    """What was asked for ends the process that runs it, as ``sys.exit`` does."""


def contained(work: Callable[..., A], *arguments: Any) -> A:
    """``work(*arguments)``; what is meant to end the process (SystemExit and its like) is an EndedError."""
    try:
        return work(*arguments)
    except Exception:
        raise
    except BaseException as end:
        raise EndedError(f"what was asked for ended with {type(end).__name__} instead of an answer") from None


class Together(Generic[A]):
    """Answers questions in one thread; those that came meanwhile as one: ``answer`` gets and gives lists of them."""

    def __init__(self, answer: Callable[[list[Any]], list[A | Exception]], most: int) -> None:
        self.answer, self.most = answer, most
        self.waiting: list[tuple[Any, asyncio.Future[A]]] = []
        self.running: asyncio.Task[None] | None = None
        self.thread = ThreadPoolExecutor(1, "opcast-ops")

    async def ask(self, question: Any) -> A:
        """The answer to one question, or what was raised for it. BusyError when too many wait."""
        if len(self.waiting) >= self.most:
            raise BusyError(f"{len(self.waiting)} questions wait: ask again in a moment")
        loop = asyncio.get_running_loop()
        promised: asyncio.Future[A] = loop.create_future()
        self.waiting.append((question, promised))
        if self.running is None:
            self.running = loop.create_task(self._answer_all())
        return await promised

    async def call(self, work: Callable[..., B], *arguments: Any) -> B:
        """Run something else in the same thread: the engines are one caller's at a time."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, contained, work, *arguments)

    async def _answer_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self.waiting:
            batch, self.waiting = self.waiting, []
            questions = [question for question, _ in batch]
            answers: list[A | Exception]
            try:
                answers = await loop.run_in_executor(self.thread, contained, self.answer, questions)
            except Exception as error:
                answers = [error] * len(batch)
            for (_, promised), answer in zip(batch, answers, strict=True):
                if promised.done():
                    continue
                if isinstance(answer, Exception):
                    promised.set_exception(answer)
                else:
                    promised.set_result(answer)
        self.running = None

    def close(self) -> None:
        """Let go of the thread."""
        self.thread.shutdown(wait=False, cancel_futures=True)


def predict_all(requests: list[PredictRequest]) -> list[list[OpPrediction] | Exception]:
    """The answer to each request; those that ask about the same place become one."""
    answers: list[list[OpPrediction] | Exception] = [[] for _ in requests]
    alike: dict[PredictRequest | int, list[int]] = {}
    for index, request in enumerate(requests):
        together = request.cluster is None and not request.transfers
        alike.setdefault(_bare(request) if together else index, []).append(index)
    for places in alike.values():
        for index, answer in zip(places, _answered([requests[index] for index in places]), strict=True):
            answers[index] = answer
    return answers


def _bare(request: PredictRequest) -> Any:
    device = request.device if isinstance(request.device, str) else request.device.id
    return device, request.cache, request.limits, request.sources


def _answered(alike: list[PredictRequest]) -> list[list[OpPrediction] | Exception]:
    """The answers to requests of one place: together, and each for itself when one of them cannot be answered."""
    try:
        ops = tuple(op for request in alike for op in request.ops) if len(alike) > 1 else alike[0].ops
        predictions = bench_of(alike[0]).predict(replace(alike[0], ops=ops))
    except Exception as error:
        return [error] if len(alike) == 1 else [_answered([request])[0] for request in alike]
    if len(alike) == 1:
        return [predictions]
    parts: list[list[OpPrediction] | Exception] = []
    for request in alike:
        parts.append(predictions[: len(request.ops)])
        predictions = predictions[len(request.ops) :]
    return parts


def apart(offline: bool) -> None:
    """Keep a process that answers from kernels of the hub, and where no model of the hub is allowed from all of it."""
    os.environ["USE_HUB_KERNELS"] = "0"
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"


class Processes:
    """Runs questions in processes: ``workers`` at once, ``waiting`` more in a queue, each for ``timeout_s`` at most."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self.under_way = 0
        self._pool: Any = None

    async def run(
        self,
        work: Callable[..., A],
        arguments: tuple[Any, ...],
        gone: Callable[[], Any] | None = None,
        limit: str = "timeout_s",
    ) -> A:
        """The result of ``work(*given)`` in a process. BusyError, SlowError, GoneError, DiedError, and what it raises.

        ``gone`` is awaited now and then: once it is true, or when this call is cancelled, the process is ended.
        ``limit`` names the setting that says how long it may take.
        """
        settings, timeout_s = self.settings, getattr(self.settings, limit)
        if self.under_way >= settings.workers + settings.waiting:
            raise BusyError(f"{self.under_way} steps are under way or wait: ask again in a moment")
        self.under_way += 1
        future: Future[A] = self._started().schedule(contained, args=(work, *arguments), timeout=timeout_s)
        try:
            wrapped = asyncio.wrap_future(future)
            while True:
                done, _ = await asyncio.wait({wrapped}, timeout=LOOK_S)
                if done:
                    return wrapped.result()
                if gone is not None and await gone():
                    raise GoneError
        except TimeoutError:
            raise SlowError(f"it took longer than {timeout_s} s: ask for less, or start with {limit}=…") from None
        except ProcessExpired as error:
            raise DiedError(f"the process that answered ended (exit code {error.exitcode}): ask for less") from None
        finally:
            future.cancel()
            self.under_way -= 1

    def _started(self) -> Any:
        """The pool, made with the first question: processes cost a second and memory."""
        if self._pool is None:
            from multiprocessing import get_context

            offline = not any(HUB_ID.match(name) for name in self.settings.allow)
            count, context = self.settings.workers, get_context("spawn")
            self._pool = ProcessPool(count, initializer=apart, initargs=(offline,), context=context)
        return self._pool

    def close(self) -> None:
        """End every process."""
        if self._pool is not None:
            self._pool.stop()
            with contextlib.suppress(TimeoutError):
                self._pool.join(timeout=5)
