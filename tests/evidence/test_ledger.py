"""The ledger of predictions: what was said is kept and scored later, and what gets worse raises an alarm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from opcast.datasets.truth import Row
from opcast.datasets.truth.rows import Hardware
from opcast.tests.evidence.ledger import FOLDER, Entry, alarms, cells, main, read_release, score, write_release

MACHINE = Hardware("H100", "h100_sxm", "dgx_h100", 8)
MEASURED = {"a": 1.0, "b": 2.0, "c": 4.0}
ROWS = {"steps": [Row(id=key, hardware=MACHINE, measured={"step_time": value}) for key, value in MEASURED.items()]}


def said(factor: float) -> list[Entry]:
    """A release whose every step is so many times what was measured, in an interval of a tenth each way."""
    return [
        Entry("steps", key, "step_time", value * factor, value * factor * 0.9, value * factor * 1.1)
        for key, value in MEASURED.items()
    ]


def test_a_release_is_scored_on_what_was_measured_later(tmp_path: Path) -> None:
    entries = [*said(1.05), Entry("steps", "d", "", None, why="no such GPU")]
    write_release(tmp_path / "2026-01-01.parquet", entries)
    assert read_release(tmp_path / "2026-01-01.parquet") == entries
    (cell,) = cells(entries, ROWS).values()
    assert (cell.figures["n"], cell.inside) == (3, 1.0)
    assert cell.figures["median_ape"] == pytest.approx(5.0)
    assert str(cell) == "steps step_time: 5.0 / 5.0 / 5.0 on 3 rows, 100 % inside"


def test_what_was_said_cannot_be_said_anew(tmp_path: Path) -> None:
    write_release(tmp_path / "one.parquet", said(1.0))
    with pytest.raises(FileExistsError, match="says what it says once"):
        write_release(tmp_path / "one.parquet", said(1.1))


@pytest.mark.parametrize(("factor", "count"), [(1.0, 0), (1.04, 0), (1.06, 0), (1.08, 2)])
def test_two_points_worse_is_an_alarm(factor: float, count: int) -> None:
    lines = alarms(said(1.05), said(factor), ROWS)
    assert len(lines) == count
    assert not lines or lines[0] == "steps step_time: median 5.0 % before, 8.0 % now"


def test_a_row_that_was_answered_and_is_refused_is_an_alarm() -> None:
    now = [
        replace(entry, quantity="", predicted=None, why="no such chip") if entry.id == "b" else entry
        for entry in said(1.05)
    ]
    assert alarms(said(1.05), now, ROWS) == ["steps b: answered before, now refused: no such chip"]
    assert alarms(now, said(1.05), ROWS) == []  # the other way round is what one hopes for


def test_rows_that_one_release_alone_had_say_nothing_of_change() -> None:
    assert alarms(said(1.05), [*said(1.05)[:2], Entry("steps", "e", "step_time", 9.0)], ROWS) == []


def test_the_newest_release_is_held_against_the_one_before(capsys: pytest.CaptureFixture[str]) -> None:
    assert score({"2026-01-02": said(1.2), "2026-01-01": said(1.05)}, ROWS)
    assert "ALARM steps step_time: median 5.0 % before, 20.0 % now" in capsys.readouterr().out
    assert not score({"2026-01-01": said(1.2), "2026-01-02": said(1.05)}, ROWS)


def test_an_empty_ledger_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(tmp_path / "none.csv"), "--folder", str(tmp_path)]) == 2
    assert "record one first" in capsys.readouterr().out


def test_what_was_recorded_can_be_read() -> None:
    for path in FOLDER.glob("*.parquet"):
        entries = read_release(path)
        assert len({entry.table for entry in entries}) > 10
        assert all((entry.predicted is None) == bool(entry.why) for entry in entries)
