"""Predictors in a plain folder: ``<root>/<device_id>/<kind>@<backend>/<version>/``, and which version is current.

A version is never changed once written. ``current`` beside the versions names the one in use and is replaced
atomically, so readers and a training run never meet half a model. No server, no database.

Who names no backend gets one that has learned the format asked about, if any has: of those ``torch``'s; without it,
the first that a line of ``<root>/default`` names: a backend or its framework (``vllm``, ``trtllm-1.3.0rc20``), best
first; without such a line, the one trained on most rows. The backend that comes first by name decides a tie.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from .features import alike
from .predictor import CARD, MODEL, Predictor, PredictorError, load, read_card

CURRENT, DEFAULT = "current", "default"
DEFAULT_BACKEND = "torch"  # the one a user gets who names none, where there is one


@dataclass(frozen=True)
class Entry:
    """One registered version."""

    kind: str
    device_id: str
    backend: str
    version: str
    current: bool
    path: Path

    @property
    def card(self) -> dict[str, Any]:
        return read_card(self.path)


class Registry:
    """All predictors under ``root``, which need not exist yet. Loaded predictors are kept while the process lives."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def find(self, kind: str, device_id: str, backend: str | None = None) -> Predictor | None:
        """The current predictor, or None. Without a backend: that of the default backend.

        PredictorError when the current version cannot be used (damaged, another format).
        """
        if backend is None:
            backend = self.default_backend(kind, device_id)
            if backend is None:
                return None
        folder = self._folder(kind, device_id, backend)
        version = _current(folder)
        return self.load(folder / version) if version else None

    def load(self, path: Path) -> Predictor:
        """A version by its folder, from memory when it was loaded before and its files are the same."""
        try:
            stamp = tuple((path / name).stat().st_mtime_ns for name in (CARD, MODEL))
        except OSError:
            return load(path)  # says what is missing
        return _loaded(path, stamp)

    def backends(self, kind: str, device_id: str) -> list[str]:
        """Backends with a current predictor, by name."""
        base = self.root / quote(device_id, safe="")
        folders = base.glob(f"{quote(kind, safe='')}@*") if base.is_dir() else []
        return sorted(unquote(folder.name.partition("@")[2]) for folder in folders if _current(folder))

    def default_backend(self, kind: str, device_id: str, dtype: str | None = None) -> str | None:
        """The backend that answers when none is named (see the module); None without any predictor."""
        preferences = (DEFAULT_BACKEND, *self.preferences())
        return self._best(kind, device_id, self.backends(kind, device_id), preferences, dtype)

    def matching(self, kind: str, device_id: str, wanted: str | None, dtype: str | None = None) -> str | None:
        """The backend meant by ``wanted``: itself, or the best of a framework (``vllm``, ``trtllm-1.3.0rc20``)."""
        if wanted is None:
            return self.default_backend(kind, device_id, dtype)
        known = [each for each in self.backends(kind, device_id) if _means(wanted, each)]
        return wanted if wanted in known else self._best(kind, device_id, known, self.preferences(), dtype)

    def preferences(self) -> tuple[str, ...]:
        """Lines of ``<root>/default``, but empty ones and comments (``#``)."""
        try:
            lines = (self.root / DEFAULT).read_text().splitlines()
        except OSError:
            return ()
        return tuple(text for line in lines if (text := line.partition("#")[0].strip()))

    def _best(
        self, kind: str, device_id: str, known: Sequence[str], wanted: Sequence[str], dtype: str | None
    ) -> str | None:
        if len(known) < 2:
            return next(iter(known), None)
        cards = {backend: self._card(kind, device_id, backend) for backend in known}
        seen = [backend for backend in known if dtype is None or _learned(cards[backend], dtype)] or known
        left = next((found for each in wanted if (found := [name for name in seen if _means(each, name)])), seen)
        return max(left, key=lambda backend: cards[backend].get("n", 0))

    def _card(self, kind: str, device_id: str, backend: str) -> dict[str, Any]:
        folder = self._folder(kind, device_id, backend)
        return read_card(folder / (_current(folder) or ""))

    def register(self, predictor: Predictor, promote: bool = True) -> Predictor:
        """Write a new version (the number after the last) and, if ``promote``, make it current; returns it.

        Registering the very arrays that are current writes nothing and returns the current version.
        """
        folder = self._folder(predictor.kind, predictor.device_id, predictor.backend)
        digest = hashlib.sha256(predictor.model_bytes()).hexdigest()
        version = _current(folder)
        if version and read_card(folder / version).get("sha256") == digest:
            return self.load(folder / version)
        while True:
            made = dataclasses.replace(predictor, version=str(_last(folder) + 1))
            try:
                path = made.save(folder / made.version)
            except FileExistsError:  # another training run took the number
                continue
            break
        if promote or version is None:
            _point(folder, made.version)
        return self.load(path)

    def list(self) -> list[Entry]:
        """Every version, by device, kind, backend and number."""
        entries = []
        for path in self.root.glob("*/*@*/*/card.json") if self.root.is_dir() else []:
            folder = path.parent.parent
            kind, _, backend = folder.name.partition("@")
            version = path.parent.name
            if version.isdigit():
                entries.append(
                    Entry(
                        unquote(kind),
                        unquote(folder.parent.name),
                        unquote(backend),
                        version,
                        version == _current(folder),
                        path.parent,
                    )
                )
        return sorted(entries, key=lambda each: (each.device_id, each.kind, each.backend, int(each.version)))

    def path(self, predictor: Predictor) -> Path:
        """The folder of a registered predictor."""
        return self._folder(predictor.kind, predictor.device_id, predictor.backend) / predictor.version

    def promote(self, entry: Entry) -> None:
        """Make a version current. PredictorError when it does not load."""
        self.load(entry.path)
        _point(entry.path.parent, entry.version)

    def _folder(self, kind: str, device_id: str, backend: str) -> Path:
        return self.root / quote(device_id, safe="") / f"{quote(kind, safe='')}@{quote(backend, safe='')}"


@lru_cache(maxsize=512)
def _loaded(path: Path, stamp: tuple[int, ...]) -> Predictor:
    return load(path)


def _means(wanted: str, backend: str) -> bool:
    """Whether ``wanted`` is the backend, or the framework or version that it belongs to."""
    return backend == wanted or backend.startswith((f"{wanted}-", f"{wanted}:"))


def _learned(card: dict[str, Any], dtype: str) -> bool:
    """Whether a predictor has rows of a format; formats of 16 bits are alike to it."""
    return alike(dtype) in {alike(name) for name in card.get("dtypes", ())}


def _current(folder: Path) -> str | None:
    try:
        version = (folder / CURRENT).read_text().strip()
    except OSError:
        return None
    if not version.isdigit() or not (folder / version).is_dir():
        raise PredictorError(f"{folder / CURRENT} names version {version!r}, which is not there; train it again")
    return version


def _last(folder: Path) -> int:
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return max((int(name) for name in names if name.isdigit()), default=0)


def _point(folder: Path, version: str) -> None:
    handle, staging = tempfile.mkstemp(prefix=f".{CURRENT}-", dir=folder)
    with os.fdopen(handle, "w") as file:
        file.write(version + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(staging, folder / CURRENT)
