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


def setting(default: Any = MISSING, help_text: str = "", **more: Any) -> Any:
    """A field of a request with what its users read of it; a class as ``default`` stands for what it makes.

    ``more``: ``path`` is what the command line calls it where that is not its own name, ``name`` what Python and HTTP
    do; ``group`` spreads the fields of a dataclass as settings of their own, which the command line has in a group of
    that name (empty: in none); ``chosen`` is for what the command line chooses among files of ``conf``; ``http`` is why
    HTTP does not take it, ``of`` the kinds of work that read it; ``hidden`` is for what no face names, ``words`` for
    names that stand in its place; ``least``, ``most``, ``positive`` and ``choices`` are what it may be
    (:func:`~opcast.datasets.loading.check_fields`).
    """
    metadata = {"help": help_text, **more}
    factory = default if isinstance(default, type) else type(default)
    if isinstance(default, (type, dict, list)):
        return dataclasses.field(default_factory=factory, metadata=metadata)
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
    return next(
        (candidate for candidate in (kind, *get_args(kind)) if isinstance(candidate, type) and is_dataclass(candidate)),
        None,
    )


@lru_cache
def settings_of(request: type, group: str = "", of: tuple[str, ...] = ()) -> tuple[RequestSetting, ...]:
    """The settings that the fields of a request declare, those of its spread parts included.

    ``group`` is that of the command line; ``of``: these fields alone.
    """
    types = get_type_hints(request)
    return tuple(
        setting_
        for field in fields(request)
        if not of or field.name in of
        for setting_ in _settings(field, types[field.name], group)
    )


def _settings(field: Field[Any], kind: Any, group: str) -> Iterator[RequestSetting]:
    metadata = field.metadata
    if "words" in metadata:
        yield from (RequestSetting(name, name, Any, None, help_text) for name, help_text in metadata["words"].items())
    if metadata.get("hidden"):
        return
    if "group" in metadata:
        inner = dataclass_in(kind)
        assert inner is not None
        yield from settings_of(inner, metadata["group"])
        return
    path = metadata.get("path") or (f"{group}.{field.name}" if group else field.name)
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    yield RequestSetting(
        name=metadata.get("name", field.name),
        path=path,
        kind=kind,
        default=default,
        help=metadata.get("help", ""),
        chosen=bool(metadata.get("chosen")),
        http=metadata.get("http", ""),
        of=metadata.get("of", ()),
    )


def plain_default(value: Any) -> Any:
    """A default as YAML and JSON have it: what no face names left out."""
    if is_dataclass(value) and not isinstance(value, type):
        unset, values = type(value)(), {}
        for item in settings_of(type(value)):
            current = getattr(value, item.name, item.default)
            values[item.name] = plain_default(
                item.default if current == getattr(unset, item.name, current) else current
            )
        return values
    if isinstance(value, Mapping):
        return {name: plain_default(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_default(item) for item in value]
    return None if value is MISSING else value


def defaults_of(settings: Sequence[RequestSetting]) -> dict[str, Any]:
    """The defaults of settings as the command line nests them, a mapping for each group."""
    defaults: dict[str, Any] = {}
    for entry in settings:
        *groups, name = entry.path.split(".")
        node = defaults
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = plain_default(entry.default)
    return defaults


def value_at(config: Mapping[str, Any], path: str) -> Any:
    """What stands at a path of a configuration; :data:`MISSING` where nothing does."""
    node: Any = config
    for name in path.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return MISSING
        node = node[name]
    return node
