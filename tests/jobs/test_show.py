"""Tables fit the width they are shown in, numbers stand right, and a mistyped word gets the one that was meant."""

import pytest

from opcast.jobs.cli import main
from opcast.jobs.show import GAP, LINES, parts, side

HEADS = ("", "layout", "step", "MFU", "why")
ROWS = [["1", "tp=1 pp=1 zero_stage=1 micro_batch=1 dp=8", "3.54 s", "45.1%", "597 ms less communication, " * 6]]


@pytest.mark.parametrize("width", [20, 40, 80, 160, 400])
def test_a_table_goes_on_below_and_loses_no_column(width: int) -> None:
    found = parts(HEADS, ROWS, width)
    assert [at for part in found for at in part[1:]] == [1, 2, 3, 4]
    assert all(part[0] == 0 for part in found)
    for part in found:
        least = [max(len(word) for word in (HEADS[at], *ROWS[0][at].split())) for at in part]
        assert len(part) == 2 or sum(least) + GAP * len(part) < width


def test_what_fits_stays_one_table() -> None:
    assert parts(HEADS, ROWS, 400) == [[0, 1, 2, 3, 4]]
    assert parts(HEADS, [], 80) == [[0, 1, 2, 3, 4]]
    assert len(ROWS[0][4]) > LINES * 40  # so that 80 characters hold it only by itself
    assert parts(HEADS, ROWS, 80)[-1] == [0, 4]


def test_numbers_stand_right_and_sentences_left() -> None:
    assert side(1, ["3.54 s", "45 s"]) == side(1, ["+2.9%", "29.5 to 59.1"]) == "right"
    assert side(1, ["5.0% better in step_time: 80 ms less compute"]) == side(0, ["1"]) == side(1, ["noise"]) == "left"


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["list", "device"], "devices"),
        (["data", "chek"], "check"),
        (["completion", "bsh"], "bash"),
        (["profile", "statsu"], "status"),
    ],
)
def test_a_mistyped_word_gets_the_one_that_was_meant(
    words: list[str], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert f"; did you mean {near}?" in capsys.readouterr().err
