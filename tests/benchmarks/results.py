"""What ``opcast validate`` says of every table under the shipped calibration, as it stands in ``docs/results.md``.

    python tests/benchmarks/results.py FOLDER [--write]

FOLDER holds the tables. Takes six minutes on two cores, a quarter of that once graphs are traced.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "results.md"
MARKED = re.compile(r"<!-- results -->.*?<!-- end of results -->", re.DOTALL)
AT_ONCE = 2
TABLES = {  # file -> what it is, and what else is known of it
    "train_llm_foundry_mpt": ("llm-foundry, MPT 125 M to 70 B", ""),
    "train_megatron_bridge": ("Megatron-Bridge, H100 to GB300", "the same recipe between releases: 2.7 / 28.9"),
    "train_simumax_b200": ("SimuMax's B200 steps", "SimuMax itself: 6.8 / 11.4, peaks 0.36 / 0.74"),
    "train_megatron_sc21": ("Megatron-LM and DeepSpeed, SC'21", ""),
    "train_korthikanti22": ("Megatron-LM, MLSys'23", ""),
    "train_llama3_paper": ("Llama 3 405B, its paper", ""),
    "train_mlperf": ("MLPerf", ""),
    "train_nemo_automodel": ("NeMo AutoModel", ""),
    "train_torchtitan": ("torchtitan, H100 and H200", "repeats 34 apart"),
    "train_torchtitan_quant": ("torchtitan, B200", "four of ten under an unknown power cap"),
    "train_vtrain_a100": ("vTrain's A100 table, composed rows too", "vTrain's own claim: mean 8.4 and 14.7"),
    "train_nanotron_h100": ("nanotron's sweep of all layouts", ""),
    "neusight_e2e_labels": ("NeuSight's whole models, fp32", "NeuSight's own claim: mean 10.0"),
    "infer_fastertransformer_bert": ("encoders of four engines, 2021", ""),
    "infer_fastertransformer_gpt": ("FasterTransformer GPT", ""),
    "infer_trtllm_static_v05_v071": (
        "TensorRT-LLM 0.5 and 0.7",
        "aiconfigurator 0.12: 11.5 / 64.4 (23 rows) and 11.7 / 25.2 (12)",
    ),
    "infer_imec_llama2": ("static batches of Llama-2 (NeMo)", "aiconfigurator 0.12: 23.4 / 44.7"),
    "infer_koyeb_a100": ("vLLM on A100 (Koyeb)", "aiconfigurator 0.12: 9.9 / 46.5"),
    "infer_nvidia_nim": ("NVIDIA NIM, closed loops", ""),
    "memory_korthikanti22": ("activations, MLSys'23", ""),
    "memory_mbridge_studies": ("Megatron-Bridge's memory studies", ""),
    "collectives": ("collectives, nccl-tests and others", ""),
    "ops_llmcompass": ("LLMCompass's operators", ""),
    "ncu_gemm_a100": ("products under a profiler, A100 at 1.04 GHz", ""),
}
QUANTITIES = {
    "step_time": "step",
    "latency": "latency",
    "e2e": "end to end",
    "ttft": "first token",
    "tpot": "token",
    "throughput": "throughput",
    "peak_memory": "peak memory",
    "activation_share": "activations",
}


def validated(path: Path) -> dict[str, Any]:
    """What the command says of a table."""
    command = [sys.executable, "-m", "opcast.jobs.cli", "validate", f"truth={path}", "format=json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def told(metrics: Mapping[str, Any], rows: int) -> str:
    """Every quantity's median and 90th percentile in percent, and how many its intervals hold."""
    parts = []
    for name, words in QUANTITIES.items():
        one = metrics.get(name) or {}
        if one.get("median_ape") is not None:
            count = "" if one["n"] == rows else f" of {one['n']}"
            held = "" if one.get("coverage") is None else f" ({one['coverage']:.0%})"
            parts.append(f"{words}{count} {one['median_ape']:.1f} / {one['p90_ape']:.1f}{held}")
    if "fits" in metrics:
        parts.append(f"fits or not: {metrics['fits']['accuracy']:.1f} % right of {metrics['fits']['n']}")
    return "; ".join(parts)


def line(name: str, beside: str, found: Mapping[str, Any]) -> str:
    """A row of the document."""
    constant = ((found["baseline"] or {}).get("metrics") or {}).get("step_time")
    mfu = f"{constant['median_ape']:.1f} / {constant['p90_ape']:.1f}" if constant else ""
    ranked = (found["rank_correlation"] or {}).get("median")
    order = "" if ranked is None else f"{ranked:.2f}"
    rows = f"{found['simulated']:,} of {found['rows']:,}"
    return f"| {name} | {rows} | {told(found['metrics'], found['simulated'])} | {mfu} | {order} | {beside} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda name: validated(asked.folder / f"{name}.csv"), TABLES))
    lines = [line(*words, each) for words, each in zip(TABLES.values(), found, strict=True)]
    head = "| table | rows | median / p90 in percent (in 90 % interval) | constant MFU | layouts ranked | beside it |"
    text = "\n".join(("<!-- results -->", head, "| --- " * 6 + "|", *lines, "<!-- end of results -->"))
    print(text)
    if asked.write:
        page = DOCUMENT.read_text("utf-8")
        DOCUMENT.write_text(MARKED.sub(lambda _: text, page), "utf-8")


if __name__ == "__main__":
    main()
