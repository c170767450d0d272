"""Predictors in a plain folder: ``<root>/<device_id>/<kind>@<backend>/<version>/``, and which version is current.

A version is never changed once written. ``current`` beside the versions names the one in use and is replaced
atomically, so readers and a training run never meet half a model. No server, no database.

Of several backends one answers by :mod:`.choice`, with the lines of ``<root>/default``: a backend or its framework
(``vllm``, ``trtllm-1.3.0rc20``) each, best first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from ..datasets.backends import framework
from ..datasets.files import write_atomically
from ..datasets.launches import ANYONE, Caller, place
from .choice import has_learned, is_own, launched, matching, sources_of
from .predictor import CARD, MEND, MODEL, Predictor, PredictorError, load, read_card

CURRENT, DEFAULT = "current", "default"


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
        """Backends with a predictor, damaged ones included, by name."""
        base = self.root / quote(device_id, safe="")
        folders = base.glob(f"{quote(kind, safe='')}@*") if base.is_dir() else []
        return sorted(unquote(folder.name.partition("@")[2]) for folder in folders if _last(folder))

    def default_backend(self, kind: str, device_id: str, dtype: str | None = None) -> str | None:
        """The backend that answers when none is named (see the module); None without any predictor."""
        return self.matching(kind, device_id, None, dtype)

    def matching(
        self,
        kind: str,
        device_id: str,
        label: str | None,
        dtype: str | None = None,
        preferences: Sequence[str] | None = None,
        caller: Caller = ANYONE,
        foreign: bool = False,
        unmasked: int = 0,
    ) -> str | None:
        """The backend meant by ``wanted``: itself, or the best of a framework (``vllm``, ``trtllm-1.3.0rc20``).

        ``preferences`` stand in for the lines of ``<root>/default``; ``foreign`` leaves out those of own rows. None
        where no predictor fits; PredictorError where it takes the card of a damaged one to choose.
        """
        order = self.preferences() if preferences is None else preferences
        card_of = partial(self._card, kind, device_id)
        labels = self.backends(kind, device_id)
        if foreign:
            labels = [candidate for candidate in labels if not is_own(sources_of(card_of(candidate)))]
        return matching(labels, card_of, label, dtype, order, kind, caller, unmasked)

    def learned(
        self,
        kind: str,
        device_id: str,
        label: str | None,
        dtype: str,
        preferences: Sequence[str] | None = None,
        caller: Caller = ANYONE,
        unmasked: int = 0,
    ) -> str | None:
        """:meth:`matching`, where its predictor has learned the format."""
        backend = self.matching(kind, device_id, label, dtype, preferences, caller, unmasked=unmasked)
        return backend if backend and has_learned(self._card(kind, device_id, backend), dtype) else None

    def launched(
        self, kind: str, device_id: str, dtype: str, preferences: Sequence[str] | None, caller: Caller
    ) -> str | None:
        """The backend of own rows that a caller launches, of those whose predictor has learned the format."""
        placed = [name for name in self.backends(kind, device_id) if place(caller, kind, dtype, name) is not None]
        cards = {name: self._card(kind, device_id, name) for name in placed}
        rows = {
            backend: card.get("n", 0)
            for backend, card in cards.items()
            if is_own(sources_of(card)) and has_learned(card, dtype)
        }
        order = self.preferences() if preferences is None else preferences
        return next(iter(launched(rows, order, kind, dtype, caller)), None)

    def calling(
        self, kind: str, device_id: str, calls: str, dtype: str, framework_name: str | None = None
    ) -> str | None:
        """The backend with most rows of those with ``calls`` in their names whose predictor has learned the format.

        Of one framework, or of any.
        """
        cards = {
            backend: self._card(kind, device_id, backend)
            for backend in self.backends(kind, device_id)
            if calls in backend and framework_name in (None, framework(backend))
        }
        taught = [backend for backend in cards if has_learned(cards[backend], dtype)]
        return max(taught, key=lambda backend: (cards[backend].get("n", 0), backend), default=None)

    def devices(self) -> list[str]:
        """Devices with a folder, by id."""
        folders = self.root.iterdir() if self.root.is_dir() else ()
        return sorted(
            unquote(folder_of_device.name) for folder_of_device in folders if next(folder_of_device.glob("*@*"), None)
        )

    def preferences(self) -> tuple[str, ...]:
        """Lines of ``<root>/default``, but empty ones and comments (``#``)."""
        try:
            lines = (self.root / DEFAULT).read_text().splitlines()
        except OSError:
            return ()
        return tuple(text for line in lines if (text := line.partition("#")[0].strip()))

    def _card(self, kind: str, device_id: str, backend: str) -> dict[str, Any]:
        """The card of the current predictor. PredictorError when it is not what its folder says."""
        folder = self._folder(kind, device_id, backend)
        path = folder / (_current(folder) or "")
        card = _card_at(path)
        if (card.get("kind"), card.get("backend")) != (kind, backend) or not isinstance(card.get("sha256"), str):
            raise PredictorError(f"{path / CARD} is damaged: it is no card of {kind} on {backend}; {MEND}")
        return card

    def register(self, predictor: Predictor, promote: bool = True) -> Predictor:
        """Write a new version (the number after the last) and, if ``promote``, make it current; returns it.

        Registering the very arrays that are current writes nothing and returns the current version.
        """
        folder = self._folder(predictor.kind, predictor.device_id, predictor.backend)
        digest = hashlib.sha256(predictor.model_bytes()).hexdigest()
        with contextlib.suppress(PredictorError):  # a damaged one is replaced
            version = _current(folder)
            if version and read_card(folder / version).get("sha256") == digest:
                return self.load(folder / version)
        while True:
            numbered = dataclasses.replace(predictor, version=str(_last(folder) + 1))
            try:
                path = numbered.save(folder / numbered.version)
            except FileExistsError:  # another training run took the number
                continue
            break
        if promote or not (folder / CURRENT).exists():
            _point(folder, numbered.version)
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
        return sorted(entries, key=lambda entry: (entry.device_id, entry.kind, entry.backend, int(entry.version)))

    def path(self, predictor: Predictor) -> Path:
        """The folder of a registered predictor."""
        return self._folder(predictor.kind, predictor.device_id, predictor.backend) / predictor.version

    def promote(self, entry: Entry) -> None:
        """Make a version current. PredictorError when it does not load."""
        self.load(entry.path)
        _point(entry.path.parent, entry.version)

    def roll_back(self, kind: str, device_id: str, backend: str) -> Entry:
        """Make the last version before the current one current again; it. PredictorError where there is none."""
        entries = [e for e in self.list() if (e.kind, e.device_id, e.backend) == (kind, device_id, backend)]
        now = next((int(entry.version) for entry in entries if entry.current), 0)
        earlier = [entry for entry in entries if int(entry.version) < now]
        if not earlier:
            raise PredictorError(
                f"{kind}@{device_id}@{backend} has no version before {now or 'the first'} to go back to"
            )
        self.promote(earlier[-1])
        return dataclasses.replace(earlier[-1], current=True)

    def _folder(self, kind: str, device_id: str, backend: str) -> Path:
        return self.root / quote(device_id, safe="") / f"{quote(kind, safe='')}@{quote(backend, safe='')}"


@lru_cache(maxsize=512)
def _loaded(path: Path, stamp: tuple[int, ...]) -> Predictor:
    return load(path)


def _card_at(path: Path) -> dict[str, Any]:
    """A card by its folder, from memory when it was read before and its file is the same; not to be changed."""
    try:
        stamp = (path / CARD).stat()
    except OSError:
        return read_card(path)  # says what is missing
    return _card_of(path, (stamp.st_mtime_ns, stamp.st_size, stamp.st_ino))


@lru_cache(maxsize=4096)
def _card_of(path: Path, stamp: tuple[int, ...]) -> dict[str, Any]:
    return read_card(path)


def _current(folder: Path) -> str | None:
    """The version in use, the newest where nothing says which; None where there is none yet.

    PredictorError when it names one that is not there.
    """
    try:
        version = (folder / CURRENT).read_text("ascii", "replace").strip()
    except OSError:
        return str(_last(folder)) if _last(folder) else None
    if not version.isdecimal() or not (folder / version).is_dir():
        raise PredictorError(f"{folder / CURRENT} names version {version[:20]!r}, which is not there; {MEND}")
    return version


def _last(folder: Path) -> int:
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return max((int(name) for name in names if name.isdigit()), default=0)


def _point(folder: Path, version: str) -> None:
    write_atomically(folder / CURRENT, lambda file: file.write_text(version + "\n"), PredictorError)
