"""What the commands of the documents print, below each command: runs them, and puts today's figures there.

    python tests/benchmarks/samples.py [PAGE…] [--write]

README.md where no page is named. Lines stay as they were chosen; what changes are their figures. A line that a command
no longer prints is named, and stays. ``tests/test_docs.py`` runs the same commands, and holds each figure of the front
page to the interval of the answer.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*?) -->\n+)?^```(?P<language>\w*)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL
)
FIGURE = re.compile(r"([+-]?[\d,]*\.?\d+)(.*)")
NEARLY = 0.25  # how much a shown figure may differ: answers move a little with every calibration
BETWEEN = 40  # words of the output that a shown line may leave out in one place
UNITS = {"ns": 1e-9, "µs": 1e-6, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
TIME = r"([\d,.]+) (ns|µs|us|ms|s|min|h)\b"
ANSWER = re.compile(rf"(?:latency|step time|TPOT|end to end)\s+{TIME}.*?interval\s+{TIME} to {TIME}", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    note: str
    shown: str = ""  # the output below it
    span: tuple[int, int] = (0, 0)  # where that stands in the page

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(pages: Sequence[Path]) -> Iterator[Block]:
    """The blocks of the pages that are code to run."""
    for path in pages:
        text = path.read_text("utf-8")
        for match in BLOCK.finditer(text):
            if match["language"] not in ("bash", "python") or (match["note"] or "").startswith("not run"):
                continue
            below = BLOCK.match(text, match.end() + 1)
            shown, span = (below["text"], below.span("text")) if below and below["language"] == "text" else ("", (0, 0))
            line = text.count("\n", 0, match.start("text"))
            name = path.relative_to(ROOT).as_posix()
            yield Block(name, line, match["language"], match["text"], match["note"] or "", shown, span)


def commands(block: Block) -> list[str]:
    """The commands of a block: continued lines joined, comments and blank lines left out."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


def not_said(shown: str, output: str, near: float | None = NEARLY) -> list[str]:
    """The shown lines that the output does not have."""
    said = words_of(output)
    return [line for line in shown.splitlines() if place(words_of(line), said, near) is None]


def words_of(text: str) -> list[str]:
    """Its words, without what ends a clause."""
    return [word.rstrip(",;:") for word in text.split() if word != "…"]


def place(words: Sequence[str], said: Sequence[str], near: float | None) -> list[int] | None:
    """Where the words stand in what was said, in their order, with the fewest others between; None: nowhere.

    Of several such places the one whose figures are nearest.
    """
    places = [found for at in range(len(said)) if (found := begins(words, said, at, near))]

    def distance(found: list[int]) -> tuple[int, int]:
        far = sum(not same(word, said[at], NEARLY) for word, at in zip(words, found, strict=True))
        return found[-1] - found[0], far

    return min(places, key=distance, default=None)


def begins(words: Sequence[str], said: Sequence[str], at: int, near: float | None) -> list[int] | None:
    """Where the words stand if the first one stands at ``at``."""
    if not same(words[0], said[at], near):
        return None
    found = [at]
    for word in words[1:]:
        ahead = range(found[-1] + 1, min(found[-1] + BETWEEN, len(said)))
        at = next((i for i in ahead if same(word, said[i], near)), -1)
        if at < 0:
            return None
        found.append(at)
    return found


def same(shown: str, said: str, near: float | None) -> bool:
    """Whether two words are equal, or figures of one unit that are near: by any factor where ``near`` is None."""
    one, other = FIGURE.fullmatch(shown), FIGURE.fullmatch(said)
    if not one or not other or one[2] != other[2]:
        return shown == said
    a, b = (float(match[1].replace(",", "")) for match in (one, other))
    return near is None or abs(a - b) <= near * max(abs(a), abs(b))


def nearness(output: str) -> float:
    """How far a figure may be from today's: no farther than the nearer end of the answer's interval, nor a quarter."""
    match = ANSWER.search(output)
    if match is None:
        return NEARLY
    answer, low, high = (float(match[i].replace(",", "")) * UNITS[match[i + 1]] for i in (1, 3, 5))
    return min(NEARLY, 1 - low / answer, 1 - answer / high)


def refreshed(shown: str, output: str) -> tuple[str, list[str]]:
    """The shown lines with the figures of the output, in their columns, and the lines that it does not have."""
    said, lines, lost = words_of(output), [], []
    for line in shown.splitlines():
        found = place(words_of(line), said, NEARLY) or place(words_of(line), said, None)
        lines.append(line if found is None else with_figures(line, [said[at] for at in found]))
        lost += [] if found else [line]
    return "".join(f"{line}\n" for line in lines), lost


def with_figures(line: str, words: Sequence[str]) -> str:
    """A line with other words of the same number; each begins where it did, as far as there is room."""
    made, rest = "", iter(words)
    for match in re.finditer(r"\S+", line):
        end = match[0][len(match[0].rstrip(",;:")) :]
        word = match[0] if match[0] == "…" else f"{next(rest)}{end}"
        column = match.start() if line[: match.start()].endswith("  ") or not made else 0
        made = f"{(f'{made} ' if made else '').ljust(column)}{word}"
    return made


def run(line: str, home: Path) -> str:
    """What a command of a document prints."""
    words = [sys.executable, "-m", "opcast.jobs.cli", *shlex.split(line)[1:]]
    environment = {**os.environ, "OPCAST_HOME": str(home), "COLUMNS": "250"}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment, cwd=home)
    return f"{done.stderr}\n{done.stdout}"


def main() -> int:
    """Run the commands of the pages that show an output, and say or write what changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, default=[ROOT / "README.md"])
    parser.add_argument("--write", action="store_true")
    asked, wrong = parser.parse_args(), 0
    with tempfile.TemporaryDirectory() as home:
        for page in asked.pages:
            text = page.read_text("utf-8")
            for block in reversed([each for each in blocks([page.resolve()]) if each.shown]):
                new, lost = refreshed(block.shown, "\n".join(run(line, Path(home)) for line in commands(block)))
                print(f"{block}: {'as it was' if new == block.shown else 'other figures'}")
                print("".join(f"  no longer printed: {line}\n" for line in lost), end="")
                wrong += len(lost)
                text = text[: block.span[0]] + new + text[block.span[1] :]
            if asked.write:
                page.write_text(text, "utf-8")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
