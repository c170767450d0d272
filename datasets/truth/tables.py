"""Reads a table of results. What it is about is told by its columns; every line becomes a row, or a reason."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..clusters import ClusterError
from ..devices import DeviceError
from ..ops import OpError
from .cells import REFUSE, Cells
from .halves import source_of
from .inference import inference_row, whole_model_row
from .networks import network_row
from .operators import collective_row, operator_row
from .published import OutcomeError, columns_of, named
from .rows import FailedRow, Row, TruthError, TruthTable, UnsupportedRow
from .serving import distinct, serving_row, with_peer
from .training import training_row

Reader = Callable[[Cells, Path], Row]
LARGEST_BYTES = 1 << 28
PUBLISHED = "rules=FOLDER says what the columns of a published table mean"


# Columns that tell a kind of table -> (kind, reader of a line). The first that a file has all of counts.
KINDS: tuple[tuple[frozenset[str], str, Reader], ...] = (
    (frozenset({"collective", "busbw_GBps"}), "collective", collective_row),
    (frozenset({"topology", "simulated_ns"}), "collective", network_row),
    (frozenset({"op", "latency_ms"}), "operator", operator_row),
    (frozenset({"mode", "e2e_latency_ms"}), "inference", whole_model_row),
    (frozenset({"ttft_ms", "tpot_ms", "stack"}), "serving", serving_row),
    (frozenset({"input_len_tokens", "num_gpus"}), "inference", inference_row),
    (frozenset({"param_opt_gib", "activation_gib"}), "memory", training_row),
    (frozenset({"num_gpus", "seq_len_tokens"}), "training", training_row),
)


def read_table(
    path: Path,
    limit: int | None = None,
    setting: str = "truth",
    rules: Path | None = None,
    outcomes: tuple[str, ...] = (REFUSE,),
) -> TruthTable:
    """All lines of a CSV file as rows and reasons; ``limit`` takes the first so many, ``setting`` named the file.

    ``rules`` is the folder that says what is known of published tables (None: that of the checkout, if it is one),
    ``outcomes`` what those of them may do that measured results told (:mod:`.published`).

    TruthError for a file that cannot be read, or whose columns are not those of a table of results.
    """
    if path.suffix != ".csv":
        raise TruthError(f"{setting}={path}: a table of results is a .csv file")
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise TruthError(f"{setting}={path}: larger than {LARGEST_BYTES >> 20} MiB, which no table of results is")
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            names = list(reader.fieldnames or ())
            lines = [line for _, line in zip(range(limit or 1 << 62), reader, strict=False)]
    except UnicodeDecodeError:
        raise TruthError(f"{setting}={path} cannot be read: it is no text") from None
    except (OSError, csv.Error) as error:
        raise TruthError(f"{setting}={path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    columns = columns_of(names, rules)
    kind, reader_of = kind_of(path, frozenset((*names, *columns)), setting)
    if twice := next((name for name in names if name and names.count(name) > 1), None):
        raise TruthError(f"{setting}={path}: two columns are called {twice}")
    if not lines:
        raise TruthError(f"{setting}={path} holds no rows")
    rows: list[Row] = []
    unsupported: list[UnsupportedRow] = []
    failed: list[FailedRow] = []
    by_outcome: list[Row] = []
    for number, line in enumerate(lines, start=1):
        texts = {key: value for key, value in line.items() if isinstance(key, str)}
        cells = Cells(named(texts, columns), number, rules=rules, outcomes=outcomes)
        source = source_of(cells, kind, path.stem)
        try:
            if None in line:  # a comma in a cell without quotes: what follows it would be read one column off
                raise TruthError(f"{len(names) + len(line[None])} cells under {len(names)} columns")
            rows.append(replace(reader_of(cells, path.parent), source=source))
        except OutcomeError as error:
            unsupported.append(UnsupportedRow(cells.id, str(error), source, by_outcome=True))
            by_outcome += _without_outcomes(reader_of, cells, path.parent, source)
        except (TruthError, DeviceError, ClusterError, OpError) as error:
            unsupported.append(UnsupportedRow(cells.id, str(error), source))
        except Exception as error:  # one row never ends a run
            failed.append(FailedRow.by(cells.id, error, source))
    rows, copies = distinct(rows)
    rows = with_peer(rows, path) if kind == "serving" else rows
    again, _ = distinct((*rows, *by_outcome))  # a copy of another row says nothing new
    return TruthTable(path.stem, kind, tuple(rows), (*unsupported, *copies), tuple(failed), tuple(again[len(rows) :]))


def _without_outcomes(reader: Reader, cells: Cells, folder: Path, source: str) -> list[Row]:
    """The row as it is where measured results refuse nothing; none where something else does."""
    try:
        return [replace(reader(replace(cells, outcomes=()), folder), source=source)]
    except (TruthError, DeviceError, ClusterError, OpError):
        return []


def kind_of(path: Path, columns: frozenset[str], setting: str = "truth") -> tuple[str, Reader]:
    """(kind, reader) of a table; TruthError names what the nearest kind lacks, or all kinds where none is near."""
    for needed, kind, reader in KINDS:
        if needed <= columns:
            return kind, reader
    if not any(needed & columns for needed, _, _ in KINDS):
        kinds = "; ".join(f"{kind} by {', '.join(sorted(needed))}" for needed, kind, _ in KINDS)
        raise TruthError(f"{setting}={path}: no table of results; columns tell what it is about: {kinds}; {PUBLISHED}")
    needed, kind, _ = min(KINDS, key=lambda row_kind: len(row_kind[0] - columns) / len(row_kind[0]))
    lacks = ", ".join(sorted(needed - columns))
    raise TruthError(
        f"{setting}={path}: no table of results; {kind} tables have the columns {lacks}, which it lacks; {PUBLISHED}"
    )
