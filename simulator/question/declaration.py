"""Settings of a question, declared once: on the fields of its request stand default, type, help, and who may name it.

The command line, Python and HTTP take names, defaults and help from here; none has a list or a default of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any, get_args, get_type_hints

FILES = "it names a file: use the command line or Python"


def setting(default: Any = MISSING, said: str = "", **more: Any) -> Any:
    """A field of a request with what its users read of it.

    ``more``: ``path`` is what the command line calls it where that is not its own name, ``name`` what Python and HTTP
    do; ``group`` spreads the fields of a dataclass as settings of their own, which the command line has in a group of
    that name (empty: in none); ``chosen`` is for what the command line chooses among files of ``conf``; ``http`` is why
    HTTP does not take it, ``of`` the kinds of work that read it; ``hidden`` is for what no face names, ``words`` for
    names that stand in its place.
    """
    metadata = {"help": said, **more}
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=type(default), metadata=metadata)
    if default is MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class RequestSetting:
    """A setting of a verb: its name in Python and HTTP, its path on the command line, type, default and help.

    ``chosen``: the command line has a group of choices for it. ``http``: why HTTP does not take it. ``of``: the kinds
    of work that read it (empty: all).
    """

    name: str
    path: str
    kind: Any
    default: Any
    help: str
    chosen: bool = False
    http: str = ""
    of: tuple[str, ...] = ()

    @property
    def inside(self) -> tuple[RequestSetting, ...]:
        """The settings within it, where it is a mapping of a dataclass's."""
        kind = dataclass_in(self.kind)
        return () if kind is None or self.chosen else settings_of(kind)


def dataclass_in(kind: Any) -> type | None:
    """The dataclass that a type is, or that stands beside null in it."""
    return next((each for each in (kind, *get_args(kind)) if isinstance(each, type) and is_dataclass(each)), None)


@lru_cache
def settings_of(request: type, group: str = "", of: tuple[str, ...] = ()) -> tuple[RequestSetting, ...]:
    """The settings that the fields of a request declare, those of its spread parts included.

    ``group`` is that of the command line; ``of``: these fields alone.
    """
    types = get_type_hints(request)
    return tuple(
        found
        for each in fields(request)
        if not of or each.name in of
        for found in _settings(each, types[each.name], group)
    )


def _settings(each: Field[Any], kind: Any, group: str) -> Iterator[RequestSetting]:
    own = each.metadata
    if "words" in own:
        yield from (RequestSetting(name, name, Any, None, said) for name, said in own["words"].items())
    if own.get("hidden"):
        return
    if "group" in own:
        inner = dataclass_in(kind)
        assert inner is not None
        yield from settings_of(inner, own["group"])
        return
    path = own.get("path") or (f"{group}.{each.name}" if group else each.name)
    default = each.default_factory() if each.default_factory is not MISSING else each.default
    yield RequestSetting(
        name=own.get("name", each.name),
        path=path,
        kind=kind,
        default=default,
        help=own.get("help", ""),
        chosen=bool(own.get("chosen")),
        http=own.get("http", ""),
        of=own.get("of", ()),
    )


def plain_default(value: Any) -> Any:
    """A default as YAML and JSON have it: what no face names left out."""
    if is_dataclass(value) and not isinstance(value, type):
        usual, made = type(value)(), {}
        for each in settings_of(type(value)):
            own = getattr(value, each.name, each.default)
            made[each.name] = plain_default(each.default if own == getattr(usual, each.name, own) else own)
        return made
    if isinstance(value, Mapping):
        return {name: plain_default(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_default(each) for each in value]
    return None if value is MISSING else value


def defaults_of(settings: Sequence[RequestSetting]) -> dict[str, Any]:
    """The defaults of settings as the command line nests them, a mapping for each group."""
    made: dict[str, Any] = {}
    for each in settings:
        *groups, name = each.path.split(".")
        place = made
        for group in groups:
            place = place.setdefault(group, {})
        place[name] = plain_default(each.default)
    return made


def value_at(config: Mapping[str, Any], path: str) -> Any:
    """What stands at a path of a configuration; :data:`MISSING` where nothing does."""
    place: Any = config
    for name in path.split("."):
        if not isinstance(place, Mapping) or name not in place:
            return MISSING
        place = place[name]
    return place
