"""A child process that measures, seen from the campaign: started, asked, watched, killed and replaced.

The child runs :mod:`.worker` and speaks JSON lines over its pipes. It may crash, hang or be killed for want of
memory: :meth:`Supervisor.ask` always comes back, with what was measured or with what became of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import IO, Any

from .compiling import compiled_module
from .environment import child_environment
from .ledger import CampaignError
from .plan import Case, Settings

WORKER = ("-m", f"{__package__}.worker")
STARTS_BEFORE_GIVING_UP = 3
CLOSE_S = 10.0  # a killed process that is not gone by then is held by its driver: nobody waits for it
CHECK_AGAIN_S = 5.0  # a device that was reset takes a moment
STDERR_TAIL_BYTES = 4000
STOP = object()


class InterruptError(Exception):
    """The campaign was told to stop while it waited for the worker."""


@dataclass(frozen=True)
class _Line:
    """A line from a child, or None when its output ended."""

    child: int
    text: bytes | None


class Supervisor:
    """One worker at a time, started when needed. Call it from the thread that made it, which must outlive it:
    Linux kills the worker when that thread ends.

    ``restarts`` counts workers that had to be replaced. ``worker`` is what Python runs: a module or a script that
    ends in :func:`.worker.main`, given this process's id.
    """

    def __init__(self, settings: Settings, ranks: int = 1, worker: Sequence[str] = WORKER) -> None:
        self.settings = settings
        self.ranks = ranks
        self.worker = tuple(worker)
        self.restarts = 0
        self.environment: dict[str, Any] = {}
        self.left_behind: list[int] = []  # processes that outlive SIGKILL
        self._hopeless = ""
        self._compiled: set[tuple[Any, ...]] = set()
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def interrupt(self) -> None:
        """Make a waiting :meth:`ask` or :meth:`start` raise InterruptError. Safe in a signal handler."""
        self._inbox.put(STOP)

    def start(self) -> dict[str, Any]:
        """Provenance columns and abilities of a ready worker, whose device has passed its check.

        CampaignError when none comes up, or when the device does not compute, several times over.
        """
        if self._process is not None:
            return self.environment
        if self._hopeless:
            raise CampaignError(self._hopeless)
        for number in range(STARTS_BEFORE_GIVING_UP):
            self._spawn()
            reply = self._exchange(self._greeting(), self.settings.start_timeout_s)
            if isinstance(reply, _Loss):
                self._hopeless = f"the worker does not start: {reply.detail}{self._held_words()}"
            elif refusal := reply.get("refused"):
                raise CampaignError(refusal)
            elif ill := reply.get("ill"):
                self.close()
                self._hopeless = (
                    f"the GPU does not compute ({ill}): reset it (nvidia-smi --gpu-reset) or take another, then run "
                    f"the same command again: it measures the rest{self._held_words()}"
                )
                if number + 1 < STARTS_BEFORE_GIVING_UP:
                    self._pause(CHECK_AGAIN_S)
            else:
                self.environment, self._hopeless = reply, ""
                return reply
        raise CampaignError(self._hopeless)

    def _held_words(self) -> str:
        pids = ", ".join(map(str, self.left_behind))
        return f"; the driver still holds process {pids}" if pids else ""

    def _pause(self, seconds: float) -> None:
        """Wait, but raise InterruptError at once when the campaign is to stop."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(Empty):
            while self._inbox.get(timeout=max(0.0, deadline - time.monotonic())) is not STOP:
                pass
            raise InterruptError

    def ask(self, case: Case, lost: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
        """What became of a case: the row's measured columns, ``status`` among them. Raises InterruptError.

        ``died`` among them marks a case that ended its worker. On a GPU the next worker is then started at once, and
        ``device_healthy`` says whether the device passes its check there: whose failure it was.
        ``lost`` is never called: whatever becomes of the worker, this process goes on.
        """
        self.start()
        reply = self._compile(case) or self._exchange({"case": case.to_dict()}, self.settings.case_timeout_s)
        if isinstance(reply, _Loss):
            reply = {"status": reply.status, "error": reply.detail, "died": True}
        else:
            ill, worn = reply.pop("ill", ""), reply.pop("worn", "")
            if not ill and not worn:
                return reply
            self.close()
            reply.update({"died": True} if ill else {})
        self.restarts += 1
        if reply.get("died") and self.settings.device != "cpu":
            reply["device_healthy"] = self._recovers()
        return reply

    def _compile(self, case: Case) -> _Loss | None:
        """Have a kernel compiled that its package compiles at the first call, once; how the worker was lost over it."""
        module = compiled_module(case)
        if module is None or module in self._compiled:
            return None
        self._compiled.add(module)
        reply = self._exchange({"compile": case.to_dict()}, self.settings.compile_timeout_s)
        return reply if isinstance(reply, _Loss) else None

    def _recovers(self) -> bool:
        """Whether a new worker comes up and its device passes the check; the next call says what is wrong if not."""
        try:
            self.start()
        except CampaignError:
            return False
        except InterruptError:
            self.interrupt()
            return False
        return True

    def probe(self) -> dict[str, Any]:
        """The figures of the device, measured by the worker; CampaignError when that fails."""
        self.start()
        reply = self._exchange({"probe": True}, self.settings.start_timeout_s)
        if isinstance(reply, _Loss) or "device" not in reply:
            detail = reply.detail if isinstance(reply, _Loss) else reply.get("error", "")
            raise CampaignError(f"this machine's figures could not be measured: {detail}")
        return reply["device"]

    def close(self) -> None:
        """Kill the worker and all that it started, and wait for its end, :data:`CLOSE_S` at most."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        if _wait(self._process) is None:
            self.left_behind.append(self._process.pid)
        for stream in (self._process.stdin, self._stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._process = None

    def _greeting(self) -> dict[str, Any]:
        return {"settings": vars(self.settings), "ranks": self.ranks}

    def _spawn(self) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        self._process = subprocess.Popen(
            [sys.executable, "-P", *self.worker, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=child_environment(self.settings.threads),
            start_new_session=True,
        )
        threading.Thread(target=_read, args=(self._process, self._inbox), daemon=True).start()

    def _exchange(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any] | _Loss:
        """The worker's answer, or how it was lost; a lost worker is dead and buried afterwards."""
        assert self._process is not None
        process = self._process
        with contextlib.suppress(BrokenPipeError):  # its death shows as the end of its output
            assert process.stdin is not None
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                item = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                detail = f"no answer within {timeout_s:g} s: killed"
                self.close()
                return _Loss("timeout", detail)
            if item is STOP:
                self.close()
                raise InterruptError
            if item.child != process.pid:
                continue
            if item.text is None:
                return self._loss(process)
            return json.loads(item.text)

    def _loss(self, process: subprocess.Popen[bytes]) -> _Loss:
        code = _wait(process)
        words = self._last_words()
        self.close()
        if code is None:
            return _Loss(
                "error", f"the worker closed its output but did not end: killed{': ' + words if words else ''}"
            )
        if code == -signal.SIGKILL:
            return _Loss("oom", "killed by SIGKILL: the kernel does that when memory runs out")
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return _Loss("error", f"the worker {how}{': ' + words if words else ''}")

    def _last_words(self) -> str:
        """The last line that the worker left on stderr, leaving out the stack that faulthandler prints."""
        assert self._stderr is not None
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - STDERR_TAIL_BYTES))
        lines = self._stderr.read().decode(errors="replace").splitlines()
        stack = next((i for i, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
        printed = [line.strip() for line in lines[: None if stack is None else stack + 1] if line.strip()]
        return printed[-1][:300] if printed else ""


@dataclass(frozen=True)
class _Loss:
    """How a worker was lost: the status for the case that it was at, and the words for its row."""

    status: str
    detail: str


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    """The exit code of an ending process; None when the kernel has not let it go after :data:`CLOSE_S`."""
    try:
        return process.wait(CLOSE_S)
    except subprocess.TimeoutExpired:
        return None


def _read(process: subprocess.Popen[bytes], inbox: SimpleQueue[Any]) -> None:
    assert process.stdout is not None
    with process.stdout as stream:
        for line in stream:
            inbox.put(_Line(process.pid, line))
    inbox.put(_Line(process.pid, None))
