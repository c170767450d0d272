"""How many distinct layouts of one model are simulated a second in one process, as a search asks for them.

    python tests/benchmarks/configurations.py [--count 60] [--profile]

Llama 3 70B on 64 nodes of eight H100, training with Megatron: tensor, pipeline and virtual stages, ZeRO stage, sequence
parallelism, recomputation and micro-batch vary. Beside it stands the same in a fresh process for each layout, which is
what a caller without shared work pays (from one run: imports, tracing from disk, one layout).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.simulator.engines import build_engine
from opcast.simulator.question.plan import Parallel, Plan, PlanError, load_stack
from opcast.simulator.question.work import Work
from opcast.simulator.simulate import simulate

SHIPPED = Path(__file__).resolve().parents[2] / "models" / "shipped"


def layouts() -> Iterator[tuple[Plan, Work]]:
    """Distinct plans that fit together, the last choices varying fastest."""
    cluster = replace(load_cluster("dgx_h100"), nodes=64)
    stack = load_stack("megatron")
    choices: tuple[tuple[Any, ...], ...] = ((8, 4), (4, 8, 2), (1, 2), (1, 2), (0, 1), ("none", "full", "selective"))
    for tp, pp, vpp, micro_batch, zero, recompute in itertools.product(*choices):
        parallel = Parallel(tp=tp, pp=pp, vpp=vpp, zero_stage=zero, sequence_parallel=True)
        plan = Plan(parallel, cluster, stack, recompute=recompute)
        yield plan, Work(micro_batch=micro_batch, global_batch=1024, seq_len=8192)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    device = load_device("h100_sxm")
    engine = build_engine(device, [], [SHIPPED], cluster=load_cluster("dgx_h100"))
    engine = build_engine(device, [], [SHIPPED], cluster=replace(load_cluster("dgx_h100"), nodes=64))
    home = Path.home() / ".opcast" / "graphs"

    def ask(count: int) -> tuple[int, float]:
        began, done = time.process_time(), 0
        for plan, work in itertools.islice(layouts(), count):
            try:
                simulate("llama3_70b", work, plan, device, engine, home)
            except PlanError as error:
                print(f"refused: {error}", file=sys.stderr)
                continue
            done += 1
        return done, time.process_time() - began

    ask(1)  # traces and compiles what every process compiles once
    if options.profile:
        import cProfile
        import pstats

        with cProfile.Profile() as profile:
            ask(options.count)
        pstats.Stats(profile).sort_stats("cumulative").print_stats(45)
        return
    done, seconds = ask(options.count)
    print(f"{done} layouts in {seconds:.2f} s of CPU time: {done / seconds:.1f} a second")


if __name__ == "__main__":
    main()
