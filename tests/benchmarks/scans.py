"""What a compute unit moves a clock in the kernels of scans and short convolutions, by TensorRT-LLM's operator tables.

    python tests/benchmarks/scans.py aiconfigurator_core/systems/data

The folder is that of the wheel ``aiconfigurator-core`` (``SYSTEM/linear_attention/trtllm/VERSION/*.parquet``). The
groups of shapes are parted in two halves by a hash; each prints bytes a clock and unit (median), and measured time over
the law's.
"""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pandas as pd

from opcast.datasets.devices import Device, load_device, overridden
from opcast.datasets.vocabulary import OpColumns
from opcast.models import analytical
from opcast.models.analytical.setting import SUSTAINED_MEMORY

CHIPS = "h100_sxm h200_sxm b200_sxm gb200 b300_sxm gb300 l40s rtx_pro_6000_server".split()
FEW_TOKENS, FEW_ROWS = 512, 8192
Columns = dict[str, np.ndarray]


def delta_rules(table: pd.DataFrame) -> tuple[str, pd.DataFrame, Columns]:
    """FLA's Triton kernels of gated delta rules over prompts that fill a device."""
    rows = table[table.kernel_source == "chunk_gated_delta_rule"]
    rows = rows[(rows.num_tokens * rows.num_v_heads >= 2**19) & (rows.seq_len >= FEW_TOKENS)]
    names = {"batch": "batch_size", "heads": "num_v_heads", "groups": "num_k_heads", "seq": "seq_len"}
    names |= {"head_dim": "head_v_dim", "state_dim": "head_k_dim"}
    columns = {name: rows[given].to_numpy(float) for name, given in names.items()}
    whole = np.ones(len(rows))
    return "linear_attention_prefill", rows, columns | {"chunk": 64 * whole, "rule": whole}


def convolutions(table: pd.DataFrame) -> tuple[str, pd.DataFrame, Columns]:
    """causal_conv1d over prompts, of the channels that Mamba-2 convolves."""
    rows = table[(table.kernel_source == "causal_conv1d_fn") & (table.num_tokens >= FEW_ROWS)]
    rows = rows[rows.seq_len >= 2 * FEW_TOKENS]
    cols = (rows.nheads * rows.head_dim + 2 * rows.n_groups * rows.d_state).to_numpy(float)
    tokens, whole = rows.num_tokens.to_numpy(float), np.ones(len(rows))
    return "causal_conv1d", rows, {"rows": tokens, "cols": cols, "width": 4 * whole, "update": 0 * whole}


def held(kind: str, rows: pd.DataFrame, columns: Columns, device: Device) -> str:
    """Bytes a clock and unit, and measured over predicted, of each half of the shapes."""
    measured = rows.latency.to_numpy() * 1e3
    latency = analytical.latency_us(OpColumns(kind, columns, "bf16", None), device)
    slots = device.clock_mhz * device.compute_units
    rate = bytes_of(kind, columns, device) / measured / slots
    shapes = np.stack([columns[name] for name in sorted(columns) if name not in ("batch", "seq", "rows")], axis=1)
    half = np.array([sha256(each.tobytes()).digest()[0] % 2 for each in shapes])
    found = []
    for own in (half == 0, half == 1):
        if own.any():
            over = np.median((measured / latency)[own])
            found.append(f"{own.sum():4d} rows {np.median(rate[own]):5.1f} B/clock, law x {over:.2f}")
    return " | ".join(found)


def bytes_of(kind: str, columns: Columns, device: Device) -> np.ndarray:
    """The bytes that the law counts: what it takes on a device whose memory is slower than anything else."""
    slow = overridden(device, {"memory_gbps": 1.0, "l2_gbps": 1.0})
    parts = analytical.terms(OpColumns(kind, columns, "bf16", "bf16", "cold"), slow)
    return np.concatenate([np.asarray(part[2].memory) for part in parts]) * SUSTAINED_MEMORY * 1e3


def main(folder: Path) -> None:
    for chip in CHIPS:
        device = load_device(chip)
        for name, read in (("gdn", delta_rules), ("mamba2", convolutions)):
            for path in sorted(folder.glob(f"{chip}/linear_attention/trtllm/*/{name}_perf.parquet")):
                kind, rows, columns = read(pd.read_parquet(path))
                if len(rows):
                    print(f"{chip:20s} {kind:26s} {held(kind, rows, columns, device)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
