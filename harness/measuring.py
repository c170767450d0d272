"""What becomes of one case in the process at hand: the measured columns of its row, whatever it raises.

Run by the replaceable process of a campaign (:mod:`.worker`) and by each of torchrun's ranks (:mod:`.collectives`).
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ..datasets.ops import KINDS
from .accelerator import best_format
from .environment import clocks, energy_j, environment
from .plan import Case, Settings
from .provenance import gpu_facts

if TYPE_CHECKING:
    from .rank_map import RankMap
    from .timer import Timing

PR_SET_PDEATHSIG = 1
MEMORY_WORDS = ("can't allocate memory", "not enough memory", "bad_alloc", "out of memory")


class NoMemoryError(MemoryError):
    """A rank has not enough memory for a collective. All of its ranks know, and none of them has begun it."""


class Ranks(Protocol):
    """What measures collectives: rank 0 of a group."""

    ranks_per_node: int
    rank_map: RankMap
    placement: Mapping[str, Any]

    @property
    def link(self) -> str:
        """The slowest link that all ranks together cross."""

    def measure(self, case: Case) -> Timing:
        """Time one case on its ranks."""


def abilities(settings: Settings, group: Ranks | None) -> dict[str, Any]:
    """Provenance columns, the ``format`` that a GPU has units for, and link, ranks per node, placement of collectives.

    Raises ValueError when the device is not here, IllDeviceError when it is but does not compute.
    """
    import torch

    if settings.device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                "settings.device=cuda, but torch finds no CUDA device here: use device=cpu or fix the driver"
            )
        check_device()
    columns: dict[str, Any] = environment(settings.device, settings.threads)
    if settings.device == "cuda":
        columns |= gpu_facts() | {"format": best_format(torch.cuda.get_device_properties(torch.cuda.current_device()))}
    if group is None:
        return {**columns, "link": "", "ranks_per_node": 1}
    of_group = {"link": group.link, "ranks_per_node": group.ranks_per_node, "rank_map": group.rank_map.to_dict()}
    return {**columns, **of_group, "placement": group.placement}


def measured_figures(device: str) -> dict[str, Any]:
    """The figures of the ``cpu`` or ``cuda`` device at hand, as a Device's fields."""
    if device == "cpu":
        from .probe import measure_cpu
        from .reuse import HOW, measure_reuse

        figures = measure_cpu().to_dict()
        return figures | {"reuse": measure_reuse(), "sources": {**figures["sources"], "reuse": HOW}}
    from .probe_gpu import measure_gpu

    return measure_gpu().to_dict()


class IllDeviceError(RuntimeError):
    """The GPU is there, but a small sum on it fails or is wrong."""


CHECKED = 4096  # elements whose sum says whether a device computes


def check_device() -> None:
    """Have the current CUDA device add up a few ones; IllDeviceError when it does not come to their number."""
    import torch

    try:
        total = float(torch.ones(CHECKED, device="cuda").sum())
    except RuntimeError as error:
        raise IllDeviceError(first_line(error)) from error
    if total != CHECKED:
        raise IllDeviceError(f"{CHECKED} ones add up to {total:g}")


def outcome(case: Case, settings: Settings, group: Ranks | None = None) -> dict[str, Any]:
    """The measured columns of a case's row. Whatever it raises becomes a status.

    Beside them ``ill`` says why this process cannot go on and its device is in doubt, ``worn`` why another process
    should go on, though nothing is wrong with the device. What was measured before that is kept.
    """
    try:
        columns = _measure(case, settings, group)
    except Exception as error:
        status = _status(error)
        columns = {"status": status, "error": first_line(error)}
        if KINDS[case.op.kind].collective:
            ill = status != "unsupported" and not isinstance(error, NoMemoryError)  # ranks are in different places
        else:
            ill = status == "error" and _is_ill(settings.device)
        if ill:
            columns["ill"] = columns["error"]
    if trouble := _release(settings.device):
        columns.setdefault("ill", trouble)
    if settings.device == "cuda":
        from .cuda_timer import FAILED_CAPTURES

        if FAILED_CAPTURES:
            columns["worn"] = f"a capture failed: {FAILED_CAPTURES[-1]}"
    return columns


def _measure(case: Case, settings: Settings, group: Ranks | None) -> dict[str, Any]:
    kernel = None
    if KINDS[case.op.kind].collective:
        timing = _measure_collective(case, group)
    else:
        from .cases import prepare
        from .timer import measure

        prepared = prepare(case.op, case.backend, settings.device, settings.seed)
        kernel = prepared.kernel
        timing = measure(
            prepared,
            cache=case.cache,
            ci_width=settings.ci_width,
            budget_s=settings.case_budget_s,
            clocks=(lambda: clocks("cuda")) if settings.device == "cuda" else None,
            energy_j=energy_j if settings.device == "cuda" else None,
            energy_s=settings.energy_s,
        )
    reading = clocks(settings.device)
    return {
        "status": "ok",
        **{name: value for name, value in timing.columns().items() if name != "cache"},
        "kernel": kernel,
        "sm_clock_mhz": timing.sm_clock_mhz or reading.sm_clock_mhz,
        "mem_clock_mhz": reading.mem_clock_mhz,
        "temperature_c": reading.temperature_c,
    }


def _measure_collective(case: Case, group: Ranks | None) -> Timing:
    from .cases import Unsupported

    if group is None:
        raise Unsupported(f"{case.op.kind} wants {case.op.ranks} ranks, this machine has no second device")
    return group.measure(case)


def _status(error: BaseException) -> str:
    """oom, unsupported or error: by what was raised, or by what that was raised from."""
    import torch

    from .cases import Unsupported

    chain = [error, *(cause for cause in (error.__cause__, error.__context__) if cause)]
    for link in chain:
        memory = any(word in str(link) for word in MEMORY_WORDS)
        if isinstance(link, (torch.OutOfMemoryError, MemoryError)) or (isinstance(link, RuntimeError) and memory):
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


def _release(device: str) -> str:
    """Free what the case held; what the device said when it could not be freed, else nothing.

    What has survived a collection is not looked at again: torch alone takes 0.1 s.
    """
    gc.collect()
    gc.freeze()
    if device != "cuda":
        return ""
    import torch

    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:  # after a sticky error every call raises it again
        return first_line(error)
    return ""


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux); end now when it already has."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
