"""How far opcast is from ASTRA-sim, run by run: where both model the same, and what differs where they do not.

    python tests/benchmarks/astra.py [--table FILE] [--json] [--rows]

FILE is a table of ASTRA-sim runs (default: the reference measurements'). Each run is given to opcast as what it is:
chunks of collectives that follow each other, or messages one after the other. A class of runs is what ASTRA-sim does
otherwise than a fluid fabric:

- *same*: every message has its links for itself. Only sums are added (it reads twice and writes once what arrives).
- *whole messages*: its congestion-aware backend forwards a message only once it has arrived in whole, first come,
  first served; fabrics cut through and share.
- *nothing in the way*: its congestion-unaware backend times every message alone, whatever else its NIC does; chunks
  that are active at once cost as much as one.
- *whole levels*: its trees pass whole chunks from level to level; NCCL's pipeline.
- *relays*: its all-to-all round a ring relays one block at a time, so that latencies add up.
- *dimensions*: its chunks follow each other through the dimensions of a product; NCCL ends one phase before the next.

Where the models differ, the same messages are replayed by ASTRA-sim's rule, and the class is explained when that takes
its time. Exit code 1 when a run of the class *same*, or an explanation, is more than 10 % off.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from opcast.simulator.network.astra import ASTRA_SHAPES, GIB_GB
from opcast.simulator.network.collectives import plan
from opcast.simulator.network.fabric import Fabric, Transfer
from opcast.simulator.network.fidelity import simulate
from opcast.simulator.network.shapes import Dimension, product

REFERENCE = Path(os.environ.get("OPCAST_REFERENCE") or Path(__file__).resolve().parents[3] / "shared")
ASTRA_ALGORITHMS = {
    "ring": "ring",
    "direct": "direct",
    "halvingDoubling": "halving_doubling",
    "doubleBinaryTree": "tree",
    "oneRing": "ring",
    "oneDirect": "direct",
    "oneHalvingDoubling": "halving_doubling",
}
BOUND = 0.10
FEW = 8  # transfers from which on those that do the same are run once
SUM_BYTES_US = 1.6e6  # of the memory that sums are made in: 1600 GB/s
START_S = 0.008  # of its process, which its wall times hold


class Message(NamedTuple):
    """Bytes from one rank to another once the messages ``after`` have arrived; ``sum_us`` pass before others go on."""

    source: int
    target: int
    size_bytes: float
    after: tuple[int, ...] = ()
    sum_us: float = 0.0


class ComparedTime(NamedTuple):
    """One run: its class, ASTRA-sim's time, opcast's, and that with the class's terms; seconds that both took."""

    group: str
    what: str
    astra_us: float
    opcast_us: float
    explained_us: float
    astra_s: float
    opcast_s: float


class Run:
    """A row of the table as opcast has it."""

    def __init__(self, row: Any) -> None:
        self.row = row
        self.shapes = str(row.topology).split("x")
        self.sizes = [int(each) for each in str(row.npus_per_dim).split("x")]
        self.gbps = [float(each) * GIB_GB for each in str(row.bandwidth_GBps_per_dim).split("x")]
        self.hop_us = [float(each) / 1e3 for each in str(row.latency_ns_per_dim).split("x")]
        self.algorithms = [ASTRA_ALGORITHMS[each] for each in str(row.algorithm_per_dim).split("+")]
        self.aware = row.backend == "congestion_aware"
        self.chunks, self.active = int(row.dataset_splits), int(row.active_chunks)
        self.together = int(row.pattern[0]) if "concurrent" in row.pattern else 1
        size = float(row.size_bytes)
        self.size_bytes = size * self.sizes[0] if row.collective == "all_gather" else size
        self.sends = row.collective == "send_recv"

    @property
    def relays(self) -> bool:
        return self.row.collective == "all_to_all" and self.algorithms == ["ring"]

    @property
    def group(self) -> str:
        """The class."""
        if len(self.sizes) > 1:
            return "dimensions"
        if self.algorithms == ["tree"]:
            return "whole levels"
        if self.relays:
            return "relays"
        near = self.shapes == ["FullyConnected"] or (self.shapes == ["Ring"] and not self.sends)
        if self.aware:
            return "same" if near or self.alone else "whole messages"
        if self.active > 1 or (self.shapes == ["Switch"] and self.algorithms == ["direct"]):
            return "nothing in the way"
        return "same" if near or not self.sends or self.alone else "nothing in the way"

    @property
    def alone(self) -> bool:
        """Whether this is messages that meet no other and, if they are not forwarded whole, may cross many links."""
        hops = [len(self.path(a, b)) for a, b in pairs(self)] if self.sends else [2]
        meets = ("alltoall", "incast", "two_flows", *(("shift",) if self.shapes == ["Ring"] else ()))
        return max(hops) == 1 or not (self.aware or str(self.row.pattern).startswith(meets))

    def fabric(self, axis: int = 0) -> Fabric:
        """One dimension's fabric; that of relays goes round one way only."""
        made = product(
            [Dimension(ASTRA_SHAPES[self.shapes[axis]], self.sizes[axis], self.gbps[axis], self.hop_us[axis])]
        )
        if self.relays:
            made = made.keep(made.target == (made.source + 1) % made.ranks)
        return Fabric(made, "shortest")

    def path(self, source: int, target: int) -> list[tuple[int, int]]:
        """Links of a message as pairs of ends; -1 is the switch. Ties go up a ring."""
        if self.shapes[0] == "FullyConnected":
            return [(source, target)]
        if self.shapes[0] == "Switch":
            return [(source, -1), (-1, target)]
        n = self.sizes[0]
        up = (target - source) % n
        step, count = (1, up) if 2 * up <= n else (-1, n - up)
        return [((source + step * i) % n, (source + step * (i + 1)) % n) for i in range(count)]

    def sum_us(self, size_bytes: float) -> float:
        return 3.0 * size_bytes / SUM_BYTES_US


def pairs(run: Run) -> list[tuple[int, int]]:
    """Source and target of every message of a pattern, in the order in which each rank sends them."""
    name, n = str(run.row.pattern), run.sizes[0]
    if name.startswith("alltoall"):
        return [(a, b) for a in range(n) for b in range(n) if a != b]
    if name.startswith("bcast"):
        return [(0, b) for b in range(1, n)]
    if name.startswith("incast"):
        return [(a, 0) for a in range(1, n)]
    if name.startswith("shift"):
        return [(a, (a + int(name[5:])) % n) for a in range(n)]
    if name.startswith("two_flows"):
        return [(0, 2), (1, 3)]
    return [(0, int(name.split("(")[0].split("to")[1]))]


def transfers(run: Run) -> list[Transfer]:
    """A run of one dimension: chunks of which some are active at once, or messages, one at a time a rank."""
    made: list[Transfer] = []
    if run.sends:
        last: dict[int, tuple[int, ...]] = {}
        for a, b in pairs(run):
            made.append(Transfer("send", (a, b), run.size_bytes, after=last.get(a, ())))
            last[a] = (len(made) - 1,)
        return made
    name = "direct" if run.relays else run.algorithms[0]
    for i in range(run.chunks * run.together):
        after = (i - run.active,) if i >= run.active else ()
        made.append(
            Transfer(run.row.collective, tuple(range(run.sizes[0])), run.size_bytes / run.chunks, name, 0.0, after)
        )
    return made


def messages(run: Run) -> list[Message]:
    """The same message by message. A rank goes on when all that it waits for has come; chunks follow at each rank."""
    if run.sends:
        return [Message(*each.group, each.size_bytes, each.after) for each in transfers(run)]
    chunks, one_by_one = run.chunks * run.together, run.active == 1 and run.algorithms != ["tree"]
    made: list[Message] = []
    arrived: list[dict[int, tuple[int, ...]]] = []  # what each rank has received, by chunk
    for i in range(1 if one_by_one else chunks):
        before = arrived[i - run.active] if i >= run.active else {}
        add = _tree if run.algorithms == ["tree"] else _steps
        arrived.append(add(run, made, before, i))
    return made


def _steps(run: Run, made: list[Message], before: dict[int, tuple[int, ...]], chunk: int) -> dict[int, tuple[int, ...]]:
    steps = []
    for phase in plan(run.row.collective, run.algorithms[0], range(run.sizes[0]), run.size_bytes / run.chunks):
        times = round(phase[0].steps) if phase[0].round else 1
        steps += [[(move, move.size_bytes / times) for move in phase]] * times
    reducing = {"all_reduce": len(steps) // 2, "reduce_scatter": len(steps)}.get(run.row.collective, 0)
    sums = [step[0][1] for step in steps[:reducing]]
    if run.algorithms == ["halving_doubling"]:
        sums = [*sums[1:], 0.0]
    sums += [0.0] * (len(steps) - reducing)
    for i, step in enumerate(steps):
        got: dict[int, list[int]] = {}
        for move, size in step:
            for a, b in zip(move.source.tolist(), move.target.tolist(), strict=True):
                got.setdefault(b, []).append(len(made))
                made.append(Message(a, b, size, before.get(a, ()), run.sum_us(sums[i])))
        before = {rank: tuple(each) for rank, each in got.items()}
    return before


def _tree(run: Run, made: list[Message], before: dict[int, tuple[int, ...]], chunk: int) -> dict[int, tuple[int, ...]]:
    """Up and down one of the two binary trees of opcast's plan; every second chunk takes the other."""
    n, size = run.sizes[0], run.size_bytes / run.chunks
    ((*trees,),) = plan("all_reduce", "tree", range(n), 1.0)
    edges = trees[chunk % 2]
    parent = dict(zip(edges.source[: n - 1].tolist(), edges.target[: n - 1].tolist(), strict=True))
    depth = {each: sum(1 for _ in _above(parent, each)) for each in range(n)}
    got: dict[int, list[int]] = {}
    for each in sorted(parent, key=lambda rank: -depth[rank]):
        after = (*got.get(each, ()), *before.get(each, ()))
        got.setdefault(parent[each], []).append(len(made))
        made.append(Message(each, parent[each], size, after, run.sum_us(size)))
    root = next(each for each in range(n) if each not in parent)
    down = {root: tuple(got[root])}
    for each in sorted(parent, key=lambda rank: depth[rank]):
        made.append(Message(parent[each], each, size, down[parent[each]]))
        down[each] = (len(made) - 1,)
    return down


def _above(parent: dict[int, int], rank: int) -> Iterator[int]:
    while rank in parent:
        rank = parent[rank]
        yield rank


def replayed_us(run: Run) -> float:
    """The messages by ASTRA-sim's rule: whole at every link, in order of arrival; or each of them alone."""
    sent = messages(run)
    left = [len(each.after) for each in sent]
    followers: list[list[int]] = [[] for _ in sent]
    for i, each in enumerate(sent):
        for other in each.after:
            followers[other].append(i)
    rate, hop_us = run.gbps[0] * 1e3, run.hop_us[0]
    free: dict[tuple[int, int], float] = {}
    events = [(0.0, i, i, 0) for i, each in enumerate(sent) if not each.after]
    heapq.heapify(events)
    count, end = len(sent), 0.0
    while events:
        now, _, i, hop = heapq.heappop(events)
        path = run.path(sent[i].source, sent[i].target)
        if hop < len(path):
            took, hops = sent[i].size_bytes / rate, 1 if run.aware else len(path)
            begin = max(now, free.get(path[hop], 0.0)) if run.aware else now
            free[path[hop]] = begin + took
            later = [(begin + took + hop_us * hops, i, hop + hops)]
        else:
            end, later = max(end, now), []
            for other in followers[i]:
                left[other] -= 1
                later += [(now + sent[i].sum_us, other, 0)] if not left[other] else []
        for at, which, place in later:
            heapq.heappush(events, (at, count, which, place))
            count += 1
    last_sum = max((sent[i].sum_us for i in range(len(sent)) if not followers[i]), default=0.0)
    whole = run.active == 1 and not run.sends and run.algorithms != ["tree"]
    return (end + last_sum) * (run.chunks * run.together if whole else 1)


def stages(run: Run) -> list[tuple[int, float]]:
    """(dimension, us) of a chunk's phases through a product: reduce-scatters up, gathers down, each by its formula."""
    top, chunk = len(run.sizes) - 1, run.size_bytes / run.chunks
    if run.row.collective == "all_to_all":
        return [(axis, chunk / n / run.gbps[axis] / 1e3 + _farthest_us(run, axis)) for axis, n in enumerate(run.sizes)]
    up, down = [], []
    for axis, n in enumerate(run.sizes):
        if axis == top:
            up.append((axis, _stage_us(run, axis, "all_reduce", chunk)))
            break
        up.append((axis, _stage_us(run, axis, "reduce_scatter", chunk)))
        down.append((axis, _stage_us(run, axis, "all_gather", chunk)))
        chunk /= n
    return up + down[::-1]


def _stage_us(run: Run, axis: int, collective: str, size: float) -> float:
    n, name = run.sizes[axis], run.algorithms[axis]
    cost = run.fabric(axis).cost(collective, name, range(n))
    sums = 0.0 if collective == "all_gather" else run.sum_us(_summed(name, n) * size)
    return cost.latency_us + cost.us_per_byte * size + sums


def _summed(algorithm: str, ranks: int) -> float:
    """Share of the buffer that a rank sums one after the other; halving counts what it sends next."""
    return {"direct": 1.0, "halving_doubling": ranks / 2.0 - 1.0}.get(algorithm, ranks - 1.0) / ranks


def _farthest_us(run: Run, axis: int) -> float:
    hops = {"Ring": run.sizes[axis] // 2, "Switch": 2}.get(run.shapes[axis], 1)
    return hops * run.hop_us[axis]


def pipelined_us(run: Run) -> float:
    """Chunks through their stages, one at a time in each dimension, in order of arrival."""
    path, free = stages(run), [0.0] * len(run.sizes)
    events = [(0.0, i, 0) for i in range(run.chunks)]
    end = 0.0
    while events:
        now, chunk, stage = heapq.heappop(events)
        end = max(end, now)
        if stage < len(path):
            axis, us = path[stage]
            free[axis] = max(now, free[axis]) + us
            heapq.heappush(events, (free[axis], chunk, stage + 1))
    return end


def with_terms(run: Run, opcast_us: float) -> float:
    """opcast's time with what the class of the run adds."""
    if run.group == "dimensions":
        return pipelined_us(run)
    if run.group == "relays":
        n = run.sizes[0]
        return opcast_us + run.chunks * run.hop_us[0] * (n * (n - 1) / 2 - (n - 1))
    if run.group != "same":
        return replayed_us(run)
    sums = run.active == 1 and run.row.collective in ("all_reduce", "reduce_scatter")
    return opcast_us + (run.sum_us(_summed(run.algorithms[0], run.sizes[0]) * run.size_bytes) if sums else 0.0)


def answered_us(run: Run) -> float:
    """opcast's own time for the run."""
    if len(run.sizes) == 1:
        sent = transfers(run)
        return float(run.fabric().flow(sent, folded=len(sent) > FEW)[1].max())
    return sum(us for _, us in stages(run)) * run.chunks


def compare(table: Path) -> Iterator[ComparedTime]:
    """All runs of the table that ended."""
    import pandas as pd

    for row in pd.read_csv(table).itertuples():
        if row.status != "ok":
            continue
        run = Run(row)
        began = time.process_time()
        opcast_us = answered_us(run)
        took = time.process_time() - began
        what = f"{row.backend} {row.pattern} {row.collective} {row.topology} {row.npus_per_dim} {row.algorithm_per_dim}"
        what += f" {row.size_bytes} {run.chunks}/{run.active}"
        explained = with_terms(run, opcast_us)
        yield ComparedTime(run.group, what, row.simulated_ns / 1e3, opcast_us, explained, row.wall_s, took)


def off(mine: float, theirs: float) -> float:
    return abs(mine / theirs - 1.0)


def summary(found: Sequence[ComparedTime]) -> list[dict[str, Any]]:
    """By backend and class: runs, and how far opcast and the explanation are off, median and maximum."""
    groups: dict[tuple[str, str], list[ComparedTime]] = {}
    for each in found:
        groups.setdefault((each.what.partition(" ")[0], each.group), []).append(each)
    rows = []
    for (backend, group), each in sorted(groups.items()):
        plain = [off(one.opcast_us, one.astra_us) for one in each]
        known = [off(one.explained_us, one.astra_us) for one in each]
        rows.append(
            {"backend": backend, "class": group, "n": len(each), "opcast_median": np.median(plain)}
            | {"opcast_max": max(plain), "explained_median": np.median(known), "explained_max": max(known)}
        )
    return rows


def speed(found: Sequence[ComparedTime]) -> dict[str, float]:
    """How many times faster opcast is where ASTRA-sim's events took longer than its process needs to start."""
    long = [each for each in found if each.astra_s >= 2.5 * START_S and each.what.startswith("congestion_aware")]
    ratios = np.array([(each.astra_s - START_S) / each.opcast_s for each in long])
    return {"n": len(long), "mean": float(np.exp(np.log(ratios).mean())), "min": float(ratios.min())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=REFERENCE / "truth" / "astra_collectives.csv")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", action="store_true", help="print every run that is more than 5 % off")
    options = parser.parse_args()
    ring = tuple(range(64))  # so many that the compiled loops are loaded
    simulate(
        Fabric(product([Dimension("fully_connected", 64, 1.0)])), [Transfer("all_to_all", ring, 1.0, "direct")] * 64
    )
    found = list(compare(options.table))
    rows, ratio = summary(found), speed(found)
    missed = [each for each in found if off(each.explained_us, each.astra_us) > BOUND]
    if options.json:
        print(json.dumps({"classes": rows, "missed": [each.what for each in missed], "faster": ratio}))
        return int(bool(missed))
    print(f"{'backend':19} {'class':19} runs   opcast off: median      max   by its rule: median      max")
    for row in rows:
        print(
            f"{row['backend']:19} {row['class']:19} {row['n']:4d} {row['opcast_median']:20.1%} {row['opcast_max']:8.1%}"
            f" {row['explained_median']:21.1%} {row['explained_max']:8.1%}"
        )
    for each in found if options.rows else missed:
        if off(each.explained_us, each.astra_us) > BOUND / 2:
            print(
                f"{each.what}: {each.astra_us:.1f} us, opcast {each.opcast_us:.1f}, by its rule {each.explained_us:.1f}"
            )
    print(
        f"{ratio['n']} event-driven runs: {ratio['mean']:.0f} times faster (geometric mean), least {ratio['min']:.1f}"
    )
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
