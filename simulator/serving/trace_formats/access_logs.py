"""Logs of OpenAI-style servers and gateways: of each request the time and the token counts alone are read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .rows import RequestRows, as_numbers, table_of, without

if TYPE_CHECKING:
    import pandas as pd

TIMES = ("timestamp", "time", "created", "created_at", "start_time", "startTime", "request_time", "ts")
PROMPTS = ("usage.prompt_tokens", "usage.input_tokens", "prompt_tokens", "input_tokens")
ANSWERS = ("usage.completion_tokens", "usage.output_tokens", "completion_tokens", "output_tokens")
EPOCHS = ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3))  # seconds of a unit, by how large times since 1970 are in it


def is_log(names: frozenset[str]) -> bool:
    """Whether a record with these names is one of a log."""
    tokens = "usage" in names or bool({"prompt_tokens", "input_tokens"} & names)
    return tokens and bool(names & set(TIMES))


def read_log(path: Path, records: list[Any] | pd.DataFrame) -> RequestRows:
    """The requests of a log, in order of their times. Those without an answer are left out and counted."""
    import pandas as pd

    listed = records.to_dict("records") if isinstance(records, pd.DataFrame) else records
    columns = {"time": TIMES, "prompt_tokens": PROMPTS, "completion_tokens": ANSWERS}
    table = table_of([record if isinstance(record, dict) else {} for record in listed], columns)
    counts = as_numbers(table["completion_tokens"])
    unanswered = np.asarray(table["completion_tokens"].isna() | (counts == 0))
    table, notes = without(table, unanswered, "they have no answer", path)
    latest = np.max(as_numbers(table["time"]), initial=0.0, where=~np.isnan(as_numbers(table["time"])))
    unit_s = next((unit for least, unit in EPOCHS if latest >= least), 1.0)
    return RequestRows(
        path, table, "time", "prompt_tokens", "completion_tokens", unit_s=unit_s, ordered=False, notes=notes
    )
