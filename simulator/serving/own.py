"""A user's own policies and routers: ``module:name`` of a module that is installed or in the current folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..passes.custom import called, load
from ..question.canonical import RequestError
from ..question.plan import PlanError


def load_function(setting: str, where: str) -> Any:
    """What ``where`` names. RequestError, with the setting, where there is none."""
    try:
        return load(where, setting)
    except PlanError as error:
        why = str(error).removeprefix(f"{setting} {where!r}").lstrip(": ")
        raise RequestError(f"{setting}={where} cannot be loaded: {why}") from None


def guard(setting: str, where: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which raises RequestError, with the setting, where it raises anything."""

    def call(*arguments: Any) -> Any:
        try:
            return called(lambda: function(*arguments), f"{setting}={where}")
        except PlanError as error:
            raise RequestError(str(error)) from error

    return call


def load_router(where: str) -> Callable[..., int]:
    """A user's router, which returns one of the ranks that it is asked about. RequestError as above."""
    function = guard("router", where, load_function("router", where))

    def route(state: Any, setup: Any, slot: int, first: int, last: int) -> int:
        rank = function(state, setup, slot, first, last)
        if not isinstance(rank, (int, np.integer)) or not first <= rank < last:
            raise RequestError(f"router={where} returned {rank!r}, not a rank from {first} to {last - 1}")
        return int(rank)

    return route
