"""What a search over ways to serve has played, kept beside the file of its points: a search that is killed goes on.

Beside ``ways.parquet`` stands ``ways.parquet.played`` until the points are written: JSON, the key of the request in it.
Tables of replicas are kept by themselves (:mod:`.replicas`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ....datasets.files import write_atomically
from ...question.canonical import RequestError
from .. import workers
from .request import ServedSearchRequest

PLAYED = ".played"  # what the file's name ends with


class PlayedWays:
    """Answers of the event loop by what was asked, in a file beside ``points`` (None: nothing is kept).

    A file of another request is written anew. RequestError where ``points`` is a folder.
    """

    def __init__(self, points: Path | None, request: ServedSearchRequest) -> None:
        if points is not None and (points.is_dir() or not points.name):
            raise RequestError(f"points={points} is a folder: name a file, as {points / 'ways.parquet'}")
        self.path = None if points is None else points.with_name(points.name + PLAYED)
        self.key, self.kept_s = request.key() if points else "", time.monotonic()
        self.answers: dict[str, Any] = {} if self.path is None else read(self.path, self.key)

    def of(self, asked: Sequence[Any], play: Callable[[], Any]) -> Any:
        """The answer to what is asked: as it was kept, else what ``play`` says. Kept every few seconds; RequestError
        where it cannot be."""
        name = json.dumps(asked, default=float)
        if name not in self.answers:
            self.answers[name] = play()
            if self.path is not None and time.monotonic() - self.kept_s >= workers.KEPT_EVERY_S:
                text = json.dumps({"key": self.key, "answers": self.answers}, default=float)
                write_atomically(self.path, lambda file: file.write_text(text), RequestError, "points=")
                self.kept_s = time.monotonic()
        return self.answers[name]

    def end(self) -> None:
        """The points are written: nothing more is kept."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def read(path: Path, key: str) -> dict[str, Any]:
    """The answers of a file; none where it has those of another search, or cannot be read."""
    try:
        stored = json.loads(path.read_text())
        return dict(stored["answers"]) if stored["key"] == key else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
