"""Tables with a request in each row: opcast's own, Azure's, Splitwise's, Mooncake's, Vidur's and BurstGPT's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .rows import MOST_TOKENS, RequestRows, RequestTraceError, labels, numbers, without

if TYPE_CHECKING:
    import pandas as pd

FLAT: Mapping[str, tuple[str, str, str, float]] = {  # format -> columns of arrival, input, output; seconds of a unit
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens", 1.0),
    "splitwise": ("arrival_timestamp", "prompt_size", "token_size", 1.0),
    "mooncake": ("timestamp", "input_length", "output_length", 1e-3),
    "vidur": ("arrived_at", "num_prefill_tokens", "num_decode_tokens", 1.0),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens", 1.0),
    "columns": ("arrival_s", "input_tokens", "output_tokens", 1.0),
}
IMAGES = "NumImages"  # of Azure's multimodal trace of 2025
MODEL, ANSWER = "Model", "Response tokens"  # of BurstGPT


def read_flat(path: Path, table: pd.DataFrame, kind: str) -> RequestRows:
    """The requests of a table of this format."""
    arrival, prompt, output, unit_s = FLAT[kind]
    rows = RequestRows(path, table, arrival, prompt, output, unit_s)
    notes: tuple[str, ...] = ()
    if kind == "azure" and IMAGES in table.columns:
        images = numbers(rows, IMAGES)
        notes = (
            f"{int((images > 0).sum()):,} of {len(table):,} requests have images ({int(images.sum()):,} in all): their "
            "encoder is not simulated, prompts are as long as ContextTokens says",
        )
    if kind == "columns" and "error" in table.columns:
        table, notes = without(table, table["error"].fillna("").astype(str).ne("").to_numpy(), "they failed", path)
    if kind == "burstgpt":
        failed = (numbers(rows, prompt) == 0) | (numbers(rows, ANSWER) == 0)
        table, notes = without(table, failed, f"no {ANSWER}, which is how BurstGPT marks failures", path)
        if MODEL in table.columns and (names := labels(replace(rows, table=table), MODEL)).nunique() > 1:
            parts = ", ".join(f"{share:.0%} {name}" for name, share in names.value_counts(normalize=True).items())
            notes = (*notes, f"requests to several models ({parts}) are played on one")
    return RequestRows(path, table, arrival, prompt, output, unit_s, notes=notes)


def block_contents(rows: RequestRows) -> list[np.ndarray]:
    """The contents of each request's blocks, int64. RequestTraceError for what is no list of whole numbers."""
    contents = []
    for row, hash_ids in zip(rows.table.index, rows.table["hash_ids"], strict=True):
        ids = hash_ids.tolist() if isinstance(hash_ids, np.ndarray) else hash_ids  # Parquet gives arrays
        if not isinstance(ids, list) or not all(
            type(hash_id) is int and abs(hash_id) < MOST_TOKENS**2 for hash_id in ids
        ):
            raise RequestTraceError(
                f"{rows.path} row {row + 1}: hash_ids={str(hash_ids)[:60]} must be a list of whole numbers"
            )
        contents.append(np.array(ids, np.int64))
    return contents
