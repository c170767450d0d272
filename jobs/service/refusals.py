"""How the service says no: an object for the caller that tells no folder of the server, a line for its operator."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ...simulator.workbench import PACKAGE
from ..show import say
from .settings import ServiceSettings

LINES_A_SECOND = 10  # of a flood of bad calls the rest are counted
LONGEST_LINE = 300


class Refusals:
    """Bodies of refusals. What they say of the server's folders is left out, and told to its operator alone."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.hidden = places(settings)
        self._second, self._told, self._untold = 0, 0, 0

    def body(self, status: int, code: str, message: str) -> bytes:
        """``{"error": {"code": …, "message": …}}``, with a line in the log."""
        self.log(f"{status} {code}: {message}")
        return msgspec.json.encode({"error": {"code": code, "message": self.outside(message)}})

    def outside(self, message: str) -> str:
        """A message without the server's folders."""
        for folder, name in self.hidden:
            message = message.replace(folder, name)
        return message

    def log(self, message: str) -> None:
        """One line for the operator, of at most so many a second."""
        now = int(time.monotonic())
        if now != self._second:
            if self._untold:
                say(f"opcast: … and {self._untold:,} more")
            self._second, self._told, self._untold = now, 0, 0
        if self._told < LINES_A_SECOND:
            self._told += 1
            line = "".join(character if character.isprintable() else " " for character in message)
            say(f"opcast: {line if len(line) <= LONGEST_LINE else f'{line[:LONGEST_LINE]}…'}")
        else:
            self._untold += 1


def places(settings: ServiceSettings) -> tuple[tuple[str, str], ...]:
    """Folders that no caller is told of, and what they are called instead; the longest first."""
    sources = settings.sources
    named = [(sources.store, "the store"), (sources.predictors, "the predictors"), (sources.graphs, "the graphs")]
    named += [(sources.calibration, "the calibration")] if os.sep in sources.calibration else []
    named += [
        (sys.executable, "python"),
        (sys.prefix, "the environment"),
        (str(PACKAGE), "opcast"),
        (str(Path.home()), "~"),
        (os.getcwd(), "."),
    ]
    names = {spelled: name for folder, name in named for spelled in _spellings(folder) if len(spelled) > 1}
    return tuple(sorted(names.items(), key=lambda pair: -len(pair[0])))


def _spellings(folder: str) -> Iterable[str]:
    path = Path(folder).expanduser()
    return folder, str(path), str(path.resolve())
