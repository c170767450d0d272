"""What a step makes of its kernels: times in traces of real steps over those of rows of the same shapes, timed alone.

    python tests/benchmarks/in_step.py [--folder datasets/measured/h200] [--model llama3_8b]

Printed are, by step and family of kernels, microseconds in the trace, microseconds by the rows, and how far they are
apart in percent. The rows are those that ``opcast simulate`` takes, at boost clocks. A family counts where rows of this
very machine answer all of it, and where the names of its kernels tell it from others.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import opcast
from opcast.datasets.devices import load_device
from opcast.simulator.question.keywords import simulate_request
from opcast.simulator.question.sources import Sources
from opcast.simulator.report.needs import needs
from opcast.simulator.workbench import Workbench

# Words in names of kernels by family, and kinds of ops; the first family that fits has the kernel.
FAMILIES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "attention, backward": (("sdpa_sm90_flash_bprop",), ("attention_backward",)),
    "attention": (("sdpa", "lean_reduction"), ("attention_prefill", "attention_decode")),
    "products": (("nvjet", "splitKreduce"), ("gemm",)),
    "AdamW": (("multi_tensor_apply",), ("adamw",)),
    "softmax": (("SoftMaxForward",), ("softmax",)),
}
WORKLOADS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "train": ("train", {"seq_len": 4096, "micro_batch": 1, "global_batch": 1}),
    "prefill": ("prefill", {"batch": 1, "input_len": 4096}),
    "decode": ("decode", {"batch": 1, "input_len": 2048}),
    "decode_64": ("decode", {"batch": 64, "input_len": 2048}),
}


def traced(path: Path) -> dict[str, float]:
    """Microseconds of kernels in a trace by family."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    found = dict.fromkeys(FAMILIES, 0.0)
    for event in events:
        if event.get("cat") == "kernel":
            own = (name for name, (words, _) in FAMILIES.items() if any(word in event["name"] for word in words))
            if (family := next(own, None)) is not None:
                found[family] += float(event["dur"])
    return found


def by_rows(config: Mapping[str, Any], workload: str, settings: Mapping[str, Any], store: Path) -> dict[str, float]:
    """The same by rows of a store; families that rows do not answer wholly are left out."""
    device = replace(load_device("h200_sxm"), tdp_w=0.0)  # no limit slows what was timed at boost clocks
    sources = replace(Sources.at(tempfile.mkdtemp(), calibration="none"), store=str(store))
    request = simulate_request(config, workload, device, sources, {"stack": "torch", **settings})
    state = Workbench(request.sources).answered(request).report.state
    assert state is not None
    asked = needs(state)
    families = {name: [need for need in asked if need.op.kind in kinds] for name, (_, kinds) in FAMILIES.items()}
    return {
        name: sum(need.us for need in found)
        for name, found in families.items()
        if found and all(need.engine == "measured" for need in found)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(opcast.__path__[0]) / "datasets" / "measured" / "h200")
    parser.add_argument("--model", default="llama3_8b")
    given = parser.parse_args()
    with (given.folder / "steps_train.csv").open(encoding="utf-8") as file:
        config = next(json.loads(row["config"]) for row in csv.DictReader(file) if row["model"] == given.model)
    for name, (workload, settings) in WORKLOADS.items():
        seen = traced(given.folder / "traces" / f"{given.model}_{name}.json.gz")
        for family, rows_us in by_rows(config, workload, settings, given.folder / "store").items():
            apart = seen[family] / rows_us - 1.0
            print(f"{name:10} {family:20} {seen[family]:9.1f} in the step {rows_us:9.1f} by rows {apart:+6.1%}")


if __name__ == "__main__":
    main()
