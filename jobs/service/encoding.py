"""Answers as JSON: numpy's numbers are numbers, NaN and infinities null."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Response


def encoded(value: Any) -> bytes:
    """A value as JSON."""
    return msgspec.json.encode(value, enc_hook=lambda scalar: scalar.item())


def as_json(value: Any) -> Response:
    """A response that holds a value as JSON."""
    return Response(encoded(value), media_type="application/json")
