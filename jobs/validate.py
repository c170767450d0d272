"""``opcast validate``: every row of a table of published results, simulated and scored."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..datasets.counts import counted
from ..simulator.validation import Validation
from . import resolve
from .show import print_json, say, table, wants_json

TAGS = 12  # groups of one tag that a person is shown
INTERVALS = ("coverage", "interval_width", "interval_score")
FREE_CHOICE = {"device": "++device.id", "cluster": "+cluster.path"}
ADDED = ("device.", "cluster.")


def run(config: dict[str, Any]) -> int:
    """Simulate a table and print the errors; returns the exit code: 1 where a row failed, 2 where none can be used."""
    as_json = wants_json(config)
    request = resolve.validate_request(config)
    validation = resolve.bench(config).validate(request, progress_bar)
    error = (
        f"none of the {counted(validation.rows, 'row')} of {validation.table} was simulated"
        if not validation.simulated
        else ""
    )
    if error and validation.refused:
        error += f": {next(iter(validation.refused))}"
    if as_json:
        print_json({**validation.to_dict(), **({"error": error} if error else {})})
    else:
        show(validation)
    if error:
        say(f"opcast: {error}")
    return 1 if validation.failed else 2 if error else 0


@contextmanager
def progress_bar(rows: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's stderr; nothing elsewhere."""
    if not sys.stderr.isatty() or not rows:
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=rows)
        yield lambda done: bar.advance(task, done)


def show(validation: Validation) -> None:
    """Errors, what they stand beside, groups, and the reasons of rows left out, as tables."""
    heads = (
        "",
        "rows",
        "median %",
        "mean %",
        "p90 %",
        "max %",
        "bias %",
        "in interval %",
        "its width %",
        "its score %",
    )
    rows = list(lines("opcast", validation.metrics))
    if validation.with_refused is not None:
        rows += lines(f"with {validation.refused_by_outcome} refused by result", validation.with_refused)
    if validation.baseline is not None:
        rows += lines("constant MFU", validation.baseline["metrics"])
        rows += lines("opcast on these", validation.baseline["opcast_on_same_rows"])
    rows += lines("repeats (noise floor)", validation.noise_floor)
    if validation.rival is not None:
        rows += lines(f"rival {validation.rival.name}", validation.rival.metrics)
        rows += lines("opcast on these", validation.rival.opcast)
    table(
        f"{validation.table}: {validation.simulated} of {validation.rows} rows simulated, {validation.kind}"
        + (f", {validation.half} sources" if validation.half else ""),
        heads,
        rows,
    )
    for tag, groups in validation.by_group.items():
        if len(groups) > 1:
            top_groups = list(groups.items())[:TAGS]
            table(f"by {tag}", heads, [line for value, metrics in top_groups for line in lines(value, metrics)])
    if validation.rank_correlation is not None:
        median, mean = validation.rank_correlation["median"], validation.rank_correlation["mean"]
        say(f"rank correlation of layouts of one model: median {median:.2f}, mean {mean:.2f}")
    if validation.per_row is not None:
        show_rows(validation.per_row)
    for why, count in validation.refused.items():
        say(f"not simulated, {counted(count, 'row')}: {why}")
    for error, count in Counter(row.error for row in validation.failed).most_common():
        first = next(row.id for row in validation.failed if row.error == error)
        named = f" (the first is {first})" if first else ""
        say(f"failed, {counted(count, 'row')}{named}: {error}")


def lines(name: str, metrics: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[object, ...]]:
    """A line per quantity."""
    for quantity, values in metrics.items():
        if quantity == "fits":
            parts = ", ".join(f"{key.removeprefix('accuracy_')} {values[key]:.1f}" for key in values if key != "n")
            yield (f"{name}: fits", f"{values['n']:.0f}", parts.replace("accuracy", "right %"), *[""] * 7)
            continue
        figures = [values.get(key) for key in ("median_ape", "mean_ape", "p90_ape", "max_ape", "bias")]
        figures += [None if key not in values else values[key] * 100 for key in INTERVALS]
        yield (f"{name}: {quantity}", f"{values['n']:.0f}", *("" if f is None else f"{f:.1f}" for f in figures))


def show_rows(rows: tuple[Mapping[str, Any], ...]) -> None:
    """Every row and quantity, worst first."""
    row_lines = [
        (row["id"], row.get("model", row.get("op", "")), row["devices"], row.get("layout", ""), name, values)
        for row in rows
        for name, values in row["quantities"].items()
        if "ape" in values
    ]
    row_lines.sort(key=lambda line: -line[-1]["ape"])
    heads = ("row", "model", "devices", "layout", "quantity", "predicted", "measured", "APE %")
    top_rows = [
        (*line[:5], f"{v['predicted']:.4g}", f"{v['measured']:.4g}", f"{v['ape']:.1f}") for *line, v in row_lines
    ]
    table("every row, worst first", heads, top_rows)
