"""How long opcast takes to answer for large clusters, process start included, and how that grows.

``python tests/benchmarks/cluster_steps.py [--repeat 3] [--scaling]`` prints wall-clock seconds of whole ``opcast
simulate`` processes with a warm graph cache, their ratio to the shortest process that composes the same configuration
(a bound measured in the same run), and with ``--scaling`` times inside one process over devices, layers and
micro-batches.
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

DENSE = (
    "model=llama3_405b cluster=dgx_h100 cluster.nodes=2048 parallel.tp=8 parallel.pp=16 parallel.zero_stage=1 "
    "parallel.sequence_parallel=true workload=train workload.seq_len=8192 workload.global_batch=2048"
)
SPARSE = (
    "model=deepseek_v3 cluster=dgx_h100 cluster.nodes=256 parallel.pp=16 parallel.ep=64 parallel.zero_stage=1 "
    "workload=train workload.seq_len=4096 workload.global_batch=15360 workload.recompute=full"
)
CASES = {
    "llama3_405b, 16,384 GPUs, 1F1B": DENSE,
    "llama3_405b, 16,384 GPUs, interleaved": f"{DENSE} parallel.vpp=7 workload.recompute=selective:layernorm",
    "deepseek_v3, 2,048 GPUs, EP64 PP16 DualPipe": f"{SPARSE} parallel.schedule=dualpipe",
}
LAYERS = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}


def processes(repeat: int, home: str) -> None:
    """Whole processes, warm."""
    bound = min(run("list clusters", home)[0] for _ in range(repeat))
    print(f"{'bound: list clusters':46} {bound:6.2f} s")
    for name, arguments in CASES.items():
        cold, answer = run(f"simulate {arguments}", home)
        warm = min(run(f"simulate {arguments}", home)[0] for _ in range(repeat))
        print(
            f"{name:46} {warm:6.2f} s warm, {warm / bound:4.1f} x bound, {cold:6.2f} s cold; "
            f"step {answer['step_time_s']:.2f} s, MFU {answer['mfu']:.3f}"
        )


def timed(model: object, plan: Plan, work: Work, home: Path, repeat: int) -> float:
    """Best seconds of a step in this process."""
    device = load_device(plan.cluster.device)
    engine = build_engine(device, [], [SHIPPED_PREDICTORS], cluster=plan.cluster)
    best = float("inf")
    for _ in range(repeat + 1):  # the first one traces and loads
        started = time.perf_counter()
        simulate(model, work, plan, device, engine, home)  # type: ignore[arg-type]
        best = min(best, time.perf_counter() - started)
    return best


def scaling(repeat: int, home: Path) -> None:
    """Growth over devices, layers and micro-batches, each against the smallest of its row."""
    cluster, stack = load_cluster("dgx_h100"), load_stack("megatron")

    def row(name: str, sizes: list[int], seconds: list[float]) -> None:
        cells = (f"{size:,}: {s:.3f} s ({s / seconds[0]:.1f}x)" for size, s in zip(sizes, seconds, strict=True))
        print(f"{name}: {', '.join(cells)}")

    gpus = [8, 64, 1024, 16384, 131072]
    plans = [Plan(Parallel(tp=8, zero_stage=1), replace(cluster, nodes=n // 8), stack) for n in gpus]
    work = [Work("train", seq_len=4096, global_batch=max(n // 8, 1) * 4) for n in gpus]
    row("devices", gpus, [timed("llama3_70b", p, w, home, repeat) for p, w in zip(plans, work, strict=True)])
    layers = [16, 64, 256, 1024]
    models = [LAYERS | {"num_hidden_layers": n, "vocab_size": 32000, "name": f"layers{n}"} for n in layers]
    deep = Plan(Parallel(tp=8, pp=4), replace(cluster, nodes=4), stack)
    row("layers", layers, [timed(m, deep, Work("train", global_batch=16), home, repeat) for m in models])
    batches = [16, 256, 4096, 62500]
    piped = Plan(Parallel(tp=4, pp=8), replace(cluster, nodes=4), stack)
    row("micro-batches", batches, [timed("llama3_8b", piped, Work("train", global_batch=n), home, 1) for n in batches])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--scaling", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        processes(asked.repeat, folder)
        if asked.scaling:
            scaling(asked.repeat, Path(folder))
