"""How long schedules take to make: pipelines from a thousand to a million tasks, streams with and without folding.

    python tests/benchmarks/schedules.py [--most TASKS]

Prints milliseconds of CPU time and how they grow: a pipeline must grow no faster than its tasks, and a program of
repeated layers must not grow with their number. Exit code 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from opcast.datasets.ops import make_op
from opcast.simulator.formats.perfetto import write_trace
from opcast.simulator.graph import Block, Node
from opcast.simulator.question.orders import make_orders
from opcast.simulator.report.tracks import pipeline_tracks
from opcast.simulator.timing.schedule.pipeline import in_flight, run_pipeline
from opcast.simulator.timing.schedule.streams import Overlap, place

STAGES = 16
LARGEST_GROWTH = 3.0  # of the time per task, from the smallest to the largest pipeline: caches, no square
MOST_MS_PER_MILLION = 4000.0
MOST_MS_FOLDED, MOST_MS_UNROLLED = 20.0, 100.0


def least_ms(work: Callable[[], object], repeats: int) -> float:
    """The least CPU time of some runs."""
    found = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found) * 1e3


def pipelines(most: int) -> list[tuple[int, float]]:
    """(tasks, milliseconds) of interleaved pipelines of 16 stages and 8 chunks each."""
    print(f"{'pipeline of':>12} {'order':>9} {'walk':>9} {'in flight':>9}  per task")
    found = []
    micro_batches = STAGES
    while micro_batches * STAGES * 16 <= most:
        count = micro_batches
        orders = make_orders("interleaved", STAGES, count, 8)
        repeats = 5 if len(orders) < 100_000 else 2
        made = least_ms(partial(make_orders, "interleaved", STAGES, count, 8), repeats)
        walked = least_ms(partial(run_pipeline, orders, 1.0, 2.0, send_us=0.1), repeats)
        held = least_ms(partial(in_flight, orders), repeats)
        each = (made + walked + held) / len(orders) * 1e3
        print(f"{len(orders):>12,} {made:>6.1f} ms {walked:>6.1f} ms {held:>6.1f} ms  {each:.2f} us")
        found.append((len(orders), made + walked + held))
        micro_batches *= 4
    return found


def layers(count: int, nodes: int = 40) -> tuple[Block, ...]:
    """Layers of ``nodes`` nodes, whose weights are gathered on a stream of their own when the layer before begins."""
    gemm = make_op("gemm", m=4096, n=4096, k=4096)
    gather = make_op("all_gather", size_bytes=1 << 24, ranks=8, ranks_per_node=8, link="nvlink")
    wide = count + 2
    path, values, kept = "model.layers.0", wide, 2 * wide
    body = [
        Node(gather, "nccl.all_gather", path, "forward", (values,), (1,), 0, group="dp", stream="comm:dp"),
        Node(gemm, "aten.mm", path, "forward", (0, values), (values + 1,), 0),
        *[Node(gemm, "aten.mm", path, "forward", (values + 1,), (kept,), 0)] * (nodes - 2),
    ]
    steps = {0: 1, 1: 1, values: 1, values + 1: 1, kept: 0}
    return (Block(tuple(body), count, steps),)


def programs() -> list[tuple[str, float, float]]:
    """(what, milliseconds, bound) of programs on two streams, with a host that issues them."""
    found = []
    overlap = Overlap(0.1, 0.2)
    latency, host = np.random.default_rng(0).uniform(5, 50, 40), np.full(40, 4.0)
    for count in (8, 126, 1000):
        quick = least_ms(partial(place, layers(count), latency, host, overlap), 5)
        found.append((f"{count * 40:,} nodes, folded", quick, MOST_MS_FOLDED))
    block, count = layers(126)[0], 126
    plain = (Block(tuple(node for i in range(count) for node in block.repetition(i))),)
    whole = least_ms(partial(place, plain, np.tile(latency, count), np.tile(host, count), overlap), 5)
    found.append((f"{count * 40:,} nodes, written out", whole, MOST_MS_UNROLLED))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=1_100_000, help="tasks of the largest pipeline")
    most = parser.parse_args().most
    missed = []
    found = pipelines(most)
    growth = found[-1][1] / found[-1][0] / (found[0][1] / found[0][0])
    print(
        f"time per task from {found[0][0]:,} to {found[-1][0]:,} tasks grows by {growth:.2f} (at most {LARGEST_GROWTH})"
    )
    if growth > LARGEST_GROWTH or found[-1][1] / found[-1][0] * 1e6 > MOST_MS_PER_MILLION:
        missed.append("pipeline")
    for name, ms, bound in programs():
        print(f"streams: {name}: {ms:.1f} ms (at most {bound:.0f})")
        if ms > bound:
            missed.append(name)
    times = run_pipeline(make_orders("1f1b", STAGES, 512), 1.0, 2.0, send_us=0.1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.json.gz"
        wrote = least_ms(lambda: write_trace(path, *pipeline_tracks(times)), 3)
        print(f"timeline of {len(times.orders):,} tasks: {wrote:.0f} ms, {path.stat().st_size / 1024:.0f} KiB")
    if missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
