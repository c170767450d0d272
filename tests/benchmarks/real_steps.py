"""Real steps of cut models on this GPU: what simulated steps are compared with.

    python tests/benchmarks/real_steps.py measure FILE.json [--models NAME …] [--runs N] [--compiled] [--traces FOLDER]
    python tests/benchmarks/real_steps.py tables FILE.json FOLDER
    opcast validate truth=FOLDER/steps_train.csv        # and steps_infer.csv

Each model keeps its layers' shapes and has fewer of them, so that one card holds it. PyTorch as users of transformers
call it, in bf16: operators one by one, or with ``--compiled`` through ``torch.compile``. The file has every run of
every step in milliseconds, how long kernels ran in one of them, and what the machine is. ``--traces`` keeps the
profiler's trace of that one. ``tables`` makes of it the tables that ``opcast validate`` reads.
"""

from __future__ import annotations

import argparse
import csv
import gc
import gzip
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from opcast.simulator.trace.models import shipped_config
from opcast.simulator.trace.workload import Workload

LAYERS = {"llama3_8b": 4, "qwen3_0_6b": 28, "qwen3_30b_a3b": 3, "deepseek_v2_lite": 3, "llama2_7b": 4}
WORKLOADS = {
    "train": Workload("train", batch=1, seq_len=4096, attention="fused"),
    "prefill": Workload("prefill", batch=1, seq_len=4096, attention="fused"),
    "decode": Workload("decode", batch=1, seq_len=2048, attention="fused"),
    "decode_64": Workload("decode", batch=64, seq_len=2048, attention="fused"),
}
WARM_UP = 3
ON_THE_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of the profiler's events


def cut_model(name: str) -> dict[str, Any]:
    """The shipped model's configuration with the layers of :data:`LAYERS`."""
    return {**shipped_config(name), "num_hidden_layers": LAYERS[name]}


# --- measure -------------------------------------------------------------------------------------------


def measure(models: Sequence[str], runs: int, compiled: bool, traces: Path | None, output: Path) -> None:
    """Run every workload of every model; the file is written anew behind each model."""
    import torch

    from opcast.harness.environment import environment
    from opcast.harness.provenance import gpu_facts

    facts = {**environment("cuda"), **gpu_facts(), "gpu_name": torch.cuda.get_device_name()}
    steps: list[dict[str, Any]] = []
    for name in models:
        for word, workload in WORKLOADS.items():
            steps.append(real_step(name, word, workload, runs, compiled, traces))
            print(name, word, f"{steps[-1]['took_s']:.1f} s", steps[-1].get("error", ""), flush=True)
        output.write_text(json.dumps({"environment": facts, "steps": steps}, indent=1, default=str))


def real_step(
    name: str, word: str, workload: Workload, runs: int, compiled: bool, traces: Path | None
) -> dict[str, Any]:
    """One workload of one model: its runs, or why there are none."""
    import torch

    from opcast.jobs.real_run import load

    model = cut_model(name)
    step = {"model": name, "config": model, "workload": word, "compiled": compiled, **asdict(workload)}
    began = time.perf_counter()
    try:
        request = {"model": model, "device": "cuda", "precision": "bf16", "workloads": {word: asdict(workload)}}
        run = load(request)[word]
        if compiled:
            run.model.forward = torch.compile(run.model.forward)
        step["runs_ms"] = [1e3 * run() for _ in range(WARM_UP + runs)][WARM_UP:]
        step["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        step |= kernels_of(run, None if traces is None else traces / f"{name}_{word}{'_compiled' * compiled}.json.gz")
    except (RuntimeError, ValueError) as error:
        step["error"] = f"{type(error).__name__}: {error}"[:500]
    del run
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return {**step, "took_s": time.perf_counter() - began}


def kernels_of(run: Any, kept: Path | None) -> dict[str, Any]:
    """How long kernels and copies ran in one step, and how many; the profiler's trace is kept where a file is named."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(plain))
        text = plain.read_bytes()
    if kept is not None:
        kept.write_bytes(gzip.compress(text))
    spans = [event["dur"] for event in json.loads(text)["traceEvents"] if event.get("cat") in ON_THE_GPU]
    return {"kernels": len(spans), "kernels_ms": sum(spans) / 1e3}


# --- tables --------------------------------------------------------------------------------------------


def write_tables(measured: Mapping[str, Any], folder: Path) -> None:
    """``steps_train.csv`` and ``steps_infer.csv`` of what :func:`measure` wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = [step for step in measured["steps"] if "error" not in step]
    for name, training in (("steps_train.csv", True), ("steps_infer.csv", False)):
        rows = [table_row(step, measured["environment"]) for step in steps if (step["kind"] == "train") is training]
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def table_row(step: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    """A step as a line of a table of results, its median as what was measured."""
    facts = {key: environment.get(key) for key in ("gpu_name", "driver", "cuda", "cudnn", "torch", "opcast_version")}
    median_ms = statistics.median(step["runs_ms"])
    row = {
        "source": "tests/benchmarks/real_steps.py, " + json.dumps(facts, sort_keys=True),
        "row_id": f"{step['model']}-{step['workload']}",
        "kind": f"real_{step['workload']}",
        "model": step["model"],
        "config": json.dumps(step["config"], sort_keys=True),
        "gpu": environment["device_id"],
        "num_gpus": 1,
        "precision": "bf16",
        "tp": 1,
        "pp": 1,
        "stack": "torch_compile" if step["compiled"] else "torch",
    }
    spread = {"runs": len(step["runs_ms"]), "fastest_ms": min(step["runs_ms"]), "slowest_ms": max(step["runs_ms"])}
    seen = {"kernels": step["kernels"], "kernels_ms": step["kernels_ms"], "memory_gib": step["memory_gib"]}
    if step["kind"] == "train":
        batch = {"mbs_seqs": step["batch"], "gbs_seqs": step["batch"], "recompute": "none", "sp": "false"}
        own = {"zero_stage": 0, "seq_len_tokens": step["seq_len"], **batch, "step_time_s": median_ms / 1e3}
    else:
        decodes = step["kind"] == "decode"
        own = {"batch_size": step["batch"], "input_len_tokens": step["seq_len"], "kv_cache": step["cache"]}
        own |= {"output_len_tokens": 2 if decodes else 1}
        own |= {"ttft_ms": "" if decodes else median_ms, "itl_ms": median_ms if decodes else ""}
    return {**row, **own, **spread, **seen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    measuring = verbs.add_parser("measure")
    measuring.add_argument("output", type=Path)
    measuring.add_argument("--models", nargs="*", default=list(LAYERS), choices=list(LAYERS))
    measuring.add_argument("--runs", type=int, default=20)
    measuring.add_argument("--compiled", action="store_true")
    measuring.add_argument("--traces", type=Path)
    writing = verbs.add_parser("tables")
    writing.add_argument("measured", type=Path)
    writing.add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.verb == "tables":
        write_tables(json.loads(given.measured.read_text()), given.folder)
    else:
        measure(given.models, given.runs, given.compiled, given.traces, given.output)


if __name__ == "__main__":
    main()
