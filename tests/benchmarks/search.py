"""How long a search takes: Llama 3 70B on 64 nodes of eight H100, some ten thousand layouts, by two processes.

    python tests/benchmarks/search.py [--workers 2] [--everything]

Beside the wall clock stands the processor time of all processes, which other work on the machine does not change.
``--everything`` simulates every point that may fit: nothing is left out by its time.
"""

from __future__ import annotations

import argparse
import resource
import time

import opcast

AXES = {"zero_stage": [0, 1, 2, 3], "cp": [1, 2, 4], "sequence_parallel": [True]}


def processor_s() -> float:
    """Processor time of this process and of those that ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in both)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--everything", action="store_true")
    parser.add_argument("--top", type=int, default=10)
    parser.add_argument(
        "--objectives", default="step_time", help="step_time,memory makes a front, of which more is asked"
    )
    options = parser.parse_args()
    step = {"cluster": "dgx_h100", "nodes": 64, "seq_len": 8192, "global_batch": 1024}
    for micro_batch in (1, 2, 4, 8):  # traces the model, which is kept on disk
        opcast.simulate("llama3_70b", micro_batch=micro_batch, tp=8, pp=8, zero_stage=1, **step)
    before, began = processor_s(), time.perf_counter()
    prune = ["memory"] if options.everything else ["memory", "time"]
    found = opcast.search(
        "llama3_70b",
        AXES,
        workers=options.workers,
        prune=prune,
        top=options.top,
        objectives=options.objectives.split(","),
        **step,
    )
    wall_s = time.perf_counter() - began
    if options.workers > 1:
        from joblib.externals.loky import get_reusable_executor

        get_reusable_executor().shutdown(wait=True)
    print(f"{found.points:,} layouts, {found.evaluated:,} simulated in full, {found.pruned:,} left out")
    print(f"{wall_s:.1f} s on the wall, {processor_s() - before:.1f} s of processor time, {options.workers} processes")
    for name, left in found.pruned_by.items():
        print(f"  {name}: {left.count:,}")
    best = found.best[0]
    print(
        f"best: {best['step_time_s']:.3f} s, tp={best['tp']} pp={best['pp']} vpp={best['vpp']} mb={best['micro_batch']}"
    )


if __name__ == "__main__":
    main()
