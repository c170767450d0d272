"""Collectives between ranks: every kind of the family over nccl or gloo, by nccl-tests' conventions.

A :class:`RankGroup` holds the ranks. A campaign makes a local one (its worker is rank 0 and starts the others); on
several nodes torchrun starts the same ranks::

    torchrun --nnodes 2 --nproc-per-node 8 -m opcast.harness.collectives PLAN.json STORE

``size_bytes`` is the buffer that nccl-tests reports for the collective. The ranks of a case are the first ones of one
node, or as many of each of several nodes (:mod:`.rank_map`). One sample is a block of back-to-back calls after an
untimed one that aligns the ranks: each rank's mean per call, then the maximum over the ranks. ``latency_us`` is the
median of these over the blocks. The calls are the ones that torch has: all_reduce and broadcast in place, the others
from one buffer to another; the backends
``nccl:inplace`` and ``gloo:inplace`` run all_gather and reduce_scatter in place, as nccl-tests' second column.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, TCPStore

from .cases import Unsupported, refusals
from .collective_calls import CallSetting, ReadyCollective
from .collective_timer import make_block
from .collective_variants import Variant, variant
from .command import execute, refuse
from .compiling import compiled_module
from .deep_ep_calls import BUFFERS, buffer_key
from .environment import (
    clocks,
    gloo_words,
    machine_name,
    threads_beside,
    torchrun_rank,
    use_loopback,
    use_route_to_master,
)
from .ledger import CampaignError
from .measuring import IllDeviceError, NoMemoryError, abilities, die_with, first_line, measured_figures, outcome
from .placement import here, node_facts, placement, rank_map
from .plan import CampaignPlan, Case, Settings
from .rank_map import RankMap
from .stopping import MedianWidth
from .supervisor import InterruptError
from .timer import Timing, collect, summarise

BLOCK_US = 2000.0
MOST_CALLS = 20  # in a block: nccl-tests' default number of iterations
WARMUP_CALLS = 5  # nccl-tests' default
GRACE_S = 3.0
IDLE = timedelta(days=7)
Members = tuple[int, ...]


def device_of(local_rank: int, local_ranks: int, visible: int) -> int:
    """The device of a rank among those that it sees: all of the node's, or its own alone as Slurm may show them.

    CampaignError when there are several, but fewer than ranks.
    """
    if visible == 1:
        return 0
    if visible < local_ranks:
        raise CampaignError(
            f"{local_ranks} ranks on a node whose tasks see {visible} GPUs each: start one rank for each GPU, "
            "and show it all of its node's (srun --gpus-per-node=8 --gpu-bind=none)"
        )
    return local_rank


# --- the group -----------------------------------------------------------------------------------------


@dataclass
class RankGroup:
    """Ranks that wait for cases from rank 0 and run them together.

    Only rank 0 calls :meth:`measure`; every other rank is in :meth:`serve`.
    """

    settings: Settings
    rank: int
    ranks: int
    ranks_per_node: int
    control: ProcessGroup
    rank_map: RankMap
    placement: Mapping[str, Any]
    groups: dict[tuple[Members, str], tuple[ProcessGroup, ProcessGroup]] = field(default_factory=dict, init=False)

    @property
    def link(self) -> str:
        """The slowest link that all ranks together cross."""
        return self.rank_map.link(range(self.ranks))

    @classmethod
    def local(cls, settings: Settings, ranks: int) -> RankGroup | None:
        """This process as rank 0 and ``ranks`` - 1 children, fewer when there are not so many GPUs.

        None when that leaves one. This process ends when one of the children does.
        """
        if settings.device == "cuda":
            ranks = min(ranks, torch.cuda.device_count())
        if ranks < 2:
            return None
        use_loopback()
        store = TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
        for rank in range(1, ranks):
            rank_setup = {"settings": vars(settings), "port": store.port, "rank": rank, "ranks": ranks}
            command = [sys.executable, "-P", "-m", f"{__package__}.collectives", "--peer", str(os.getpid())]
            peer = subprocess.Popen(
                [*command, json.dumps(rank_setup)], stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno()
            )
            threading.Thread(target=_end_with, args=(peer,), daemon=True).start()
        return cls._join(settings, 0, ranks, store)

    @classmethod
    def peer(cls, rank_setup: dict[str, Any]) -> RankGroup:
        """A child of the process that called :meth:`local`."""
        use_loopback()
        rank, ranks = rank_setup["rank"], rank_setup["ranks"]
        store = TCPStore("127.0.0.1", rank_setup["port"], ranks, is_master=False)
        settings = Settings.from_dict(rank_setup["settings"])
        return cls._join(settings, rank, ranks, store)

    @classmethod
    def torchrun(cls, settings: Settings, rank: int, ranks: int, local_ranks: int) -> RankGroup:
        """This process as one of torchrun's ranks. CampaignError when they do not reach each other."""
        use_loopback() if ranks == local_ranks else use_route_to_master()
        return cls._join(settings, rank, ranks, None)

    @classmethod
    def _join(cls, settings: Settings, rank: int, ranks: int, store: Any) -> RankGroup:
        """Which ranks share a node is asked of them all: a launcher that starts each alone does not say."""
        control, nodes = _meet(settings, rank, ranks, store)
        beside = [other for other, node in enumerate(nodes) if node == nodes[rank]]
        if rank or settings.device == "cuda":
            torch.set_num_threads(threads_beside(settings.threads, len(beside)))
        if settings.device == "cuda":
            torch.cuda.set_device(device_of(beside.index(rank), len(beside), torch.cuda.device_count()))
        answers: list[Any] = [None] * ranks
        facts = node_facts(settings.device) if rank == beside[0] else {}
        dist.all_gather_object(answers, (here(settings.device), facts), group=control)
        ranks_of = rank_map(nodes, answers, settings)
        return cls(settings, rank, ranks, len(beside), control, ranks_of, placement(answers))

    def measure(self, case: Case) -> Timing:
        """Time one case on its ranks. Raises Unsupported or NoMemoryError where the ranks agree that it cannot run.

        Anything else was raised inside the collective: the other ranks wait there, and the group is of no use any more.
        """
        if case.op.ranks > self.ranks:
            raise Unsupported(f"{case.op.kind} wants {case.op.ranks} ranks, here are {self.ranks}")
        self._broadcast(case.to_dict(), self.control)
        timing = self._run(case)
        assert timing is not None
        return timing

    def serve(self) -> None:
        """Take part in every case until rank 0 closes the group. An error in a collective ends this process."""
        while (fields := self._broadcast(None, self.control)) is not None:
            case = Case.from_dict(fields)
            with contextlib.suppress(Unsupported, NoMemoryError):
                self._run(case)
        self._leave()

    def close(self) -> None:
        """Release the other ranks; on rank 0."""
        self._broadcast(None, self.control)
        self._leave()

    def _leave(self) -> None:
        BUFFERS.make_way()
        dist.destroy_process_group()

    def _broadcast(self, value: Any, group: ProcessGroup) -> Any:
        box = [value]
        dist.broadcast_object_list(box, 0, group=group)
        return box[0]

    def _agree(self, problem: Exception | None, group: ProcessGroup, ranks: int) -> None:
        """Raise on every rank what one of them met: Unsupported, or NoMemoryError for anything else."""
        mine = (isinstance(problem, Unsupported), str(problem).splitlines()[0]) if problem else None
        problems: list[Any] = [None] * ranks
        dist.all_gather_object(problems, mine, group=group)
        for unsupported, text in filter(None, problems):
            raise Unsupported(text) if unsupported else NoMemoryError(text)

    def _group(self, members: Members, backend: str) -> tuple[ProcessGroup, ProcessGroup]:
        """These ranks: a group for data and one for control. Every rank must call this."""
        if (members, backend) not in self.groups:
            limit = timedelta(seconds=2 * self.settings.case_timeout_s)
            data = dist.new_group(list(members), backend=backend, timeout=limit)
            self.groups[members, backend] = data, dist.new_group(list(members), backend="gloo", timeout=IDLE)
        return self.groups[members, backend]

    def _members(self, case: Case) -> Members:
        """The ranks of a case, rank 0 among them; the first ones where a planned spread is none of these nodes'."""
        ranks = case.op.ranks
        return self.rank_map.members(ranks, case.op.ranks_per_node) or tuple(range(ranks))

    def _run(self, case: Case) -> Timing | None:
        """This rank's part of a case, and on rank 0 the result. Ranks beyond the case's return at once."""
        way = self._way(case)
        members = self._members(case)
        data, control = self._group(members, "nccl" if self.settings.device == "cuda" else "gloo")
        if case.backend.startswith("deep_ep"):
            BUFFERS.make_way(buffer_key(case.op, members, case.backend))
        if self.rank not in members:
            return None
        ready_call: ReadyCollective | None = None
        problem: Exception | None = None
        member = members.index(self.rank)
        try:
            with refusals():
                ready_call = way.build(CallSetting(case.op, data, member, self.settings.device, control=control))
        except (Unsupported, MemoryError, torch.OutOfMemoryError) as error:
            problem = error
        self._agree(problem, control, case.op.ranks)
        assert ready_call is not None
        return self._time(case, ready_call, control)

    def _way(self, case: Case) -> Variant:
        """How the case is run; Unsupported where every rank can tell by itself that it is not."""
        way = variant(case.op, case.backend, self.settings.device)
        if case.cache != "warm":
            raise Unsupported("collectives are measured warm")
        if case.op.ranks < 2:
            raise Unsupported("a collective needs at least 2 ranks")
        return way

    def _time(self, case: Case, ready_call: ReadyCollective, control: ProcessGroup) -> Timing | None:
        """Blocks of calls on every rank, as many as rank 0 decides."""
        for _ in range(WARMUP_CALLS):
            ready_call.run()
        timed = make_block(ready_call.run, self.settings.device, lambda: dist.barrier(group=control))

        def block(calls: int) -> float:
            return timed(calls) / ready_call.calls

        shortest = min(block(1) for _ in range(3))
        calls = self._broadcast(
            max(1, min(MOST_CALLS, round(BLOCK_US / max(shortest * ready_call.calls, 1.0)))), control
        )

        def blocks(count: int) -> list[float]:
            return self._maximum([block(calls) for _ in range(count)], control)

        if self.rank > 0:
            while count := self._broadcast(None, control):
                blocks(count)
            return None

        def sampler(count: int) -> list[float]:
            self._broadcast(count, control)
            return blocks(count)

        deadline = time.perf_counter_ns() + round(self.settings.case_budget_s * 1e9)
        probe = (lambda: clocks("cuda")) if self.settings.device == "cuda" else None
        samples = collect(sampler, MedianWidth(self.settings.ci_width), deadline, probe)
        self._broadcast(0, control)
        timer = "cuda_event" if self.settings.device == "cuda" else "cpu_clock"
        return summarise(samples, calls * ready_call.calls, timer, case.cache)

    def _maximum(self, values: list[float], control: ProcessGroup) -> list[float]:
        """Element by element the largest over the ranks."""
        table = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(table, dist.ReduceOp.MAX, group=control)
        return table.tolist()


def _meet(settings: Settings, rank: int, ranks: int, store: Any) -> tuple[ProcessGroup, list[str]]:
    """A control group of all ranks, and the machine of each. CampaignError when they do not reach each other."""
    nodes: list[str] = [""] * ranks
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if settings.device == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=2 * settings.case_timeout_s),
        )
        control = dist.new_group(backend="gloo", timeout=IDLE)
        dist.all_gather_object(nodes, machine_name(), group=control)
    except RuntimeError as error:
        raise CampaignError(f"the ranks do not reach each other: {first_line(error)}. {gloo_words()}") from None
    return control, nodes


@dataclass
class InProcess:
    """Rank 0 of torchrun's ranks as the campaign's worker: this process measures, and ends when a case hangs."""

    group: RankGroup
    restarts: int = 0
    interrupted: bool = False
    broken: str = ""
    compiled: set[tuple[Any, ...]] = field(default_factory=set)

    def interrupt(self) -> None:
        """Make the next :meth:`ask` raise InterruptError."""
        self.interrupted = True

    def start(self) -> dict[str, Any]:
        """Provenance columns and where the ranks are; CampaignError when this rank's GPU does not compute."""
        try:
            return abilities(self.group.settings, self.group)
        except IllDeviceError as error:
            raise CampaignError(f"the GPU of rank 0 does not compute ({error}): take another node") from None

    def probe(self) -> dict[str, Any]:
        """The figures of this rank's device."""
        return measured_figures(self.group.settings.device)

    def ask(self, case: Case, lost: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """The measured columns of a case; CampaignError after a failed collective. Raises InterruptError.

        A case that hangs is handed to ``lost``, then all ranks end.
        """
        if self.interrupted:
            raise InterruptError
        if self.broken:
            raise CampaignError(f"a collective failed ({self.broken}): run the same command again for the rest")
        limit = self.group.settings.case_timeout_s
        if (module := compiled_module(case)) not in self.compiled and module is not None:
            self.compiled.add(module)
            limit += self.group.settings.compile_timeout_s
        watch = threading.Timer(limit, self._end, (lost, f"no answer within {limit:g} s: the ranks were ended"))
        watch.daemon = True
        watch.start()
        columns = outcome(case, self.group.settings, self.group)
        watch.cancel()
        self.broken = columns.pop("ill", "")
        columns.pop("worn", None)  # other ranks hold this process's group: it cannot be replaced
        return columns

    def _end(self, lost: Callable[[dict[str, Any]], None], detail: str) -> None:
        lost({"status": "timeout", "error": detail})
        os._exit(1)

    def close(self) -> None:
        """Release the other ranks; after a failure they are gone already."""
        if not self.broken:
            self.group.close()


def _end_with(peer: subprocess.Popen[bytes]) -> None:
    """End this process when a rank ends: the rest would wait for it for ever."""
    code = peer.wait()
    print(f"a rank ended with exit code {code}", file=sys.stderr, flush=True)
    os._exit(1)


def main(arguments: Sequence[str]) -> int:
    """Entry of each rank: a campaign's child (``--peer``), or one of torchrun's with a plan and a store."""
    if arguments[:1] == ["--peer"]:
        die_with(int(arguments[1]))
        return _serve(RankGroup.peer(json.loads(arguments[2])))
    torchrun_place = torchrun_rank()
    if len(arguments) != 2 or torchrun_place is None:
        print("usage: torchrun ... -m opcast.harness.collectives PLAN.json STORE", file=sys.stderr)
        return 2
    try:
        plan = CampaignPlan.from_json(Path(arguments[0]))
    except ValueError as error:
        return refuse(f"{arguments[0]}: {error}")
    try:
        group = RankGroup.torchrun(plan.settings, *torchrun_place)
    except CampaignError as error:
        return refuse(str(error))
    if group.rank > 0:
        return _serve(group)
    return execute(plan, arguments[1], quiet=False, measurer=InProcess(group))


def _serve(group: RankGroup) -> int:
    """Take part until released; after a failure, leave rank 0 the time to report its own."""
    try:
        group.serve()
    except RuntimeError as error:
        print(f"rank {group.rank}: {error}", file=sys.stderr, flush=True)
        time.sleep(GRACE_S)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
