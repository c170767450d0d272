"""Answers that physics forbids or makes unlikely, found without any measurement.

    python tests/benchmarks/sanity.py [LAW...] [--device ID...] [--stack ID...] [--batch 1 4 16]

``decode``: a time per token of each chip, engine, format and batch, with its ratio to what weights and caches take at
the memory's bandwidth. Marked are a ratio below ``LEAST`` or above ``MOST``, a larger batch that is faster, and a
format of fewer bits that is slower than one of more. ``streams``: products of few rows and decode attention, whose
bytes come faster than memory gives them. ``products``: a product that takes longer than its two halves or is beyond
the peak. ``chips``: one slower than another of its generation with less bandwidth and FLOPs. ``train``: steps whose
share of the peak (MFU) is outside of ``MFU``, and tensor ranks that gain more than their number. ``formats``: products
of many rows that are slower in fp8 than in bf16, or faster where their weights are unpacked. ``collectives``: those of
any cluster that take less time for more bytes, or ``STEP`` times as long for twice as many. ``ranks``: decode steps of
a large batch that are slower on twice the tensor ranks.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np

import opcast
from opcast.datasets.clusters import known_clusters, load_cluster
from opcast.datasets.devices import load_device
from opcast.datasets.ops import Op, make_op
from opcast.simulator.engines.answers import ask
from opcast.simulator.engines.fused import FusedEngine, build_engine
from opcast.simulator.question.stack import load_stack

MODEL, EMBEDDING_BYTES = "llama3_8b", 128256 * 4096 * 2  # a step reads a row of it
LEAST, MOST = (
    1.02,
    2.5,
)  # of a decode step over its bytes at the bandwidth: below no kernel gets, above none is that slow
FASTER = 0.98  # of a smaller batch or more bits: less is no noise of a table
HALVES = 1.15  # of two halves: more is no step of waves, but a table that throttled, or another kernel
STEP = 2.5  # of half the bytes: B200's own table has 2.36, where NCCL changes its protocol
FALL = 0.8  # of half the bytes, where NCCL keeps LL for too long: H200's own table has 0.81
GAINS_LAST = 8  # tensor ranks inside a node
MFU = (0.12, 0.75)  # of a training step of one sequence of 4,096 tokens a rank; cut chips are above
CONTEXT = 512
SHIPPED = Path(__file__).parents[2] / "models" / "shipped"
SERVERS = {"vllm": ("bf16", "fp8", "w4a16"), "sglang": ("bf16", "fp8", "w4a16"), "trtllm": ("bf16", "fp8", "w4a16")}
SINGLE = {
    "llama_cpp": ("fp16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0"),
    "exllama": ("w8a16", "w6a16", "w4.25a16"),
    "mlc": ("fp16", "w4.5a16"),
    "gpt_fast": ("bf16", "w8a16", "w4.5a16"),
    "lmdeploy": ("fp16", "w4a16"),
    "tgi": ("fp16", "w4a16"),
}
STACKS = {**SERVERS, **SINGLE}
TRAINING = ("megatron", "torchtitan", "nanotron", "nemo", "llm_foundry", "deepspeed")
CLUSTERS = {"a100_sxm_80gb": "dgx_a100", "h100_sxm": "dgx_h100", "h200_sxm": "dgx_h200", "b200_sxm": "dgx_b200"}
DEVICES = (
    "a100_sxm_80gb h100_sxm h200_sxm h20_sxm gh200 b200_sxm gb200 l40s l4 a10g mi300x mi355x rtx_3090 rtx_4090 "
    "rtx_5090 apple_m2_ultra"
).split()
LAYERS = ((6144, 4096), (28672, 4096), (4096, 14336), (57344, 8192))  # (n, k) of products of 8B and 70B models
HEADS = ((32, 8), (64, 8), (8, 1))  # of queries and of keys, of 128 each
Time = tuple[float, float]  # TPOT in ms, and its ratio to the bytes of a step over the bandwidth


def times(device: str, stack: str, precision: str, batches: Sequence[int]) -> dict[int, Time]:
    """Times by batch; none where the combination cannot be asked."""
    found: dict[int, Time] = {}
    for batch in batches:
        work = opcast.Work("decode", batch=batch, input_len=CONTEXT)
        try:
            report = opcast.simulate(MODEL, work, device=device, stack=stack, precision=precision, calibration="none")
        except ValueError:
            return {}
        parts = report.memory.by_class
        read_bytes = (parts["weights"] + parts.get("KV cache", 0.0)) * 2**30 - EMBEDDING_BYTES
        found[batch] = (report.tpot_ms, report.tpot_ms * load_device(device).memory_gbps * 1e6 / read_bytes)
    return found


def faults(now: Mapping[int, Time], before: Mapping[int, Time]) -> Iterator[str]:
    """What is wrong with times of a format, after those of more bits."""
    slower = 0.0
    for batch, (tpot_ms, ratio) in now.items():
        if not LEAST <= ratio <= MOST:
            yield f"batch {batch}: {ratio:.2f} of its bytes"
        if tpot_ms < FASTER * slower:
            yield f"batch {batch} faster than a smaller one"
        if FASTER * tpot_ms > before.get(batch, (math.inf, 0.0))[0]:
            yield f"batch {batch} slower than with more bits"
        slower = max(slower, tpot_ms)


def decode(devices: Sequence[str], stacks: Sequence[str], batches: Sequence[int]) -> Iterator[str]:
    """Decode steps of every chip, engine and format; those with a mark say it."""
    for device in devices:
        for stack in stacks:
            before: dict[int, Time] = {}
            for precision in STACKS.get(stack, ()):
                now = times(device, stack, precision, batches)
                if not now:
                    continue
                wrong = list(faults(now, before))
                shown = " ".join(f"{tpot_ms:7.2f} ({ratio:.2f})" for tpot_ms, ratio in now.values())
                yield f"{device:16} {stack:10} {precision:8} {shown}  {'; '.join(wrong)}".rstrip()
                before = now


@lru_cache
def engine_of(device: str, stack: str) -> FusedEngine:
    """Who answers for the kernels of a stack on a device."""
    return replace(build_engine(load_device(device), [], [SHIPPED]), stack=load_stack(stack))


def latencies_us(device: str, stack: str, ops: Sequence[Op]) -> np.ndarray | None:
    """Microseconds of cold ops; None where the device has no units for them."""
    try:
        return np.asarray(ask(engine_of(device, stack), ops, "cold").latency_us)
    except ValueError:
        return None


def streams(devices: Sequence[str], stacks: Sequence[str], batches: Sequence[int]) -> Iterator[str]:
    """Weights and caches that come faster than memory gives them."""
    products = {
        dtype: [make_op("gemm", dtype, m=m, n=n, k=k) for m in batches for n, k in LAYERS]
        for dtype in ("bf16", "fp8", "w4a16")
    }
    caches = [
        make_op(
            "attention_decode", batch=64, seq_kv=cached, heads_q=q, heads_kv=kv, head_dim=128, v_head_dim=128, seq_q=1
        )
        for q, kv in HEADS
        for cached in (4096, 32768)
    ]
    for device in devices:
        for stack in stacks:
            for name, ops in {**products, "caches": caches}.items():
                found = latencies_us(device, stack, ops)
                if found is None:
                    continue
                share = np.array([op.cost.read_bytes for op in ops]) / found / load_device(device).memory_gbps / 1e3
                if share.max() > 1 / LEAST:
                    yield f"{device} {stack} {name}: {ops[int(share.argmax())]} at {share.max():.2f} of the bandwidth"


def products(devices: Sequence[str], stacks: Sequence[str], batches: Sequence[int]) -> Iterator[str]:
    """Products that take longer than their two halves, or are beyond the peak."""
    rows = [2**power for power in range(9, 16)]
    for device in devices:
        for stack in stacks:
            for dtype in ("bf16", "fp8", "w4a16"):
                for n, k in LAYERS:
                    found = latencies_us(device, stack, [make_op("gemm", dtype, m=m, n=n, k=k) for m in rows])
                    if found is None:
                        break
                    halves = [whole / (2 * half) for half, whole in pairwise(found)]
                    rate = load_device(device).tensor_rate("bf16" if dtype == "w4a16" else dtype)
                    share = (2.0 * np.array(rows) * n * k / found / 1e6 / rate).max()
                    said = f"{device} {stack} {dtype} n={n} k={k}"
                    if max(halves) > HALVES:
                        m = rows[1 + int(np.argmax(halves))]
                        yield f"{said}: m={m} takes {max(halves):.2f} of two halves"
                    if share > 1.02:
                        yield f"{said}: {share:.2f} of the peak"


def chips(devices: Sequence[str], stacks: Sequence[str], batches: Sequence[int]) -> Iterator[str]:
    """Chips slower than one of their vendor and generation that has less of everything."""
    figures = {name: load_device(name) for name in devices}
    for stack in stacks:
        for precision in STACKS.get(stack, ())[:1]:
            found = {name: times(name, stack, precision, batches) for name in devices}
            for less, more in permutations(devices, 2):
                a, b = figures[less], figures[more]
                grows = a.memory_gbps < b.memory_gbps and a.vector_tflops <= b.vector_tflops
                if not (grows and (a.vendor, a.architecture) == (b.vendor, b.architecture)):
                    continue
                for batch in found[less].keys() & found[more].keys():
                    if FASTER * found[more][batch][0] > found[less][batch][0]:
                        yield f"{stack} {precision} batch {batch}: {more} is slower than {less}"


def train(devices: Sequence[str], stacks: Sequence[str], batches: Sequence[int]) -> Iterator[str]:
    """Training steps whose share of the peak is unlikely, and tensor ranks that gain more than their number."""
    for device in devices:
        for stack in TRAINING:
            if device not in CLUSTERS:
                continue
            work = opcast.Work("train", seq_len=4096, global_batch=8, micro_batch=1)
            cluster = CLUSTERS[device]
            steps = {
                tp: opcast.simulate(MODEL, work, cluster=cluster, stack=stack, tp=tp, calibration="none")
                for tp in (1, 4)
            }
            for tp, step in steps.items():
                if not MFU[0] <= step.mfu <= MFU[1]:
                    yield f"{device} {stack} tp={tp}: MFU {step.mfu:.2f}"
            if steps[4].step_time_s * 4 < FASTER * steps[1].step_time_s:
                yield f"{device} {stack}: four tensor ranks gain more than four times"


def formats(devices: Sequence[str], stacks: Sequence[str], batches: Sequence[int]) -> Iterator[str]:
    """Products of many rows that are slower in fp8 than in bf16, or faster with weights that are unpacked."""
    for device in devices:
        for stack in stacks:
            for rows in (2048, 8192):
                shapes = [{"m": rows, "n": n, "k": k} for n, k in LAYERS]
                found = {
                    dtype: latencies_us(device, stack, [make_op("gemm", dtype, **shape) for shape in shapes])
                    for dtype in ("bf16", "fp8", "w8a16", "w4a16")
                }
                for dtype, us in found.items():
                    if us is None or found["bf16"] is None:
                        continue
                    share = us / found["bf16"]
                    wrong = share > 1 / FASTER if dtype == "fp8" else share < FASTER
                    for at in np.flatnonzero(wrong):
                        yield f"{device} {stack} {dtype} {shapes[at]}: {share[at]:.2f} of bf16"


def collectives(devices: Sequence[str], stacks: Sequence[str], batches: Sequence[int]) -> Iterator[str]:
    """Collectives that take less time for more bytes, or much more than twice as long for twice as many."""
    sizes = [2**power for power in range(16, 31)]
    clusters = [load_cluster(name) for name in known_clusters()]
    for cluster in (cluster for cluster in clusters if devices is DEVICES or cluster.device in devices):
        for nodes in (1, 2, 8, 64):
            ranks = nodes * cluster.devices_per_node
            for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send_recv"):
                asked = {"ranks": ranks, "cluster": cluster.id, "nodes": nodes}
                times_us = [opcast.predict(kind, size_bytes=size, **asked).latency_us for size in sizes]
                for size, (less, more) in zip(sizes, pairwise(times_us), strict=False):
                    if not FALL * less <= more <= STEP * less:
                        what = f"{cluster.id} {kind} of {ranks}"
                        yield f"{what}: {less:.0f} us for {size >> 10} KiB, {more:.0f} for twice"


def ranks(devices: Sequence[str], stacks: Sequence[str], batches: Sequence[int]) -> Iterator[str]:
    """Decode steps of a large batch that are slower on twice the tensor ranks."""
    work = opcast.Work("decode", batch=256, input_len=2048)
    for device in (device for device in devices if device in CLUSTERS):
        for stack in (stack for stack in stacks if stack in SERVERS):
            asked = {"cluster": CLUSTERS[device], "stack": stack, "precision": "bf16", "calibration": "none"}
            steps_ms = {tp: opcast.simulate("llama3_70b", work, tp=tp, **asked).tpot_ms for tp in (2, 4, GAINS_LAST)}
            for (few, slow_ms), (many, fast_ms) in pairwise(steps_ms.items()):
                if FASTER * fast_ms > slow_ms:
                    yield f"{device} {stack}: {fast_ms:.1f} ms on {many} tensor ranks, {slow_ms:.1f} on {few}"


LAWS: Mapping[str, Callable[[Sequence[str], Sequence[str], Sequence[int]], Iterator[str]]] = {
    "decode": decode,
    "streams": streams,
    "products": products,
    "chips": chips,
    "train": train,
    "formats": formats,
    "collectives": collectives,
    "ranks": ranks,
}


def main() -> None:
    """Print what each law finds."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("laws", nargs="*", default=[], choices=[*LAWS, []])
    options.add_argument("--device", nargs="+", default=DEVICES)
    options.add_argument("--stack", nargs="+", default=list(STACKS))
    options.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16])
    chosen = options.parse_args()
    for name in chosen.laws or LAWS:
        for line in LAWS[name](chosen.device, chosen.stack, chosen.batch):
            print(f"{name}: {line}", flush=True)


if __name__ == "__main__":
    main()
