"""Tables fit the width they are shown in, numbers stand right, and a mistyped word gets the one that was meant."""

import os
import re
import subprocess
import sys

import pytest

from opcast.jobs.cli import main
from opcast.jobs.show import GAP, LINES, parts, side, table, with_units
from opcast.simulator.network.query import parse_size
from opcast.simulator.report.view import time_text

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
    assert side(1, ["5.0% better in step time: 80 ms less compute"]) == side(0, ["1"]) == side(1, ["noise"]) == "left"


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


@pytest.mark.parametrize("size", [0, 1, 1000, 1024, 64_000_000, 393_216, 2**30, 3 * 2**29, 6_294_528])
def test_sizes_are_shown_as_they_may_be_asked(size: int) -> None:
    shown = with_units(f"all_reduce[size_bytes={size} ranks=8]")
    assert parse_size(shown.removeprefix("all_reduce[size_bytes=").partition(" ")[0].removesuffix("]")) == size
    assert shown.endswith(" ranks=8]")
    assert with_units("size_bytes=1073741824") == "size_bytes=1GiB"


def test_what_only_rounding_leaves_is_nothing() -> None:
    assert time_text(-1.46e-11) == "0 µs"
    assert time_text(0.739) == "0.739 µs"


def test_a_title_is_not_folded_into_the_width_of_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    table("a title that is longer than the table below it", ("a", "b"), [("x", "1")])
    assert capsys.readouterr().out.splitlines()[0] == "a title that is longer than the table below it"


@pytest.mark.parametrize("words", [["list", "devices"], ["list", "ops"], ["predict", "op=gemm", *"mnk"]])
def test_a_terminal_of_80_columns_is_never_exceeded_and_no_color_is_heeded(words: list[str]) -> None:
    """On a terminal: a pseudo one, whose other end is read."""
    words = [f"op.{word}=4096" if len(word) == 1 else word for word in words]
    told = on_a_terminal(words, {"TERM": "xterm-256color", "COLUMNS": "80"})
    plain = on_a_terminal(words, {"TERM": "xterm-256color", "COLUMNS": "80", "NO_COLOR": "1"})
    colour = re.compile(r"\x1b\[(?:3|4|9|10)\d(?:;\d+)*m")
    assert not colour.search(plain)
    for said in (told, plain):
        assert max(len(re.sub(r"\x1b\[[\d;]*m", "", line)) for line in said.splitlines()) <= 80


def on_a_terminal(words: list[str], environment: dict[str, str]) -> str:
    """What a command writes to a terminal."""
    import pty

    reader, writer = pty.openpty()
    command = [sys.executable, "-P", "-m", "opcast.jobs.cli", *words]
    if words[0] == "predict":
        command.append("device=h100")
    with subprocess.Popen(command, stdout=writer, env={**os.environ, **environment}) as child:
        os.close(writer)
        said = b""
        while piece := read_some(reader):
            said += piece
    assert child.returncode == 0
    os.close(reader)
    return said.decode()


def read_some(reader: int) -> bytes:
    """The next bytes of a terminal; none where its other end is closed, which Linux calls an error."""
    try:
        return os.read(reader, 65536)
    except OSError:
        return b""
