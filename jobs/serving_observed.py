"""What was seen of served requests, beside the same requests simulated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..simulator.serving.trace_formats.rows import RequestRows, complain, numbers
from .show import BadInputError, table

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from ..simulator.report.served import ServingReport

TIMES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "end to end"}
FIGURES = ("mean", "p50", "p90", "p99")


def observed_beside(path: Path, report: ServingReport) -> dict[str, dict[str, dict[str, float]]]:
    """By time and figure what was ``seen``, what is ``simulated``, and how far that is ``off`` (a share of what was
    seen). BadInputError for a file that `opcast serving observe` did not write, RequestTraceError for a time that is
    none."""
    import pandas as pd

    try:
        rows = pd.read_parquet(path).reset_index(drop=True)
    except (OSError, ValueError) as error:
        raise BadInputError(f"observed={path} cannot be read: {str(error).splitlines()[0]}") from None
    if missing := [name for name in (*TIMES, "error") if name not in rows]:
        raise BadInputError(f"observed={path} lacks the column {missing[0]}: `opcast serving observe` writes it")
    answered = rows[rows["error"] == ""]
    beside: dict[str, dict[str, dict[str, float]]] = {}
    for name in TIMES:
        values = gaps_ms(path, answered) if name == "itl_ms" else times_ms(path, answered, name)
        if not len(values):
            continue
        figures = (float(np.mean(values)), *np.percentile(values, (50, 90, 99)).tolist())
        spread = getattr(report, name)
        if not spread.count:
            continue
        simulated = spread.to_dict()
        beside[name] = {
            figure: {"seen": value, "simulated": simulated[figure], "off": simulated[figure] / value - 1}
            for figure, value in zip(FIGURES, figures, strict=True)
            if value > 0
        }
    return beside


def times_ms(path: Path, answered: pd.DataFrame, name: str) -> np.ndarray:
    """The times [n] of a column, those that a row has. RequestTraceError for what is no number."""
    present = answered[answered[name].notna()]
    return numbers(RequestRows(path, present, None, name, name), name)


def gaps_ms(path: Path, answered: pd.DataFrame) -> np.ndarray:
    """The times between tokens of all rows, one after another. RequestTraceError for a row without a list of them."""
    lists = [np.asarray(gaps) for gaps in answered["itl_ms"]]
    bad = [gaps.ndim != 1 or gaps.dtype.kind not in "fiu" or not np.isfinite(gaps).all() for gaps in lists]
    rows = RequestRows(path, answered, None, "itl_ms", "itl_ms")
    complain(rows, "itl_ms", np.array(bad, bool), "must be a list of numbers")
    return np.concatenate([*lists, np.zeros(0)])


def show_observed(beside: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """The comparison as a table."""
    rows = [
        (f"{TIMES[name]} {figure}", f"{value['seen']:,.1f}", f"{value['simulated']:,.1f}", f"{value['off']:+.1%}")
        for name, figures in beside.items()
        for figure, value in figures.items()
    ]
    table("milliseconds, seen on the server and simulated", ("", "seen", "simulated", "off"), rows)
