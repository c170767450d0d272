"""Every request as a row: what users saw of it, in milliseconds, beside what it was and where it ran."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .limits import TOLD
from .state import NONE

KEPT = ("request", "rank", "prefill_rank", "input_tokens", "output_tokens", "preemptions", "hit_tokens")


def columns(requests: np.ndarray, host_us: float, bytes_per_token: float) -> dict[str, np.ndarray]:
    """The columns of records as :class:`.serve.ServedTraffic` has them; NaN for times that a request does not have.

    ``host_us`` is what the host adds to the first token. A rejected request has the rank -1, and
    ``rejected_by`` names the limit; of one that was not tried again it is ``failure`` (of its replica).
    """
    served = requests["rank"] != NONE
    several = served & (requests["output_tokens"] > 1)
    moved = requests["moved_us"] > 0
    decode = requests["finish_us"] - requests["first_token_us"]
    ttft = requests["first_token_us"] - requests["arrival_us"] + host_us
    times = {
        "ttft_ms": (ttft, served),
        "tpot_ms": (decode / np.maximum(requests["output_tokens"] - 1, 1), several),
        "e2e_ms": (ttft + decode, served),
        "queue_ms": (requests["admitted_us"] - requests["arrival_us"], served),
        "prefill_e2e_ms": (requests["prefilled_us"] - requests["arrival_us"] + host_us, moved),
        "kv_transfer_ms": (requests["moved_us"], moved),
        "decode_e2e_ms": (requests["finish_us"] - requests["prefilled_us"] - requests["moved_us"], moved),
    }
    table = {name: requests[name] for name in KEPT}
    names = np.array(["", *(TOLD[code][0] for code in sorted(TOLD)), "failure"])
    table["rejected_by"] = names[requests["limit"]]
    table["arrival_s"] = requests["arrival_us"] / 1e6
    table |= {name: np.where(mask, us / 1e3, np.nan) for name, (us, mask) in times.items()}
    table["kv_transfer_bytes"] = np.where(moved, requests["input_tokens"] * bytes_per_token, 0.0)
    return table


def write_requests(table: dict[str, np.ndarray], path: Path) -> None:
    """The columns as Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(table), path, compression="zstd")
