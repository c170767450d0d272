"""Where a figure of a framework, an engine, a network or a host is from: :class:`FigureSource`."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("documented", "code", "measured_elsewhere", "assumed", "read_off")


class FigureSourceError(ValueError):
    """A source that says nothing, or half of what it should. The message says what."""


@dataclass(frozen=True)
class FigureSource:
    """One line for each kind of evidence that a figure rests on.

    ``documented`` in documents, releases or papers; read in the ``code``; ``measured_elsewhere``, not on runs of a
    scored table; ``assumed`` with a reason; ``read_off`` published runs of ``table``, whose score therefore says little
    of it. FigureSourceError for none of them, and for a table without ``read_off`` or the other way round.
    """

    documented: str = ""
    code: str = ""
    measured_elsewhere: str = ""
    assumed: str = ""
    read_off: str = ""
    table: str = ""

    def __post_init__(self) -> None:
        if not self.kinds:
            raise FigureSourceError(f"sources: say {', '.join(KINDS)}: one of them at least")
        if bool(self.read_off) != bool(self.table):
            raise FigureSourceError(
                "sources: read_off needs the table that it was read off, and no other source has one"
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of evidence, by name."""
        return tuple(name for name in KINDS if getattr(self, name))

    @property
    def basis(self) -> str:
        """The kinds of evidence in words, with the table."""
        return ", ".join(self._called(name) for name in self.kinds)

    def _called(self, kind: str) -> str:
        return f"read off {self.table}" if kind == "read_off" else kind.replace("_", " ")

    def __str__(self) -> str:
        return "; ".join(f"{self._called(name)}: {getattr(self, name)}" for name in self.kinds)
