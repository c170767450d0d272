"""The process in which cases run: ``python -P -m opcast.harness.worker``, started by :mod:`.supervisor`.

JSON lines: the first names the settings and is answered with the environment; each further one is a case and is
answered with the measured columns of its row. What a case does to this process is no matter: it is replaceable.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

from .environment import core_ids, default_threads, free_memory_bytes
from .measuring import IllDeviceError, abilities, die_with, first_line, measured_figures, outcome
from .plan import Case, Settings

if TYPE_CHECKING:
    from .collectives import RankGroup

SHARE_OF_FREE_MEMORY = 0.9


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    die_with(int(sys.argv[1]))
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, replies = _channel()
    greeting = next(requests)
    settings = Settings.from_dict(greeting["settings"])
    _take_place(settings, greeting["ranks"])
    group = None
    try:
        group = _group(settings, greeting["ranks"])
        _reply(replies, abilities(settings, group))
    except ValueError as error:
        _reply(replies, {"refused": str(error)})
        return
    except IllDeviceError as error:
        _reply(replies, {"ill": str(error)})
        return
    for request in requests:
        if "probe" in request:
            _reply(replies, _probe(settings.device))
            continue
        if "compile" in request:
            outcome(Case.from_dict(request["compile"]), settings, group)  # measured again: what went wrong will, too
            _reply(replies, {})
            continue
        reply = outcome(Case.from_dict(request["case"]), settings, group)
        _reply(replies, reply)
        if reply.get("ill") or reply.get("worn"):
            os._exit(1)


def _channel() -> tuple[Iterator[dict[str, Any]], IO[bytes]]:
    """Requests and the stream for replies. What libraries print goes to stderr instead of between the replies."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return (json.loads(line) for line in sys.stdin.buffer), replies


def _reply(stream: IO[bytes], message: Mapping[str, Any]) -> None:
    stream.write(json.dumps(message).encode() + b"\n")


def _take_place(settings: Settings, ranks: int) -> None:
    """Bind to one logical processor per thread, before torch makes its threads; limit memory; set torch up.

    A process with other ranks beside it stays free to move.
    """
    threads = settings.threads or default_threads()
    cores = core_ids()
    alone = settings.device == "cpu" and ranks < 2
    if settings.pin and alone and hasattr(os, "sched_setaffinity") and threads <= len(cores):
        os.sched_setaffinity(0, cores[:threads])
    import torch

    from . import cases, timer  # noqa: F401 - now, not within the first case's time

    torch.set_num_threads(threads)
    torch.manual_seed(settings.seed)
    gc.freeze()
    if alone:
        limit_memory(settings.max_bytes or int(SHARE_OF_FREE_MEMORY * free_memory_bytes("cpu")))


def limit_memory(more_bytes: int) -> None:
    """Let this process take at most so many bytes more, so that a case fails instead of the machine (Linux)."""
    if sys.platform != "linux":
        return
    import resource

    with open("/proc/self/status") as file:
        used = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData:"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _group(settings: Settings, ranks: int) -> RankGroup | None:
    if ranks < 2:
        return None
    from .collectives import RankGroup

    return RankGroup.local(settings, ranks)


def _probe(device: str) -> dict[str, Any]:
    try:
        return {"device": measured_figures(device)}
    except Exception as error:
        return {"error": first_line(error)}


if __name__ == "__main__":
    main()
