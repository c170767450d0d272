"""Asks the golden questions again, shows what changed and keeps the new answers.

    python tests/golden/regenerate.py [pattern …]    show what changed, keep the new answers
    python tests/golden/regenerate.py --check        only show it; exit code 1 where something differs

Patterns are of names of cases (``train_*``, ``*flow*``); without one, all are asked.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from opcast.tests.golden.asking import ANSWERS, AskedError, ask, questions, stored, write, write_home
from opcast.tests.golden.differences import LINES, Change, differences, report


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 1 where a case has no answer, or with ``--check`` where one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", metavar="pattern", help="names of cases, * and ? as in a shell")
    parser.add_argument("--check", action="store_true", help="show what differs, write nothing")
    parser.add_argument("--all", action="store_true", help=f"every line, not the first {LINES} of a case")
    parser.add_argument("--reverse", action="store_true", help="ask in reversed order: answers must be the same")
    chosen = parser.parse_args(argv)
    asked = questions()
    names = [name for name in asked.cases if any(fnmatchcase(name, each) for each in chosen.patterns or ["*"])]
    if not names:
        parser.error(f"no case is called {' or '.join(chosen.patterns)}; tests/golden/cases.yaml lists them")
    found: dict[str, list[Change]] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        write_home(home, asked)
        for name in reversed(names) if chosen.reverse else names:
            try:
                answer = ask(asked.cases[name], home)
            except AskedError as error:
                failed.append(f"{name}: no answer: {error}")
                continue
            before = stored(name)
            changes = [Change("", "nothing", "an answer")] if before is None else differences(before, answer)
            if changes:
                found[name] = changes
            if changes and not chosen.check:
                write(name, answer)
    stale = [] if chosen.patterns else sorted({path.stem for path in ANSWERS.glob("*.json")} - asked.cases.keys())
    for name in stale:
        found[name] = [Change("", "an answer", "nothing")]
        if not chosen.check:
            (ANSWERS / f"{name}.json").unlink()
    for name, changes in sorted(found.items(), key=lambda item: (-item[1][0].size, item[0])):
        print(report(name, changes, len(changes) if chosen.all else LINES))
    for line in failed:
        print(line)
    same = len(names) - len(found.keys() - set(stale)) - len(failed)
    kept = "differ" if chosen.check else "changed and were written"
    print(f"{same} of {len(names)} cases are unchanged; {len(found)} {kept}; {len(failed)} have no answer")
    return 1 if failed or (chosen.check and found) else 0


if __name__ == "__main__":
    sys.exit(main())
