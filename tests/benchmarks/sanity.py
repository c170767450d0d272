"""Answers that physics forbids or makes unlikely, found without any measurement: decode steps of engines by chip.

    python tests/benchmarks/sanity.py [--device ID...] [--stack ID...] [--batch 1 4 16]

Each line is a chip, an engine, a format and a time per token for each batch, with its ratio to what weights and caches
take at the memory's bandwidth. Marked are a ratio below ``LEAST`` or above ``MOST``, a larger batch that is faster, and
a format of fewer bits that is slower than one of more.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence

import opcast
from opcast.datasets.devices import load_device

MODEL, EMBEDDING_BYTES = "llama3_8b", 128256 * 4096 * 2  # a step reads a row of it
LEAST, MOST = (
    1.02,
    2.5,
)  # of a decode step over its bytes at the bandwidth: below no kernel gets, above none is that slow
FASTER = 0.98  # of a smaller batch or more bits: less is no noise of a table
CONTEXT = 512
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
DEVICES = (
    "a100_sxm_80gb h100_sxm h200_sxm b200_sxm l40s mi300x mi355x rtx_3090 rtx_4090 rtx_5090 apple_m2_ultra".split()
)
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


def main() -> None:
    """Print every combination, and how many are marked."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", nargs="+", default=DEVICES)
    options.add_argument("--stack", nargs="+", default=list(STACKS))
    options.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16])
    chosen = options.parse_args()
    marked = 0
    for device in chosen.device:
        for stack in chosen.stack:
            before: dict[int, Time] = {}
            for precision in STACKS[stack]:
                now = times(device, stack, precision, chosen.batch)
                if not now:
                    continue
                wrong = list(faults(now, before))
                marked += bool(wrong)
                shown = " ".join(f"{tpot_ms:7.2f} ({ratio:.2f})" for tpot_ms, ratio in now.values())
                print(f"{device:16} {stack:10} {precision:8} {shown}  {'; '.join(wrong)}", flush=True)
                before = now
    print(f"{marked} are marked")


if __name__ == "__main__":
    main()
