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

from ..datasets.ops import KINDS
from .environment import clocks, core_ids, default_threads, environment, free_memory_bytes
from .plan import Case, Settings

if TYPE_CHECKING:
    from .collectives import Group
    from .timer import Timing

COLLECTIVES = frozenset(name for name, kind in KINDS.items() if kind.collective)
PR_SET_PDEATHSIG = 1
SHARE_OF_FREE_MEMORY = 0.9
MEMORY_WORDS = ("can't allocate memory", "not enough memory", "bad_alloc", "out of memory")


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
    for request in requests:
        if "probe" in request:
            _reply(replies, _probe())
            continue
        reply = outcome(Case.from_dict(request["case"]), settings, group)
        _reply(replies, reply)
        if reply.get("ill"):
            os._exit(1)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux); end now when it already has."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
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
    wanted = used + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _group(settings: Settings, ranks: int) -> Group | None:
    if ranks < 2:
        return None
    from .collectives import Group

    return Group.local(settings, ranks)


def abilities(settings: Settings, group: Group | None) -> dict[str, Any]:
    """Provenance columns, and the link and ranks per node of collectives; ValueError when the device is not here."""
    import torch

    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("settings.device=cuda, but torch finds no CUDA device here: use device=cpu or fix the driver")
    found: dict[str, Any] = environment(settings.device, settings.threads)
    return {**found, "link": group.link if group else "", "ranks_per_node": group.ranks_per_node if group else 1}


def _probe() -> dict[str, Any]:
    from .probe import measure_cpu

    try:
        return {"device": measure_cpu().to_dict()}
    except Exception as error:
        return {"error": first_line(error)}


def outcome(case: Case, settings: Settings, group: Group | None = None) -> dict[str, Any]:
    """The measured columns of a case's row. Whatever it raises becomes a status; ``ill`` marks a broken process."""
    try:
        return _measure(case, settings, group)
    except Exception as error:
        status = _status(error)
        reply = {"status": status, "error": first_line(error)}
        ill = status == "error" and (case.op.kind in COLLECTIVES or _is_ill(settings.device))
        return {**reply, "ill": True} if ill else reply
    finally:
        _release(settings.device)


def _measure(case: Case, settings: Settings, group: Group | None) -> dict[str, Any]:
    if case.op.kind in COLLECTIVES:
        timing = _measure_collective(case, group)
    else:
        from .cases import prepare
        from .timer import measure

        timing = measure(
            prepare(case.op, case.backend, settings.device, settings.seed),
            cache=case.cache,
            ci_width=settings.ci_width,
            budget_s=settings.case_budget_s,
            clocks=(lambda: clocks("cuda")) if settings.device == "cuda" else None,
        )
    seen = clocks(settings.device)
    return {
        "status": "ok",
        **{name: value for name, value in timing.columns().items() if name != "cache"},
        "sm_clock_mhz": seen.sm_clock_mhz,
        "mem_clock_mhz": seen.mem_clock_mhz,
        "temperature_c": seen.temperature_c,
        "power_w": seen.power_w,
    }


def _measure_collective(case: Case, group: Group | None) -> Timing:
    from .cases import Unsupported

    if group is None:
        raise Unsupported(f"{case.op.kind} wants {case.op.ranks} ranks, this machine has no second device")
    return group.measure(case)


def _status(error: BaseException) -> str:
    """oom, unsupported or error: by what was raised, or by what that was raised from."""
    import torch

    from .cases import Unsupported

    chain = [error, *(cause for cause in (error.__cause__, error.__context__) if cause)]
    for part in chain:
        memory = any(word in str(part) for word in MEMORY_WORDS)
        if isinstance(part, (torch.OutOfMemoryError, MemoryError)) or (isinstance(part, RuntimeError) and memory):
            return "oom"
    return "unsupported" if isinstance(error, Unsupported) else "error"


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    from .cases import Unsupported

    line = (str(error).strip().splitlines() or [""])[0][:300]
    return line if isinstance(error, Unsupported) else f"{type(error).__name__}: {line}"


def _is_ill(device: str) -> bool:
    """Whether the CUDA context is beyond use, as after an illegal memory access."""
    if device != "cuda":
        return False
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _release(device: str) -> None:
    """Free what the case held. What has survived a collection is not looked at again: torch alone takes 0.1 s."""
    gc.collect()
    gc.freeze()
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
