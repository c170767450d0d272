"""Ranks that replay a trace together: children on this machine, or torchrun's.

    torchrun --nnodes 2 --nproc-per-node 8 -m opcast.jobs.cli trace replay path=DIR target=cuda

Each child reads its plan, a JSON file, and writes what it measured beside it. When one ends with an error, all do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..datasets.traces.calls import TraceCall
from .collecting import export
from .environment import child_environment, free_memory_bytes, torchrun_rank, use_loopback
from .measuring import die_with

POLL_S = 0.05
LIMIT = timedelta(minutes=10)


class ReplayError(ValueError):
    """A replay that cannot be done. The message says why."""


@dataclass(frozen=True)
class ReplaySettings:
    """How to replay. ``against``: (back end, dtype) that collectives are compared with; empty for none of both."""

    device: str = "cpu"
    lazy: bool = False
    warmup: int = 1
    iterations: int = 5
    against: tuple[str, str] | None = None
    profile: str = ""
    threads: int = 0


def replay(calls: Mapping[int, Sequence[TraceCall]], settings: ReplaySettings) -> dict[int, dict[str, Any]]:
    """Replay the calls of each rank together; what each measured (:func:`.replay.result`).

    Under torchrun this process is one of the ranks, and its own result alone comes back. ReplayError when a rank fails.
    """
    refuse_more_than_memory(calls, settings)
    torchrun_place = torchrun_rank()
    if torchrun_place is not None:
        rank, world, local = torchrun_place
        if world != len(calls):
            raise ReplayError(f"torchrun started {world} ranks, the replay has {len(calls)}: ranks={world}")
        if world == local:
            use_loopback()
        return {rank: run_rank(calls[rank], settings, rank, world, groups_of(calls), None)}
    with tempfile.TemporaryDirectory(prefix="opcast-replay-") as folder:
        return _children(calls, settings, Path(folder))


def refuse_more_than_memory(calls: Mapping[int, Sequence[TraceCall]], settings: ReplaySettings) -> None:
    """ReplayError where buffers of collectives and messages are more than this machine has free, before any rank
    begins: one that is killed for its memory would keep the others waiting."""
    if settings.device != "cpu":
        return
    needed = 0
    for rank_calls in calls.values():
        sizes = [call.size_bytes * (len(call.ranks) if call.collective == "all_gather" else 1)
                 for call in rank_calls if call.communicates]  # fmt: skip
        needed += 2 * (max(sizes, default=0) if settings.lazy else sum(sizes))
    free = free_memory_bytes("cpu")
    if needed > free:
        raise ReplayError(f"collectives and messages need {needed / 2**30:,.1f} GiB, {free / 2**30:,.1f} GiB "
                          "are free: nodes=[first,last] takes a part, tensors=lazy one call at a time")  # fmt: skip


def groups_of(calls: Mapping[int, Sequence[TraceCall]]) -> list[tuple[int, ...]]:
    """Every group of two ranks or more that a collective runs in, in one order for all ranks."""
    groups = {tuple(sorted(call.ranks)) for rank_calls in calls.values() for call in rank_calls if len(call.ranks) > 1}
    return sorted(groups)


def _children(
    calls: Mapping[int, Sequence[TraceCall]], settings: ReplaySettings, folder: Path
) -> dict[int, dict[str, Any]]:  # fmt: skip
    from torch.distributed import TCPStore

    use_loopback()
    world, groups = len(calls), groups_of(calls)
    store = TCPStore("127.0.0.1", 0, world + 1, is_master=True, wait_for_workers=False)
    children: dict[int, subprocess.Popen[bytes]] = {}
    for rank, rank_calls in calls.items():
        plan = {"settings": asdict(settings), "rank": rank, "world": world, "port": store.port, "groups": groups,
                "calls": [asdict(call) for call in rank_calls]}  # fmt: skip
        path = folder / f"plan.{rank}.json"
        path.write_text(json.dumps(plan))
        command = [sys.executable, "-P", "-m", f"{__package__}.replaying", str(os.getpid()), str(path)]
        with open(folder / f"said.{rank}", "wb") as output:
            children[rank] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output,
                                              stderr=output, env=child_environment(settings.threads))  # fmt: skip
    try:
        _wait(children, folder)
    finally:
        for child in children.values():
            child.kill()
            child.wait()
    del store
    return {rank: json.loads((folder / f"result.{rank}.json").read_text()) for rank in calls}


def _wait(children: Mapping[int, subprocess.Popen[bytes]], folder: Path) -> None:
    """Until all have ended. ReplayError with the last line of the first that failed."""
    while any(child.poll() is None for child in children.values()):
        if failed := [rank for rank, child in children.items() if child.poll() not in (None, 0)]:
            raise ReplayError(_last_word(folder, failed[0], children[failed[0]].returncode))
        time.sleep(POLL_S)
    for rank, child in children.items():
        if child.returncode:
            raise ReplayError(_last_word(folder, rank, child.returncode))


def _last_word(folder: Path, rank: int, code: int) -> str:
    lines = (folder / f"said.{rank}").read_text(errors="replace").strip().splitlines()
    return f"rank {rank} of the replay ended with code {code}: {lines[-1][:200] if lines else 'it said nothing'}"


def run_rank(
    calls: Sequence[TraceCall], settings: ReplaySettings, rank: int, world: int, groups: Sequence[tuple[int, ...]],
    port: int | None,
) -> dict[str, Any]:  # fmt: skip
    """One rank's part, in this process. ``port``: where the parent's store is; None under torchrun."""
    import torch
    import torch.distributed as dist

    from .collective_calls import CALLS
    from .replay import Replayer, accuracy, collective_op, result

    if settings.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    elif settings.threads:
        torch.set_num_threads(settings.threads)
    both = "cpu:gloo,cuda:nccl" if settings.device == "cuda" else "gloo"
    process_groups: dict[tuple[int, ...], Any] = {}
    if world > 1:
        store = dist.TCPStore("127.0.0.1", port, world + 1, is_master=False) if port is not None else None
        dist.init_process_group(both, store=store, rank=rank, world_size=world, timeout=LIMIT)
        process_groups = {members: dist.new_group(list(members), timeout=LIMIT) for members in groups}
    replayer = Replayer(settings.device, settings.lazy, process_groups, rank)
    ready = replayer.ready(calls)
    for _ in range(settings.warmup):
        replayer.once(ready, False)
    walls = [replayer.once(ready, True) for _ in range(settings.iterations)]
    report = result(ready, walls)
    if settings.profile:
        _profiled(lambda: replayer.once(ready, False), Path(settings.profile), rank, settings.device)
    if settings.against and world > 1:
        backend, dtype = settings.against
        usual = "nccl" if settings.device == "cuda" else "gloo"
        device = "cpu" if backend == "gloo" else settings.device
        others = process_groups if backend in ("", usual) else {
            members: dist.new_group(list(members), backend=backend, timeout=LIMIT) for members in groups
        }  # fmt: skip
        ops = {(collective_op(entry.call), tuple(sorted(entry.call.ranks))): None for entry in ready
               if entry.call.collective in CALLS and not entry.why}  # fmt: skip
        report["accuracy"] = accuracy(list(ops), rank, (process_groups, others), (settings.device, device), dtype)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    return report


def _profiled(run: Any, folder: Path, rank: int, device: str) -> None:
    """One more run under PyTorch's profiler: ``FOLDER/profile.RANK.json``."""
    from torch.profiler import ProfilerActivity, profile

    folder.mkdir(parents=True, exist_ok=True)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=kinds, record_shapes=True) as recorded:
        run()
    export(recorded, folder / f"profile.{rank}.json", rank)


def _call(fields: Mapping[str, Any]) -> TraceCall:
    """A call as it was before it became JSON."""
    arguments: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return TraceCall(**arguments)


def main(arguments: Sequence[str]) -> int:
    """A child of :func:`replay`: its parent's process id and its plan."""
    die_with(int(arguments[0]))
    use_loopback()
    path = Path(arguments[1])
    plan = json.loads(path.read_text())
    fields = plan["settings"]
    fields["against"] = tuple(fields["against"]) if fields["against"] else None
    calls = [_call(call) for call in plan["calls"]]
    groups = [tuple(group) for group in plan["groups"]]
    report = run_rank(calls, ReplaySettings(**fields), plan["rank"], plan["world"], groups, plan["port"])
    path.with_name(f"result.{plan['rank']}.json").write_text(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
