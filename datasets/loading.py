"""Plain values of YAML, JSON or a command line become dataclasses: one loader, one style of message.

:func:`load` lets msgspec check names of fields and kinds of values. Ranges and choices are the class's own affair: it
calls :func:`check_fields`, or :func:`whole`, :func:`number`, :func:`flag` and :func:`choice`, in ``__post_init__``, so
that they hold for what is made in Python as well. Every message names the full setting, the bad value and what is
allowed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from .near import did_you_mean, meant

T = TypeVar("T")
Error = type[ValueError]
LONGEST_PATTERN = 2000  # characters of a regular expression
MOST_WHOLE = 2**53  # what a float of 64 bits and JSON keep exactly
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", type(None): "null"}


def load(cls: type[T], values: Any, error: Error, where: str, noun: str = "field") -> T:
    """The instance of a dataclass that a mapping describes, nested ones included.

    ``where`` is what the setting is called (``cluster``), ``noun`` what its fields are. Null is as if a list or a
    mapping were not given. Raises ``error`` in one line for an unknown, missing or impossible field, or what the class
    raises.
    """
    import msgspec

    fields = _known(cls, values, error, where, noun)
    try:
        return msgspec.convert(fields, cls)
    except (msgspec.ValidationError, UnicodeError) as wrong:
        _complain(cls, fields, error, where)
        raise error(f"{where}: {wrong}") from None


def whole(error: Error, name: str, value: Any, least: int = 0, most: int = MOST_WHOLE) -> int:
    """The value itself; ``error`` where it is no whole number of at least ``least`` and at most ``most``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise error(f"{name}={value!r} must be a whole number of at least {least}")
    if value > most:
        raise error(f"{name}={value!r} must be at most {most}")
    return value


def finite(value: Any) -> bool:
    """Whether a value is a number, neither true nor false nor infinite."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf


def number(
    error: Error, name: str, value: Any, least: float = 0, most: float = math.inf, positive: bool = False
) -> float:
    """The value itself; ``error`` where it is no finite number of at least ``least`` and at most ``most``, or is 0 but
    must be ``positive``."""
    if not finite(value) or value < least:
        raise error(f"{name}={value!r} must be a number of at least {least:g}")
    if value > most:
        raise error(f"{name}={value} must be {'a share, ' if most == 1 else ''}at most {most}")
    if positive and value == 0:
        raise error(f"{name}=0 must be more than 0")
    return float(value)


def flag(error: Error, name: str, value: Any) -> bool:
    """The value itself; ``error`` where it is neither true nor false."""
    if not isinstance(value, bool):
        raise error(f"{name}={value!r} must be true or false")
    return value


def check_fields(owner: Any, error: Error, group: str = "") -> None:
    """``error`` for what fields of a dataclass cannot have; ``group`` is what the settings are called by together.

    Whole numbers, numbers and flags are checked by :func:`whole`, :func:`number` and :func:`flag` with the limits in a
    field's metadata (``least``, ``most``, ``positive``), what has ``choices`` there by :func:`choice`. Null may stand
    where the type says so; fields of other types are not looked at.
    """
    prefix = f"{group}." if group else ""
    for name, nullable, check in _checks(owner.__class__):
        value = getattr(owner, name)
        if value is not None or not nullable:
            check(error, prefix + name, value)


@lru_cache
def _checks(cls: type) -> list[tuple[str, bool, Callable[[Error, str, Any], object]]]:
    """What :func:`check_fields` looks at: the name of a field, whether null may stand there, and its check."""
    by_type: dict[Any, tuple[Callable[..., object], Sequence[str]]] = {
        int: (whole, ("least", "most")),
        float: (number, ("least", "most", "positive")),
        bool: (flag, ()),
    }
    checks: list[tuple[str, bool, Callable[[Error, str, Any], object]]] = []
    for field in dataclasses.fields(cls):
        kinds = set(get_args(kind := _kinds(cls)[field.name])) or {kind}
        nullable, (first, *others) = type(None) in kinds, kinds - {type(None)}
        if "choices" in field.metadata:
            checks.append((field.name, nullable, partial(choice, choices=field.metadata["choices"])))
        elif first in by_type and not others:
            check, names = by_type[first]
            limits = {name: field.metadata[name] for name in names if name in field.metadata}
            checks.append((field.name, nullable, partial(check, **limits)))
    return checks


def no_pattern(value: Any) -> str:
    """What is wrong with a regular expression of a user; empty where nothing is."""
    if not isinstance(value, str):
        return "must be a regular expression, in quotes"
    if len(value) > LONGEST_PATTERN:
        return f"has {len(value):,} characters: a regular expression may have {LONGEST_PATTERN:,}"
    try:
        re.compile(value)
    except (re.error, OverflowError) as error:
        return f"is no regular expression: {error}"
    except RecursionError:
        return "is no regular expression that can be read: its brackets are too deep within each other"
    return ""


def choice(error: Error, name: str, value: Any, choices: Sequence[Any]) -> None:
    """``error`` where the value is not one of the known ones."""
    if value not in choices:
        raise error(f"{name}={value!r} is not one of {', '.join(map(str, choices))}{meant(value, map(str, choices))}")


def nearest(name: object, choices: Iterable[str], otherwise: str = "it has") -> str:
    """What to say of an unknown name: the nearest known one, else all of them, after ``otherwise``."""
    names = list(choices)
    return did_you_mean(name, names, f"{otherwise} {', '.join(names) or 'none'}", 1)


def _known(cls: type, values: Any, error: Error, where: str, noun: str) -> dict[str, Any]:
    """The fields given, with all names known and none missing, in nested dataclasses too."""
    if not isinstance(values, Mapping):
        raise error(f"{where}={values!r} must be a mapping of {', '.join(_kinds(cls))}")
    kinds = _kinds(cls)
    for name in values:
        if name not in kinds:
            raise error(f"{where} has no {noun} {name!r}; {nearest(name, sorted(kinds))}")
    missing = sorted(_required(cls) - values.keys())
    if missing:
        called = f" {values['id']!r}" if "id" in values else ""
        raise error(f"{where}{called} lacks {', '.join(missing)}")
    converted = {}
    for name, value in values.items():
        kind = kinds[name]
        inner, many = _dataclass_in(kind)
        if value is None and _container(kind):
            continue
        if inner is not None and many and isinstance(value, (list, tuple)):
            value = [_known(inner, _plain(item), error, f"{where}.{name}", noun) for item in value]
        elif inner is not None and not many and isinstance(_plain(value), Mapping):
            value = _known(inner, _plain(value), error, f"{where}.{name}", noun)
        converted[name] = value
    return converted


def _plain(value: Any) -> Any:
    """An instance as the mapping of its fields; anything else as it is."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value


def _complain(cls: type, values: Mapping[str, Any], error: Error, where: str) -> None:
    """Raises what is wrong: in the class's own words where it has any for these values, as they were given."""
    kinds = _kinds(cls)
    with contextlib.suppress(TypeError, AttributeError):
        cls(**{name: _inner(kinds[name], value) for name, value in values.items()})
    for name, value in values.items():
        _descend(kinds[name], value, error, f"{where}.{name}")


def _inner(kind: Any, value: Any) -> Any:
    """The instances of a nested dataclass, where mappings describe them; else the value as it was given."""
    import msgspec

    inner, many = _dataclass_in(kind)
    if inner is not None and not many and isinstance(value, Mapping):
        with contextlib.suppress(msgspec.ValidationError):
            return msgspec.convert(value, inner)
    if inner is not None and many and isinstance(value, (list, tuple)):
        with contextlib.suppress(msgspec.ValidationError):
            return msgspec.convert(value, tuple[inner, ...])  # type: ignore[valid-type]
    return value


def _descend(kind: Any, value: Any, error: Error, name: str) -> None:
    """Raises ``error`` for the innermost value that is not of its kind."""
    import msgspec

    try:
        msgspec.convert(value, kind)
        return
    except msgspec.ValidationError:
        pass
    inner, many = _dataclass_in(kind)
    if inner is not None and not many and isinstance(value, Mapping):
        _complain(inner, value, error, name)
    elif isinstance(value, Mapping) and _container(kind) and issubclass(get_origin(kind) or kind, Mapping):
        for key, item in value.items():
            if not isinstance(key, str) and get_args(kind)[0] is str:
                raise error(f"{name} has the name {key!r}, which must be a word")
            _descend(get_args(kind)[-1], item, error, f"{name}.{key}")
    elif isinstance(value, (list, tuple)) and _container(kind):
        for index, item in enumerate(value):
            _descend(get_args(kind)[0], item, error, f"{name}[{index}]")
    raise error(f"{name}={value!r} must be {_words(kind)}")


def _words(kind: Any) -> str:
    if isinstance(kind, types.UnionType) or get_origin(kind) is Union:
        return " or ".join(dict.fromkeys(map(_words, get_args(kind))))
    if _container(kind):
        return "a mapping" if issubclass(get_origin(kind) or kind, Mapping) else "a list"
    return WORDS.get(kind, "a mapping")


def _container(kind: Any) -> bool:
    """Whether values of this kind are lists or mappings, and never null."""
    origin = get_origin(kind) or kind
    return isinstance(origin, type) and issubclass(origin, (Mapping, tuple, list))


def _dataclass_in(kind: Any) -> tuple[type | None, bool]:
    """The dataclass that a kind is, may be or holds many of, and whether it is many."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return kind, False
    if isinstance(kind, types.UnionType) or get_origin(kind) is Union:
        classes = [_dataclass_in(argument) for argument in get_args(kind)]
        return next((argument for argument in classes if argument[0] is not None), (None, False))
    if get_origin(kind) in (tuple, list):
        return _dataclass_in(get_args(kind)[0])[0], True
    return None, False


@lru_cache
def _kinds(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


@lru_cache
def _required(cls: type) -> frozenset[str]:
    fields = dataclasses.fields(cls)
    return frozenset(field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING)
