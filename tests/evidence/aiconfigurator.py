"""NVIDIA's aiconfigurator (PyPI) on static batches, beside opcast on the same rows.

    python tests/evidence/aiconfigurator.py TABLE.csv [--limit N]

prints the errors of both as JSON. aiconfigurator has its own tables and interpolation, and the model by its
configuration. It knows Llama-like, Mixtral-like and DeepSeek models on the systems whose operators NVIDIA measured.
Prompt and generated token come from its static mode, the whole from ``ttft + (output_len - 1) · tpot``.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from opcast.datasets.truth import InferenceRow, Row, UnsupportedRow, read_table
from opcast.simulator.question.sources import Sources
from opcast.simulator.validation.answers import simulated
from opcast.simulator.validation.run import Answered, compared
from opcast.simulator.workbench import workbench

Estimate = Callable[..., Any]
SYSTEMS = {"a100_sxm_80gb": "a100_sxm", "a100_pcie_80gb": "a100_pcie"}  # others are named alike
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
FORMATS = {"": {}, "fp8": {"gemm_quant_mode": "fp8"}, "nvfp4": {"gemm_quant_mode": "nvfp4"}}
BACKENDS = {"vllm": "vllm"}


def answer(rows: Sequence[Row], estimate: Estimate) -> Answered:
    """What it says of every row, and why it says nothing of the others."""
    found: dict[str, Mapping[str, float]] = {}
    missing: list[UnsupportedRow] = []
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            try:
                found[row.id] = asked(row, estimate, Path(folder))
            except Exception as error:  # it raises errors of many kinds for what it has no tables of
                why = str(error).strip().splitlines() or [type(error).__name__]
                missing.append(UnsupportedRow(row.id, why[0][:200]))
    return found, tuple(missing)


def asked(row: Row, estimate: Estimate, folder: Path) -> dict[str, float]:
    """Its latencies of one row in ms; ValueError for what it does not simulate."""
    if not isinstance(row, InferenceRow):
        raise ValueError("aiconfigurator simulates inference only")
    kind = str(row.config.get("model_type"))
    if kind not in ARCHITECTURES:
        raise ValueError(f"aiconfigurator has no model of the {kind} family")
    if row.quantization not in FORMATS:
        raise ValueError(f"aiconfigurator has no {row.quantization} products")
    path = folder / row.model
    path.mkdir(exist_ok=True)
    config = {**row.config, "architectures": [ARCHITECTURES[kind]]}
    (path / "config.json").write_text(json.dumps(config))
    made = estimate(
        str(path),
        SYSTEMS.get(row.hardware.device, row.hardware.device),
        mode="static" if row.output_len > 1 else "static_ctx",
        backend_name=BACKENDS.get(row.framework, "trtllm"),
        isl=row.input_len,
        osl=row.output_len,
        batch_size=row.batch,
        tp_size=row.layout.tp,
        pp_size=row.layout.pp,
        **FORMATS[row.quantization],
    )
    whole = made.ttft + (row.output_len - 1) * made.tpot
    said = {"ttft": made.ttft, "e2e": whole, "throughput": row.batch * row.output_len / whole * 1e3}
    return said | ({"tpot": made.tpot} if row.output_len > 1 else {})


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--limit", type=int, help="the first so many rows")
    chosen = parser.parse_args(arguments)
    try:
        from aiconfigurator.cli.api import cli_estimate
    except ImportError:
        sys.exit("aiconfigurator is not installed: pip install aiconfigurator")
    for name in ("aiconfigurator", "aiconfigurator_core"):
        logging.getLogger(name).setLevel(logging.ERROR)
    rows = read_table(chosen.table, chosen.limit).rows
    own = simulated(rows, workbench(Sources()).validation(), lambda done: None)
    print(json.dumps(compared("aiconfigurator", answer(rows, cli_estimate), own.predicted, rows).to_dict(), indent=1))


if __name__ == "__main__":
    main()
