"""How long opcast takes to answer for steps of inference, process start included, and in one process over many shapes.

``python tests/benchmarks/inference_steps.py [--repeat 3]`` prints wall-clock seconds of whole ``opcast simulate``
processes, cold (no traced graph) and warm, beside the shortest process of the same start (a bound measured in the same
run), and milliseconds of one question among many of other batches and contexts inside one process.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from whole_process import run

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.jobs.resolve import SHIPPED_PREDICTORS
from opcast.simulator.engines import build_engine
from opcast.simulator.question.plan import Parallel, Plan, load_stack
from opcast.simulator.question.work import Work
from opcast.simulator.simulate import simulate

CASES = {
    "llama3_405b decode, TP8, FP8": "model=llama3_405b cluster=dgx_h100 parallel.tp=8 precision=fp8 workload=decode",
    "llama3_70b generate, TP8": "model=llama3_70b cluster=dgx_h100 parallel.tp=8 workload=generate",
    "deepseek_v3 decode, EP16": (
        "model=deepseek_v3 cluster=dgx_h100 cluster.nodes=2 parallel.ep=16 precision=fp8_block workload=decode"
    ),
}
SHAPES = [(batch, context) for batch in (1, 4, 16, 64, 256) for context in (128, 1000, 4000, 16000)]


def processes(repeat: int, home: str) -> None:
    """Whole processes, cold once and warm."""
    bound = min(run("list clusters", home)[0] for _ in range(repeat))
    print(f"{'bound: list clusters':34} {bound:6.2f} s")
    for name, arguments in CASES.items():
        cold, answer = run(f"simulate {arguments}", home)
        warm = min(run(f"simulate {arguments}", home)[0] for _ in range(repeat))
        tpot = answer["tpot_ms"]
        shown = f"TPOT {tpot:.2f} ms" + ("" if answer["fits"] else ", does not fit")
        print(f"{name:34} {warm:6.2f} s warm ({warm / bound:.1f}x), {cold:6.2f} s cold; {shown}")


def shapes(home: str) -> None:
    """Many batches and contexts of one model in one process: none but the first is traced."""
    device, cluster = load_device("h100_sxm"), load_cluster("dgx_h100")
    engine = build_engine(device, [], [Path(SHIPPED_PREDICTORS)], cluster=cluster)
    for tp in (1, 8):
        plan = Plan(Parallel(tp=tp), replace(cluster, devices_per_node=tp), load_stack("vllm"))
        simulate("llama3_8b", Work("decode", batch=2), plan, device, engine, Path(home))
        started = time.perf_counter()
        for batch, context in SHAPES:
            work = Work("decode", batch=batch, input_len=context)
            simulate("llama3_8b", work, plan, device, engine, Path(home))
        each = (time.perf_counter() - started) / len(SHAPES)
        print(f"llama3_8b decode, TP{tp}: {each * 1e3:.0f} ms a question, {len(SHAPES)} batches and contexts")


def main() -> None:
    """Print everything."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--repeat", type=int, default=3)
    with tempfile.TemporaryDirectory() as home:
        processes(options.parse_args().repeat, home)
        shapes(home)


if __name__ == "__main__":
    main()
