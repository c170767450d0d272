"""What every request can do: become JSON and come back, and be known by a hash of its content."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from ...datasets.loading import load
from ...datasets.ops import Op
from ...datasets.reading import problem, read_json


class RequestError(ValueError):
    """A request whose parts do not go together. The message names the setting and the way out."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A question as frozen data. Equal questions are equal, have equal JSON and the same :meth:`key`."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values of all fields, defaults filled in. RequestError for a model that is a function."""
        values = plain(self)
        assert isinstance(values, dict)
        return values

    def to_json(self) -> str:
        """One line of canonical JSON: names in order, no spaces, numbers as their fields have them."""
        return _json(type(self).from_dict(self.to_dict()).to_dict())

    def key(self) -> str:
        """The sha256 of the canonical JSON: the same in every process, whatever the order of names."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The request that plain values describe; RequestError or the error of the part that cannot be."""
        if why := problem(values):
            raise RequestError(f"{cls.called()} cannot be read: {why}")
        return load(cls, cls.named(dict(values)), RequestError, cls.called())

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The request of :meth:`to_json`, or of JSON with fewer fields. RequestError for what is no such JSON."""
        values = read_json(text, RequestError, cls.called())
        if not isinstance(values, Mapping):
            raise RequestError(f"{cls.called()} must be a JSON object, not {str(text)[:40]!r}")
        return cls.from_dict(values)

    @classmethod
    def called(cls) -> str:
        """How messages call the request: ``predict request``."""
        return f"{cls.__name__.removesuffix('Request').lower()} request"

    @classmethod
    def named(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The values with names of shipped devices, clusters and frameworks looked up, and short forms written out."""
        return values


def plain(value: Any) -> Any:
    """The value as JSON has it; RequestError for what JSON cannot say."""
    if isinstance(value, Op):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    what = getattr(value, "__qualname__", type(value).__name__)
    raise RequestError(f"{what} cannot be written as JSON: name it as module:{what}")


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
